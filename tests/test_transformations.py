"""Stacks under the transformations of JAX and Flax, against the stored stack."""

import copy
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from stacks import (
    HALF,
    assert_close,
    blocks_of,
    modes,
    normal,
    per_block,
    square,
    stack,
)
from test_evaluations import equations

from revjax import ReversibleCouplingBlock, ReversibleSequence

pytestmark = pytest.mark.slow

DEPTH = 3
X = normal(0, 2, 2 * HALF)
SHIFT = normal(1, 1, HALF)
ROWS = jnp.asarray([3, 1, 0, 2])


class Dense(nnx.Module):
    """A branch with one product, a context, and indices."""

    def __init__(self, rngs):
        w = jax.random.normal(rngs.params(), (HALF, HALF), jnp.float64) / 2
        self.w = nnx.Param(w)

    def __call__(self, x, shift, rows):
        return jnp.tanh((x + shift)[:, rows] @ self.w[...])


def make_block(rngs):
    return ReversibleCouplingBlock(2 * HALF, Dense(rngs), Dense(rngs))


@functools.cache
def blocks():
    rngs = nnx.Rngs(0)
    return [make_block(rngs) for _ in range(DEPTH)]


def in_modes(*names):
    return pytest.mark.parametrize("mode", names)


@functools.cache
def parts(mode):
    return nnx.split(stack(blocks(), mode))


def run(mode, params, x, shift=SHIFT, rows=ROWS):
    return nnx.merge(parts(mode)[0], params)(x, shift, rows)


def by_block(mode, params):
    """The parameters, or what is like them, of each block, whatever the mode."""
    return per_block(nnx.merge(*parts(mode)), nnx.Param, params)


# --- transformations of a loss ------------------------------------------------------
#
# Each takes a loss of parameters, an input and a shift, and the parameters.

POINT = (X, SHIFT)
BATCH = normal(2, 3, 2, 2 * HALF)


def under_jit(loss, params):
    return jax.grad(loss, (0, 1, 2))(params, *POINT)


def over_inputs(loss, params):
    gradient = jax.grad(lambda *args: jnp.sum(jax.vmap(loss, (None, 0, None))(*args)))
    return gradient(params, BATCH, SHIFT)


def of_each_input(loss, params):
    return jax.vmap(jax.grad(loss, 1), (None, 0, None))(params, BATCH, SHIFT)


def hessian_vector_product(loss, params):
    """Reverse over reverse, along a direction in everything."""
    arguments = (params, *POINT)
    direction = jax.tree.map(jnp.cos, arguments)

    def along(*arguments):
        gradient = jax.grad(loss, (0, 1, 2))(*arguments)
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, direction)))

    return jax.grad(along, (0, 1, 2))(*arguments)


def hessian(loss, params):
    """Forward over reverse."""
    return jax.hessian(loss, 2)(params, *POINT)


def linearized_gradient(loss, params):
    gradient, linear = jax.linearize(jax.grad(loss), params, *POINT)
    return jax.tree.map(jnp.add, gradient, linear(params, jnp.ones_like(X), SHIFT))


def checkpointed(loss, params):
    def twice(params, x, shift):
        return jnp.sin(jax.checkpoint(loss)(params, x, shift)) + square(x)

    return jax.grad(twice, (0, 1, 2))(params, *POINT)


def accumulated(loss, params):
    """Gradients summed over a scan of parts of a batch."""

    def add(total, x):
        gradient = jax.grad(loss)(params, x, SHIFT)
        return jax.tree.map(jnp.add, total, gradient), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), BATCH)[0]


TRANSFORMED = {
    under_jit: ("sequential", "invert_2"),
    over_inputs: ("reversible", "recompute_2"),
    of_each_input: ("reversible", "invert_2"),
    hessian_vector_product: ("reversible", "recompute_2"),
    hessian: ("reversible", "invert_2"),
    linearized_gradient: ("reversible", "recompute_2"),
    checkpointed: ("reversible", "invert_2"),
    accumulated: ("sequential", "reversible"),
}


def gradients_by_block(mode, found):
    """Sorts what is like the parameters by blocks."""
    return jax.tree.map(
        lambda node: by_block(mode, node) if isinstance(node, nnx.State) else node,
        found,
        is_leaf=lambda node: isinstance(node, nnx.State),
    )


@functools.cache
def transformed(transform, mode):
    def loss(params, x, shift):
        return square(run(mode, params, x, shift))

    found = jax.jit(functools.partial(transform, loss))(parts(mode)[1])
    return gradients_by_block(mode, found)


@pytest.mark.parametrize(
    ("transform", "mode"),
    [(transform, mode) for transform, pair in TRANSFORMED.items() for mode in pair],
)
def test_a_transformed_loss_is_that_of_the_stored_stack(transform, mode):
    assert_close(transformed(transform, mode), transformed(transform, "stored"))


@in_modes("reversible", "recompute_2", "invert_2")
def test_a_stack_may_be_the_cell_of_a_recurrent_network(mode):
    def gradient(mode):
        def loss(params, x, inputs):
            def cell(state, u):
                state = jnp.tanh(run(mode, params, state, u))
                return state, jnp.sum(state)

            state, sums = jax.lax.scan(cell, x, inputs)
            return square(state) + square(sums)

        found = jax.jit(jax.grad(loss, (0, 1, 2)))(
            parts(mode)[1], X, normal(3, 4, 1, HALF)
        )
        return gradients_by_block(mode, found)

    assert_close(gradient(mode), gradient("stored"))


@in_modes("sequential", "reversible", "recompute_2")
def test_a_vjp_with_integers_among_its_arguments_gives_them_float0(mode):
    def pulled_back(mode):
        y, pullback = jax.vjp(
            functools.partial(run, mode), parts(mode)[1], *POINT, ROWS
        )
        *found, rows = pullback(jnp.cos(y))
        assert (rows.dtype, rows.shape) == (jax.dtypes.float0, ROWS.shape)
        return gradients_by_block(mode, tuple(found))

    assert_close(pulled_back(mode), pulled_back("stored"))


def test_a_stored_stack_is_linearized_with_integers_among_its_arguments():
    params = parts("stored")[1]
    y, linear = jax.linearize(functools.partial(run, "stored"), params, *POINT, ROWS)
    tangents = jax.tree.map(jnp.cos, (params, *POINT))
    slope = linear(*tangents, np.zeros(ROWS.shape, jax.dtypes.float0))
    h = 1e-6
    ahead = jax.tree.map(lambda a, t: a + h * t, (params, *POINT), tangents)
    np.testing.assert_allclose((run("stored", *ahead) - y) / h, slope, rtol=1e-4)


@in_modes("reversible", "invert_2")
def test_a_reversible_stack_refuses_the_linear_function_of_linearize(mode):
    _, linear = jax.linearize(lambda x: run(mode, parts(mode)[1], x), X)
    with pytest.raises(TypeError, match="forward-mode"):
        linear(X)


# --- ensembles ----------------------------------------------------------------------


@in_modes("sequential", "reversible", "recompute_2")
def test_an_ensemble_of_parameters_is_trained_as_each_of_its_members(mode):
    params = parts(mode)[1]
    members = [params, jax.tree.map(jnp.sin, params)]

    def gradient(params):
        return jax.grad(lambda params, x: square(run(mode, params, x)), (0, 1))(
            params, X
        )

    together = jax.tree.map(lambda *a: jnp.stack(a), *members)
    found = jax.jit(jax.vmap(gradient))(together)
    each = [jax.jit(gradient)(member) for member in members]
    assert_close(found, jax.tree.map(lambda *a: jnp.stack(a), *each))


@pytest.mark.parametrize("options", [{}, {"anchor_every": 2}])
def test_an_ensemble_created_by_nnx_vmap_is_trained_as_each_of_its_members(options):
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def create(rngs):
        return ReversibleSequence.create(make_block, DEPTH, rngs=rngs, **options)

    ensemble = create(nnx.Rngs(0))
    run_all = nnx.vmap(lambda model: model(X, SHIFT, ROWS))
    found = nnx.grad(lambda model: jnp.sum(jnp.square(run_all(model))))(ensemble)
    graphdef, params = nnx.split(ensemble)

    def loss(params):
        model = nnx.merge(graphdef, params)
        model.anchor_every, model.store_activations = 0, True
        return jnp.sum(jnp.square(model(X, SHIFT, ROWS)))

    one = jax.jit(jax.grad(loss))
    each = [one(jax.tree.map(lambda a, i=i: a[i], params)) for i in range(2)]
    assert_close(found, jax.tree.map(lambda *a: jnp.stack(a), *each))


# --- training with Flax -------------------------------------------------------------


def trained(mode):
    """Two steps, with one rate for F, and another and momentum for G."""
    model = stack(blocks(), mode)
    rates: dict[Hashable, Any] = {"F": optax.sgd(0.1), "G": optax.sgd(0.3, 0.9)}

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "G" if "'G'" in jax.tree_util.keystr(path) else "F", params
        )

    transform = optax.multi_transform(rates, labels)
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return square(model(X, SHIFT, ROWS))

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    losses = [step(model, optimizer) for _ in range(2)]
    return losses, [nnx.to_pure_dict(nnx.state(b)) for b in blocks_of(model)]


@functools.cache
def trained_as_stored():
    return trained("stored")


@in_modes("sequential", "reversible", "recompute_2")
def test_branches_are_trained_by_different_optimizers(mode):
    losses, states = trained(mode)
    assert_close((losses, states), trained_as_stored())
    assert losses[1] < losses[0]


@in_modes("sequential", "reversible", "recompute_2")
def test_a_model_that_was_updated_or_copied_computes_with_its_new_parameters(mode):
    model = stack(blocks(), mode)
    before = model(X, SHIFT, ROWS)
    graphdef, params = nnx.split(model)
    new = jax.tree.map(jnp.sin, params)
    expected = nnx.merge(graphdef, new)(X, SHIFT, ROWS)
    copies = [
        copy.deepcopy(model),
        nnx.clone(model),
        jax.tree.map(jnp.asarray, model),
        jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(model)),
    ]
    for twin in copies:
        nnx.update(twin, new)
        np.testing.assert_array_equal(twin(X, SHIFT, ROWS), expected)
    np.testing.assert_array_equal(model(X, SHIFT, ROWS), before)
    np.testing.assert_array_equal(
        jax.tree.map(jnp.sin, model)(X, SHIFT, ROWS), expected
    )


def restored(path, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def saved(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    return path


def test_a_checkpoint_is_restored_into_a_stack_of_any_mode(tmp_path):
    """The state of a sequence does not depend on its mode."""
    model = stack(blocks(), "reversible")
    path = saved(tmp_path / "model", nnx.state(model))
    for mode in ("stored", "recompute_2", "invert_2"):
        abstract = nnx.eval_shape(
            lambda mode=mode: ReversibleSequence.create(
                make_block, DEPTH, rngs=nnx.Rngs(1), **modes(DEPTH)[mode]
            )
        )
        graphdef, like = nnx.split(abstract)
        found = nnx.merge(graphdef, restored(path, like))
        assert_close(found(X, SHIFT, ROWS), model(X, SHIFT, ROWS))
        assert found.store_activations == (mode == "stored")


def test_a_checkpoint_of_a_sequential_is_stacked_into_a_created_stack(tmp_path):
    """A list of blocks and a created stack differ by one stacked axis."""
    listed = stack(blocks(), "sequential")
    path = saved(tmp_path / "model", nnx.state(listed))
    state = restored(path, nnx.state(stack(blocks(), "sequential")))
    rows = [state["blocks"][i] for i in range(DEPTH)]
    created = ReversibleSequence.create(make_block, DEPTH, rngs=nnx.Rngs(1))
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *rows)
    nnx.update(created.segments[0].block, stacked)
    assert_close(created(X, SHIFT, ROWS), listed(X, SHIFT, ROWS))
    # And back again, block by block.
    again = stack(blocks_of(created), "sequential")
    assert_close(nnx.state(again), nnx.state(listed))


# --- what holds in the backward pass too --------------------------------------------

EVERY = ("sequential", "reversible", "stored", "recompute_2", "invert_2")


@in_modes(*EVERY)
def test_the_matmul_precision_of_the_call_holds_in_the_whole_gradient(mode):
    def loss(params, x):
        with jax.default_matmul_precision("highest"):
            y = run(mode, params, x)
        return square(y)

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(parts(mode)[1], X)
    products = [
        e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"
    ]
    highest = jax.lax.Precision.HIGHEST
    assert len(products) >= 6  # of a branch: forward, and two of the gradient
    assert {e.params["precision"] for e in products} == {(highest, highest)}


class Branch(nnx.Module):
    """A product, around which a function of the stream happens."""

    def __init__(self, rngs, around):
        self.dense, self.around = Dense(rngs), around

    def __call__(self, x):
        return self.around(lambda x: self.dense(x, SHIFT, ROWS), x)


def branches(around):
    """Blocks with such a branch F."""
    rngs = nnx.Rngs(0)
    return [
        ReversibleCouplingBlock(2 * HALF, Branch(rngs, around), Branch(rngs, call))
        for _ in range(DEPTH)
    ]


def gradient_of(around, mode):
    """The gradient of a stack of such blocks, and where to take it."""
    graphdef, params = nnx.split(stack(branches(around), mode))

    def loss(params, x):
        return square(nnx.merge(graphdef, params)(x))

    return jax.grad(loss, (0, 1)), (params, X)


def call(dense, x):
    return dense(x)


@in_modes(*EVERY)
def test_the_names_of_scopes_stand_in_the_compiled_gradient(mode):
    def around(dense, x):
        with jax.named_scope("attention"):
            return dense(x)

    gradient, arguments = gradient_of(around, mode)
    text = jax.jit(gradient).lower(*arguments).compile().as_text()
    assert text is not None
    named = {line for line in text.splitlines() if "attention" in line}
    # Of the operation in either pass, the second of which autodiff calls so.
    products = {"transpose(" in line for line in named if "dot_general" in line}
    assert products == {False, True}


# How often a branch runs in one step: again in the backward pass, unless it was stored.
PASSES = {
    "sequential": 2,
    "reversible": 2,
    "stored": 1,
    "recompute_2": 2,
    "invert_2": 2,
}


@pytest.mark.parametrize(("mode", "passes"), PASSES.items())
def test_callbacks_in_a_branch_fire_once_a_pass(mode, passes, capsys):
    seen = []

    def around(dense, x):
        jax.debug.callback(lambda x: seen.append(float(x)), x[0, 0])
        jax.debug.print("stream {}", x[0, 0])
        return dense(x)

    gradient, arguments = gradient_of(around, mode)
    jax.block_until_ready(jax.jit(gradient)(*arguments))
    jax.effects_barrier()
    assert len(seen) == passes * DEPTH
    # Both passes see the same streams, up to rounding.
    each = np.reshape(sorted(seen), (DEPTH, passes))
    np.testing.assert_allclose(each, each[:, :1].repeat(passes, 1), rtol=1e-12)
    assert capsys.readouterr().out.count("stream ") == passes * DEPTH


@pytest.mark.filterwarnings("ignore:Invalid nan value:UserWarning")
@in_modes("sequential", "recompute_2", "invert_2")
def test_debug_nans_finds_a_branch_that_makes_one(mode):
    gradient, arguments = gradient_of(lambda dense, x: dense(jnp.log(x - 99)), mode)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.block_until_ready(jax.jit(gradient)(*arguments))


# --- collectives --------------------------------------------------------------------


def centred(dense, x):
    """Depends on the whole batch, which is spread over a named axis."""
    return dense(x - jax.lax.pmean(jnp.mean(x, 0, keepdims=True), "batch"))


def by_vmap(function):
    """One example in each place of the axis."""
    return jax.vmap(function, (None, 0), axis_name="batch")


def by_shard_map(function):
    """A part of the batch on each device; the gradient's sum is shard_map's."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=auto)
    whole, split = PartitionSpec(), PartitionSpec("batch")

    def local(params, x):
        return function(params, x.reshape(-1, 2 * HALF)).reshape(x.shape)

    return jax.shard_map(local, mesh=mesh, in_specs=(whole, split), out_specs=split)


@functools.cache
def centred_at_once():
    """The same gradient where the batch is one array."""
    gradient, (params, _) = gradient_of(
        lambda dense, x: dense(x - jnp.mean(x, 0, keepdims=True)), "stored"
    )
    d_params, d_x = jax.jit(gradient)(params, BATCH.reshape(-1, 2 * HALF))
    return [*jax.tree.leaves(d_params), d_x.reshape(BATCH.shape)]


@pytest.mark.parametrize("mapped", [by_vmap, by_shard_map])
@in_modes("reversible", "stored", "recompute_2", "invert_2")
def test_collectives_in_a_branch_find_their_axis_in_both_passes(mode, mapped):
    graphdef, params = nnx.split(stack(branches(centred), mode))

    def loss(params, x):
        return square(mapped(lambda p, x: nnx.merge(graphdef, p)(x))(params, x))

    found = jax.jit(jax.grad(loss, (0, 1)))(params, BATCH)
    assert_close(jax.tree.leaves(found), centred_at_once())


class Balance(nnx.Variable):
    """A second loss, which a branch leaves behind."""


class Balanced(nnx.Module):
    def __init__(self):
        self.gain = nnx.Param(jnp.asarray(0.5))
        self.balance = Balance(jnp.zeros(()))

    def __call__(self, x):
        x = x - jax.lax.pmean(jnp.mean(x), "batch")
        self.balance[...] = jnp.mean(x**2)
        return jnp.tanh(self.gain[...] * x)


@in_modes("reversible", "recompute_2", "invert_2")
def test_collectives_find_their_axis_where_state_has_a_gradient_too(mode):
    def gradients(mode):
        made = [
            ReversibleCouplingBlock(2 * HALF, Balanced(), Balanced())
            for _ in range(DEPTH)
        ]
        graphdef, state = nnx.split(stack(made, mode))

        def loss(state, x):
            model = nnx.merge(graphdef, state, copy=True)
            y = model(x)
            left = jax.tree.leaves(nnx.state(model, Balance))
            return square(y) + sum(map(jnp.sum, left))

        def total(state, x):
            return jnp.sum(jax.vmap(loss, (None, 0), axis_name="batch")(state, x))

        return jax.jit(jax.grad(total, (0, 1)))(state, BATCH)

    found, true = (jax.tree.leaves(gradients(m)) for m in (mode, "stored"))
    assert_close(found, true)
