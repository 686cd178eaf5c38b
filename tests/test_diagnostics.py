"""`check_reversible` passes what is right, and finds each planted kind of fault."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from stacks import HALF, MLP, host, mlp_block, normal

from revjax import (
    Coupling,
    PerBlock,
    ReversibleCouplingBlock,
    ReversibleSequence,
    ReversibleSequential,
)
from revjax.diagnostics import check_reversible

X = normal(0, 3, 2 * HALF)
CHECKS = [
    "contract",
    "inverse",
    "gradients",
    "state",
    "randomness",
    "purity",
    "evaluations",
    "residuals",
]


class Rich(nnx.Module):
    """Parameters, batch statistics, dropout and context in one branch."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(HALF, HALF, param_dtype=jnp.float64, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros((1, HALF)))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, shift, *, rate):
        h = jnp.tanh(self.linear(x))
        mean = jnp.mean(h, 0, keepdims=True)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * mean
        return rate * self.drop(h - mean) + shift


def rich_block(rngs):
    return ReversibleCouplingBlock(2 * HALF, Rich(rngs), Rich(rngs))


def block(F=None, G=None, kind=ReversibleCouplingBlock, **options):
    rngs = nnx.Rngs(0)
    return kind(2 * HALF, F or MLP(rngs), G or MLP(rngs), **options)


def report_of(model, x=X, *context, **kwargs):
    before = jax.tree.map(host, nnx.state(model))
    report = check_reversible(model, x, *context, **kwargs)
    after = jax.tree.map(host, nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    return report


def failures(report):
    return [name for name, check in report.checks.items() if check.passed is False]


def sequence(**options):
    return ReversibleSequence.create(rich_block, 4, rngs=nnx.Rngs(0), **options)


# What makes a model of depth 4 or 1, how often a branch runs in a step, and how many
# outputs are kept.
RIGHT = {
    "block": (lambda: rich_block(nnx.Rngs(0)), 2, 1),
    "sequential": (
        lambda: ReversibleSequential([rich_block(nnx.Rngs(i)) for i in range(4)]),
        8,
        4,
    ),
    "sequence": (sequence, 8, 1),
    "recompute": (lambda: sequence(anchor_every=3), 8, 2),
    "invert": (lambda: sequence(anchor_every=3, between_anchors="invert"), 8, 2),
    "stored": (lambda: sequence(store_activations=True), 4, None),
}


@pytest.mark.parametrize("name", list(RIGHT))
def test_a_right_model_passes_every_check(name):
    make, evaluations, outputs = RIGHT[name]
    depth = 1 if name == "block" else 4
    rates = PerBlock(normal(1, depth))
    report = report_of(make(), X, normal(2, 1, HALF), rate=rates)
    assert failures(report) == [], report
    assert list(report.checks) == CHECKS
    assert report.passed
    assert report.evaluations == {"f": evaluations, "g": evaluations}
    assert len(report.inverse_errors) == depth
    assert max(report.gradient_errors.values()) < 1e-9
    assert {"input", "context.0", "context.rate.0"} <= set(report.gradient_errors)
    if outputs is None:
        assert report.checks["residuals"].passed is None
    else:
        assert report.residual_bytes == outputs * X.nbytes


def test_a_report_is_printed_as_a_table():
    lines = str(report_of(mlp_block(nnx.Rngs(0)))).splitlines()
    assert [line.split()[0] for line in lines] == CHECKS
    assert all(line.split()[1] == "ok" for line in lines)
    assert lines[0] == "contract     ok      float64[3, 8] to float64[3, 8], 1 blocks"


def test_an_empty_stack_passes():
    assert report_of(ReversibleSequence([])).passed


# --- planted faults -----------------------------------------------------------------


def test_a_branch_that_breaks_the_contract_is_found():
    report = report_of(block(F=lambda x: x[:, :2]))
    assert failures(report) == ["contract"]
    assert not report.passed
    assert "must return an array of the shape" in report.checks["contract"].found


class Doubling(ReversibleCouplingBlock):
    def __call__(self, x, *context, **kwargs):
        return jnp.concatenate([super().__call__(x, *context, **kwargs)] * 2)


def test_a_model_that_changes_the_shape_is_found():
    report = report_of(block(kind=Doubling))
    assert failures(report) == ["contract"]
    assert report.checks["contract"].found == "float64[3, 8] becomes float64[6, 8]"


@dataclasses.dataclass(frozen=True)
class WrongLaw(Coupling):
    def combine(self, x, h):
        return 2 * x + h

    def recover(self, y, h):
        return y - h


def test_a_coupling_that_does_not_undo_itself_is_found():
    rngs = nnx.Rngs(0)
    blocks = [block(MLP(rngs), MLP(rngs), coupling=WrongLaw()) for _ in range(2)]
    report = report_of(ReversibleSequence(blocks))
    assert failures(report) == ["inverse", "gradients"]
    worst = max(report.gradient_errors, key=lambda name: report.gradient_errors[name])
    assert f"of `{worst}`" in report.checks["gradients"].found


class Drifting(nnx.Module):
    """A branch so steep that float32 loses the input."""

    def __call__(self, x):
        return 1e5 * jnp.sin(x)


def test_drift_is_found():
    model = ReversibleSequence([block(Drifting(), Drifting()) for _ in range(3)])
    report = report_of(model, X.astype(jnp.float32))
    assert failures(report) == ["inverse", "gradients"]


class Twice(ReversibleCouplingBlock):
    """Counts a step twice, since it runs twice."""

    def __call__(self, x, *context, **kwargs):
        first = super().__call__(x, *context, **kwargs)
        return (first + super().__call__(x, *context, **kwargs)) / 2


class Counter(nnx.Module):
    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.sin(x)


def test_a_block_that_runs_twice_is_found():
    report = report_of(block(F=Counter(), kind=Twice))
    assert failures(report) == ["state", "evaluations", "residuals"]
    assert report.checks["state"].found == "differs after a step: `F.calls`"
    assert report.evaluations == {"f": 4, "g": 4}


def test_randomness_from_the_host_is_found():
    random = np.random.default_rng(0)

    def noise(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        noise = jax.pure_callback(
            lambda x: random.normal(size=x.shape), shape, jax.lax.stop_gradient(x)
        )
        return jnp.sin(x) * noise

    assert {"gradients", "randomness", "purity"} <= set(
        failures(report_of(block(noise)))
    )


def test_a_global_numpy_generator_is_found():
    random = np.random.default_rng(0)
    report = report_of(block(F=lambda x: x * random.normal()))
    assert "purity" in failures(report)
    assert report.checks["purity"].found == "two calls of `f` of block 0 differ"


def test_a_counter_in_python_is_found():
    calls = []

    def branch(x):
        calls.append(0)
        return x * len(calls)

    model = ReversibleSequence([mlp_block(nnx.Rngs(0)), block(G=branch)])
    report = report_of(model)
    assert "purity" in failures(report)
    assert report.checks["purity"].found == "two calls of `g` of block 1 differ"


class Loop(ReversibleSequence):
    """Runs its blocks one by one, and so keeps an output of each."""

    def __call__(self, x, *context, **kwargs):
        y = jnp.asarray(x)
        for i in range(len(self)):
            y = self[i](y, *context, **kwargs)
        return y


def test_a_stack_that_keeps_more_than_one_output_is_found():
    report = report_of(Loop([mlp_block(nnx.Rngs(i)) for i in range(3)]))
    assert failures(report) == ["residuals"]
    assert report.residual_bytes == 3 * X.nbytes


def test_randomness_that_cannot_be_switched_off_leaves_the_inverse_untold():
    class Noise(nnx.Module):
        def __init__(self):
            self.rngs = nnx.Rngs(0)

        def __call__(self, x):
            return x + jax.random.normal(self.rngs(), x.shape, x.dtype)

    report = report_of(block(Noise()))
    assert report.passed
    assert report.checks["inverse"].passed is None
    assert "cannot undo a call" in report.checks["inverse"].found


def test_only_reversible_models_and_floats_are_taken():
    message = (
        "`model` must be a reversible block, a ReversibleSequential or a "
        "ReversibleSequence. Got an object of type MLP."
    )
    with pytest.raises(TypeError) as caught:
        check_reversible(MLP(nnx.Rngs(0)), X)  # type: ignore[arg-type]
    assert str(caught.value) == message
    with pytest.raises(TypeError, match="`x` must be a floating-point"):
        check_reversible(mlp_block(nnx.Rngs(0)), np.ones((3, 8), np.int32))
