"""Trouble that others reported in public, as behaviour of this library.

Above each test stands the report that it goes back to, as `owner/repo#number`. What
another module of the tests proves already is listed in `COVERED`, and what waits for a
part that the library does not have yet in `LATER`, so that no report is lost.
"""

import ast
import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import fp8_ops
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from stacks import (
    HALF,
    MLP,
    assert_close,
    call,
    host,
    modes,
    normal,
    oracle,
    pure,
    square,
    stack,
)

from revjax import (
    ReversibleCouplingBlock,
    ReversibleSequence,
    ReversibleSequential,
    on_backward,
    reversible_scan,
)

REPORTS = {
    f"{repository}#{number}"
    for repository, numbers in {
        "AI-Hypercomputer/maxtext": (4405,),
        "HomebrewML/revlib": (5,),
        "RobinBruegger/RevTorch": (3, 5),
        "facebookresearch/SlowFast": (602,),
        "google/flax": (
            1254, 1263, 3602, 3623, 3665, 3946, 3997, 4734, 4871, 5452,
        ),
        "google/trax": (581,),
        "huggingface/transformers": (10370, 21381),
        "jasperzhong/read-papers-and-code": (119,),
        "jax-ml/bonsai": (47,),
        "jax-ml/jax": (
            2520, 2777, 4891, 5832, 6452, 7047, 9635, 9836, 11628, 11916, 12792, 14056,
            16049, 16278, 18442, 21303, 21855, 22045, 23007, 23316, 25299, 25844, 27144,
            40178,
        ),
        "lucidrains/performer-pytorch": (14,),
        "lucidrains/reformer-pytorch": (142,),
        "lucidrains/se3-transformer-pytorch": (3,),
        "marin-community/levanter": (569,),
        "patrick-kidger/diffrax": (241, 300, 603),
        "silvandeleemput/memcnn": (12, 29, 41, 70, 77),
        "tensorflow/tensor2tensor": (1883,),
        "vislearn/FrEIA": (35,),
    }.items()
    for number in numbers
}  # fmt: skip

COVERED = {
    "AI-Hypercomputer/maxtext#4405": "tests/test_memory.py"
    "::test_variables_that_no_call_changes_are_not_copied_in_the_forward_pass",
    "HomebrewML/revlib#5": "tests/test_errors.py"
    "::test_a_branch_must_return_an_array_like_its_stream",
    "RobinBruegger/RevTorch#5": "tests/test_gradients.py::test_jitted",
    "facebookresearch/SlowFast#602": "tests/test_gradients.py"
    "::test_gradients_equal_those_worked_out_by_hand",
    "jax-ml/jax#2520": "tests/test_edge_cases.py"
    "::test_a_branch_may_close_over_a_traced_value",
    "jax-ml/jax#2777": "tests/test_evaluations.py"
    "::test_the_program_has_the_same_number_of_equations_at_depth_8_and_512",
    "jax-ml/jax#9836": "tests/test_edge_cases.py"
    "::test_the_streams_of_a_scan_may_be_scalars",
    "jax-ml/jax#12792": "tests/test_memory.py"
    "::test_anchors_keep_one_array_for_each_chunk",
    "jax-ml/jax#16049": "tests/test_errors.py::test_forward_mode_names_what_to_do",
    "jax-ml/jax#16278": "tests/test_edge_cases.py"
    "::test_a_large_captured_table_does_not_enter_the_program_text",
    "jax-ml/jax#25299": "tests/test_edge_cases.py"
    "::test_debug_nans_finds_a_nan_in_a_branch",
    "jax-ml/jax#40178": "tests/test_edge_cases.py"
    "::test_gradients_are_right_under_the_coming_transformations_of_jax",
    "patrick-kidger/diffrax#241": "tests/test_gradients.py"
    "::test_gradients_equal_those_worked_out_by_hand",
    "patrick-kidger/diffrax#300": "tests/test_memory.py"
    "::test_one_output_is_kept_at_every_depth",
    "patrick-kidger/diffrax#603": "tests/test_edge_cases.py::test_no_tracer_leaks",
    "silvandeleemput/memcnn#41": "tests/test_memory.py"
    "::test_scratch_is_the_same_at_depth_8_and_512",
    "silvandeleemput/memcnn#77": "tests/test_evaluations.py"
    "::test_a_block_of_two_matrix_branches_has_16_products",
}

LATER = {
    "google/flax#3602": "batch_stats of a Linen stack that are not mutable: no Linen",
    "google/flax#3665": "a Linen stack inside the transformations of JAX: no Linen",
}

pytestmark = pytest.mark.slow
MODES = ("reversible", "recompute_2")  # "invert_2" is the first, chunk by chunk
defaults = pytest.mark.usefixtures("jax_defaults")


def build(mode, F, G=None, depth=4, dim=2 * HALF):
    """Builds a stack in a mode; the branches of a block are made from its `rngs`."""

    def make_block(rngs):
        return ReversibleCouplingBlock(dim, F(rngs), (G or F)(rngs))

    options = {} if mode == "sequential" else modes(depth)[mode]
    model = ReversibleSequence.create(make_block, depth, rngs=nnx.Rngs(0), **options)
    if mode == "sequential":
        return ReversibleSequential(model[i] for i in range(depth))
    return model


def stacks(*args, **kwargs):
    """The same stack in any mode."""
    return lambda mode: build(mode, *args, **kwargs)


def nothing(rngs):
    """A branch that leaves its stream as it is."""
    return lambda x, *_, **__: 0 * x


def step(model, x, *context, run=call, loss=square, transform=jax.jit):
    """Makes one forward and backward pass."""
    function, params, rest = pure(model, run)

    def evaluate(params, x, context):
        y, state = function(params, rest, x, context, {})
        return loss(y), (y, state)

    gradient = jax.grad(evaluate, (0, 1, 2), has_aux=True, allow_int=True)
    (d_params, d_x, d_context), (y, state) = transform(gradient)(params, x, context)
    d_context = [ct for ct in d_context if ct.dtype != jax.dtypes.float0]
    state = jax.tree.map(host, state)
    return {
        "y": y, "parameters": d_params, "input": d_x, "context": d_context,
        "state": state,
    }  # fmt: skip


def error(actual, expected):
    """The relative error of all numbers of a tree together."""
    flat = [
        np.concatenate([np.ravel(a).astype(complex) for a in jax.tree.leaves(tree)])
        for tree in (actual, expected)
    ]
    assert np.linalg.norm(flat[1]) > 0
    return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


def types(tree):
    return [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(tree)]


def same_in_every_mode(make, x, *context, limit=1e-12, among=MODES, **options):
    """Holds a step in every mode against that of the stored stack, and returns it."""
    expected = step(make("stored"), x, *context, **options)
    for mode in among:
        actual = step(make(mode), x, *context, **options)
        for part, value in expected.items():
            assert types(actual[part]) == types(value), (mode, part)
            if jax.tree.leaves(value):
                assert error(actual[part], value) < limit, (mode, part)
    return expected


def loss_of(model, run=call):
    """The loss as a pure function of parameters and input, and the parameters."""
    function, params, rest = pure(model, run)

    def loss(params, x):
        return square(function(params, rest, x, (), {})[0])

    return loss, params


def named(tree, name):
    """The leaves of a tree that have a name in their path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [leaf for path, leaf in leaves if name in jax.tree_util.keystr(path)]


# --- the list -----------------------------------------------------------------------


def test_every_report_is_tested_here_or_covered_elsewhere_or_put_off():
    source = pathlib.Path(__file__).read_text()
    comments = re.findall(r"^# (\S+/\S+#\d.*)\n(?:@|def test)", source, re.M)
    here = {report for comment in comments for report in comment.split(", ")}
    assert len(REPORTS) == 58
    assert here | COVERED.keys() | LATER.keys() == REPORTS
    assert len(here) + len(COVERED) + len(LATER) == 58


@pytest.mark.parametrize("test", sorted(set(COVERED.values())))
def test_the_tests_that_cover_a_report_exist(test):
    path, name = test.split("::")
    root = pathlib.Path(__file__).parents[1]
    found = ast.walk(ast.parse((root / path).read_text()))
    assert name in {f.name for f in found if isinstance(f, ast.FunctionDef)}


# --- state --------------------------------------------------------------------------


class Count(nnx.Variable):
    pass


class Counted(nnx.Module):
    """A branch that counts its calls, as an integer or as a float."""

    def __init__(self, rngs, dtype=jnp.int32):
        self.mlp = MLP(rngs)
        self.calls = Count(jnp.zeros((), dtype))

    def __call__(self, x):
        self.calls[...] += 1
        return self.mlp(x)


class Trained(nnx.Module):
    """Batch statistics and dropout, which `train` switches on."""

    def __init__(self, rngs, rate=0.5):
        self.linear = nnx.Linear(HALF, HALF, rngs=rngs)
        self.norm = nnx.BatchNorm(HALF, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, train=True):
        x = self.norm(self.linear(x), use_running_average=not train)
        return self.dropout(x, deterministic=not train)


def counters(model):
    return [np.asarray(v).tolist() for v in jax.tree.leaves(nnx.state(model, Count))]


# silvandeleemput/memcnn#12
@defaults
def test_batch_statistics_move_once_and_the_backward_pass_is_that_of_training():
    def norm(rngs):
        return nnx.BatchNorm(1, momentum=0.9, use_running_average=False, rngs=rngs)

    x = jnp.asarray([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 6.0]])
    out = same_in_every_mode(
        stacks(norm, nothing, depth=1, dim=2), x, limit=1e-5,
        loss=lambda y: jnp.sin(y).sum(),
    )  # fmt: skip
    np.testing.assert_allclose(named(out["state"], "mean"), [[[0.3]]], rtol=1e-6)
    np.testing.assert_allclose(named(out["state"], "var"), [[[1.25]]], rtol=1e-6)


# google/flax#3997
@pytest.mark.parametrize(
    ("mode", "transform"),
    [
        ("reversible", nnx.grad),
        ("reversible", lambda loss: nnx.jit(nnx.remat(nnx.value_and_grad(loss)))),
        ("recompute_2", lambda loss: nnx.jit(nnx.grad(loss))),
    ],
)
def test_counters_move_once_a_step_under_the_transformations_of_flax(mode, transform):
    model, x = build(mode, Counted), normal(0, 4, 2 * HALF)
    train = transform(lambda model: square(model(x)))
    for _ in range(3):
        train(model)
    assert np.ravel(counters(model)).tolist() == [3] * 8


# google/flax#5452
@pytest.mark.parametrize(
    "options",
    [
        {"argnums": nnx.DiffState(0, nnx.Param)},
        {"graph": True, "graph_updates": True},
        {"graph": False, "graph_updates": False},
    ],
    ids=str,
)
def test_nnx_grad_gives_the_same_in_each_of_its_forms(options):
    model = build("reversible", functools.partial(Counted, dtype=float))
    x = normal(0, 4, 2 * HALF)
    expected = step(model, x)["parameters"]
    gradient = nnx.grad(lambda model: square(model(x)), **options)(model)
    assert error(nnx.state(gradient, nnx.Param), expected) < 1e-12
    assert counters(model) == [[1.0] * 4] * 2


# google/flax#1254
@pytest.mark.parametrize("mode", ["reversible", "sequential"])
@defaults
def test_a_new_stack_has_the_statistics_that_its_layers_began_with(mode):
    model = build(mode, Trained)
    for block in model:
        for branch in (block.F, block.G):
            assert not branch.norm.mean[...].any()
            assert (branch.norm.var[...] == 1).all()
            assert int(branch.dropout.rngs.count[...]) == 0


# huggingface/transformers#10370
@defaults
def test_in_evaluation_gradients_are_right_and_no_state_moves():
    x, before = normal(0, 4, 2 * HALF), []

    def make(mode):
        model = build(mode, Trained)
        model(x)  # a call of training, which moves the statistics
        before.append(jax.tree.map(host, nnx.state(model, nnx.Not(nnx.Param))))
        return model

    def evaluate(model, x):
        return model(x, train=False)

    out = same_in_every_mode(make, x, run=evaluate, limit=1e-5)
    assert all(np.abs(mean).max() > 0.01 for mean in named(before[0], "mean"))
    jax.tree.map(np.testing.assert_array_equal, out["state"], before[0])
    assert error(out["y"], build("reversible", Trained)(x, train=False)) > 0.01


# google/flax#3946
@pytest.mark.parametrize("train", [True, False])
def test_a_python_bool_reaches_the_branches_as_such_under_transformations(train):
    def noisy(rngs):
        dropout = nnx.Dropout(0.5, deterministic=False)
        key = jax.random.key(0)
        return lambda x, train: dropout(x, rngs=key) if train else x

    x = jnp.concatenate([jnp.zeros((1, HALF)), jnp.ones((1, HALF))], -1)
    for mode in ("sequential", *MODES):
        model = build(mode, noisy, nothing)
        total = nnx.remat(lambda model, x: model(x, train=train)[:, :HALF].sum())
        gradient = nnx.jit(nnx.grad(total, argnums=1))(model, x)[0, HALF:].tolist()
        assert (gradient == [4.0] * HALF) is not train, mode


# google/flax#3623
@pytest.mark.parametrize(("how", "old"), [("on_backward", [1, 2]), ("fp8", [3, 1])])
@defaults
def test_a_history_that_travels_as_a_gradient_is_written_once_for_each_block(how, old):
    class Scaled(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(HALF, HALF, rngs=rngs)
            self.scale = nnx.Param(jnp.ones(1))
            self.history = nnx.Param(jnp.asarray([1.0, 2.0, 3.0]))

        def __call__(self, x):
            h, history = self.linear(x), self.history[...]
            if how == "on_backward":
                return on_backward(h, history, newest_first)
            scale = self.scale[...]
            return fp8_ops.out_qdq(jnp.float32, jnp.float8_e5m2, h, scale, history)

    def newest_first(history, ct):
        return jnp.roll(history, 1).at[0].set(jnp.max(jnp.abs(ct)))

    x = normal(0, 4, 2 * HALF)
    out = same_in_every_mode(stacks(Scaled), x, limit=1e-5)
    histories = np.concatenate(named(out["parameters"], "history"))
    assert histories.shape == (8, 3)
    assert histories[:, 1:].tolist() == [old] * 8
    assert len({newest for newest in histories[:, 0] if newest > 0}) == 8


# --- randomness ---------------------------------------------------------------------


class Masked(nnx.Module):
    """Twice the stream where a mask says so; the mask comes from a key, or dropout."""

    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, key):
        if key is None:
            return self.dropout(x)
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0.0)


# RobinBruegger/RevTorch#3, jax-ml/jax#18442
@pytest.mark.parametrize("make_key", [None, jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("mode", ["sequential", *MODES])
def test_the_gradient_belongs_to_the_mask_of_the_output(mode, make_key):
    key = make_key and make_key(7)
    model = build(mode, Masked, nothing, depth=1, dim=64)
    x = jnp.concatenate([jnp.zeros((1, 32)), jnp.ones((1, 32))], -1)

    def half(y):
        return y[:, :32].sum()

    def run(model, x):
        return model(x, key)

    for transform in (jax.jit, lambda f: f)[: 2 if mode == "reversible" else 1]:
        out = step(model, x, run=run, loss=half, transform=transform)
        mask = out["y"][0, :32].tolist()
        assert set(mask) == {0.0, 2.0}
        assert out["input"][0, 32:].tolist() == mask
    assert bool(jnp.array_equal(model(x, key), model(x, key))) is (key is not None)


# --- context ------------------------------------------------------------------------


# google/trax#581, jax-ml/jax#22045
def test_masks_and_integers_may_be_sliced_in_a_branch_beside_integer_state():
    class Sliced(nnx.Module):
        def __init__(self, rngs):
            self.mlp = MLP(rngs)
            self.table = nnx.Param(jax.random.normal(rngs.params(), (8, HALF), float))
            self.calls = Count(jnp.int32(0))

        def __call__(self, x, mask, ids, times):
            self.calls[...] += 1
            chosen = jnp.where(mask[:, :HALF], self.mlp(x), 0.0)
            return chosen * times + self.table[...][ids[:, 0]]

    mask = jnp.arange(4 * 2 * HALF).reshape(4, -1) % 3 > 0
    ids = jnp.arange(8, dtype=jnp.int32).reshape(4, 2)
    out = same_in_every_mode(
        stacks(Sliced), normal(0, 4, 2 * HALF), mask, ids,
        run=lambda model, *args: model(*args, 2),
    )  # fmt: skip
    assert {dtype for _, dtype in types(out["parameters"])} == {"float64"}
    assert [v.tolist() for v in jax.tree.leaves(out["state"])] == [[1] * 4] * 2
    assert types(out["state"]) == [((4,), "int32")] * 2


# vislearn/FrEIA#35
@defaults
def test_a_conditional_stack_is_undone_with_its_condition_and_not_without():
    class Conditional(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(HALF, HALF, rngs=rngs)

        def __call__(self, x, mask, condition):
            return jnp.where(mask, jnp.tanh(self.linear(x)), 0.0) + condition

    x, mask = normal(0, 4, 2 * HALF), jnp.arange(HALF) % 2 == 0
    condition = 0.3 * normal(1, 4, HALF)
    for mode in ("sequential", *MODES):
        model = build(mode, Conditional, depth=12)
        y = model(x, mask, condition)
        assert error(model.inverse(y, mask, condition), x) < 1e-5
        with pytest.raises(TypeError, match="condition"):
            model.inverse(y, mask)


# --- memory -------------------------------------------------------------------------


def abstract(*args, **kwargs):
    """A stack whose arrays are shapes, as loss and parameters."""
    return loss_of(nnx.eval_shape(lambda: build(*args, **kwargs)))


def wide(rngs, hidden=64):
    return MLP(rngs, width=32, hidden=hidden)


def rows(*shape):
    return jax.ShapeDtypeStruct((*shape, 64), jnp.float64)


def planned(function, *args):
    plan = jax.jit(function).lower(*args).compile().memory_analysis()
    assert plan is not None
    return plan.temp_size_in_bytes


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# lucidrains/reformer-pytorch#142
@pytest.mark.parametrize(("depth", "most"), [(2, 1.0), (16, 0.25)])
@pytest.mark.usefixtures("full_optimization")
def test_reversibility_lowers_memory_and_at_depth_2_does_not_raise_it(depth, most):
    reversible, stored = (
        planned(jax.grad(loss, (0, 1)), params, rows(256))
        for loss, params in (
            abstract(mode, wide, depth=depth, dim=64)
            for mode in ("reversible", "stored")
        )
    )
    assert reversible <= most * stored


# jax-ml/jax#14056
@pytest.mark.usefixtures("full_optimization")
def test_blocks_that_cannot_be_scanned_use_the_same_memory_again():
    def different(depth, mode):
        rngs = nnx.Rngs(0)
        widths = [16 * (1 + i % 3) for i in range(depth)]
        return ReversibleSequence(
            [ReversibleCouplingBlock(64, wide(rngs, w), wide(rngs)) for w in widths],
            store_activations=mode == "stored",
        )

    def growth(mode):
        models = [nnx.eval_shape(lambda d=d: different(d, mode)) for d in (3, 9)]
        assert [len(model.segments) for model in models] == [3, 9]
        few, many = (
            planned(jax.grad(loss, (0, 1)), params, rows(256))
            for loss, params in map(loss_of, models)
        )
        return many / few

    assert growth("reversible") < 1.5
    assert growth("stored") > 2


# google/flax#4871
@pytest.mark.usefixtures("full_optimization")
def test_calls_in_a_loop_do_not_copy_the_parameters_for_each():
    loss, params = abstract("reversible", wide, dim=64)

    def accumulated(params, xs):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)[0]

    def kept(params, xs):  # one gradient for each call, to see that copies are seen
        gradients = jax.lax.map(lambda x: jax.grad(loss)(params, x), xs)
        return jax.tree.map(lambda a: jnp.sort(a, 0)[0], gradients)

    once = planned(jax.grad(loss), params, rows(16))
    assert planned(accumulated, params, rows(5, 16)) < once + 2.5 * nbytes(params)
    assert planned(kept, params, rows(5, 16)) > once + 4 * nbytes(params)


# jax-ml/jax#23316
@pytest.mark.usefixtures("full_optimization")
def test_frozen_parameters_have_no_gradient_in_memory():
    loss, params = abstract("reversible", wide, depth=8, dim=64)

    def norm(wrt):
        def of(params, x):
            gradients = jax.tree.leaves(jax.grad(loss, wrt)(params, x))
            return jnp.max(jnp.concatenate([jnp.sort(g, None) for g in gradients]))

        return of

    assert planned(norm(1), params, rows(2)) < nbytes(params) / 2
    assert planned(norm(0), params, rows(2)) > nbytes(params)


# --- precision ----------------------------------------------------------------------


class Typed(nnx.Module):
    """Two layers in the dtypes that a user asks for."""

    def __init__(self, rngs, size=HALF, gain=None, **dtypes):
        self.up = nnx.Linear(size, 2 * size, rngs=rngs, **dtypes)
        self.down = nnx.Linear(2 * size, size, rngs=rngs, **dtypes)
        self.gain = gain

    def __call__(self, x, shift=0):
        x = self.down(jnp.tanh(self.up(x + shift)))
        return x if self.gain is None else x * self.gain[...]


# marin-community/levanter#569, jax-ml/jax#27144
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@defaults
def test_each_gradient_arrives_in_the_dtype_of_its_value(dtype):
    """The dtype is that of the parameters, one of which all blocks share."""
    gain = nnx.Param(jnp.ones((), dtype))
    make = stacks(functools.partial(Typed, gain=gain, param_dtype=dtype))
    x = normal(0, 4, 2 * HALF).astype(jnp.bfloat16)
    shift = normal(1, 1, HALF).astype(jnp.bfloat16)
    out = same_in_every_mode(make, x, shift, limit=0.05)
    assert ((), dtype) in types(out["parameters"])
    assert {d for _, d in types(out["parameters"])} == {dtype}
    assert types([out["y"], out["input"]]) == [((4, 2 * HALF), "bfloat16")] * 2
    assert types(out["context"]) == [((1, HALF), "bfloat16")]


@functools.cache
def prenorm_gradients(mode, dtype):
    """Parameter gradients of 16 blocks for six inputs."""

    def branch(rngs):
        norm = nnx.LayerNorm(32, dtype=dtype, rngs=rngs)
        up = nnx.Linear(32, 64, dtype=dtype, rngs=rngs)
        down = nnx.Linear(64, 32, dtype=dtype, rngs=rngs)
        return nnx.Sequential(norm, up, nnx.gelu, down)

    loss, params = loss_of(build(mode, branch, depth=16, dim=64))
    gradient = jax.jit(jax.grad(loss))
    xs = normal(0, 6, 8, 64).astype(jnp.bfloat16).astype(dtype)
    return [gradient(params, x) for x in xs]


# jax-ml/jax#23007
@pytest.mark.parametrize(
    ("mode", "limit"), [("reversible", 3), ("recompute_2", 2), ("invert_2", 2)]
)
@defaults
def test_a_bfloat16_stack_is_hardly_more_wrong_than_its_stored_twin(mode, limit):
    """Without anchors 16 blocks drift to 2.5 times the error of the stored stack."""
    truth, stored, found = (
        prenorm_gradients(*case)
        for case in (
            ("stored", jnp.float32),
            ("stored", jnp.bfloat16),
            (mode, jnp.bfloat16),
        )
    )
    for right, plain, gradient in zip(truth, stored, found, strict=True):
        assert 1e-3 < error(gradient, right) < limit * error(plain, right)


# jax-ml/jax#11628
@defaults
def test_gradients_of_64_float32_blocks_hold_at_any_matmul_precision():
    make = stacks(functools.partial(Typed, size=32), depth=64, dim=64)
    for precision, most in ((None, 1e-2), ("highest", 1e-4)):
        with jax.default_matmul_precision(precision):
            same_in_every_mode(make, normal(0, 8, 64), limit=most, among=MODES[:1])


# lucidrains/se3-transformer-pytorch#3
def test_gradients_of_64_float64_blocks_are_those_of_the_stored_stack():
    make, x = stacks(MLP, depth=64), normal(0, 4, 2 * HALF)
    out = same_in_every_mode(make, x, among=MODES[:1])
    assert {d for _, d in types([out["parameters"], out["input"]])} == {"float64"}


# jax-ml/jax#4891
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_complex_stacks_are_conjugated_as_jax_does(mode):
    def gradients(function, w, x, options):
        def loss(w, x):
            y1, y2 = reversible_scan(function, function, (w, w), x, **options)
            return jnp.sum(jnp.abs(y1) ** 2) + jnp.sum(jnp.abs(y2 - 1) ** 2)

        return jax.jit(jax.grad(loss, (0, 1)))(w, x)

    def mixed(w, x):
        return jnp.sin(w * x) + 0.3 * jnp.conj(x)

    w = jax.lax.complex(normal(0, 4), normal(1, 4)) / 4
    x1, x2 = normal(2, 2, 3), normal(3, 2, 3)
    x = jax.lax.complex(x1[0], x1[1]), jax.lax.complex(x2[0], x2[1])
    actual = gradients(mixed, w, x, modes(4)[mode])
    assert error(actual, gradients(mixed, w, x, modes(4)["stored"])) < 1e-12
    # By hand: in JAX the gradient of |z|^2 is twice the conjugate of z, and the
    # derivative of what is holomorphic multiplies it.
    w, x1, x2 = np.array([0.5 - 1j, 1 + 2j, 3 - 1j])
    y1 = x1 + w * x2
    y2 = x2 + w * y1
    y2_ct = 2 * np.conj(y2 - 1)
    y1_ct = 2 * np.conj(y1) + w * y2_ct
    actual = gradients(jnp.multiply, w[None], (x1, x2), modes(1)[mode])
    by_hand = [y2_ct * y1 + y1_ct * x2, y1_ct, y2_ct + w * y1_ct]
    np.testing.assert_allclose(jnp.hstack(jax.tree.leaves(actual)), by_hand)


# silvandeleemput/memcnn#29
@defaults
def test_48_blocks_with_batch_statistics_train_as_their_stored_twin():
    x, target = normal(0, 32, 2 * HALF), jnp.sin(jnp.arange(2.0 * HALF))

    def curve(mode):
        model = build(mode, functools.partial(Trained, rate=0.0), depth=48)
        function, params, rest = pure(model)

        @jax.jit
        @jax.value_and_grad
        def gradient(params):
            y, _ = function(params, rest, x, (), {})
            return square(jnp.tanh(y / 10) - target)

        losses = []
        for _ in range(20):
            loss, d_params = gradient(params)
            params = jax.tree.map(lambda p, d: p - 0.03 * d, params, d_params)
            losses.append(float(loss))
        return losses

    stored = curve("stored")
    assert stored[-1] < 0.95 * stored[0]
    np.testing.assert_allclose(curve("reversible"), stored, rtol=1e-2)


# --- sharing ------------------------------------------------------------------------


class Scale(nnx.Module):
    def __init__(self, factor):
        self.factor = nnx.Param(jnp.asarray(factor))

    def __call__(self, x):
        return self.factor[...] * x


# google/flax#1263
@pytest.mark.parametrize("mode", ["block", "sequential", *MODES])
def test_a_parameter_of_both_branches_is_one_and_gets_both_shares(mode):
    branch = Scale(3.0)
    model = stack([ReversibleCouplingBlock(2, branch, branch)], mode)
    x = jnp.asarray([1.0, 2.0])
    # y1 + y2 = (1 + w)(x1 + w x2) + x2, of which the derivative is x1 + x2 + 2 w x2.
    (gradient,) = jax.tree.leaves(nnx.grad(lambda model: model(x).sum())(model))
    assert gradient.ravel().tolist() == [15.0]


# silvandeleemput/memcnn#70
def test_the_input_may_be_used_again_beside_the_stack():
    def skip(model, x):
        z = jax.nn.relu(x)
        return model(z) * z + jnp.sin(x)

    x = normal(0, 4, 2 * HALF)
    before = np.array(x)
    same_in_every_mode(stacks(MLP), x, run=skip)
    np.testing.assert_array_equal(x, before)


# jax-ml/jax#9635
@pytest.mark.parametrize("mode", MODES)
def test_one_array_may_be_both_streams_of_a_step_with_donated_parameters(mode):
    def branch(w, x):
        return jnp.tanh(x @ w)

    def loss(w, *streams):
        y1, y2 = reversible_scan(branch, branch, (w, w), streams, **modes(4)[mode])
        return square(y1) + jnp.sin(y2).sum()

    @functools.partial(jax.jit, donate_argnums=0)
    def train(w, z):
        return w - 0.1 * jax.grad(loss)(w, z, z)

    w, z = normal(0, 4, 4, 4), normal(1, 2, 4)
    d_w, first, second = jax.grad(loss, (0, 1, 2))(w, z, jnp.array(z))
    assert_close(jax.grad(lambda z: loss(w, z, z))(z), first + second)
    expected = w - 0.1 * d_w
    assert_close(train(w, z), expected)  # without a warning, which would be an error
    assert w.is_deleted()


# --- transformations ----------------------------------------------------------------


# jax-ml/jax#5832, jax-ml/jax#6452
def test_what_is_not_mapped_keeps_the_shape_of_its_gradient():
    def branch(params, x, gain):
        w, scale = params
        return jnp.tanh(x @ w) * scale + gain

    params, gain = (normal(0, 4, 4, 4), normal(1, 4)), jnp.asarray(0.2)
    x, in_axes = (normal(2, 5, 2, 4), normal(3, 2, 4)), (None, None, 0, None)

    def gradients(mode):
        def loss(params, gain, x1, x2):
            y1, y2 = reversible_scan(
                branch, branch, (params, params), (x1, x2), gain, **modes(4)[mode]
            )
            return square(y1) + jnp.sin(y2).sum()

        def summed(params, gain):
            return jax.vmap(loss, in_axes)(params, gain, *x).sum()

        each = jax.vmap(jax.grad(loss, (0, 1, 2, 3)), in_axes)
        return jax.jit(
            lambda *args: (jax.grad(summed, (0, 1))(*args), each(*args, *x))
        )(params, gain)

    expected = gradients("stored")
    for mode in MODES:
        actual = gradients(mode)
        assert_close(actual, expected)
        assert jax.tree.map(jnp.shape, actual[0]) == (((4, 4, 4), (4,)), ())


def centred(w, x):
    """A branch that looks at the whole batch, across the axis `i`."""
    mean = jax.lax.pmean(x.mean(0, keepdims=True), "i")
    return jnp.tanh(x - mean) * w


class Centred(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (), float))

    def __call__(self, x):
        return centred(self.w[...], x)


COLLECTIVE = ("block", "sequential", "stored", *MODES, "invert_2")


def with_collective(mode):
    if mode != "block":
        return build(mode, Centred, depth=2)
    return ReversibleCouplingBlock(2 * HALF, *map(Centred, (nnx.Rngs(0), nnx.Rngs(1))))


# jax-ml/jax#7047
@pytest.mark.parametrize("mode", COLLECTIVE)
def test_a_collective_of_a_branch_finds_its_axis_in_the_backward_pass(mode):
    model, xs = with_collective(mode), normal(0, 5, 4, 2 * HALF)

    def gradients(run):
        loss, params = loss_of(model, run)

        def total(params, xs):
            return jax.vmap(loss, (None, 0), axis_name="i")(params, xs).sum()

        each = jax.vmap(jax.grad(loss, (0, 1)), (None, 0), axis_name="i")
        both = jax.jit(lambda *args: (jax.grad(total, (0, 1))(*args), each(*args)))
        return both(params, xs)

    for actual, expected in zip(gradients(call), gradients(oracle), strict=True):
        assert_close(actual, expected)


# jax-ml/jax#7047
def test_a_collective_in_reversible_scan_finds_its_axis_in_the_backward_pass():
    w, xs = normal(0, 4), (normal(1, 5, 2, 4), normal(2, 5, 2, 4))

    def loop(w, x1, x2):
        for i in range(4):
            x1 = x1 + centred(w[i], x2)
            x2 = x2 + centred(w[i], x1)
        return x1, x2

    def gradients(run):
        def total(w, xs):
            y1, y2 = jax.vmap(run, (None, 0, 0), axis_name="i")(w, *xs)
            return square(y1) + jnp.sin(y2).sum()

        return jax.jit(jax.grad(total, (0, 1)))(w, xs)

    def scan(w, x1, x2, mode):
        return reversible_scan(centred, centred, (w, w), (x1, x2), **modes(4)[mode])

    expected = gradients(loop)
    for mode in ("stored", *MODES, "invert_2"):
        assert_close(gradients(functools.partial(scan, mode=mode)), expected)


# huggingface/transformers#21381
def test_gradients_of_some_parameters_are_right_and_the_others_absent():
    def of(path, _):
        return path[-3:] == ("F", "down", "kernel")

    def gradient(mode):
        model, x = build(mode, MLP), normal(0, 4, 2 * HALF)
        wrt = nnx.DiffState(0, nnx.All(nnx.Param, of))
        return nnx.grad(lambda model: square(model(x)), argnums=wrt)(model)

    expected = gradient("stored")
    assert types(expected) == [((4, 6, HALF), "float64")]
    for mode in MODES:
        assert_close(gradient(mode), expected)


# tensorflow/tensor2tensor#1883
def test_every_parameter_has_a_gradient_and_only_that_of_an_unused_one_is_zero():
    class Unused(nnx.Module):
        def __init__(self, rngs):
            self.mlp = MLP(rngs)
            self.unused = nnx.Param(jnp.ones(3))

        def __call__(self, x):
            return self.mlp(x)

    gradients = same_in_every_mode(stacks(Unused), normal(0, 4, 2 * HALF))["parameters"]
    assert [leaf.shape for leaf in named(gradients, "unused")] == [(4, 3)] * 2
    assert not any(leaf.any() for leaf in named(gradients, "unused"))
    for leaf in named(gradients, "mlp"):
        assert all(entry.any() for entry in leaf)


# jax-ml/jax#21303, jax-ml/jax#11916
@pytest.mark.parametrize("mode", ["sequential", "stored", *MODES])
def test_side_effects_happen_once_a_pass_and_remat_adds_one_forward_pass(mode):
    seen = []

    def branch(x):
        jax.debug.callback(lambda _: seen.append(1), x[0, 0])
        return jnp.tanh(x)

    model = build(mode, lambda rngs: branch)

    def loss(x):
        return square(model(x))

    def passes(function):
        seen.clear()
        jax.block_until_ready(jax.jit(function)(normal(0, 4, 2 * HALF)))
        jax.effects_barrier()
        return len(seen) / 8

    backward = 0 if mode == "stored" else 1
    assert passes(loss) == 1
    assert passes(jax.grad(loss)) == 1 + backward
    assert passes(jax.grad(jax.checkpoint(loss))) == 2 + backward


# jax-ml/jax#11916
@pytest.mark.parametrize("mode", ["sequential", "reversible"])
def test_ordered_side_effects_keep_their_order_in_both_passes(mode):
    seen = []

    class Tells(nnx.Module):
        def __init__(self, number):
            self.number = nnx.Variable(jnp.asarray(number))

        def __call__(self, x):
            number = self.number[...]
            io_callback(lambda i: seen.append(int(i)), None, number, ordered=True)
            return jnp.tanh(x)

    made = [ReversibleCouplingBlock(8, Tells(i), Tells(i + 1)) for i in (0, 2, 4)]
    model, x = stack(made, mode), normal(0, 4, 8)
    jax.block_until_ready(jax.jit(jax.grad(lambda x: square(model(x))))(x))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]


# google/flax#4734
@pytest.mark.parametrize("mode", MODES)
@defaults
def test_shapes_of_gradients_are_found_without_computing(mode):
    model = nnx.eval_shape(lambda: build(mode, Trained))
    function, params, rest = pure(model)

    def loss(params, rest, x):
        y, state = function(params, rest, x, (), {})
        return square(y), state

    x = jax.ShapeDtypeStruct((4, 2 * HALF), jnp.float32)
    found = jax.eval_shape(jax.grad(loss, has_aux=True), params, rest, x)
    assert types(found) == types((params, rest))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(found)} == {4}


# jax-ml/bonsai#47
@pytest.mark.parametrize("kind", [ReversibleSequence, ReversibleSequential])
def test_a_stack_built_from_a_list_is_part_of_a_model(kind):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.stack = kind([made(rngs) for _ in range(3)])
            self.head = nnx.Linear(2 * HALF, 1, param_dtype=float, rngs=rngs)

        def __call__(self, x):
            return self.head(self.stack(x))

    def made(rngs):
        return ReversibleCouplingBlock(2 * HALF, MLP(rngs), MLP(rngs))

    model, x = Model(nnx.Rngs(0)), normal(0, 4, 2 * HALF)
    expected = step(model, x)
    assert sum(leaf.size for leaf in jax.tree.leaves(expected["parameters"])) == 357
    twins = (
        nnx.merge(*nnx.split(model)),
        nnx.merge(*nnx.split(model, nnx.Param, ...)),
        nnx.clone(model),
        jax.tree.map(lambda leaf: leaf, model),
    )
    assert all(jnp.array_equal(twin(x), model(x)) for twin in twins)
    jax.tree.map(np.testing.assert_array_equal, step(twins[-1], x), expected)


# --- errors -------------------------------------------------------------------------


# jasperzhong/read-papers-and-code#119
@pytest.mark.parametrize(
    "layer",
    [
        nnx.Conv(2, 2, (3, 3), strides=(2, 2), rngs=nnx.Rngs(0)),
        lambda x: nnx.max_pool(x, (2, 2), (2, 2)),
    ],
    ids=["stride", "pool"],
)
@defaults
def test_a_layer_that_shrinks_the_image_is_refused_by_name_before_it_runs(layer):
    made = [ReversibleCouplingBlock(4, F, jnp.tanh) for F in (jnp.tanh, layer)]
    image = jax.ShapeDtypeStruct((1, 6, 4, 4), jnp.float32)
    message = r"`F` of block 1 .*float32\[1, 6, 4, 2\]. Got float32\[1, 3, 2, 2\]"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(ReversibleSequence(made), image)


# --- eight devices ------------------------------------------------------------------
#
# JAX fixes the number of devices when it starts, so these run in a process of their
# own, where they are tests; here they are only functions.


def on_eight_devices(mode):
    """A loss, its parameters and 16 rows of input, on one of the devices."""
    assert jax.device_count() == 8
    return *loss_of(build(mode, MLP)), normal(0, 16, 2 * HALF)


@functools.cache
def on_one_device():
    loss, params, x = on_eight_devices("stored")
    return jax.jit(jax.grad(loss))(params, x)


def mesh_of(**sizes):
    automatic = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic)


def eight_devices_give_the_gradients_of_one_when_rows_are_sharded():
    mesh, reductions = mesh_of(rows=8), {}
    for mode in ("stored", *MODES):
        loss, params, x = on_eight_devices(mode)
        placed = (
            jax.device_put(params, NamedSharding(mesh, P())),
            jax.device_put(x, NamedSharding(mesh, P("rows"))),
        )
        gradient = jax.jit(jax.grad(loss)).lower(*placed).compile()
        assert_close(gradient(*placed), on_one_device())
        text = gradient.as_text() or ""
        assert "all-gather" not in text
        reductions[mode] = text.count(" all-reduce(")
    assert 0 < max(reductions.values()) <= reductions["stored"] + 2, reductions


def eight_devices_keep_gradients_sharded_as_the_parameters_are():
    mesh = mesh_of(rows=4, hidden=2)
    hidden = {
        "['up']['kernel']": P(None, None, "hidden"),
        "['up']['bias']": P(None, "hidden"),
        "['down']['kernel']": P(None, "hidden"),
    }

    def place(path, leaf):
        name = jax.tree_util.keystr(path)
        spec = next((spec for part, spec in hidden.items() if part in name), P())
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    loss, params, x = on_eight_devices("reversible")
    placed = (
        jax.tree_util.tree_map_with_path(place, params),
        jax.device_put(x, NamedSharding(mesh, P("rows"))),
    )
    gradient = jax.jit(jax.grad(loss)).lower(*placed).compile()
    found = gradient(*placed)
    assert_close(found, on_one_device())
    assert "all-gather" not in (gradient.as_text() or "")
    sharded = 0
    for new, old in zip(*map(jax.tree.leaves, (found, placed[0])), strict=True):
        if "hidden" in old.sharding.spec:
            assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
            sharded += 1
    assert sharded == 6


def eight_devices_sum_the_gradient_once_under_shard_map():
    loss, params, x = on_eight_devices("reversible")

    def share(params, x):
        return loss(params, x)[None] / 8

    for check_vma in (True, False):
        shard_map = functools.partial(
            jax.shard_map,
            mesh=mesh_of(i=8),
            in_specs=(P(), P("i")),
            check_vma=check_vma,
        )

        def inside(params, x, automatic=check_vma):
            gradient = jax.grad(lambda *args: share(*args)[0])(params, x)
            return gradient if automatic else jax.lax.psum(gradient, "i")

        summed = jax.jit(shard_map(inside, out_specs=P()))
        assert_close(summed(params, x), on_one_device())
        shares = shard_map(share, out_specs=P("i"))
        outside = jax.jit(jax.grad(lambda *args, f=shares: f(*args).sum()))
        assert_close(outside(params, x), on_one_device())


def eight_devices_give_a_branch_its_collective_in_the_backward_pass():
    xs = normal(0, 8, 4, 2 * HALF)

    def gradients(mode, run=call):
        loss, params = loss_of(with_collective(mode), run)

        @functools.partial(
            jax.shard_map, mesh=mesh_of(i=8), in_specs=(P(), P("i")), out_specs=P("i")
        )
        def losses(params, x):
            return loss(params, x[0])[None]

        return jax.jit(jax.grad(lambda *args: losses(*args).sum(), (0, 1)))(params, xs)

    assert_close(gradients("block"), gradients("block", oracle))
    expected = gradients("stored", oracle)
    for mode in ("stored", *MODES, "invert_2"):
        assert_close(gradients(mode), expected)


# lucidrains/performer-pytorch#14, jax-ml/jax#25844, jax-ml/jax#21855, jax-ml/jax#7047
def test_what_holds_on_one_device_holds_on_eight():
    flags = os.environ.get("XLA_FLAGS", "")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8",
    }
    options = (
        "-q -m slow -p no:cacheprovider -p no:xdist -o python_functions=eight_devices_*"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), __file__],
        env=environment,
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "4 passed" in run.stdout, run.stdout + run.stderr
    assert run.returncode == 0
