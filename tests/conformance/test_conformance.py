"""Checks A to O of a reversible block, which can be run on a block of one's own.

    pytest tests/conformance --case my_package.my_module

where the module defines what `cases.Case` has. A block is dressed in what a check needs
(dropout, statistics, context) by a subclass, so any block can be given. The oracle is
the same blocks in a Python loop under ordinary autodiff.
"""

import collections
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from revjax import (
    Coupling,
    PerBlock,
    ReversibleSequence,
    ReversibleSequential,
)

DEPTH = 3
MODES = {
    "sequential": None,
    "reversible": {},
    "recompute": {"anchor_every": 2},
    "invert": {"anchor_every": 2, "between_anchors": "invert"},
    "stored": {"store_activations": True},
}
modes = pytest.mark.parametrize("mode", [m for m in MODES if m != "stored"])
few_modes = pytest.mark.parametrize("mode", ["reversible", "invert"])


# --- blocks, stacks and the oracle --------------------------------------------------


def dressed(make_block, dress):
    """Builds blocks whose branches are wrapped: `dress` returns a subclass."""

    def make(rngs):
        block = make_block(rngs)
        block.__class__ = _dressed(type(block), dress)
        dress.setup(block, rngs)
        return block

    return make


@functools.cache
def _dressed(kind, dress):
    def method(name):
        plain = getattr(kind, name)
        return lambda self, x, *args, **kwargs: dress.branch(
            self, name, plain, x, *args, **kwargs
        )

    return type(kind.__name__, (kind,), {name: method(name) for name in "fg"})


def listed(make_block, depth=DEPTH):
    return [make_block(nnx.Rngs(seed)) for seed in range(depth)]


def build(make_block, mode="reversible", depth=DEPTH):
    blocks = listed(make_block, depth)
    if mode == "sequential":
        return ReversibleSequential(blocks)
    return ReversibleSequence(blocks, **MODES[mode])


def loop(blocks, x, *args, **kwargs):
    """The oracle. `PerBlock` context is given entry by entry."""

    def is_per_block(node):
        return isinstance(node, PerBlock)

    for i, block in enumerate(blocks):
        given, named = jax.tree.map(
            lambda node, i=i: node[i].value if is_per_block(node) else node,
            (args, kwargs),
            is_leaf=is_per_block,
        )
        x1, x2 = jnp.split(x, 2, block.axis)
        x1 = block.coupling.combine(x1, block.f(x2, *given, **named))
        x2 = block.coupling.combine(x2, block.g(x1, *given, **named))
        x = jnp.concatenate([x1, x2], block.axis)
    return x


def per_block(model, state):
    """Variables of a model, with those of each block apart."""
    blocks = nnx.merge(nnx.graphdef(model), state)
    return [nnx.to_pure_dict(nnx.state(blocks[i])) for i in range(len(blocks))]


def run(model, x, *args, loss=None, transform=jax.jit, wrt=None, **kwargs):
    """One step. Returns output, state after it, and gradients of everything."""
    graphdef, state = nnx.split(model)
    loss = loss or (lambda y: jnp.sum(jnp.sin(y)))

    def evaluate(state, x, args, kwargs):
        model = nnx.merge(graphdef, state, copy=True)
        call = functools.partial(loop, model) if isinstance(model, nnx.List) else model
        y = call(x, *args, **kwargs)
        return loss(y), (y, nnx.state(model))

    @transform
    def step(state, x, args, kwargs):
        gradient = jax.grad(evaluate, wrt or (0, 1, 2, 3), has_aux=True, allow_int=True)
        cts, (y, after) = gradient(state, x, args, kwargs)
        return y, after, jax.tree.map(without_float0, cts)

    y, after, (d_state, *cts) = step(state, x, args, kwargs)
    return y, per_block(model, after), (per_block(model, d_state), *cts)


def without_float0(ct):
    return jnp.zeros(ct.shape) if ct.dtype == jax.dtypes.float0 else ct


def tolerance(dtype):
    """1e-9 in float64; elsewhere what rounding over a few blocks leaves."""
    return max(1e-9, 1e3 * float(jnp.finfo(dtype).eps)) if dtype != np.float64 else 1e-9


def host(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    exact = not jnp.issubdtype(leaf.dtype, jnp.inexact)
    return np.asarray(leaf, None if exact else np.float64)


def close(got, want, x):
    """Every leaf agrees; and something is there to agree."""
    got, want = jax.tree.map(host, got), jax.tree.map(host, want)
    largest = max(np.max(np.abs(a), initial=0) for a in jax.tree.leaves(want))
    assert largest > 0
    rtol = tolerance(x.dtype)
    atol = rtol * largest * (1e-3 if x.dtype == np.float64 else 0.1)
    compare = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(compare, got, want)


def agrees(make_block, mode, case, depth=DEPTH, transform=jax.jit, **kwargs):
    """A step of a stack agrees with the oracle's in output, state and gradients."""
    kwargs = case.kwargs | kwargs
    model = build(make_block, mode, depth)
    got = run(model, case.x, *case.args, transform=transform, **kwargs)
    oracle = nnx.List(listed(make_block, depth))
    want = run(oracle, case.x, *case.args, **kwargs)
    close(got, want, case.x)
    return got


def gradient_of(case, depth, **options):
    """A function to the pullback of a stack, and its abstract arguments."""
    model = nnx.eval_shape(
        lambda: ReversibleSequence.create(
            case.make_block, depth, rngs=nnx.Rngs(0), **options
        )
    )
    graphdef, state = nnx.split(model)

    def call(state, x):
        return nnx.merge(graphdef, state, copy=True)(x, *case.args, **case.kwargs)

    return call, (state, case.x)


def residual_bytes(case, depth, **options):
    call, (state, x) = gradient_of(case, depth, **options)

    def nbytes(tree):
        floats = (
            a for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.inexact)
        )
        return sum(a.size * a.dtype.itemsize for a in floats)

    kept = jax.eval_shape(lambda *args: jax.vjp(call, *args)[1], state, x)
    return nbytes(kept) - nbytes((state, case.args, case.kwargs))


def scratch_bytes(case, depth, **options):
    call, arguments = gradient_of(case, depth, **options)

    def gradient(*arguments):
        y, pullback = jax.vjp(call, *arguments)
        return pullback(jnp.ones_like(y))

    plan = jax.jit(gradient).lower(*arguments).compile().memory_analysis()
    assert plan is not None
    return plan.temp_size_in_bytes


# --- what a block is dressed in -----------------------------------------------------


class Dress:
    """Wraps the branches of a block."""

    def setup(self, block, rngs):
        """Gives the block what the wrapped branches use."""

    def branch(self, block, name, plain, x, *args, **kwargs) -> Any:
        return plain(block, x, *args, **kwargs)


class Dropout(Dress):
    def setup(self, block, rngs):
        block.drop = nnx.Dropout(0.5, rngs=rngs)

    def branch(self, block, name, plain, x, *args, **kwargs):
        return block.drop(plain(block, x, *args, **kwargs))


class Statistics(Dress):
    """A mean that `f` updates and `g` reads, and a number of calls."""

    def setup(self, block, rngs):
        block.mean = nnx.BatchStat(jnp.ones(()))
        block.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def branch(self, block, name, plain, x, *args, **kwargs):
        block.calls[...] += 1
        mean = block.mean[...]
        if name == "f":
            block.mean[...] = 0.9 * mean + 0.1 * jnp.mean(x).astype(mean.dtype)
        return plain(block, x * mean.astype(x.dtype), *args, **kwargs)


class Shift(Dress):
    """Float context, which changes what both branches see and return."""

    def branch(self, block, name, plain, x, *args, shift, **kwargs):
        return (1 + shift) * plain(block, x + shift, *args, **kwargs)


class Rate(Dress):
    """A rate for each block, which scales both updates."""

    def branch(self, block, name, plain, x, *args, rate, **kwargs):
        return rate * plain(block, x, *args, **kwargs)


class Count(Dress):
    """Counts evaluations on the host."""

    counts: ClassVar[collections.Counter] = collections.Counter()

    def branch(self, block, name, plain, x, *args, **kwargs):
        def tick(_):
            self.counts[name] += 1
            return np.zeros((), x.dtype)

        zero = jax.pure_callback(
            tick, jax.ShapeDtypeStruct((), x.dtype), jax.lax.stop_gradient(jnp.sum(x))
        )
        return plain(block, x + zero, *args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Leaky(Coupling):
    """A law of a user: its derivative is written nowhere."""

    def combine(self, x, h):
        return 1.25 * x + h * jnp.cosh(h)

    def recover(self, y, h):
        return (y - h * jnp.cosh(h)) / 1.25


class Law(Dress):
    def setup(self, block, rngs):
        block.coupling = Leaky()


# --- the checks ---------------------------------------------------------------------


@modes
def test_a_gradients_are_those_of_autodiff(case, mode):
    agrees(case.make_block, mode, case)


def test_a_gradients_of_an_eager_step_are_those_of_autodiff(case):
    agrees(case.make_block, "reversible", case, transform=lambda step: step)


@modes
def test_b_dropout_draws_the_same_mask_in_both_passes(case, mode):
    agrees(dressed(case.make_block, Dropout()), mode, case)


@modes
def test_c_statistics_are_updated_once(case, mode):
    _, after, _ = agrees(dressed(case.make_block, Statistics()), mode, case)
    assert [int(block["calls"]) for block in after] == [2] * DEPTH


@few_modes
def test_d_an_input_that_is_not_differentiated_changes_no_gradient(case, mode):
    model = build(case.make_block, mode)
    (want, *_) = run(model, case.x, *case.args, **case.kwargs)[2]
    x = case.x
    graphdef, state = nnx.split(model)

    @jax.jit
    def gradient(state):
        def loss(state):
            model = nnx.merge(graphdef, state, copy=True)
            y = model(jax.lax.stop_gradient(x), *case.args, **case.kwargs)
            return jnp.sum(jnp.sin(y))

        return jax.tree.map(without_float0, jax.grad(loss, allow_int=True)(state))

    close(per_block(model, gradient(state)), want, case.x)


@few_modes
def test_e_gradients_of_parameters_alone(case, mode):
    model = build(case.make_block, mode)
    (want, *_) = run(model, case.x, *case.args, **case.kwargs)[2]
    got = run(model, case.x, *case.args, wrt=(0,), **case.kwargs)[2]
    close(got[0], want, case.x)


@few_modes
def test_f_one_pullback_serves_twice(case, mode):
    model = build(case.make_block, mode)
    graphdef, state = nnx.split(model)

    def call(state, x):
        return nnx.merge(graphdef, state, copy=True)(x, *case.args, **case.kwargs)

    x = case.x
    y, pullback = jax.vjp(call, state, x)
    once, twice, again = (
        [without_float0(ct) for ct in jax.tree.leaves(pullback(y_ct))]
        for y_ct in (y, 2 * y, y)
    )
    close(again, once, x)
    close(twice, [2 * ct for ct in once], x)


@few_modes
def test_g_second_order(case, mode):
    def products(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, x):
            model = nnx.merge(graphdef, params, rest, copy=True)
            call = model
            if isinstance(model, nnx.List):
                call = functools.partial(loop, model)
            return jnp.sum(jnp.sin(call(x, *case.args, **case.kwargs)))

        def squares(params, x):
            gradients = jax.grad(loss, (0, 1))(params, x)
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))

        d_params, d_x = jax.jit(jax.grad(squares, (0, 1)))(params, case.x)
        return per_block(model, nnx.merge_state(d_params, rest)), d_x

    oracle = nnx.List(listed(case.make_block))
    close(products(build(case.make_block, mode)), products(oracle), case.x)


@modes
@pytest.mark.parametrize("computed", [False, True], ids=["leaf", "computed"])
def test_h_float_context_receives_its_gradient(case, mode, computed):
    make_block = dressed(case.make_block, Shift())
    half = case.x.shape[-1] // 2 if case.make_block(nnx.Rngs(0)).axis == -1 else 1
    shift = jnp.linspace(-1, 1, half, dtype=case.x.dtype).reshape(
        *[1] * (case.x.ndim - 1), half
    )
    if not computed:
        *_, (_, _, _, kwargs) = agrees(make_block, mode, case, shift=shift)
        assert np.any(kwargs["shift"])
        return

    def gradient(model):
        graphdef, state = nnx.split(model)

        def loss(shift):
            call = model = nnx.merge(graphdef, state, copy=True)
            if isinstance(model, nnx.List):
                call = functools.partial(loop, model)
            upstream = jnp.tanh(shift) * jnp.cos(shift)
            y = call(case.x, *case.args, **case.kwargs, shift=upstream)
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss)(shift)

    oracle = nnx.List(listed(make_block))
    close(gradient(build(make_block, mode)), gradient(oracle), case.x)


def test_i_kept_memory_is_flat_in_depth(case):
    shallow, deep = (residual_bytes(case, depth) for depth in (4, 12))
    stored = [residual_bytes(case, d, store_activations=True) for d in (4, 12)]
    assert shallow == deep <= case.x.nbytes
    assert stored[1] > 2 * stored[0] > 0


def test_j_scratch_is_flat_in_depth(case):
    shallow, deep = (scratch_bytes(case, depth) for depth in (4, 12))
    stored = [scratch_bytes(case, d, store_activations=True) for d in (4, 12)]
    assert shallow == deep
    assert stored[1] > 1.5 * stored[0]


@few_modes
def test_k_a_users_own_coupling(case, mode):
    agrees(dressed(case.make_block, Law()), mode, case)


@few_modes
@pytest.mark.parametrize("depth", [1, 2])
def test_l_odd_and_even_depth(case, mode, depth):
    agrees(case.make_block, mode, case, depth=depth)


@few_modes
def test_m_inputs_of_single_blocks_matter(case, mode):
    make_block = dressed(case.make_block, Rate())
    rates = jnp.linspace(0.5, 1.5, DEPTH, dtype=case.x.dtype)
    y, _, cts = agrees(make_block, mode, case, rate=PerBlock(rates))
    assert np.all(cts[-1]["rate"].value)
    model = build(make_block, mode)
    other = model(
        case.x, *case.args, **case.kwargs, rate=PerBlock(rates.at[DEPTH - 1].set(0))
    )
    assert not np.allclose(y, other)


def test_n_one_key_decides_everything(case):
    make_block = dressed(case.make_block, Dropout())

    def step(seed):
        rngs = nnx.Rngs(seed)
        model = ReversibleSequence.create(make_block, DEPTH, rngs=rngs)
        return run(model, case.x, *case.args, **case.kwargs)

    one, again, other = (jax.tree.map(host, step(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert not np.allclose(one[0], other[0])


@pytest.mark.parametrize("mode", MODES)
def test_o_each_branch_is_evaluated_once_a_pass(case, mode):
    make_block = dressed(case.make_block, Count())
    model = build(make_block, mode)
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(state, x):
        return nnx.merge(graphdef, state)(x, *case.args, **case.kwargs)

    Count.counts.clear()
    jax.block_until_ready(forward(state, case.x))
    assert Count.counts == {"f": DEPTH, "g": DEPTH}
    Count.counts.clear()
    jax.block_until_ready(run(model, case.x, *case.args, **case.kwargs))
    passes = 1 if mode == "stored" else 2
    assert Count.counts == {"f": passes * DEPTH, "g": passes * DEPTH}
