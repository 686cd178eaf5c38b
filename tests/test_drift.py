"""How far what comes back is from what was there, measured in two ways."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from stacks import MLP, assert_close, mlp_block, normal, planned, square

from revjax import (
    Additive,
    Coupling,
    Drift,
    ExactAdditive,
    ReversibleCouplingBlock,
    ReversibleHalfBlock,
    ReversibleSequence,
    ReversibleSequential,
    Squeeze,
    reversible_scan,
)
from revjax.diagnostics import check_reversible, reconstruction_error

X = normal(0, 3, 8)


@dataclasses.dataclass(frozen=True)
class Leaky(Coupling):
    """Undoes less than it did: a drift that is no accident of rounding."""

    leak: float = 1e-3

    def combine(self, x, h):
        return x + h

    def recover(self, y, h):
        return y - (1 - self.leak) * h


def leaky_block(rngs, hidden=6):
    return ReversibleCouplingBlock(
        8, MLP(rngs, hidden=hidden), MLP(rngs, hidden=hidden), coupling=Leaky()
    )


def leaky_blocks(count):
    rngs = nnx.Rngs(0)
    return [leaky_block(rngs) for _ in range(count)]


def naive(blocks, x, every=0):
    """Keeps all inputs, undoes block by block, and compares."""
    inputs = [x]
    for block in blocks:
        inputs.append(block(inputs[-1]))
    found, errors = inputs[-1], []
    for i in reversed(range(len(blocks))):
        if every and (i + 1) % every == 0:
            found = inputs[i + 1]
        found = blocks[i].inverse(found)
        gap = np.asarray(found - inputs[i])
        errors.append(
            (np.abs(gap).max(), np.linalg.norm(gap) / np.linalg.norm(inputs[i]))
        )
    return np.array(errors[::-1]).T


def agrees(error, expected):
    np.testing.assert_allclose(error.absolute, expected[0], rtol=1e-9)
    np.testing.assert_allclose(error.relative, expected[1], rtol=1e-9)


def mixed_blocks():
    rngs = nnx.Rngs(1)
    half = ReversibleHalfBlock(8, MLP(rngs), coupling=Leaky())
    return [
        leaky_block(rngs), leaky_block(rngs), half, leaky_block(rngs, hidden=3), half,
    ]  # fmt: skip


@pytest.mark.parametrize("make", [functools.partial(leaky_blocks, 7), mixed_blocks])
@pytest.mark.parametrize("every", [0, 1, 3])
def test_the_error_of_each_block_is_that_of_undoing_one_by_one(make, every):
    blocks = make()
    options: Any = {"between_anchors": "invert"} if every else {}
    model = ReversibleSequence(blocks, every, **options)
    agrees(reconstruction_error(model, X), naive(blocks, X, every))


def test_a_block_and_a_sequential_begin_again_at_each_output():
    blocks = leaky_blocks(3)
    agrees(reconstruction_error(blocks[0], X), naive(blocks[:1], X))
    agrees(reconstruction_error(ReversibleSequential(blocks), X), naive(blocks, X, 1))


@pytest.mark.parametrize("mode", [{"anchor_every": 2}, {"store_activations": True}])
def test_where_nothing_is_undone_there_is_no_error(mode):
    error = reconstruction_error(ReversibleSequence(leaky_blocks(3), **mode), X)
    assert error.absolute.shape == (3,)
    assert not error.relative.any()


def test_moves_between_blocks_are_undone_exactly():
    class Pixels(nnx.Module):
        def __init__(self, size, rngs):
            self.conv = nnx.Conv(size, size, (3, 3), param_dtype=float, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.conv(x))

    rngs = nnx.Rngs(0)
    blocks = [
        ReversibleCouplingBlock(2, Pixels(1, rngs), Pixels(1, rngs), coupling=Leaky()),
        Squeeze(2),
        ReversibleCouplingBlock(8, Pixels(4, rngs), Pixels(4, rngs), coupling=Leaky()),
    ]
    x = normal(0, 2, 4, 6, 2)
    agrees(reconstruction_error(ReversibleSequence(blocks), x), naive(blocks, x))


def test_context_and_state_are_those_of_the_call_and_the_model_is_left_alone():
    class Stateful(nnx.Module):
        def __init__(self, rngs):
            self.mlp = MLP(rngs)
            self.calls = nnx.Variable(jnp.zeros(()))
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, shift):
            self.calls[...] += 1
            return self.calls[...] * self.drop(self.mlp(x, shift))

    model = ReversibleSequence.create(
        lambda rngs: ReversibleCouplingBlock(8, Stateful(rngs), Stateful(rngs)),
        6,
        rngs=nnx.Rngs(0),
    )
    before = jax.tree.map(jnp.copy, nnx.state(model))
    error = reconstruction_error(model, X, normal(1, 3, 4))
    assert 0 < error.relative.max() < 1e-13
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), before, nnx.state(model))
    assert all(jax.tree.leaves(same))


def test_memory_of_the_measurement_does_not_grow_with_depth():
    def scratch(depth):
        model = ReversibleSequence.create(mlp_block, depth, rngs=nnx.Rngs(0))
        x = jnp.zeros((256, 8))
        measure = jax.jit(lambda x: reconstruction_error(model, x).relative)
        return planned(measure.lower(x).compile()).temp_size_in_bytes - 8 * depth * (
            8 * 6 * 4
        )  # the weights

    assert scratch(64) < scratch(8) + 4 * 8 * 256


# The meter in the backward pass.


def leaky_stack(depth, every, **options):
    return ReversibleSequence.create(
        leaky_block, depth, every, between_anchors="invert", rngs=nnx.Rngs(0), **options
    )


BOTH = nnx.DiffState(0, (nnx.Param, Drift))


def loss(model, x):
    return square(model(x))


def meter_of(gradients) -> Any:
    (drift,) = jax.tree.leaves(nnx.state(gradients, Drift))
    return drift


@pytest.mark.parametrize(
    "jit", [pytest.param(False, marks=pytest.mark.slow), True], ids=["eager", "jitted"]
)
@pytest.mark.parametrize(("depth", "every"), [(8, 2), (7, 3), (5, 1), (4, 4), (3, 5)])
def test_the_gradient_of_the_meter_is_the_drift_at_each_anchor(depth, every, jit):
    model = leaky_stack(depth, every, measure_drift=True)
    compute = nnx.grad(loss, argnums=BOTH)
    gradients = (nnx.jit(compute) if jit else compute)(model, X)
    drift = meter_of(gradients)
    error = reconstruction_error(model, X).relative
    inside = error[every::every]  # the first block of a chunk begins at an anchor
    np.testing.assert_allclose(drift, [*inside, 0], rtol=1e-9)
    plain = nnx.grad(loss)(leaky_stack(depth, every), X)
    assert_close(nnx.state(gradients, nnx.Param), nnx.state(plain, nnx.Param))


def test_a_list_of_different_blocks_has_a_meter_at_each_anchor():
    blocks = mixed_blocks()
    model = ReversibleSequence(blocks, 2, between_anchors="invert", measure_drift=True)
    gradients = nnx.grad(loss, argnums=BOTH)(model, X)
    drift = meter_of(gradients)
    expected = naive(blocks, X, 2)[1]
    np.testing.assert_allclose(drift, [expected[2], expected[4], 0], rtol=1e-9)


def test_a_stack_whose_anchors_were_taken_away_says_that_it_cannot_measure():
    model = leaky_stack(4, 2, measure_drift=True)
    model.between_anchors = "recompute"
    with pytest.raises(ValueError, match="`measure_drift` needs anchors"):
        model(X)


def test_the_meters_of_a_batch_are_added_up():
    model = leaky_stack(6, 2, measure_drift=True)
    graphdef, meter, rest = nnx.split(model, Drift, ...)
    xs = normal(3, 4, 3, 8)

    def run(meter, x):
        return square(nnx.merge(graphdef, meter, rest)(x))

    def of_batch(meter):
        return jnp.sum(jax.vmap(run, (None, 0))(meter, xs))

    one_by_one = jax.vmap(jax.grad(run), (None, 0))(meter, xs)
    total = jax.tree.map(lambda drift: jnp.sum(drift, 0), one_by_one)
    assert_close(jax.grad(of_batch)(meter), total)


def test_the_meter_works_under_shard_map():
    model = leaky_stack(6, 2, measure_drift=True)
    graphdef, meter, rest = nnx.split(model, Drift, ...)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec

    def run(meter, x):
        return nnx.merge(graphdef, meter, rest)(x)

    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    found = jax.jit(jax.grad(lambda meter: square(sharded(meter, X))))(meter)
    assert_close(found, jax.grad(lambda meter: square(run(meter, X)))(meter))


@pytest.mark.parametrize("coupling", [Additive(), ExactAdditive(30)])
@pytest.mark.parametrize("every", [0, 2])
def test_a_stream_that_the_loss_does_not_see_is_no_trouble_under_shard_map(
    coupling, every
):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    w, x = normal(0, 5, 4, 4), normal(1, 3, 4)

    def tanh(w, x):
        return jnp.tanh(x @ w)

    def run(w, x):
        y1, _ = reversible_scan(
            tanh, tanh, (w, w), (x, x), coupling=coupling, anchor_every=every,
            between_anchors="invert",
        )  # fmt: skip
        return y1

    sharded = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    found = jax.jit(jax.grad(lambda *a: square(sharded(*a)), (0, 1)))(w, x)
    assert_close(found, jax.grad(lambda *a: square(run(*a)), (0, 1))(w, x))


def test_nothing_drifts_where_all_is_zero():
    model = leaky_stack(6, 2, measure_drift=True)
    for leaf in jax.tree.leaves(nnx.state(model)):
        assert leaf.size
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))
    x = jnp.zeros((3, 8))
    gradients = nnx.grad(loss, argnums=BOTH)(model, x)
    assert not meter_of(gradients).any()
    assert not reconstruction_error(model, x).relative.any()


def test_a_stack_with_a_meter_passes_every_check():
    model = ReversibleSequence.create(
        mlp_block, 5, 2, between_anchors="invert", measure_drift=True, rngs=nnx.Rngs(0)
    )
    report = check_reversible(model, X)
    assert report.passed, str(report)


def test_training_can_log_the_meter():
    model = leaky_stack(6, 2, measure_drift=True)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        gradients = nnx.grad(loss, argnums=BOTH)(model, x)
        drift = meter_of(gradients)
        nnx.pop(gradients, Drift)
        optimizer.update(model, gradients)
        return drift

    drifts = jnp.stack([step(model, optimizer, X) for _ in range(3)])
    assert (drifts[:, :-1] > 1e-5).all()
    assert not drifts[:, -1].any()
    assert not model.drift[...].any()  # the variable itself stays as it is


def test_the_pure_function_has_the_same_meter():
    def branch(w, x):
        return jnp.tanh(x @ w)

    params = normal(0, 9, 4, 4), normal(1, 9, 4, 4)
    streams = normal(2, 3, 4), normal(3, 3, 4)

    def run(meter, coupling):
        y = reversible_scan(
            branch, branch, params, streams, anchor_every=4, between_anchors="invert",
            drift=meter, coupling=coupling,
        )  # fmt: skip
        return sum(map(jnp.sum, y))

    drift = jax.grad(run)(jnp.zeros(3), Leaky())
    more = jax.grad(run)(jnp.zeros(3), Leaky(2e-3))
    assert (drift[:-1] > 1e-5).all()
    np.testing.assert_allclose(more[:-1] / drift[:-1], 2, rtol=0.05)
    narrow = jax.grad(run)(jnp.zeros(3, jnp.float32), Additive())
    assert narrow.dtype == jnp.float32
    assert (narrow[:-1] < 1e-13).all()


def test_a_meter_that_is_not_read_costs_nothing():
    def scratch(**options):
        model = leaky_stack(12, 3, **options)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def run(params, rest, x):
            return square(nnx.merge(graphdef, params, rest)(x))

        x = jnp.zeros((512, 8))
        compiled = jax.jit(jax.grad(run)).lower(params, rest, x).compile()
        return planned(compiled).temp_size_in_bytes

    assert scratch(measure_drift=True) <= scratch() + 1024


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"anchor_every": 2},
        {"between_anchors": "invert"},
        {"anchor_every": 2, "between_anchors": "invert", "store_activations": True},
    ],
)
def test_there_is_nothing_to_measure_without_anchors_to_undo_from(options):
    with pytest.raises(ValueError, match="`measure_drift` needs anchors"):
        ReversibleSequence(leaky_blocks(2), measure_drift=True, **options)
    w, x = jnp.zeros((2, 4, 4)), jnp.zeros((3, 4))
    with pytest.raises(ValueError, match="`drift` needs anchors"):
        reversible_scan(
            lambda w, x: x @ w, lambda w, x: x @ w, (w, w), (x, x),
            drift=jnp.zeros(1), **options,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("drift", "kind"), [(jnp.zeros(3), ValueError), (jnp.zeros(1, int), TypeError)]
)
def test_the_array_of_the_meter_is_checked(drift, kind):
    w, x = jnp.zeros((2, 4, 4)), jnp.zeros((3, 4))
    with pytest.raises(kind, match="`drift` must"):
        reversible_scan(
            lambda w, x: x @ w, lambda w, x: x @ w, (w, w), (x, x), anchor_every=2,
            between_anchors="invert", drift=drift,
        )  # fmt: skip


# What has been said of reversible stacks elsewhere: "about 3e-3 over 12 blocks", and
# "exact up to magnitudes of 1e9". Each is true of some branches.


def scan_gradients(branch, dtype, scale, depth=12, **mode):
    params = tuple(scale * normal(i, depth, 32, 32) / 32**0.5 for i in range(2))
    streams = tuple(normal(2 + i, 16, 32) for i in range(2))
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32

    def run(params, streams):
        y = reversible_scan(
            lambda w, x: branch(w.astype(dtype), x.astype(dtype)),
            lambda w, x: branch(w.astype(dtype), x.astype(dtype)),
            params, tuple(s.astype(wide) for s in streams), **mode,
        )  # fmt: skip
        weights = jnp.linspace(0.5, 1.5, y[0].size).reshape(y[0].shape)
        return sum(jnp.sum(weights * s.astype(jnp.float64)) for s in y), y

    grads, y = jax.jit(jax.grad(run, (0, 1), has_aux=True))(params, streams)
    return grads, max(float(jnp.max(jnp.abs(s))) for s in y)


def norm_mlp(w, x):
    mean_square = jnp.mean(jnp.square(x), -1, keepdims=True)
    return jnp.tanh(x * jax.lax.rsqrt(mean_square + jnp.asarray(1e-6, x.dtype)) @ w)


def linear(w, x):
    return x @ w


def distance(found, true):
    found, true = (
        jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (found, true)
    )
    return float(jnp.linalg.norm(found - true) / jnp.linalg.norm(true))


def undone(branch, dtype, streams_dtype):
    """The drift of 12 blocks: 24 are run, with an anchor in the middle."""
    params: Any = tuple(normal(i, 24, 32, 32) / 32**0.5 for i in range(2))
    x1, x2 = (normal(2 + i, 16, 32).astype(streams_dtype) for i in range(2))

    def cast(w, x):
        return branch(w.astype(dtype), x.astype(dtype))

    def run(meter):
        y = reversible_scan(
            cast, cast, params, (x1, x2), anchor_every=12, between_anchors="invert",
            drift=meter,
        )  # fmt: skip
        return sum(map(jnp.sum, y))

    return float(jax.jit(jax.grad(run))(jnp.zeros(2))[0])


def test_thousandths_in_twelve_blocks_are_the_drift_of_half_precision_or_no_norm():
    assert 3e-4 < undone(norm_mlp, jnp.float16, jnp.float16) < 5e-3
    assert 3e-3 < undone(norm_mlp, jnp.bfloat16, jnp.bfloat16) < 5e-2
    assert 3e-4 < undone(linear, jnp.float32, jnp.float32) < 3e-2
    assert undone(norm_mlp, jnp.bfloat16, jnp.float32) < 1e-3
    assert undone(norm_mlp, jnp.float32, jnp.float32) < 1e-6


def test_exact_up_to_large_magnitudes_holds_for_input_gradients_of_linear_branches():
    compute = functools.partial(scan_gradients, linear, scale=4.0)
    (d_params, d_x), size = compute(jnp.float32)
    (true_params, true_x), _ = compute(jnp.float64, store_activations=True)
    (stored_params, _), _ = compute(jnp.float32, store_activations=True)
    assert size > 1e9
    assert distance(d_x, true_x) < 1e-5
    assert distance(stored_params, true_params) < 1e-5
    assert distance(d_params, true_params) > 1e-2
