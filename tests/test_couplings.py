"""Every law and every kind of block, held against its equations in plain Python."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from stacks import HALF, Kind, assert_close, call, normal, square, stack, train
from test_evaluations import Calls
from test_memory import ONE_OUTPUT, X, abstract, planned, residual_bytes

from revjax import (
    Additive,
    Affine,
    Coupling,
    ExactAdditive,
    Leapfrog,
    Momentum,
    PerBlock,
    Permutation,
    ReversibleCouplingBlock,
    ReversibleGroupBlock,
    ReversibleHalfBlock,
    ReversibleSequence,
    Scaled,
    Squeeze,
    reversible_scan,
)
from revjax.diagnostics import check_reversible


@dataclasses.dataclass(frozen=True)
class Gated(Coupling):
    """A user's law: two arrays from a branch, and no derivative written."""

    arity = 2

    def combine(self, x, h):
        return x * (0.5 + h[0] ** 2) + h[0] * h[1]

    def recover(self, y, h):
        return (y - h[0] * h[1]) / (0.5 + h[0] ** 2)


class Wrong(Additive):
    """A law that is not undone, or changes the shape of a stream of few axes."""

    def combine(self, x, h):
        return x / 2 + h if x.ndim > 1 else jnp.sum(x + h)


def wide(module):
    """Makes every floating-point array of a module one of float64."""
    floats = nnx.state(module, lambda _, v: jnp.issubdtype(v.dtype, jnp.floating))
    nnx.update(module, jax.tree.map(lambda a: a.astype(jnp.float64), floats))
    return module


class Branch(nnx.Module):
    """A layer for each array that a coupling takes, in a tuple or joined on an axis."""

    count: Any = None  # a counter of evaluations

    def __init__(self, rngs, arity=1, *, width=HALF, join=None, noisy=False):
        noise = [nnx.BatchNorm(width, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)]
        layers = [nnx.Linear(width, width, rngs=rngs) for _ in range(arity)]
        self.noise, self.layers = nnx.List(noise if noisy else []), nnx.List(layers)
        self.join = join

    def __call__(self, x, shift=0.0) -> Any:
        x = x if self.count is None else self.count(x)
        with jax.numpy_dtype_promotion("standard"):  # within BatchNorm
            for layer in self.noise:
                x = layer(x)
        x = jnp.cos(shift) * x + shift
        h = tuple(jnp.tanh(layer(x)) for layer in self.layers)
        if len(h) == 1:
            return h[0]
        return h if self.join is None else jnp.concatenate(h, self.join)


def coupling_block(law, rngs, G=None, **options):
    laws = law if isinstance(law, tuple) else (law, law)
    F, last = (Branch(rngs, w.arity, **options) for w in laws)
    return ReversibleCouplingBlock(2 * HALF, F, G or last, coupling=law)


class HalfBlock(ReversibleHalfBlock):
    def __init__(self, coupling, rngs):
        super().__init__(2 * HALF, coupling=coupling)
        self.branch = Branch(rngs, coupling.arity)

    def f(self, x, shift):
        return self.branch(x - shift, shift)


def group_block(laws, dim, rngs, axis=-1, **options):
    branches = [Branch(rngs, law.arity, **options) for law in laws]
    laws = laws[0] if len(set(laws)) == 1 else laws
    return ReversibleGroupBlock(dim, branches, coupling=laws, axis=axis)


def rounded(x):
    """To the grid of 40 fraction bits, with a derivative as if it was not rounded."""
    return x + jax.lax.stop_gradient(jnp.round(x * 2.0**40) / 2.0**40 - x)


# The laws: `y` by the stream, the branch's output and the stream that the branch saw.
EQUATIONS: dict[Any, Any] = {
    Additive(): lambda x, h, _: x + h,
    Scaled(0.7): lambda x, h, _: x + 0.7 * h,
    Momentum(0.9): lambda x, h, _: 0.9 * x + 0.1 * h,
    Affine(): lambda x, h, _: x * jnp.exp(2 * jnp.tanh(h[0])) + h[1],
    Affine(0.5, "atan"): lambda x, h, _: x * jnp.exp(jnp.atan(h[0]) / jnp.pi) + h[1],
    Affine(0.5, "sigmoid"): lambda x, h, _: x * jnp.exp(nnx.sigmoid(h[0]) - 0.5) + h[1],
    ExactAdditive(40): lambda x, h, _: rounded(x) + rounded(h),
    Gated(): lambda x, h, _: x * (0.5 + h[0] * h[0]) + h[0] * h[1],
    Leapfrog(0.3): lambda x, h, other: 2 * other - x + 0.3**2 * h,
}
NAMES = "additive", "scaled", "momentum", "affine", "atan", "sigmoid", "exact", "gated"


def kind(make_block, *args, shape=(3, 2 * HALF), context=1, **options):
    """A kind of block; `context` says how many arrays its branches take."""
    x, shift = normal(0, *shape), normal(1, *[1] * len(shape))
    make: Any = functools.partial(make_block, *args, **options)
    return Kind(lambda rngs: wide(make(rngs=rngs)), x, (shift,) * context)


KINDS = {
    **{n: kind(coupling_block, law) for n, law in zip(NAMES, EQUATIONS, strict=False)},
    "affine_joined": kind(coupling_block, Affine(), join=-1),
    "affine_default": kind(ReversibleCouplingBlock, 8, coupling=Affine(), context=0),
    "momentum_resnet": kind(
        coupling_block, (Momentum(0.9), Additive()), G=lambda v, _: v
    ),
    "half": kind(HalfBlock, Additive()),
    "half_affine": kind(HalfBlock, Affine()),
    "leapfrog": kind(HalfBlock, Leapfrog(0.3)),
    "group_2": kind(group_block, (Momentum(0.9), Affine()), 2 * HALF),
    "group_3": kind(group_block, (Affine(),) * 3, 6, shape=(6, 4), axis=0, join=0),
    "group_state": kind(group_block, (Scaled(0.7),) * 3, 12, shape=(3, 12), noisy=True),
    "group_5": kind(group_block, (ExactAdditive(40),) * 5, 10, shape=(3, 10), width=2),
}


def fast(every, *few):
    """Marks every case as slow but a few."""
    return [c if c in few else pytest.param(c, marks=pytest.mark.slow) for c in every]


def made(name, depth):
    rngs = nnx.Rngs(depth)
    return [KINDS[name].make_block(rngs) for _ in range(depth)]


def equations(block: Any, x, *args):
    """What a block computes, under ordinary autodiff."""
    if isinstance(block, Permutation):
        return x[..., jnp.array(block.indices)]
    if isinstance(block, Squeeze):
        pixels = [x[:, i::2, j::2] for i in range(2) for j in range(2)]
        return jnp.stack(pixels, -1).reshape(*pixels[0].shape[:-1], -1)
    if isinstance(block, ReversibleHalfBlock):
        x1, x2 = jnp.split(x, 2, block.axis)
        y2 = EQUATIONS[block.coupling](x1, block.f(x2, *args), x2)
        return jnp.concatenate([x2, y2], block.axis)
    branches = getattr(block, "branches", None) or (block.f, block.g)
    streams = jnp.split(x, len(branches), block.axis)
    for i, branch in enumerate(branches):
        law = block.coupling[i] if isinstance(block.coupling, tuple) else block.coupling
        other = streams[i - 1] if i else functools.reduce(jnp.add, streams[1:])
        h = branch(other, *args)
        if law.arity > 1 and not isinstance(h, tuple):
            h = jnp.split(h, 2, block.axis)
        streams[i] = EQUATIONS[law](streams[i], h, other)
    return jnp.concatenate(streams, block.axis)


def oracle(blocks, x, *args, run: Any = equations):
    for i in range(len(blocks)):
        x = run(blocks[i], x, *args)
    return x


MODES = "reversible", "invert_2", "block", "recompute_2", "sequential", "stored"
FEW = [(name, MODES[i % 6]) for i, name in enumerate(KINDS)]
CASES = sorted({*FEW, *((k, MODES[i % 4 - 2]) for i, k in enumerate(KINDS))})


@pytest.mark.parametrize("case", fast(CASES, *FEW), ids="-".join)
def test_gradients_are_those_of_the_equations(case):
    (name, mode), eager = case, CASES.index(case) % 4 == 0
    k, depth = KINDS[name], 1 if mode == "block" else 3
    blocks = nnx.List(made(name, depth))
    model = blocks if mode == "block" else stack(blocks, mode)
    run: Any = functools.partial(oracle, run=call) if mode == "block" else call
    transform: Any = (lambda function: function) if eager else jax.jit
    actual = train(model, k.x, *k.args, run=run, transform=transform)
    assert_close(actual, train(blocks, k.x, *k.args, run=oracle))


FEW_KINDS = "affine", "exact", "momentum_resnet", "leapfrog", "group_3"


@pytest.mark.parametrize("name", fast(KINDS, *FEW_KINDS))
def test_the_inverse_undoes_the_equations_in_value_and_derivative(name):
    """The inverse of the equations is `x`, whatever parameters and context are."""
    k, model = KINDS[name], stack(made(name, 3))
    model.eval()

    def there_and_back(model, x, *args):
        return model.inverse(oracle(model, x, *args), *args)

    step = train(model, k.x, *k.args, run=there_and_back)
    assert_close((step["y"], step["input"]), (k.x, jax.grad(square)(k.x)))
    others = jax.tree.leaves((step["parameters"], step["context"]))
    assert max(jnp.max(jnp.abs(ct)) for ct in others) < 1e-9


@pytest.mark.parametrize("name", ["additive", "affine"])
def test_memory_of_the_gradient_of_the_inverse_does_not_grow_with_depth(name):
    def kept_and_planned(*args, **kwargs):
        make = functools.partial(ReversibleSequence.create, KINDS[name].make_block)
        graphdef, params = abstract(lambda: make(*args, rngs=nnx.Rngs(0), **kwargs))

        def loss(params, y):
            return square(nnx.merge(graphdef, params).inverse(y))

        kept = residual_bytes(graphdef, params, method="inverse")
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(params, X).compile()
        return kept, planned(compiled).temp_size_in_bytes

    kept, scratch = kept_and_planned(8)
    assert kept_and_planned(64) == (kept, scratch) == (ONE_OUTPUT, scratch)
    stored = kept_and_planned(64, store_activations=True)
    assert stored[0] > 60 * kept
    assert stored[1] > 6 * scratch


@pytest.mark.parametrize("name", [*FEW_KINDS, "gated", "group_5"])
def test_each_branch_is_evaluated_once_forward_and_once_backward(name):
    k, model, calls = KINDS[name], stack(made(name, 3)), Calls()
    branches = [m for _, m in nnx.iter_modules(model) if isinstance(m, Branch)]
    for i, branch in enumerate(branches):
        branch.count = functools.partial(calls.count, i)

    def loss(model, x):
        return square(model(x, *k.args))

    for function, passes in (loss, 1), (nnx.grad(loss, argnums=(0, 1)), 2):
        jax.block_until_ready(nnx.jit(function)(model, k.x))
        assert calls.take() == dict.fromkeys(range(len(branches)), 3 * passes)


def pair(w, x, shift):
    return jnp.tanh((x + shift) @ w[0]), jnp.tanh((x - shift) @ w[1])


def scan_equations(law, w, x, shift):
    x1, x2 = x
    for f, g in zip(*w, strict=True):
        x1 = EQUATIONS[law](x1, pair(f, x2, shift), x2)
        x2 = EQUATIONS[law](x2, pair(g, x1, shift), x1)
    return x1, x2


def derivatives(run, w, x, shifts):
    """The gradient, that of its norm, and those for several contexts at once."""

    def loss(*args):
        y1, y2 = run(*args)
        return square(y1) + jnp.sum(jnp.sin(y2) * y1)

    def norm(*args):
        return sum(map(square, jax.tree.leaves(gradient(*args))))

    gradient, second = (jax.grad(f, (0, 1, 2)) for f in (loss, norm))
    mapped = jax.vmap(gradient, (None, None, 0))
    return gradient(w, x, shifts[0]), second(w, x, shifts[0]), mapped(w, x, shifts)


@pytest.mark.parametrize("law", fast([Affine(), Gated()], Gated()))
def test_derivatives_of_reversible_scan_are_those_of_the_equations(law):
    (*w,), (*x,) = normal(0, 2, 3, 2, HALF, HALF) / 2, normal(1, 2, 3, HALF)
    scan = functools.partial(reversible_scan, pair, pair, coupling=law)
    runs = scan, functools.partial(scan_equations, law)
    derive = jax.jit(derivatives, static_argnums=0)
    assert_close(*(derive(run, tuple(w), tuple(x), normal(2, 2, 1, 1)) for run in runs))


@pytest.mark.parametrize("name", fast(KINDS, *FEW_KINDS))
def test_check_reversible_passes(name):
    (block,), k = made(name, 1), KINDS[name]
    report = check_reversible(block, k.x, *k.args)
    assert report.passed, str(report)
    assert set(report.evaluations.values()) == {2}  # one in each pass


@pytest.mark.parametrize("make_block", [coupling_block, HalfBlock])
def test_check_reversible_finds_a_law_that_is_not_undone(make_block):
    k, rngs = kind(make_block, Wrong()), nnx.Rngs(0)
    model = ReversibleSequence([k.make_block(rngs) for _ in range(2)])
    report = check_reversible(model, k.x, *k.args)
    failed = {name for name, check in report.checks.items() if check.passed is False}
    assert (report.passed, failed) == (False, {"inverse", "gradients"})


def test_rounding_errors_of_a_momentum_stack_grow_as_its_docstring_says():
    """Those of the first stream, recovered from the output in float32."""

    def branch(x, kick):  # hardly sees its stream: errors grow by the law alone
        return jnp.tanh(kick + x / 1000)

    def error(law, depth):
        make = functools.partial(ReversibleCouplingBlock, 2 * HALF, branch, branch)
        laws, kick = (law, Additive()), normal(1, depth, 1, HALF).astype(jnp.float32)
        model = ReversibleSequence(make(coupling=laws) for _ in range(depth))
        x, kick = normal(0, 256, 2 * HALF).astype(jnp.float32), PerBlock(kick)
        return float(jnp.std((model.inverse(model(x, kick), kick) - x)[:, :HALF]))

    # Measured: from 4.3e-8 to 1.1e-3, by 2.5e4, where 0.9**-100 is 3.8e4; that of
    # additive blocks from 3.2e-8 to 8.3e-7, by 26.
    one, last = (error(Momentum(0.9), depth) for depth in (1, 100))
    assert 0.9**-100 / 10 < last / one < 0.9**-100 * 10
    assert last > 100 * error(Additive(), 100)


def test_a_leapfrog_oscillator_keeps_its_energy_and_runs_backwards():
    spring = ReversibleHalfBlock(2, jnp.negative, coupling=Leapfrog(0.1))
    period = jax.jit(ReversibleSequence([spring] * 63))
    start = x = jnp.array([1.0, jnp.cos(0.1)])
    for _ in range(100):
        x = period(x)
        assert 0.9 < jnp.mean(x) ** 2 + ((x[1] - x[0]) / 0.1) ** 2 < 1.1
    back = functools.reduce(lambda x, _: period(x), range(100), x[::-1])
    assert_close(back[::-1], start)


def mixed():
    rngs, laws = nnx.Rngs(0), (Affine(), Gated(), Scaled(0.7), Momentum(0.9))
    blocks = [
        Squeeze(),
        *(coupling_block(Affine(), rngs) for _ in range(2)),
        *(Permutation([3, 1, 7, 5, 0, 6, 2, 4]) for _ in range(2)),
        *(HalfBlock(law, rngs) for law in (Gated(), Gated(), Additive())),
        group_block(laws, 8, rngs, width=2),
    ]
    return [wide(block) for block in blocks]


@pytest.mark.parametrize("mode", fast(MODES[:2] + MODES[3:], "reversible"))
def test_a_list_of_every_kind_has_the_gradients_of_the_equations(mode):
    image, shift = normal(0, 2, 4, 4, 2), normal(1, 1, 1, 1, 1)
    expected = train(nnx.List(mixed()), image, shift, run=oracle)
    assert_close(train(stack(mixed(), mode), image, shift), expected)


def test_alike_neighbours_are_stacked_and_permutations_are_not():
    depths = [segment.depth for segment in ReversibleSequence(mixed()).segments]
    assert depths == [None, 2, None, None, 2, None, None]


def run(*laws, branch: Any = jnp.sin, shape=(2, 4), dtype: Any = jnp.float32):
    blocks = [ReversibleCouplingBlock(4, branch, branch, coupling=w) for w in laws]
    jax.eval_shape(ReversibleSequence(blocks), jax.ShapeDtypeStruct(shape, dtype))


def options(law: Any, name, *values):
    return [(functools.partial(law, **{name: value}), name) for value in values]


WRONG: list[tuple[Any, str]] = [
    (lambda: run(Affine(), branch=lambda x: (x, x, x)), "F"),
    (lambda: run(Affine()), "F"),
    (lambda: run((Affine(), Additive(), Additive())), "coupling"),
    (lambda: run(ExactAdditive(20), ExactAdditive(16)), "fraction_bits"),
    (lambda: run(ExactAdditive(31)), "fraction_bits"),
    (lambda: run(ExactAdditive(), dtype=jnp.complex64), "x"),
    (lambda: run(Wrong(), shape=(4,)), "Wrong.combine"),
    (lambda: ReversibleGroupBlock(4, [jnp.sin]), "branches"),
    (lambda: ReversibleGroupBlock(7, [jnp.sin] * 3), "dim"),
    *options(Momentum, "gamma", 0.0, 1.5, jnp.nan, True, None),
    *options(Affine, "bound", 0.0, jnp.inf, "2"),
    *options(Affine, "squash", "relu", None),
    *options(Scaled, "scale", jnp.nan, None),
    *options(Leapfrog, "step_size", jnp.inf, "1"),
    *options(ExactAdditive, "fraction_bits", -1, 63, 20.0, True),
    *options(ExactAdditive, "dtype", jnp.bfloat16, jnp.int32),
]


@pytest.mark.parametrize(("wrong", "name"), WRONG)
def test_what_is_wrong_is_named_before_anything_runs(wrong, name):
    with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
        wrong()
