"""What changes in a call changes once, and is replayed; what is shared stays shared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from stacks import (
    HALF,
    MLP,
    assert_close,
    blocks_of,
    modes,
    normal,
    oracle,
    square,
    stack,
    train,
)

from revjax import ReversibleCouplingBlock, ReversibleSequence

DEPTH = 3
X = normal(0, 6, 2 * HALF)
MODES = ["sequential", "reversible", "stored", "recompute_2", "invert_2"]


def without_strict_promotion(layer, x):
    """Flax's normalizations mix float32 constants into float64 arithmetic."""
    with jax.numpy_dtype_promotion("standard"):
        return layer(x)


class Count(nnx.Variable):
    pass


class Stateful(nnx.Module):
    """Everything at once: batch statistics, dropout, an int counter, a float sum."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(HALF, param_dtype=jnp.float64, rngs=rngs)
        # Flax makes the statistics in float32 and updates them in float64.
        for statistic in (self.norm.mean, self.norm.var):
            statistic.set_value(statistic[...].astype(jnp.float64))
        self.mlp = MLP(rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)
        self.calls = Count(jnp.asarray(0))
        self.total = Count(jnp.asarray(0.0))

    def __call__(self, x, train=True):
        norm = functools.partial(self.norm, use_running_average=not train)
        x = self.mlp(without_strict_promotion(norm, x))
        if train:
            self.calls[...] += 1
            self.total[...] += jax.lax.stop_gradient(x).sum()
        return self.dropout(x, deterministic=not train)


class Talking(ReversibleCouplingBlock):
    """F writes what G reads, and both draw from one stream."""

    def __init__(self, rngs):
        super().__init__(2 * HALF, F=MLP(rngs), G=MLP(rngs))
        self.seen = Count(jnp.zeros(HALF))
        self.rngs = rngs.fork()

    def mask(self, h):
        return jax.random.bernoulli(self.rngs.dropout(), 0.5, h.shape)

    def f(self, x):
        h = self.F(x)
        self.seen[...] = 0.5 * self.seen[...] + h.mean(0)
        return jnp.where(self.mask(h), h, 0.0)

    def g(self, x):
        h = self.G(x) * jnp.cos(self.seen[...])[None]
        return jnp.where(self.mask(h), h, 0.0)


def fresh(kind):
    rngs = nnx.Rngs(0, dropout=1)
    if kind == "talking":
        return [Talking(rngs) for _ in range(DEPTH)]
    return [
        ReversibleCouplingBlock(2 * HALF, Stateful(rngs), Stateful(rngs))
        for _ in range(DEPTH)
    ]


def as_numbers(state):
    leaves = jax.tree.leaves(state)
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [
        np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        for leaf, is_key in zip(leaves, keys, strict=True)
    ]


def compare(model, *args, jit=True, **kwargs):
    """Holds output, gradients and state after one step against the oracle."""
    plain = nnx.List(blocks_of(model))  # a list of their own, so that state shows
    transform = jax.jit if jit else lambda step: step
    actual = train(model, X, *args, transform=transform, **kwargs)
    expected = train(plain, X, *args, run=_run_blocks, transform=transform, **kwargs)
    for part in ("y", "parameters", "input"):
        assert_close(actual[part], expected[part])
    for new, true in zip(
        as_numbers(actual["state"]), as_numbers(expected["state"]), strict=True
    ):
        np.testing.assert_allclose(new, true, rtol=1e-12)
    return actual


def _run_blocks(blocks, x, *args, **kwargs):
    x1, x2 = jnp.split(x, 2, -1)
    for block in blocks:
        x1 = x1 + block.f(x2, *args, **kwargs)
        x2 = x2 + block.g(x1, *args, **kwargs)
    return jnp.concatenate([x1, x2], -1)


@pytest.mark.parametrize("kind", ["stateful", "talking"])
@pytest.mark.parametrize("mode", MODES)
def test_state_is_updated_once_and_replayed_in_the_backward_pass(mode, kind):
    compare(stack(fresh(kind), mode))


@pytest.mark.parametrize("mode", ["reversible", "recompute_2"])
def test_state_is_updated_once_in_an_eager_step(mode):
    compare(stack(fresh("talking"), mode), jit=False)


@pytest.mark.parametrize("mode", ["sequential", "reversible"])
def test_a_counter_reads_the_number_of_training_steps(mode):
    model = stack(fresh("stateful"), mode)

    @nnx.jit
    def step(model):
        return nnx.grad(lambda model: square(model(X, train=True)))(model)

    for _ in range(2):
        step(model)
    assert all(
        int(branch.calls[...]) == 2
        for block in blocks_of(model)
        for branch in (block.F, block.G)
    )


@pytest.mark.parametrize("mode", ["reversible", "invert_2"])
def test_two_calls_draw_different_masks_and_eval_changes_nothing(mode):
    model = stack(fresh("stateful"), mode)
    assert not jnp.array_equal(model(X), model(X))
    before = as_numbers(nnx.state(model))
    assert jnp.array_equal(model(X, train=False), model(X, train=False))
    after = as_numbers(nnx.state(model))
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


class Conditioned(nnx.Module):
    """Takes a mask, a float array, a key, indices and nothing."""

    def __init__(self, rngs):
        self.mlp = MLP(rngs)

    def __call__(self, x, mask, options, *, key, nothing):
        assert nothing is None
        x = self.mlp(x) + options["shift"][options["rows"]]
        keep = jax.random.bernoulli(key, 0.7, x.shape)
        return jnp.where(mask & keep, x, 0.0)


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("mode", MODES)
def test_masks_indices_keys_and_nothing_are_context_and_floats_get_gradients(mode, key):
    rngs = nnx.Rngs(0)
    model = stack(
        [
            ReversibleCouplingBlock(2 * HALF, Conditioned(rngs), Conditioned(rngs))
            for _ in range(DEPTH)
        ],
        mode,
    )
    mask = (jnp.arange(HALF) % 3 > 0)[None]
    rows = jnp.arange(6) % 2
    where = {"key": key(7), "nothing": None}

    def gradient(run):
        @jax.jit
        def of(shift, x):
            def loss(shift, x):
                return square(
                    run(model, x, mask, {"shift": shift, "rows": rows}, **where)
                )

            return jax.grad(loss, (0, 1))(shift, x)

        return of(normal(1, 2, HALF), X)

    assert_close(gradient(lambda m, *a, **k: m(*a, **k)), gradient(oracle))


def test_rngs_may_be_context_and_move_on_once_for_each_branch():
    class Drop(nnx.Module):
        def __init__(self):
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x, rngs):
            return self.dropout(x, rngs=rngs)

    model = ReversibleSequence(
        [ReversibleCouplingBlock(2 * HALF, Drop(), Drop()) for _ in range(DEPTH)]
    )
    rngs, same = nnx.Rngs(0), nnx.Rngs(0)
    y = model(X, rngs=rngs)
    assert int(rngs.default.count[...]) == 2 * DEPTH
    np.testing.assert_allclose(y, oracle(model, X, same), rtol=1e-12)


def one_module_as_both_branches(rngs):
    branch = MLP(rngs)
    return [ReversibleCouplingBlock(2 * HALF, branch, branch) for _ in range(2)]


def one_block_several_times(rngs):
    block, other = (
        ReversibleCouplingBlock(2 * HALF, MLP(rngs), MLP(rngs)) for _ in range(2)
    )
    return [block, block, other, block]


def one_layer_in_different_blocks(rngs):
    branch = MLP(rngs)
    return [ReversibleCouplingBlock(2 * HALF, branch, MLP(rngs)) for _ in range(4)]


class Listed(nnx.Module):
    """The same blocks without revjax, sharing what they share."""

    def __init__(self, blocks):
        self.blocks = nnx.List(blocks)

    def __call__(self, x):
        return _run_blocks(self.blocks, x)


@pytest.mark.parametrize("mode", ["reversible", "stored", "recompute_3", "invert_3"])
@pytest.mark.parametrize(
    "make",
    [
        one_module_as_both_branches,
        one_block_several_times,
        one_layer_in_different_blocks,
    ],
)
def test_shared_parameters_stay_shared_and_get_the_sum_of_their_gradients(make, mode):
    options = modes(4)[mode]
    trained = []
    for build in (lambda blocks: ReversibleSequence(blocks, **options), Listed):
        model = build(make(nnx.Rngs(0)))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            optimizer.update(model, nnx.grad(lambda model: square(model(X)))(model))

        for _ in range(2):
            step(model, optimizer)
        trained.append(model)
    ours, theirs = trained
    assert_close({"y": ours(X)}, {"y": theirs(X)})
    sizes = [sum(p.size for p in jax.tree.leaves(nnx.state(m))) for m in trained]
    assert sizes[0] == sizes[1]  # not one array more: nothing was untied


def test_a_layer_shared_with_the_rest_of_the_model_stays_one():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Linear(HALF, HALF, param_dtype=jnp.float64, rngs=rngs)

            def make_block(rngs):
                return ReversibleCouplingBlock(2 * HALF, self.table, MLP(rngs))

            self.stack = ReversibleSequence.create(make_block, DEPTH, rngs=rngs)

        def __call__(self, x):
            y1, y2 = jnp.split(self.stack(x), 2, -1)
            return self.table(y1) + y2

    def gradient(run):
        model = Model(nnx.Rngs(0))
        return nnx.grad(lambda model: square(run(model)))(model)

    def plain(model):
        y1, y2 = jnp.split(_run_blocks(_tied(model), X), 2, -1)
        return model.table(y1) + y2

    def _tied(model):
        blocks = blocks_of(model.stack)
        for block in blocks:
            block.F = model.table
        return blocks

    assert Model(nnx.Rngs(0)).stack.segments[0].shared
    assert_close(gradient(lambda model: model(X)), gradient(plain))
