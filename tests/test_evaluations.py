"""How often a branch is evaluated and traced: once a pass, and once."""

import collections

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from stacks import HALF, mlp_block, normal, square, stack

from revjax import ReversibleCouplingBlock, ReversibleSequence, reversible_scan

DEPTH = 5
MODES = ["sequential", "reversible", "stored", "recompute_2", "invert_2"]


class Calls:
    """A hashable counter of evaluations at run time."""

    def __init__(self):
        self.counts = collections.Counter()

    def count(self, name, x):
        """Adds a zero that only a call of the host can give, so none is left out."""

        def add(_):
            self.counts[name] += 1
            return np.zeros((1, 1))

        zero = jax.ShapeDtypeStruct((1, 1), jnp.float64)
        return x + jax.pure_callback(add, zero, jax.lax.stop_gradient(x[0, 0]))

    def take(self):
        counts, self.counts = dict(self.counts), collections.Counter()
        return counts


class Counted(nnx.Module):
    """Two matrix products; tells when it is evaluated."""

    def __init__(self, rngs, name, calls):
        shape = (HALF, HALF)
        self.up = nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float64) / 4)
        self.down = nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float64) / 4)
        self.name, self.calls = name, calls

    def __call__(self, x):
        x = self.calls.count(self.name, x)
        return jnp.tanh(x @ self.up[...]) @ self.down[...]


def counted(mode, calls):
    rngs = nnx.Rngs(0)
    blocks = [
        ReversibleCouplingBlock(2 * HALF, *(Counted(rngs, n, calls) for n in "FG"))
        for _ in range(DEPTH)
    ]
    return stack(blocks, mode)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_each_branch_is_evaluated_once_forward_and_once_backward(mode, jit):
    calls = Calls()
    graphdef, params = nnx.split(counted(mode, calls))

    def run(params, x):
        return nnx.merge(graphdef, params)(x)

    def gradient(params, x):
        return jax.grad(lambda *args: square(run(*args)), (0, 1))(params, x)

    if jit:
        run, gradient = jax.jit(run), jax.jit(gradient)
    x = normal(0, 3, 2 * HALF)
    jax.block_until_ready(run(params, x))
    assert calls.take() == {"F": DEPTH, "G": DEPTH}
    jax.block_until_ready(gradient(params, x))
    passes = 1 if mode == "stored" else 2
    assert calls.take() == {"F": passes * DEPTH, "G": passes * DEPTH}


def equations(jaxpr):
    """All equations of a program, those of inner programs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def gradient_program(depth, wrt=(0, 1), **options):
    model = nnx.eval_shape(
        lambda: ReversibleSequence.create(mlp_block, depth, rngs=nnx.Rngs(0), **options)
    )
    graphdef, params = nnx.split(model)
    x = jax.ShapeDtypeStruct((3, 2 * HALF), jnp.float64)

    def loss(params, x):
        return square(nnx.merge(graphdef, params)(x))

    return jax.jit(jax.grad(loss, wrt)).trace(params, x)


def products(program):
    return sum(
        e.primitive.name == "dot_general" for e in equations(program.jaxpr.jaxpr)
    )


def test_a_block_of_two_matrix_branches_has_16_products():
    """4 forward, 4 again, 8 in the pullbacks; the stored stack has 12."""
    assert products(gradient_program(8)) == 16
    assert products(gradient_program(8, store_activations=True)) == 12


def test_the_compiled_program_has_16_products():
    text = gradient_program(8).lower().compile().as_text()
    assert text is not None
    found = text.count(" dot(") + text.count('custom_call_target="__onednn$matmul"')
    found += text.count('custom_call_target="__cpu$dot"')
    assert found == 16


@pytest.mark.parametrize("options", [{}, {"anchor_every": 4}])
def test_the_program_has_the_same_number_of_equations_at_depth_8_and_512(options):
    counts = {
        len(list(equations(gradient_program(depth, **options).jaxpr.jaxpr)))
        for depth in (8, 512)
    }
    assert len(counts) == 1


def test_what_is_not_differentiated_costs_no_products():
    """The input's gradient alone needs 4 of the 8 products of the pullbacks."""
    assert products(gradient_program(8, wrt=1)) == 12


def test_the_matmul_precision_of_the_call_holds_in_the_backward_pass():
    def branch(w, x):
        return x @ w

    def gradient(w, x):
        # The precision is the call's; the backward pass is traced outside of it.
        def loss(w):
            with jax.default_matmul_precision("highest"):
                y1, y2 = reversible_scan(branch, branch, (w, w), (x, x))
            return square(y1) + square(y2)

        return jax.grad(loss)(w)

    program = jax.make_jaxpr(gradient)(normal(0, 3, HALF, HALF), normal(1, 2, HALF))
    highest = jax.lax.Precision.HIGHEST
    found = [
        eqn.params["precision"]
        for eqn in equations(program.jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    assert len(found) == 8
    assert all(precision == (highest, highest) for precision in found)


def test_a_second_eager_gradient_call_traces_nothing():
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def branch(w, x):
        return jnp.tanh(x @ w)

    w, x = normal(0, 3, HALF, HALF), normal(1, 2, HALF)

    def loss(w, x):
        y1, y2 = reversible_scan(branch, other, (w, w), (x, x))
        return square(y1) + square(y2)

    def other(w, x):
        return x @ w

    for _ in range(3):
        jax.grad(loss)(w, x)


class Traced(nnx.Module):
    """Counts in Python how often it is traced."""

    traces = 0

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (HALF, HALF), jnp.float64))

    def __call__(self, x):
        Traced.traces += 1
        return x @ self.w[...] / 4


@pytest.mark.parametrize("mode", ["reversible", "recompute_2", "invert_3"])
def test_a_second_eager_gradient_call_of_a_module_traces_nothing(mode):
    rngs = nnx.Rngs(0)
    blocks = [
        ReversibleCouplingBlock(2 * HALF, Traced(rngs), Traced(rngs)) for _ in range(3)
    ]
    model, x = stack(blocks, mode), normal(0, 2, 2 * HALF)
    Traced.traces = 0
    nnx.grad(lambda model: square(model(x)))(model)
    first = Traced.traces
    assert first == 2  # once for each branch, whatever the depth
    nnx.grad(lambda model: square(model(x)))(model)
    assert Traced.traces == first
