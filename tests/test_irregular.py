"""Branches with state, side effects, shared or frozen weights, context and aux."""

import functools
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from stacks import (
    HALF,
    assert_close,
    blocks_of,
    call,
    host,
    modes,
    normal,
    oracle,
    per_block,
    square,
    stack,
)
from test_evaluations import products

from revjax import (
    Additive,
    PerBlock,
    ReversibleCouplingBlock,
    ReversibleSequence,
    ReversibleSequential,
    on_backward,
    reversible_scan,
)

pytestmark = pytest.mark.slow

DEPTH = 3
X = normal(0, 3, 2 * HALF)
in_modes = pytest.mark.parametrize(
    "mode", ["sequential", "reversible", "stored", "recompute_2"]
)
SCANS = {
    "reversible": {},
    "stored": {"store_activations": True},
    "recompute": {"anchor_every": 2},
    "invert": {"anchor_every": 2, "between_anchors": "invert"},
}
in_scans = pytest.mark.parametrize("options", list(SCANS.values()), ids=list(SCANS))


class Count(nnx.Variable):
    pass


class Dense(nnx.Module):
    """The smallest branch whose gradient depends on where it is evaluated."""

    def __init__(self, rngs):
        w = jax.random.normal(rngs.params(), (HALF, HALF), jnp.float64) / 2
        self.w = nnx.Param(w)

    def __call__(self, x):
        return jnp.tanh(x @ self.w[...])


def plain(model, x, *args, **kwargs):
    """The stored stack in plain Python; each block takes its entry of a `PerBlock`."""
    for i, block in enumerate(blocks_of(model)):

        def entry(node, i=i):
            own = isinstance(node, PerBlock)
            return jax.tree.map(lambda a: a[i], node.value) if own else node

        given = jax.tree.map(
            entry, (args, kwargs), is_leaf=lambda node: isinstance(node, PerBlock)
        )
        x = oracle([block], x, *given[0], **given[1])
    return x


def only_output(y, model):
    return square(y)


def eager(function):
    return function


def step(model, x, *args, run=call, loss=only_output, transform=jax.jit, **kwargs):
    """Makes one forward and backward pass.

    Returns the output, and for each block its variables after the pass and the
    gradients of all that it held before; the gradients of the input and of context.
    """
    graphdef, state = nnx.split(model)

    def evaluate(state, x, context):
        fresh = nnx.merge(graphdef, state, copy=True)
        y = run(fresh, x, *context[0], **context[1])
        return loss(y, fresh), (y, nnx.state(fresh))

    gradient = jax.grad(evaluate, (0, 1, 2), has_aux=True, allow_int=True)
    (d_state, d_x, d_context), (y, after) = transform(gradient)(
        state, x, (args, kwargs)
    )
    d_state = jax.tree.map(
        lambda ct, v: host(v) if ct.dtype == jax.dtypes.float0 else ct, d_state, state
    )
    d_context = [c for c in jax.tree.leaves(d_context) if c.dtype != jax.dtypes.float0]
    return {
        "y": y,
        "variables": per_block(model, ..., d_state),
        "input": d_x,
        "context": d_context,
        "after": per_block(model, ..., after),
    }


class Case:
    """A kind of block with an input, context, and a loss of the output and the model.

    What a step computes is kept, since several tests are held against it.
    """

    def __init__(self, make_block, *args, x=X, loss=only_output, **kwargs):
        self.make_block, self.x, self.loss = make_block, x, loss
        self.args, self.kwargs, self.steps = args, kwargs, {}

    @functools.cached_property
    def blocks(self):
        rngs = nnx.Rngs(0, dropout=1)
        return [self.make_block(rngs) for _ in range(DEPTH)]

    def step(self, mode):
        """One step in a mode; as plain Python, if that is None."""
        if mode not in self.steps:
            model = stack(self.blocks, mode) if mode else nnx.List(self.blocks)
            run = call if mode else plain
            self.steps[mode] = step(
                model, self.x, *self.args, run=run, loss=self.loss, **self.kwargs
            )
        return self.steps[mode]


def agrees(case, mode):
    """Holds a step against the stored stack's, and that one against plain Python."""
    actual = case.step(mode)
    expected = case.step(None if mode == "stored" else "stored")
    assert_close(actual, expected)
    return actual


def block(F, G=None):
    return ReversibleCouplingBlock(2 * HALF, F, G or F)


# --- state --------------------------------------------------------------------------


class Layer(nnx.Module):
    """A layer of Flax, which mixes dtypes, on top of another."""

    def __init__(self, layer, rngs):
        self.dense, self.layer = Dense(rngs), layer

    def __call__(self, x):
        with jax.numpy_dtype_promotion("standard"):
            return self.layer(self.dense(x))


def linear(rngs):
    return nnx.Linear(HALF, HALF, param_dtype=jnp.float64, rngs=rngs)


class OneStream(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.rngs = Dense(rngs), rngs

    def __call__(self, x):
        h = self.dense(x)
        return jnp.where(
            jax.random.bernoulli(self.rngs.dropout(), 0.5, h.shape), h, 0.0
        )


class Written(ReversibleCouplingBlock):
    """F writes what G reads, and G what F reads; both draw from one stream."""

    def __init__(self, rngs):
        own = rngs.fork()
        super().__init__(2 * HALF, OneStream(own), OneStream(own))
        self.seen = Count(jnp.ones(HALF))
        self.calls = Count(jnp.asarray(0))

    def f(self, x):
        h = self.F(x) * self.seen[...][None]
        self.seen[...] = jnp.tanh(self.seen[...] + h.mean(0))
        self.calls[...] += 1
        return h

    def g(self, x):
        self.seen[...] = self.seen[...] * 0.5
        return self.G(x) * self.seen[...][None]


def batch_norm_and_dropout(rngs):
    norm = nnx.BatchNorm(HALF, param_dtype=jnp.float64, rngs=rngs)
    # Flax makes statistics in float32 and updates them in float64.
    for statistic in (norm.mean, norm.var):
        statistic.set_value(statistic[...].astype(jnp.float64))
    dropout = nnx.Dropout(0.5, rngs=rngs.fork())
    return block(Layer(norm, rngs), Layer(dropout, rngs))


def weights_normalized(rngs):
    """Flax writes the normalized weights into the parameters, at every call."""
    f, g = (
        norm(linear(rngs), param_dtype=jnp.float64, rngs=rngs)
        for norm in (nnx.SpectralNorm, nnx.WeightNorm)
    )
    return block(Layer(f, rngs), Layer(g, rngs))


def cached_attention(rngs):
    layer = nnx.MultiHeadAttention(
        2, HALF, param_dtype=jnp.float64, decode=True, rngs=rngs
    )
    layer.init_cache((3, 5, HALF), dtype=jnp.float64)
    return block(Layer(layer, rngs), Dense(rngs))


WRITTEN = Case(Written)
NORMALIZED = Case(weights_normalized)
CACHED = Case(cached_attention, x=normal(0, 3, 1, 2 * HALF))


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        ("sequential", WRITTEN),
        ("invert_2", WRITTEN),
        ("reversible", Case(batch_norm_and_dropout)),
        ("reversible", CACHED),
    ],
    ids=["written, sequential", "written, inverted", "batch_norm", "cache"],
)
def test_state_after_a_step_is_that_of_the_stored_stack(mode, case):
    """Bit for bit, but for sums that the compiler orders as it likes."""
    after, true = agrees(case, mode)["after"], case.step("stored")["after"]
    to_the_last_bits = functools.partial(
        np.testing.assert_allclose, rtol=1e-14, atol=1e-16
    )
    jax.tree.map(to_the_last_bits, after, true)


def test_parameters_that_a_call_normalizes_in_place_are_written_once():
    before = NORMALIZED.blocks[0].F.layer.layer_instance.kernel[...]
    after = agrees(NORMALIZED, "recompute_2")["after"][0]["F"]["layer"]
    assert not np.allclose(after["layer_instance"]["kernel"], before)


@pytest.mark.parametrize("mode", ["sequential", "recompute_2"])
def test_evaluation_changes_nothing(mode):
    model = stack(Case(batch_norm_and_dropout).blocks, mode)
    model.eval()
    before = jax.tree.map(host, nnx.state(model))
    assert jnp.array_equal(model(X), model(X))
    after = jax.tree.map(host, nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, after, before)


# --- on_backward --------------------------------------------------------------------


class Gauge(nnx.Variable):
    pass


def look(seen, ct):
    return jnp.stack([seen[0] + 1, jnp.linalg.norm(ct)])


class Watched(nnx.Module):
    """Counts backward passes, and keeps the norm of a gradient."""

    def __init__(self, layer, seen=None, update=look):
        self.layer, self.update = layer, update
        self.seen = Gauge(jnp.asarray([5.0, 0.0])) if seen is None else seen

    def __call__(self, x):
        return self.layer(on_backward(x, self.seen[...], self.update))


WATCHED = Case(lambda rngs: block(Watched(Dense(rngs)), Watched(Dense(rngs))))


@in_modes
def test_every_branch_learns_the_norm_of_its_gradient_once_a_step(mode):
    found = agrees(WATCHED, mode)
    gauges = [b[name]["seen"] for b in found["variables"] for name in "FG"]
    assert [float(calls) for calls, _ in gauges] == [6.0] * (2 * DEPTH)
    assert len({float(norm) for _, norm in gauges}) == 2 * DEPTH
    assert all(b["F"]["seen"][0] == 5 for b in found["after"])


@pytest.mark.parametrize("case", [WATCHED, WRITTEN], ids=["watched", "written"])
def test_a_block_by_itself_is_differentiated_as_in_plain_python(case):
    one = case.blocks[:1]
    assert_close(step(stack(one, "block"), X), step(nnx.List(one), X, run=plain))


@in_modes
def test_an_update_runs_once_also_where_nothing_else_is_differentiated(mode):
    ran = []

    def count(seen, ct):
        jax.debug.callback(lambda: ran.append(1))
        return seen + 1

    def branch():
        return Watched(jnp.tanh, update=count)

    model = stack([block(branch(), branch()) for _ in range(DEPTH)], mode)
    wrt = nnx.DiffState(0, Gauge)
    new = nnx.grad(lambda model: square(model(X)), argnums=wrt)(model)
    jax.effects_barrier()
    assert len(ran) == 2 * DEPTH
    nnx.update(model, new)
    for b in blocks_of(model):
        assert b.F.seen[...].tolist() == b.G.seen[...].tolist() == [6.0, 1.0]


@pytest.mark.parametrize("mode", ["sequential", "reversible", "recompute_2"])
def test_a_gauge_that_branches_share_receives_the_sum(mode):
    seen = Gauge(jnp.asarray([5.0, 0.0]))
    model = stack(
        [block(Watched(jnp.tanh, seen), Watched(jnp.sin, seen)) for _ in range(DEPTH)],
        mode,
    )
    (new,) = jax.tree.leaves(
        nnx.grad(lambda model: square(model(X)), argnums=nnx.DiffState(0, Gauge))(model)
    )
    assert float(new[0]) == 2 * DEPTH * 6


def raises(error, message, function, *args, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("state", "where", "found"),
    [
        ({"n": jnp.arange(2)}, "state['n']", "int64[2]"),
        ([jnp.ones(2) > 0], "state[0]", "bool[2]"),
        (1.0, "state", "1.0 of type float"),
        ("norm", "state", "'norm' of type str"),
    ],
)
def test_a_state_that_can_have_no_gradient_is_refused(state, where, found):
    raises(
        TypeError,
        f"`{where}` must be a floating-point array, since its update comes as a "
        f"gradient. Got {found}.",
        on_backward, X, state, look,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("update", "found"),
    [
        (lambda seen, ct: seen[:1], "float64[1]"),
        (lambda seen, ct: seen.astype(jnp.float32), "float32[2]"),
        (lambda seen, ct: {"seen": seen}, "{'seen': 'float64[2]'}"),
    ],
)
@pytest.mark.parametrize("mode", ["block", "reversible", "recompute_1"])
def test_an_update_must_return_arrays_like_its_state(mode, update, found):
    model = stack([block(Watched(jnp.tanh, update=update))], mode)
    raises(
        TypeError,
        f"`update` must return arrays like `state`, float64[2]. Got {found}.",
        nnx.grad(lambda model: square(model(X)), argnums=nnx.DiffState(0, Gauge)),
        model,
    )


class Fp8(nnx.Module):
    """A layer of Linen, of which the scales of its casts arrive as gradients."""

    def __init__(self, rngs):
        kind = flax.linen.Fp8DirectDotGeneralOp
        dense = flax.linen.Dense(HALF, dtype=jnp.float32, dot_general_cls=kind)
        with jax.numpy_dtype_promotion("standard"):
            bridge = nnx.bridge.ToNNX(dense, rngs=rngs)
            self.dense = bridge.lazy_init(jnp.ones((3, HALF), jnp.float32))

    def __call__(self, x):
        with jax.numpy_dtype_promotion("standard"):
            return jnp.tanh(self.dense(x.astype(jnp.float32))).astype(x.dtype)


def trained_in_fp8(model):
    """Two steps: descent for parameters, and replacement for what says so."""
    scale = nnx.variable_type_from_name("_overwrite_with_gradient")
    graphdef, params, scales, rest = nnx.split(model, nnx.Param, scale, ...)

    @jax.jit
    def train(params, scales, rest):
        def loss(params, scales):
            fresh = nnx.merge(graphdef, params, scales, rest, copy=True)
            y = fresh(4.0 * X)
            return square(y), nnx.state(fresh, nnx.Not(nnx.Any(nnx.Param, scale)))

        (d_params, scales), rest = jax.grad(loss, (0, 1), has_aux=True)(params, scales)
        params = jax.tree.map(lambda p, ct: p - jnp.float32(0.3) * ct, params, d_params)
        return params, scales, rest

    for _ in range(2):
        params, scales, rest = train(params, scales, rest)
    assert any(float(leaf.max()) > 2 for leaf in jax.tree.leaves(scales))
    return per_block(model, ..., params, scales, rest)


def test_fp8_layers_train_as_in_the_stored_stack():
    created = ReversibleSequence.create(
        lambda rngs: block(Fp8(rngs), jnp.sin), DEPTH, rngs=nnx.Rngs(0)
    )
    listed = stack(blocks_of(created), "stored")
    assert_close(trained_in_fp8(created), trained_in_fp8(listed), rtol=1e-5)


# --- sharing and freezing -----------------------------------------------------------


def test_blocks_and_branches_that_occur_again_get_the_sum_of_their_gradients():
    rngs = nnx.Rngs(0)
    one, other = (block(Dense(rngs), Dense(rngs)) for _ in range(2))
    both = block(Dense(rngs))
    assert both.F is both.G
    mixed = block(one.F, Dense(rngs))
    made = [one, one, other, one, both, mixed]
    expected = step(nnx.List(made), X, run=plain)
    for mode in ("sequential", "recompute_2"):
        assert_close(step(stack(made, mode), X), expected)


class Lookup(nnx.Module):
    def __init__(self, embed):
        self.embed = embed

    def __call__(self, x):
        table = self.embed.embedding[...][:, :HALF]
        return jnp.tanh(x @ table.T) @ table


class Language(nnx.Module):
    """One table embeds, is read in every branch `F`, and gives the logits."""

    def __init__(self, mode):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(5, 2 * HALF, param_dtype=jnp.float64, rngs=rngs)
        blocks = [block(Lookup(self.embed), Dense(rngs)) for _ in range(DEPTH)]
        if mode == "sequential":
            self.stack = ReversibleSequential(blocks)
        elif mode == "plain":
            self.stack = nnx.List(blocks)
        else:
            self.stack = ReversibleSequence(blocks, **modes(DEPTH)[mode])
        self.run = plain if mode == "plain" else call

    def __call__(self, tokens):
        y = self.run(self.stack, self.embed(tokens))
        return y @ self.embed.embedding[...].T


def trained_language(mode):
    model = Language(mode)
    optimizer = nnx.Optimizer(model, optax.sgd(0.3), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer):
        optimizer.update(
            model, nnx.grad(lambda model: square(model(jnp.arange(5))))(model)
        )

    for _ in range(2):
        update(model, optimizer)
    return model


def test_a_table_tied_between_stack_and_model_is_still_one_after_training():
    expected = nnx.state(trained_language("plain").embed)
    for mode in ("sequential", "recompute_2"):
        model = trained_language(mode)
        assert_close(nnx.state(model.embed), expected)
        shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(model))]
        assert shapes.count((5, 2 * HALF)) == 1
        for b in blocks_of(model.stack):
            np.testing.assert_array_equal(b.F.embed.embedding, model.embed.embedding)


def adapted_block(rngs):
    def branch():
        init = nnx.initializers.normal(0.5)
        return nnx.LoRA(
            HALF, 1, HALF, base_module=Dense(rngs), b_initializer=init,
            param_dtype=jnp.float64, rngs=rngs,
        )  # fmt: skip

    return block(branch(), branch())


ADAPTED = Case(adapted_block)


@pytest.mark.parametrize(
    ("mode", "traced"), [("sequential", DEPTH), ("reversible", 1), ("recompute_2", 2)]
)
def test_gradients_of_lora_alone_leave_out_the_products_of_frozen_weights(mode, traced):
    model = stack(ADAPTED.blocks, mode)

    def gradient(wrt):
        graphdef, params, frozen = nnx.split(model, wrt, ...)

        def loss(params):
            return square(nnx.merge(graphdef, params, frozen)(X))

        return jax.jit(jax.grad(loss)).trace(params)

    # One product less in each branch that the program holds.
    less = products(gradient(nnx.Param)) - products(gradient(nnx.LoRAParam))
    assert less == 2 * traced


@pytest.mark.parametrize("mode", ["reversible", "recompute_2"])
def test_gradients_of_lora_alone_are_right(mode):
    model = stack(ADAPTED.blocks, mode)
    wrt = nnx.DiffState(0, nnx.LoRAParam)

    @nnx.jit
    def gradient(model):
        return nnx.grad(lambda model: square(model(X)), argnums=wrt)(model)

    frozen = nnx.state(model, nnx.Not(nnx.LoRAParam))
    found = per_block(model, nnx.LoRAParam, gradient(model), frozen)
    for new, true in zip(found, ADAPTED.step("stored")["variables"], strict=True):
        for name in "FG":
            assert new[name].keys() == {"lora_a", "lora_b"}
            assert_close(new[name], {key: true[name][key] for key in new[name]})


class Spare(nnx.Module):
    """A parameter that nothing uses, beside integers and keys."""

    def __init__(self, rngs):
        self.dense = Dense(rngs)
        self.spare = nnx.Param(jnp.ones(2))
        self.rows = nnx.Param(jnp.arange(HALF)[::-1])
        self.key = nnx.Variable(jax.random.key(3))

    def __call__(self, x):
        seed = jax.random.key_data(self.key[...])[-1]
        return self.dense(x[:, self.rows[...]]) * seed.astype(x.dtype)


SPARE = Case(lambda rngs: block(Spare(rngs), Spare(rngs)))


@pytest.mark.parametrize("mode", ["reversible", "invert_2"])
def test_unused_parameters_get_zeros_and_integers_and_keys_are_no_error(mode):
    for block in agrees(SPARE, mode)["variables"]:
        for name in "FG":
            assert block[name]["spare"].tolist() == [0.0, 0.0]


# --- context ------------------------------------------------------------------------


class OneSided(ReversibleCouplingBlock):
    """Each branch takes a part of the context, and nobody the rest."""

    def __init__(self, rngs):
        super().__init__(2 * HALF, Dense(rngs), Dense(rngs))

    def f(self, x, shift, options, *, unused):
        return self.F(x + shift) * options["deep"]["gain"]

    def g(self, x, shift, options, *, unused):
        rate, keep = options["deep"]["own"]
        return jnp.where(keep, self.G(x) * rate, 0.0)


MASKS = jnp.asarray(np.arange(DEPTH * HALF).reshape(DEPTH, 1, HALF) % 3 > 0)
ONE_SIDED = Case(
    OneSided,
    normal(1, 1, HALF),  # broadcast over the batch
    {
        "deep": {
            "gain": jnp.asarray(0.7),
            "own": PerBlock((jnp.linspace(0.5, 1.5, DEPTH), MASKS)),
        }
    },
    unused=jnp.ones(2),
)


@in_modes
def test_context_of_one_branch_or_one_block_gets_its_own_gradient(mode):
    shift, gain, rate, unused = agrees(ONE_SIDED, mode)["context"]
    assert shift.shape == (1, HALF)
    assert gain.shape == ()
    assert rate.shape == (DEPTH,)
    assert len(set(rate.tolist())) == DEPTH
    assert unused.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["reversible", "recompute_2"])
def test_an_eager_step_with_context_is_that_of_the_stored_stack(mode):
    case, model = ONE_SIDED, stack(ONE_SIDED.blocks, mode)
    found = step(model, X, *case.args, transform=eager, **case.kwargs)
    assert_close(found, case.step("stored"))


@pytest.mark.parametrize("mode", ["sequential", "reversible", "invert_2"])
def test_the_inverse_gives_each_block_its_entry(mode):
    model, args, kwargs = (
        stack(ONE_SIDED.blocks, mode),
        ONE_SIDED.args,
        ONE_SIDED.kwargs,
    )
    y = call(model, X, *args, **kwargs)
    assert_close(model.inverse(y, *args, **kwargs), X)


class Shifted(nnx.Module):
    def __init__(self, rngs, around):
        self.dense, self.around = Dense(rngs), around

    def __call__(self, x, shift):
        return self.around(self.dense(x + shift))


def test_blocks_of_different_kinds_receive_their_entries():
    rngs = nnx.Rngs(0)
    kinds = [jnp.sin, jnp.sin, jnp.cos, jnp.sin]
    mixed = [block(Shifted(rngs, kind), Shifted(rngs, kind)) for kind in kinds]
    shifts = PerBlock(normal(1, 4, 1, HALF))
    expected = step(nnx.List(mixed), X, shifts, run=plain)
    for mode in ("reversible", "recompute_2"):
        assert_close(step(stack(mixed, mode), X, shifts), expected)


def per_block_message(where, found, blocks=DEPTH):
    return (
        f"`PerBlock{where}` must have a leading axis of size {blocks}, one entry for "
        f"each block. Got {found}; pass what all blocks share without `PerBlock`."
    )


def product(p, x, *context):
    return x * p


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([1.0], TypeError, "`PerBlock[0]` must be an array. Got 1.0 of type float."),
        ("abc", TypeError, "`PerBlock` must be an array. Got 'abc' of type str."),
        (jnp.ones((2, 4)), ValueError, per_block_message("", "float64[2, 4]")),
        ({"a": jnp.asarray(True)}, ValueError, per_block_message("['a']", "bool[]")),
    ],
)
def test_per_block_context_must_have_an_entry_for_each_block(value, error, message):
    made = [block(jnp.tanh) for _ in range(DEPTH)]
    for mode in ("sequential", "reversible", "recompute_2"):
        raises(error, message, stack(made, mode), X, PerBlock(value))
        raises(
            error, message, stack(made, mode).inverse, X, named={"a": PerBlock(value)}
        )
    p = jnp.ones(DEPTH)
    raises(
        error, message, reversible_scan, product, product, (p, p), (X, X),
        PerBlock(value),
    )  # fmt: skip


def test_one_block_is_a_stack_of_one():
    message = per_block_message("", "float64[2]", 1)
    raises(ValueError, message, block(jnp.tanh), X, PerBlock(jnp.ones(2)))
    scale = block(jnp.multiply)
    y = scale(X, PerBlock(jnp.full((1,), 2.0)))
    assert_close(y, scale(X, jnp.asarray(2.0)))


class Cross(nnx.Module):
    """Attends to what another network made of another input."""

    def __init__(self, rngs):
        self.query, self.key = Dense(rngs), Dense(rngs)

    def __call__(self, x, memory):
        weights = jax.nn.softmax(self.query(x) @ self.key(memory).T)
        return weights @ memory


def test_the_network_that_computes_the_context_is_trained():
    rngs, source = nnx.Rngs(0), normal(2, 5, HALF)
    blocks = [block(Cross(rngs), Cross(rngs)) for _ in range(DEPTH)]

    def read(run):
        return lambda model, x, w: run(model, x, jnp.tanh(source @ w))

    w = normal(3, HALF, HALF)
    expected = step(nnx.List(blocks), X, w, run=read(plain))
    for mode in ("reversible", "recompute_2"):
        assert_close(step(stack(blocks, mode), X, w, run=read(call)), expected)


# --- precision ----------------------------------------------------------------------


def error(found, true):
    """The largest relative error of a gradient in low precision."""
    assert jax.tree.structure(found) == jax.tree.structure(true)
    leaves = zip(*map(jax.tree.leaves, (found, true)), strict=True)
    return max(
        float(jnp.linalg.norm(a.astype(b.dtype) - b) / jnp.linalg.norm(b))
        for a, b in leaves
    )


def shifted(p, x, c):
    return jnp.tanh(x + c.astype(x.dtype)) * p


def summed(dtype, stream_dtype, **options):
    """The gradient of context that all of 512 blocks add to."""
    p = jnp.full(512, 1 / 512, stream_dtype)
    x = X[:, :HALF].astype(stream_dtype)

    def loss(c):
        y1, y2 = reversible_scan(shifted, shifted, (p, p), (x, x), c, **options)
        return jnp.sum(y1) + jnp.sum(y2)

    # Numbers that are exact in every dtype.
    return jax.grad(loss)(jnp.asarray([[0.5, -0.25, 0.75, 1.0]], dtype))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"store_activations": True},
        {"anchor_every": 1},
        {"anchor_every": 64},
        {"anchor_every": 1, "between_anchors": "invert"},
    ],
    ids=["reversible", "stored", "recompute", "recompute_64", "invert"],
)
def test_gradients_of_low_precision_context_are_summed_in_float32(options, dtype):
    found = summed(dtype, jnp.float32, **options)
    assert found.dtype == dtype
    # One rounding at the end, and small ones in each block that cancel.
    assert error(found, summed(jnp.float64, jnp.float64)) < jnp.finfo(dtype).eps


class Tied(nnx.Module):
    def __init__(self, shift):
        self.shift = shift

    def __call__(self, x):
        return jnp.tanh(x + self.shift[...].astype(x.dtype)) / 256


def test_gradients_of_a_tied_low_precision_parameter_are_summed_in_float32():
    def gradient(dtype, stream_dtype, **options):
        shift = nnx.Param(jnp.asarray([[0.5, -0.25, 0.75, 1.0]], dtype))
        model = ReversibleSequence.create(
            lambda rngs: block(Tied(shift)), 256, rngs=nnx.Rngs(0), **options
        )
        x = X.astype(stream_dtype)
        return nnx.grad(lambda model: jnp.sum(model(x)))(model)

    true = jax.tree.leaves(gradient(jnp.float64, jnp.float64))
    found, stored = (
        jax.tree.leaves(gradient(jnp.bfloat16, jnp.float32, **options))
        for options in ({}, SCANS["stored"])
    )
    assert [leaf.dtype for leaf in found] == [jnp.bfloat16]
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    assert error(found, true) < eps
    assert error(stored, true) < eps

    def plain(shift):
        def body(streams, _):
            x1, x2 = streams
            x1 = x1 + jnp.tanh(x2 + shift.astype(x2.dtype)) / 256
            return (x1, x2 + jnp.tanh(x1 + shift.astype(x1.dtype)) / 256), None

        streams = tuple(jnp.split(X.astype(jnp.float32), 2, -1))
        return sum(map(jnp.sum, jax.lax.scan(body, streams, length=256)[0]))

    by_scan = jax.grad(plain)(jnp.asarray([[0.5, -0.25, 0.75, 1.0]], jnp.bfloat16))
    assert error([by_scan], true) > 10 * eps


def cast(w, x, gain):
    """A branch that computes in the dtype of its weights."""
    return jnp.tanh(x.astype(w.dtype) @ w) * gain.astype(w.dtype)


def cast_gradients(dtype, streams, **options):
    w = (normal(1, 2, 6, HALF, HALF) / 2).astype(dtype)
    x = X.astype(dtype)
    arguments = (w[0], w[1]), (x[:, :HALF], x[:, HALF:]), jnp.asarray(0.5, dtype)

    def loss(*arguments):
        y = reversible_scan(
            cast, cast, *arguments, coupling=Additive(streams), **options
        )
        assert {a.dtype for a in y} == {jnp.dtype(streams)}
        return square(y[0]) + square(y[1])

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*arguments)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
    return found


@functools.cache
def true_cast_gradients():
    return cast_gradients(jnp.float64, jnp.float64, store_activations=True)


@pytest.mark.parametrize(
    ("dtype", "streams", "options"),
    [
        (jnp.bfloat16, jnp.float32, SCANS["reversible"]),
        (jnp.float16, jnp.float32, SCANS["invert"]),
        (jnp.bfloat16, jnp.bfloat16, SCANS["recompute"]),
    ],
)
def test_low_precision_branches_train_as_well_as_in_the_stored_stack(
    dtype, streams, options
):
    """On streams of higher precision; on their own with recomputed activations."""
    stored, found = (
        error(cast_gradients(dtype, streams, **option), true_cast_gradients())
        for option in (SCANS["stored"], options)
    )
    assert 0 < found < 1.5 * stored


# --- further outputs ----------------------------------------------------------------


def routed(p, x, gain) -> Any:
    h = jnp.tanh(x * p)
    return h * gain, {"load": jnp.mean(h**2), "top": jnp.argmax(h, -1)}


def bare(p, x, gain) -> Any:
    return jnp.sin(x * p), ()


def plain_scan(params, streams, gain):
    (x1, x2), rows = streams, []
    for f_params, g_params in zip(*params, strict=True):
        h, aux = routed(f_params, x2, gain)
        x1 = x1 + h
        x2 = x2 + bare(g_params, x1, gain)[0]
        rows.append(aux)
    return (x1, x2), (jax.tree.map(lambda *a: jnp.stack(a), *rows), ())


def aux_gradients(run):
    p = normal(1, 5, 1, HALF)
    arguments = (p, jnp.cos(p)), (X[:, :HALF], X[:, HALF:]), jnp.asarray(0.7)

    def loss(*arguments):
        y, aux = run(*arguments)
        return square(y[0]) + jnp.sum(jnp.arange(1.0, 6.0) * aux[0]["load"]), (y, aux)

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arguments)


@functools.cache
def plain_aux_gradients():
    return aux_gradients(plain_scan)


@in_scans
def test_further_outputs_are_stacked_and_their_gradients_flow(options):
    run = functools.partial(reversible_scan, routed, bare, has_aux=True, **options)
    found, true = aux_gradients(run), plain_aux_gradients()
    assert_close(found, true)
    (_, (_, aux)), (_, (_, aux_true)) = found, true
    np.testing.assert_array_equal(aux[0]["top"], aux_true[0]["top"])
    assert aux[1] == ()


@in_scans
def test_a_stack_of_no_blocks_has_no_rows_of_further_outputs(options):
    none = jnp.zeros((0, 1, HALF))
    x = X[:, :HALF]
    y, (f_aux, g_aux) = reversible_scan(
        routed, bare, (none, none), (x, x), jnp.asarray(1.0), has_aux=True, **options
    )
    np.testing.assert_array_equal(y, (x, x))
    assert (f_aux["load"].shape, f_aux["top"].shape, g_aux) == ((0,), (0, 3), ())


NO_PAIR = "`f` must return a pair `(h, aux)`, since `has_aux` is True. Got "


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (lambda h: h, NO_PAIR + "float64[3, 4]."),
        (lambda h: (h, 1, 2), NO_PAIR + "a tuple of length 3."),
        (
            lambda h: (h, {"n": 1}),
            "`aux['n']` of `f` must be an array. Got 1 of type int.",
        ),
    ],
)
def test_further_outputs_must_be_arrays_in_a_pair(out, message):
    def f(p, x):
        return out(x)

    raises(TypeError, message, scan_with_aux, f, has_aux=True)


def scan_with_aux(f, **options):
    p, x = jnp.ones(2), X[:, :HALF]
    return reversible_scan(f, f, (p, p), (x, x), **options)


@pytest.mark.parametrize(
    ("value", "found"), [(1, "1 of type int"), (None, "None of type NoneType")]
)
def test_has_aux_must_be_a_bool(value, found):
    message = f"`has_aux` must be a bool, True or False. Got {found}."
    raises(TypeError, message, scan_with_aux, product, has_aux=value)


class Balance(nnx.Variable):
    pass


class Balanced(nnx.Module):
    """Leaves a second loss in a variable."""

    def __init__(self, rngs):
        self.dense, self.balance = Dense(rngs), Balance(jnp.asarray(0.0))

    def __call__(self, x):
        h = self.dense(x)
        self.balance[...] = jnp.mean(jnp.square(h))
        return h


def with_balance(y, model):
    balances = jax.tree.leaves(nnx.state(model, Balance))
    return square(y) + sum(jnp.sum(jnp.sqrt(b)) for b in balances)


BALANCED = Case(lambda rngs: block(Balanced(rngs), Balanced(rngs)), loss=with_balance)


@in_modes
def test_a_loss_that_branches_leave_in_variables_is_differentiated(mode):
    found = agrees(BALANCED, mode)["after"]
    assert all(b[name]["balance"] > 0 for b in found for name in "FG")


# --- randomness ---------------------------------------------------------------------


class DropPath(ReversibleCouplingBlock):
    """Leaves a branch out for some of the examples, more often in deeper blocks."""

    def __init__(self, rngs):
        super().__init__(2 * HALF, Dense(rngs), Dense(rngs))

    def f(self, x, key, rate):
        keep = jax.random.bernoulli(key, 1 - rate, (x.shape[0], 1))
        return jnp.where(keep, self.F(x) / (1 - rate), 0.0)

    def g(self, x, key, rate):
        return self.G(x)


RATES = PerBlock(jnp.linspace(0.0, 0.6, DEPTH))
DROPPED = Case(DropPath, PerBlock(jax.random.split(jax.random.key(1), DEPTH)), RATES)


@pytest.mark.parametrize("mode", ["reversible", "recompute_2"])
def test_paths_are_dropped_alike_in_both_passes(mode):
    assert len(set(agrees(DROPPED, mode)["context"][-1].tolist())) == DEPTH


def test_gradients_over_seeds_at_once_are_those_of_each_seed():
    model = stack(DROPPED.blocks, "reversible")
    graphdef, params = nnx.split(model)

    def gradient(key, rates):
        def loss(params, rates):
            keys = PerBlock(jax.random.split(key, DEPTH))
            return square(nnx.merge(graphdef, params)(X, keys, rates))

        return jax.grad(loss, (0, 1))(params, rates)

    keys = jax.random.split(jax.random.key(0), 3)
    found = jax.jit(jax.vmap(gradient, (0, None)))(keys, RATES)
    one = jax.jit(gradient)
    each = [one(key, RATES) for key in keys]
    assert_close(found, jax.tree.map(lambda *a: jnp.stack(a), *each))
    assert not np.allclose(*jax.tree.leaves(each[:2])[:: len(jax.tree.leaves(each[0]))])


def test_one_key_decides_everything():
    @nnx.jit
    def gradient(model):
        return nnx.grad(lambda model: square(model(X)))(model)

    def two_steps(seed):
        rngs = nnx.Rngs(0, dropout=seed)
        model = ReversibleSequence([Written(rngs) for _ in range(DEPTH)])
        return jax.tree.leaves((gradient(model), gradient(model)))

    first, again, other = map(two_steps, (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    half = len(first) // 2
    assert not np.array_equal(first[0], first[half])
