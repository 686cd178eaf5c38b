"""Densities: the determinant of a stack, its gradients, its memory, and an example."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from stacks import assert_close, normal, stack, train
from test_memory import ONE_OUTPUT, X, abstract, planned, residual_bytes

import flow
import revjax
from revjax import Additive, Affine, Leapfrog, Momentum, Permutation, Scaled, Squeeze

HIDDEN = 3


class Net(nnx.Module):
    """A branch for a coupling that takes `arity` arrays, joined on the last axis."""

    def __init__(self, rngs, width, arity=2, dtype=jnp.float64):
        linear = functools.partial(nnx.Linear, param_dtype=dtype, rngs=rngs)
        self.up = linear(width, HIDDEN)
        self.down = linear(HIDDEN, arity * width)

    def __call__(self, x, shift=None):
        h = self.up(x)
        if shift is not None:
            h = h + shift.reshape((1,) * (x.ndim - 1) + (HIDDEN,))
        return self.down(jnp.tanh(h))


AFFINE: Any = Affine()


def coupled(rngs, law=AFFINE, dim=6, **options):
    laws = law if isinstance(law, tuple) else (law, law)
    F, G = (Net(rngs, dim // 2, each.arity, **options) for each in laws)
    return revjax.ReversibleCouplingBlock(dim, F, G, coupling=law)


def half(rngs, law):
    return revjax.ReversibleHalfBlock(6, Net(rngs, 3, law.arity), coupling=law)


def group(rngs, *laws):
    branches = [Net(rngs, 2, law.arity) for law in laws]
    return revjax.ReversibleGroupBlock(6, branches, coupling=laws)


def permuted(rngs):
    """Two alike blocks, which are scanned, and one beyond a permutation."""
    flip, turn = Permutation(range(5, -1, -1)), Permutation([1, 2, 3, 4, 5, 0])
    blocks = [coupled(rngs) for _ in range(3)]
    return [*blocks[:2], flip, turn, blocks[2]]


def scales(rngs):
    """Blocks at two scales of `[batch, 4, 2, 2]`."""
    fine, coarse = coupled(rngs, dim=2), coupled(rngs, dim=8)
    return [fine, Squeeze(2), Permutation([0, 4, 1, 5, 2, 6, 3, 7]), coarse]


VECTORS, IMAGES, SHIFT = normal(0, 3, 6), normal(0, 2, 4, 2, 2), normal(1, HIDDEN)
STACKS = {
    "tanh": lambda rngs: [coupled(rngs) for _ in "123"],
    "atan": lambda rngs: [coupled(rngs, Affine(1.0, "atan")) for _ in "123"],
    "sigmoid": lambda rngs: [coupled(rngs, Affine(3.0, "sigmoid")) for _ in "123"],
    "half": lambda rngs: [half(rngs, AFFINE) for _ in range(3)],
    "group": lambda rngs: [group(rngs, *[AFFINE] * 3) for _ in range(2)],
    "permuted": permuted,
    "scales": scales,
    "momentum": lambda rngs: [coupled(rngs, (Momentum(0.8), Additive()))] * 2,
    "leapfrog": lambda rngs: [half(rngs, Leapfrog(0.5)), half(rngs, Scaled(0.3))],
    "mixed": lambda rngs: [
        group(rngs, Momentum(0.7), AFFINE, Additive()),
        half(rngs, AFFINE),
        coupled(rngs, (Scaled(0.5), AFFINE)),
    ],
}
MODES = ["recompute_2", "invert_2", "stored", "sequential"]


def stacks(*quick):
    """All stacks, of which those that are not `quick` run with `-m slow`."""
    slow = [[] if name in quick else [pytest.mark.slow] for name in STACKS]
    values = [pytest.param(n, marks=m) for n, m in zip(STACKS, slow, strict=True)]
    return pytest.mark.parametrize("name", values)


def blocks_and_input(name, method="__call__"):
    images = IMAGES.reshape(2, 2, 1, 8) if method == "inverse" else IMAGES
    return STACKS[name](nnx.Rngs(7)), images if name == "scales" else VECTORS


# The oracle: the stored stack, and the determinant of its whole Jacobian.


def with_jacobian(model, x, *args, method="__call__"):
    def one(example):
        return getattr(model, method)(example[None], *args)[0]

    size = x[0].size
    jacobian = jax.vmap(jax.jacfwd(one))(x).reshape(len(x), size, size)
    return getattr(model, method)(x, *args), jnp.linalg.slogdet(jacobian)[1]


def with_log_det(model, x, *args, method="__call__"):
    way = "inverse" if method == "inverse" else "forward"
    return getattr(model, f"{way}_and_log_det")(x, *args)


def loss(outputs):
    """Neither cotangent is constant, and each example has its own."""
    y, log_det = outputs
    return jnp.sum(jnp.sin(y)) - jnp.sum(jnp.cos(log_det) + log_det)


def step(name, mode, run, method, transform=jax.jit):
    blocks, x = blocks_and_input(name, method)
    run = functools.partial(run, method=method)
    return train(stack(blocks, mode), x, SHIFT, run=run, loss=loss, transform=transform)


@functools.cache
def expected_step(name, method):
    return step(name, "stored", with_jacobian, method)


def check(name, mode, method="__call__", **options):
    actual = step(name, mode, with_log_det, method, **options)
    assert len(actual["context"]) == 1
    assert_close(actual, expected_step(name, method))


@stacks("permuted", "scales", "mixed")
def test_flow_has_the_determinant_of_its_jacobian_and_the_gradients_of_both(name):
    check(name, "reversible")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "method", ["__call__", pytest.param("inverse", marks=pytest.mark.slow)]
)
def test_flow_has_the_same_determinant_and_gradients_in_every_mode(method, mode):
    check("permuted", mode, method)


def test_flow_has_the_same_determinant_and_gradients_outside_of_jit():
    check("permuted", "reversible", transform=lambda step: step)


@stacks("half")
def test_flow_is_trained_through_its_inverse(name):
    check(name, "reversible", "inverse")


@stacks("tanh", "scales", "mixed")
@pytest.mark.parametrize("mode", ["reversible", "sequential"])
def test_flow_is_undone_with_the_negative_determinant(name, mode):
    blocks, x = blocks_and_input(name)
    model = stack(blocks, mode)
    y, log_det = model.forward_and_log_det(x, SHIFT)
    back = model.inverse_and_log_det(y, SHIFT)
    assert_close((y, *back), (model(x, SHIFT), x, -log_det))


@pytest.mark.parametrize("name", ["tanh", "half", "group"])
def test_flow_of_one_block_has_the_determinant_of_its_jacobian(name):
    block = STACKS[name](nnx.Rngs(7))[0]
    y, log_det = with_jacobian(stack([block], "stored"), VECTORS, SHIFT)
    assert_close(block.forward_and_log_det(VECTORS, SHIFT), (y, log_det))
    assert_close(block.inverse_and_log_det(y, SHIFT), (VECTORS, -log_det))


def test_flow_is_a_density_that_integrates_to_one():
    rngs = nnx.Rngs(3)
    blocks = [coupled(rngs, dim=2), Permutation([1, 0]), coupled(rngs, dim=2)]
    edge, n = 12.0, 241
    axis = jnp.linspace(-edge, edge, n)
    points = jnp.stack(jnp.meshgrid(axis, axis), -1).reshape(-1, 2)
    z, log_det = revjax.ReversibleSequence(blocks).forward_and_log_det(points)
    assert jnp.ptp(log_det) > 0.1  # it is no shift
    density = jnp.exp(log_det - jnp.sum(z**2, -1) / 2) / (2 * jnp.pi)
    mass = float(jnp.sum(density)) * (2 * edge / (n - 1)) ** 2
    assert mass == pytest.approx(1, abs=1e-6)


# Memory, of a negative log-likelihood.


def planned_bytes(method, depth, **options):
    def create():
        make = functools.partial(coupled, dim=X.shape[-1])
        return revjax.ReversibleSequence.create(
            make, depth, rngs=nnx.Rngs(0), **options
        )

    graphdef, params = abstract(create)

    def likelihood(params, x):
        z, log_det = getattr(nnx.merge(graphdef, params), method)(x)
        return jnp.mean(jnp.sum(z**2, -1) / 2 - log_det)

    program = jax.jit(jax.grad(likelihood, (0, 1))).lower(params, X)
    kept = residual_bytes(graphdef, params, method=method)
    return np.array([kept, planned(program.compile()).temp_size_in_bytes])


@pytest.mark.parametrize("method", ["forward_and_log_det", "inverse_and_log_det"])
def test_flow_keeps_one_output_where_a_stored_one_grows_with_depth(method):
    shallow, deep = (planned_bytes(method, depth) for depth in (8, 64))
    assert shallow[0] == deep[0] == ONE_OUTPUT
    assert shallow[1] == deep[1]
    shallow, deep = (planned_bytes(method, d, store_activations=True) for d in (8, 64))
    assert (deep > 6 * shallow).all()


# The conventions of others.


def reference(x, subnets, log_scale):
    """FrEIA's GLOWCouplingBlock, and its RNVPCouplingBlock where s and t are apart."""
    x1, x2 = np.split(np.asarray(x), 2, -1)
    s2, t2 = subnets[0](x2)
    y1 = x1 * np.exp(log_scale(s2)) + t2
    s1, t1 = subnets[1](y1)
    y2 = x2 * np.exp(log_scale(s1)) + t1
    log_det = log_scale(s1).sum(-1) + log_scale(s2).sum(-1)
    return np.concatenate([y1, y2], -1), log_det


@pytest.mark.parametrize(
    ("law", "log_scale", "rtol"),
    [
        (Affine(2.0, "atan"), lambda s: 2.0 * 2 / math.pi * np.arctan(s), 1e-12),
        # FrEIA writes 0.636 for 2 / pi: its log-scales are 0.1 % smaller than ours.
        (Affine(2.0, "atan"), lambda s: 2.0 * 0.636 * np.arctan(s), 1e-3),
        # RealNVP: tanh, times a number that it learns and we fix.
        (Affine(1.5), lambda s: 1.5 * np.tanh(s), 1e-12),
    ],
)
def test_flow_has_the_numbers_of_freia_and_real_nvp(law, log_scale, rtol):
    block = coupled(nnx.Rngs(1), law)

    def subnet(net):
        return lambda u: np.split(np.asarray(net(jnp.asarray(u))), 2, -1)

    s = np.linspace(-5, 5, 10)
    np.testing.assert_allclose(law.log_det((s, s)), log_scale(s), rtol)
    expected = reference(VECTORS, (subnet(block.F), subnet(block.G)), log_scale)
    for found, true in zip(block.forward_and_log_det(VECTORS), expected, strict=True):
        np.testing.assert_allclose(found, true, atol=4 * rtol)


def test_flow_has_the_numbers_of_distrax():
    """From distrax 0.1.9: two `SplitCoupling`s of `ScalarAffine`, jax 0.10.2, x64."""

    def subnet(k, x):
        return jnp.sin(k * x), jnp.cos(k * x)

    F, G = (functools.partial(subnet, k) for k in (2.0, 3.0))
    block = revjax.ReversibleCouplingBlock(6, F, G, coupling=Affine(1.5))
    x = jnp.linspace(-1, 1, 12).reshape(2, 6)
    y = [
        [
            *(0.241664585837, 0.454710613916, 0.496907611385),
            *(-0.337177364373, -0.638033456024, -0.204368285108),
        ],
        [
            *(0.57053920053, 0.788118049164, 0.923940710148),
            *(1.841676514143, 1.315310417835, 0.749065463526),
        ],
    ]
    log_det = np.array([1.16960599229, 5.899476260995])
    found, found_log_det = block.forward_and_log_det(x)
    np.testing.assert_allclose(found, y, rtol=1e-10)
    np.testing.assert_allclose(found_log_det, log_det, rtol=1e-10)
    back, back_log_det = block.inverse_and_log_det(jnp.asarray(y))
    np.testing.assert_allclose(back, x, atol=1e-10)
    np.testing.assert_allclose(back_log_det, -log_det, rtol=1e-10)


def test_flow_refuses_a_log_det_that_is_not_elementwise():
    @dataclasses.dataclass(frozen=True)
    class Doubled(Additive):
        def combine(self, x, h):
            return 2 * x + h

        def recover(self, y, h):
            return (y - h) / 2

        def log_det(self, h):
            return jnp.log(2.0)

    block = revjax.ReversibleCouplingBlock(6, jnp.tanh, jnp.tanh, coupling=Doubled())
    with pytest.raises(ValueError, match="`log_det` of the coupling"):
        block.forward_and_log_det(VECTORS)


# Odd input.

kinds = pytest.mark.parametrize(
    "kind", [revjax.ReversibleSequence, revjax.ReversibleSequential]
)


def log_det_of(*laws, branch=jnp.sin, axis=-1):
    block = revjax.ReversibleCouplingBlock(6, branch, branch, coupling=laws, axis=axis)
    return revjax.ReversibleSequence([block]).forward_and_log_det(normal(0, 6, 6))[1]


@kinds
def test_flow_of_one_example_has_a_scalar_determinant(kind):
    model = kind(permuted(nnx.Rngs(0)))
    y, log_det = model.forward_and_log_det(VECTORS)
    found = model.forward_and_log_det(VECTORS[1]), model.inverse_and_log_det(y[1])
    assert [f[1].shape for f in found] == [(), ()]
    assert_close(found, ((y[1], log_det[1]), (VECTORS[1], -log_det[1])))


@kinds
def test_flow_of_no_examples_and_of_no_blocks(kind):
    model, x = kind(permuted(nnx.Rngs(0))), VECTORS[:0]
    y, log_det = model.forward_and_log_det(x)
    assert (y.shape, log_det.shape) == ((0, 6), (0,))
    gradient = nnx.grad(lambda model: loss(model.forward_and_log_det(x)))(model)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(gradient))
    assert_close(kind([]).forward_and_log_det(VECTORS), (VECTORS, jnp.zeros(3)))


@kinds
@pytest.mark.parametrize("streams", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("branches", ["float64", "float32", "bfloat16"])
def test_flow_sums_its_determinant_in_at_least_float32(kind, branches, streams):
    def branch(x):
        return jnp.concatenate([x, x], -1).astype(branches)

    block = revjax.ReversibleCouplingBlock(6, branch, branch, coupling=AFFINE)
    model = kind([block, Permutation([1, 0, 2, 3, 4, 5])])
    x = jax.ShapeDtypeStruct((3, 6), streams)
    for method in model.forward_and_log_det, model.inverse_and_log_det:
        y, log_det = jax.eval_shape(method, x)
        assert (y.dtype, log_det.shape) == (streams, (3,))
        assert log_det.dtype == np.result_type(streams, np.float32)


def test_flow_of_bfloat16_branches_is_as_precise_as_its_streams():
    h = tuple(a.astype(jnp.bfloat16) for a in normal(1, 2, 100))
    x = normal(0, 100).astype(jnp.float32)
    scale = jax.vmap(jax.grad(AFFINE.combine))(x, h)
    np.testing.assert_allclose(AFFINE.recover(AFFINE.combine(x, h), h), x, atol=1e-5)
    np.testing.assert_allclose(AFFINE.log_det(h), jnp.log(scale), atol=1e-5)


def test_flow_of_a_branch_of_integers_keeps_the_decay_of_momentum():
    laws = Momentum(0.5), Additive()
    log_det = log_det_of(*laws, branch=lambda x: (x > 0).astype(int))
    np.testing.assert_allclose(log_det, 3 * math.log(0.5))


class Silent(Additive):
    log_det = revjax.Coupling.log_det  # as where its author wrote none


ERRORS = [
    (lambda: log_det_of(Additive(), Additive(), axis=0), ValueError, "batch"),
    (lambda: log_det_of(Additive(), Silent()), TypeError, "`log_det`.*Silent"),
    (lambda: Permutation([0, 0, 1]), ValueError, "indices"),
    (lambda: Permutation([0.0, 1.0]), TypeError, "indices"),  # pyright: ignore
    (lambda: Permutation([1, 0])(VECTORS), ValueError, "`dim` = 2.*size 6"),
    (lambda: Permutation([1, 0], axis=3)(VECTORS[:, :2]), ValueError, "axis"),
    (lambda: Squeeze(0), ValueError, "factor"),
    (lambda: Squeeze(2.0), TypeError, "factor"),  # pyright: ignore
    (lambda: Squeeze(2)(VECTORS), ValueError, r"\[3, 6\]"),
    (lambda: Squeeze(3)(IMAGES), ValueError, r"\[2, 4, 2, 2\]"),
    (lambda: Squeeze(2).inverse(IMAGES), ValueError, r"\[2, 4, 2, 2\]"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), ERRORS)
def test_flow_refuses_what_does_not_fit(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


# The example.


@pytest.mark.usefixtures("jax_defaults")
def test_flow_example_measures_both_densities_and_draws_samples(tmp_path, capsys):
    out = tmp_path / "new" / "flow.png"
    figures = flow.main(["--steps", "2", "--depth", "1", "--out", str(out)])
    assert 2 < figures.gaussian_bits < figures.flow_bits < math.log2(17)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert f"{figures.flow_bits:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--steps", "0", "a whole number of 1 or more"),
        ("--depth", "two", "a whole number of 1 or more"),
        ("--out", "samples.gif", "a file *.png"),
    ],
)
def test_flow_example_names_the_option_that_is_wrong(option, value, expected, capsys):
    with pytest.raises(SystemExit):
        flow.main([option, value])
    assert f"{option}: expected {expected}; got '{value}'" in capsys.readouterr().err


def test_flow_example_counts_bits_of_levels_and_the_determinant_of_logits():
    x = jnp.linspace(0, 1, 100_001)[:, None]
    logits, log_det = flow.to_logits(x)
    np.testing.assert_allclose(flow.to_unit(logits), x, atol=1e-12)
    density = np.exp(log_det - logits[:, 0] ** 2 / 2) / math.sqrt(2 * math.pi)
    # What a Gaussian holds between the logits of 0 and 1; beyond is no image.
    mass = math.erf(float(logits[-1, 0]) / math.sqrt(2))
    assert 0.99 < mass < 1
    assert np.trapezoid(density, x[:, 0]) == pytest.approx(mass, abs=1e-8)
    # A uniform density costs log2(17) bits; one on a known level costs none.
    bits = flow.bits_per_pixel(np.array([0, flow.PIXELS * math.log(17)]))
    np.testing.assert_allclose(bits, [math.log2(17), 0], atol=1e-12)


@pytest.mark.usefixtures("jax_defaults")
def test_flow_example_has_the_gaussians_that_jax_has():
    data, x = normal(0, 50, 3), normal(1, 50, 3)
    gaussian = jax.scipy.stats.multivariate_normal
    expected = gaussian.logpdf(x, data.mean(0), jnp.cov(data, rowvar=False))
    np.testing.assert_allclose(flow.gaussian_log_density(data, x), expected, rtol=1e-4)
    # The flow begins as that of independent pixels, in logits.
    training, held_out = flow.read_digits()
    logits, _ = flow.to_logits(flow.dequantize(training, jax.random.key(0)))
    x = flow.dequantize(held_out[:5], jax.random.key(1))
    z, log_det = flow.to_logits(x)
    log_p = jax.scipy.stats.norm.logpdf(z, logits.mean(0), logits.std(0)).sum(-1)
    found = flow.Flow(2, logits, rngs=nnx.Rngs(0)).log_density(x)
    np.testing.assert_allclose(found, log_p + log_det, rtol=1e-5)
