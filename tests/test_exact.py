"""Fixed-point streams: what comes back is, bit for bit, what was there."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from stacks import assert_close, normal, planned

from revjax import (
    Additive,
    Drift,
    ExactAdditive,
    PerBlock,
    ReversibleCouplingBlock,
    ReversibleSequence,
    reversible_scan,
)
from revjax.diagnostics import check_reversible, reconstruction_error

SIZE = 16
EXACT = ExactAdditive(fraction_bits=20)


def f32(seed, *shape):
    return normal(seed, *shape).astype(jnp.float32)


@jax.custom_vjp
def seen(x, slot):
    """Returns `x`; what the backward pass takes for `x` is the gradient of `slot`."""
    return x


seen.defvjp(lambda x, slot: (x, x), lambda x, ct: (ct, x))


def norm(x):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def mlp(w, x):
    return jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def attention(w, x):
    q, k, v = jnp.split(norm(x) @ w["up"][:, : 3 * SIZE], 3, -1)
    scores = jnp.einsum("btd,bsd->bts", q, k) * SIZE**-0.5
    return jax.nn.softmax(scores) @ v @ w["down"][:SIZE]


def convolution(w, x):
    image = norm(x).reshape(x.shape[0], 3, 2, SIZE)
    kernel = w["down"].reshape(2, 2, SIZE, SIZE)
    h = jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.silu(h).reshape(x.shape)


def dropout(w, x, key):
    h = jax.nn.relu(norm(x) @ w["up"])
    return jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0) @ w["down"]


BRANCHES = {f.__name__: f for f in (mlp, attention, convolution, dropout)}


@functools.cache
def problem(name, depth):
    """Returns parameters, streams and context, in float32."""
    params = [
        {
            "up": f32(i, depth, SIZE, 4 * SIZE) / SIZE**0.5,
            "down": f32(i + 2, depth, 4 * SIZE, SIZE) / (4 * SIZE) ** 0.5,
        }
        for i in range(2)
    ]
    keys = PerBlock(jax.random.split(jax.random.key(0), depth))
    streams = f32(5, 2, 6, SIZE), f32(6, 2, 6, SIZE)
    return params, streams, (keys,) if name == "dropout" else ()


def gradients(name, depth, coupling, dtype=jnp.float32, how="together", **mode):
    """Returns gradients, and the points at which the two passes evaluate branches."""
    params, streams, context = problem(name, depth)

    def branch(inputs, x, *context):
        w, slot = inputs
        x = seen(x, slot)
        w = jax.tree.map(lambda a: a.astype(dtype), w)
        return BRANCHES[name](w, x.astype(dtype), *context), x

    def run(params, slots, streams):
        inputs: Any = tuple(zip(params, slots, strict=True))
        y, points = reversible_scan(
            branch, branch, inputs, streams, *context,
            coupling=coupling, has_aux=True, **mode,
        )  # fmt: skip
        return sum(jnp.sum(jnp.sin(s)) for s in y), points

    slots = [jnp.zeros((depth, *streams[0].shape), jnp.float32) for _ in range(2)]
    vjp = functools.partial(jax.vjp, run, has_aux=True)
    one = jnp.ones((), jnp.float32)
    if how == "eager":
        _, pullback, points = vjp(params, slots, streams)
        d_params, d_slots, d_streams = pullback(one)
    elif how == "apart":
        _, pullback, points = jax.jit(vjp)(params, slots, streams)
        d_params, d_slots, d_streams = jax.jit(lambda f: f(one))(pullback)
    else:
        grad = jax.jit(jax.grad(run, (0, 1, 2), has_aux=True))
        (d_params, d_slots, d_streams), points = grad(params, slots, streams)
    return (d_params, d_streams), points, d_slots


def differing_bits(one, other):
    pairs = zip(one, other, strict=True)
    words = [
        (np.asarray(a).view(np.int32), np.asarray(b).view(np.int32)) for a, b in pairs
    ]
    return sum(int(np.sum(a != b)) for a, b in words)


DTYPES = [jnp.float32, jnp.bfloat16]
exact_cases = [
    *((name, 192, dtype, "together") for name in BRANCHES for dtype in DTYPES),
    ("mlp", 1, jnp.float32, "together"),
    ("mlp", 12, jnp.bfloat16, "eager"),
    ("attention", 192, jnp.float32, "apart"),
    ("dropout", 1024, jnp.float32, "together"),
]
more_cases = [
    *((name, depth, dtype, how)
      for name in BRANCHES for dtype in DTYPES
      for depth, how in ((1, "together"), (12, "eager"), (1024, "together"),
                         (1024, "apart"))),
    *((name, 192, jnp.float32, "eager") for name in BRANCHES),
]  # fmt: skip


@pytest.mark.usefixtures("full_optimization")
@pytest.mark.parametrize(
    ("name", "depth", "dtype", "how"),
    [
        *exact_cases,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in more_cases),
    ],
)
def test_the_backward_pass_meets_the_points_of_the_forward_pass(
    name, depth, dtype, how
):
    found, points, again = gradients(name, depth, EXACT, dtype, how)
    assert differing_bits(points, again) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.usefixtures("full_optimization")
@pytest.mark.parametrize("dtype", DTYPES)
def test_float_streams_do_not_come_back_exactly(dtype):
    _, points, again = gradients("mlp", 192, Additive(), dtype)
    assert differing_bits(points, again) > 0.1 * sum(p.size for p in points)


def worst_leaf(found, true):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True)
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in wide)


@pytest.mark.usefixtures("full_optimization")
@pytest.mark.parametrize(
    "name", ["mlp", pytest.param("attention", marks=pytest.mark.slow)]
)
def test_gradients_are_those_of_the_stored_stack_with_the_same_rounding(name):
    found, *_ = gradients(name, 192, EXACT)
    stored, *_ = gradients(name, 192, EXACT, store_activations=True)
    assert worst_leaf(found, stored) < 5e-6


@pytest.mark.usefixtures("full_optimization")
@pytest.mark.parametrize(
    "name", ["mlp", pytest.param("attention", marks=pytest.mark.slow)]
)
def test_bfloat16_branches_are_as_near_to_float32_as_those_of_the_stored_stack(name):
    true, *_ = gradients(name, 192, Additive(), store_activations=True)
    stored, *_ = gradients(name, 192, EXACT, jnp.bfloat16, store_activations=True)
    found, *_ = gradients(name, 192, EXACT, jnp.bfloat16)
    drifted, *_ = gradients(name, 192, Additive(), jnp.bfloat16)
    assert worst_leaf(found, true) < 1.01 * worst_leaf(stored, true)
    assert worst_leaf(drifted, stored) > 10 * worst_leaf(found, stored)


# In float64, whose words hold 64-bit integers, against plain Python.


def stepped(x, bits):
    """Rounds to the grid; its derivative is one."""
    return x + jax.lax.stop_gradient(jnp.round(x * 2.0**bits) / 2.0**bits - x)


def plain(branch, params, streams, bits):
    x1, x2 = (stepped(x, bits) for x in streams)
    for f, g in zip(*params, strict=True):
        x1 = x1 + stepped(branch(f, x2), bits)
        x2 = x2 + stepped(branch(g, x1), bits)
    return x1, x2


def tanh(w, x):
    return jnp.tanh(x @ w)


def loss(run, params, streams):
    y1, y2 = run(params, streams)
    return jnp.sum(jnp.sin(y1) * y2)


@pytest.mark.parametrize("bits", [8, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"store_activations": True},
        {"anchor_every": 3},
        {"anchor_every": 2, "between_anchors": "invert"},
    ],
)
def test_gradients_are_straight_through_in_every_mode(mode, bits):
    params = normal(0, 7, 4, 4), normal(1, 7, 4, 4)
    streams = normal(2, 3, 4), normal(3, 3, 4)
    run = functools.partial(
        reversible_scan, tanh, tanh, coupling=ExactAdditive(bits), **mode
    )
    oracle = functools.partial(plain, tanh, bits=bits)
    assert_close(run(params, streams), oracle(params, streams), rtol=1e-13)
    for transform in (jax.jit, lambda f: f):
        actual = transform(jax.grad(functools.partial(loss, run), (0, 1)))
        expected = jax.grad(functools.partial(loss, oracle), (0, 1))
        assert_close(actual(params, streams), expected(params, streams))


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"store_activations": True},
        {"anchor_every": 2},
        {"anchor_every": 2, "between_anchors": "invert"},
    ],
)
def test_second_derivatives_and_vmap_are_those_of_plain_python(mode):
    params = normal(0, 3, 4, 4), normal(1, 3, 4, 4)
    streams = normal(2, 5, 2, 4), normal(3, 5, 2, 4)

    def hessian_product(run):
        def grad_norm(params, streams):
            grads = jax.grad(functools.partial(loss, run))(params, streams)
            return sum(jnp.sum(g**2) for g in grads)

        return jax.vmap(jax.grad(grad_norm), (None, 0))(params, streams)

    run = functools.partial(
        reversible_scan, tanh, tanh, coupling=ExactAdditive(30), **mode
    )
    assert_close(
        hessian_product(run), hessian_product(functools.partial(plain, tanh, bits=30))
    )


@pytest.mark.parametrize("around", ["checkpoint", "scan"])
def test_second_derivatives_hold_inside_of_checkpoint_and_scan(around):
    params = normal(0, 3, 4, 4), normal(1, 3, 4, 4)
    streams = normal(2, 2, 4), normal(3, 2, 4)

    def twice(run, streams):
        if around == "checkpoint":
            return jax.checkpoint(lambda s: run(params, run(params, s)))(streams)
        body = jax.lax.scan(lambda s, _: (run(params, s), None), streams, length=2)
        return body[0]

    def hessian(run):
        def total(x1):
            y1, y2 = twice(run, (x1, streams[1]))
            return jnp.sum(jnp.sin(y1) * y2)

        return jax.hessian(total)(streams[0])

    run = functools.partial(reversible_scan, tanh, tanh, coupling=ExactAdditive(30))
    oracle = functools.partial(plain, tanh, bits=30)
    assert_close(hessian(run), hessian(oracle))


# Range.


def largest(bits, dtype):
    info, integer = np.finfo(dtype), f"int{8 * np.dtype(dtype).itemsize}"
    return (int(info.max.view(integer)) - int(info.tiny.view(integer))) / 2**bits


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("bits", [0, 10, 20, 28])
@pytest.mark.parametrize("sign", [-1, 1])
def test_what_fits_is_kept_and_what_does_not_fit_is_nan(bits, dtype, sign):
    law = ExactAdditive(bits, dtype)
    most = np.asarray(sign * largest(bits, dtype), dtype)
    # The float next to the limit is just above it.
    inside = np.nextafter(most, np.asarray(0, dtype))
    x = law.encode(jnp.asarray([inside, most, np.inf, -np.inf, np.nan], dtype))
    np.testing.assert_array_equal(law.decode(x), [inside, *[np.nan] * 4])
    half = law.encode(jnp.asarray(inside / 2))
    assert law.decode(law.combine(half, jnp.asarray(0.49 * inside))) / inside > 0.98
    assert np.isnan(law.combine(half, jnp.asarray(0.51 * most)))
    assert np.isnan(law.recover(half, jnp.asarray(-0.51 * most)))


def test_the_table_of_ranges_is_right():
    rows = [
        [cell.strip("() ") for cell in line.strip().strip("|").split("|")]
        for line in (ExactAdditive.__doc__ or "").splitlines()
        if line.strip().startswith("|") and line.strip(" |()")[:2].isdigit()
    ]
    assert len(rows) == 6
    for bits, quantum, most in rows:
        dtype = np.float64 if int(bits) > 30 else np.float32
        assert float(quantum) == pytest.approx(2.0 ** -int(bits), rel=0.06)
        assert float(most) == pytest.approx(largest(int(bits), dtype), rel=0.06)


@pytest.mark.parametrize("push", [1.0, -1.0])
def test_a_stack_deep_enough_to_wrap_twice_is_nan_and_never_a_number(push):
    law = ExactAdditive(28)  # holds 7.9: 40 steps of 1 would wrap around twice
    x = jnp.zeros((2, 3), jnp.float32).at[0].set(push)

    def branch(w, x):
        return jnp.full_like(x, push) * w

    def run(depth, w):
        params = jnp.full((depth,), w), jnp.zeros((depth,), jnp.float32)
        return reversible_scan(branch, branch, params, (x, x), coupling=law)

    for depth in (8, 17, 24, 40):
        y1, y2 = run(depth, jnp.float32(1))
        assert np.isnan(y1).all()
        np.testing.assert_array_equal(y2, x)
    grad = jax.grad(lambda w: jnp.sum(run(40, w)[0]))(jnp.float32(1))
    assert not np.isnan(run(6, jnp.float32(1))[0]).any()
    assert grad == 240 * push  # straight through; the loss itself is NaN


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_branch_or_an_input_that_is_not_finite_makes_the_output_nan(bad):
    params = f32(0, 3, 4, 4), f32(1, 3, 4, 4)
    x = f32(2, 5, 4)
    spoilt = x.at[1, 2].set(bad)
    y1, y2 = reversible_scan(tanh, tanh, params, (spoilt, x), coupling=EXACT)
    assert np.isnan(y1[1, 2])
    assert np.isnan(y2[1]).all()
    assert np.isfinite(y1[0]).all()
    assert np.isfinite(y2[2:]).all()
    y1, _ = reversible_scan(
        lambda w, x: bad + 0 * x, tanh, params, (x, x), coupling=EXACT
    )
    assert np.isnan(y1).all()


def test_words_are_normal_numbers_so_that_nans_can_be_debugged():
    values = np.concatenate([np.arange(-40, 40), [-(2**23), 2**23, 2**30, -(2**30)]])
    words = ExactAdditive(0).encode(jnp.asarray(values, jnp.float32))
    assert np.isfinite(words).all()
    assert (np.abs(words) >= np.finfo(np.float32).tiny).all()
    with jax.debug_nans(True):
        _, points, again = gradients("mlp", 3, EXACT)
    assert differing_bits(points, again) == 0


# Modules.


class Branch(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.drop(jnp.tanh(self.linear(self.norm(x))))


def exact_stack(depth, **mode):
    return ReversibleSequence.create(
        lambda rngs: ReversibleCouplingBlock(
            8, Branch(rngs), Branch(rngs), coupling=EXACT
        ),
        depth,
        rngs=nnx.Rngs(0),
        **mode,
    )


def test_a_block_with_state_and_randomness_passes_every_check():
    report = check_reversible(exact_stack(4), f32(0, 6, 8))
    assert report.passed, str(report)


def test_the_error_of_reconstruction_is_zero_and_that_of_floats_is_not():
    model = exact_stack(64)
    assert not reconstruction_error(model, f32(0, 6, 8)).absolute.any()
    for segment in model.segments:
        segment.block.coupling = Additive()
    assert reconstruction_error(model, f32(0, 6, 8)).absolute.all()


@pytest.mark.usefixtures("full_optimization")
def test_the_meter_of_the_backward_pass_reads_zero():
    options = {"anchor_every": 3, "between_anchors": "invert", "measure_drift": True}
    model, x = exact_stack(8, **options), f32(0, 6, 8)
    both = nnx.DiffState(0, (nnx.Param, Drift))

    def drift():
        gradients = nnx.grad(lambda m: jnp.sum(m(x) ** 2), argnums=both)(model)
        (meter,) = jax.tree.leaves(nnx.state(gradients, Drift))
        return np.asarray(meter)

    np.testing.assert_array_equal(drift(), [0, 0, 0])
    for segment in model.segments:
        segment.block.coupling = Additive()
    assert drift()[:2].all()


def test_inverse_gives_the_rounded_input_back_bit_for_bit():
    model, x = exact_stack(12), f32(0, 6, 8)
    model.eval()
    y = model(x)
    assert np.abs(y).max() < 16  # as far as float32 holds every step of the grid
    back = model.inverse(y)
    np.testing.assert_array_equal(back, jnp.round(x * 2**20) / 2**20)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_narrow_inputs_come_out_in_float32(dtype):
    y = exact_stack(2)(f32(0, 6, 8).astype(dtype))
    assert y.dtype == jnp.float32


def test_residuals_are_one_output_and_scratch_does_not_grow():
    def parts(depth, coupling, **mode):
        w = jnp.zeros((depth, SIZE, SIZE), jnp.float32)
        x = jnp.zeros((512, SIZE), jnp.float32)

        def run(f, g, x):
            return reversible_scan(
                tanh, tanh, (f, g), (x, x), coupling=coupling, **mode
            )

        kept = jax.eval_shape(lambda *a: jax.vjp(run, *a)[1], w, w, x)
        grad = jax.jit(jax.grad(lambda *a: sum(map(jnp.sum, run(*a))), (0, 1, 2)))
        scratch = planned(grad.lower(w, w, x).compile()).temp_size_in_bytes
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)]
        return sum(sizes) - 2 * w.nbytes, scratch, x.nbytes

    kept, scratch, stream = parts(8, EXACT)
    assert kept == 2 * stream
    deep_kept, deep_scratch, _ = parts(256, EXACT)
    assert deep_kept == kept
    assert deep_scratch - scratch < stream
    # A branch sees a decoded copy of its stream.
    assert scratch <= parts(8, Additive())[1] + 2 * stream
    assert parts(256, EXACT, store_activations=True)[0] > 100 * stream
