"""Tools that check a user's own reversible blocks."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from revjax import _checks
from revjax._blocks import ReversibleBlock
from revjax._calls import unwrap
from revjax._drift import ReconstructionError as ReconstructionError
from revjax._drift import reconstruction_error as reconstruction_error
from revjax._nnx import ReversibleSequence, ReversibleSequential
from revjax._step import is_inexact
from revjax._trials import (
    Model,
    Trial,
    call_model,
    call_stored,
    data,
    leaves_of,
    relative_error,
    segments_of,
)

# Every program here runs once or twice, so it is compiled quickly rather than well.
_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
      name: What it is called in the report.
      passed: Whether it holds; `None` if it could not be told.
      found: What was found, in words.
    """

    name: str
    passed: bool | None
    found: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check_reversible` found; printed as a table.

    Attributes:
      checks: The checks by name, in the order of the table.
      inverse_errors: For each block the relative error of its inverse.
      gradient_errors: The relative error of each gradient, by the path of what it
        belongs to.
      evaluations: How often each branch was evaluated in a step, over all blocks.
      residual_bytes: What is kept for the backward pass beside variables and context.
    """

    checks: Mapping[str, Check]
    inverse_errors: tuple[float, ...] = ()
    gradient_errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    evaluations: Mapping[str, int] = dataclasses.field(default_factory=dict)
    residual_bytes: int | None = None

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not any(check.passed is False for check in self.checks.values())

    def __str__(self) -> str:
        """Returns the table."""
        words = {True: "ok", False: "FAILED", None: "-"}
        width = max(map(len, self.checks))
        return "\n".join(
            f"{check.name:<{width}}  {words[check.passed]:<6}  {check.found}"
            for check in self.checks.values()
        )


def check_reversible(model: Model, x: Any, *context: Any, **kwargs: Any) -> Report:
    """Checks that a block or a stack of one's own does what a reversible one must.

    It makes training steps with the model as it is, and with the same blocks under
    ordinary autodiff (the stored stack), from the same variables, and compares. The
    model that is passed in does not change. The checks:

    - *contract*: every branch returns one array of the shape of its stream.
    - *inverse*: each block's inverse gives its input back.
    - *gradients*: of every variable, the input and every array of context, those of the
      stored stack. A wrong `recover` of a coupling shows here, and so does drift.
    - *state*: batch statistics, counters and RNG streams, after one step, are those
      that one call of each branch leaves.
    - *randomness*: two steps from the same variables give the same numbers.
    - *purity*: a branch called twice by itself returns the same; a global NumPy
      generator or a counter in Python is found here, since JAX would freeze its value
      into the compiled program.
    - *evaluations*: each branch runs once in the forward pass, and at most once more
      for the gradient (not, where activations are stored).
    - *residuals*: what is kept for the backward pass is what the mode promises: one
      output, one for each block (`ReversibleSequential`), one for each chunk (anchors).

    Errors are relative to the norm of the right value; the tolerance is the square root
    of the machine epsilon of the output's dtype (3.5e-4 in float32, 1.5e-8 in float64).

    Args:
      model: A reversible block of any kind, a `ReversibleSequential` or a
        `ReversibleSequence`.
      x: An input, as for a call; random numbers find more than zeros or ones.
      *context: As in a call.
      **kwargs: As in a call.

    Returns:
      The report: a table when printed, `report.passed`, and the numbers.

    Raises:
      TypeError: If `model` is none of the three, or `x` no floating-point array.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from revjax import ReversibleCouplingBlock
      >>> from revjax.diagnostics import check_reversible
      >>> block = ReversibleCouplingBlock(8, rngs=nnx.Rngs(0))
      >>> report = check_reversible(block, jax.random.normal(jax.random.key(0), (4, 8)))
      >>> report.passed
      True
      >>> report.evaluations
      {'f': 2, 'g': 2}
    """
    kinds = (ReversibleBlock, ReversibleSequential, ReversibleSequence)
    _checks.model(model, kinds)
    x = _checks.stream(x, "x")
    trial = Trial(model, context, kwargs)
    state, stored = trial.state, trial.step(call_stored)
    product = trial.step(call_model)
    try:
        y = jax.eval_shape(product, state, x)[0]
        jax.eval_shape(stored, state, x)
    except (TypeError, ValueError) as error:
        return Report({"contract": Check("contract", False, str(error))})
    if y.size != x.size:
        found = f"{_checks.describe(x)} becomes {_checks.describe(y)}"
        return Report({"contract": Check("contract", False, found)})

    eps = float(np.sqrt(jnp.finfo(y.dtype).eps))
    found = f"{_checks.describe(x)} to {_checks.describe(y)}, {trial.depth} blocks"
    checks = [Check("contract", True, found)]
    inverse_check, inverse_errors = _inverse(trial, x, eps)
    want = _jit(stored)(state, x)
    run = _jit(product)
    got, again = run(state, x), run(state, x)
    gradient_check, gradient_errors = _gradients(got[2], want[2], eps)
    evaluation_check, evaluations = _evaluations(trial, x)
    residual_check, residual_bytes = _residuals(trial, x, got)
    checks += [
        inverse_check,
        gradient_check,
        _state(got[1], want[1], eps),
        _same("randomness", got[:2], again[:2], "two steps from the same variables"),
        _purity(trial, x),
        evaluation_check,
        residual_check,
    ]
    return Report(
        {check.name: check for check in checks},
        inverse_errors,
        gradient_errors,
        evaluations,
        residual_bytes,
    )


def _inverse(trial: Trial, x: Array, eps: float) -> tuple[Check, tuple[float, ...]]:
    def error(row: tuple, evaluating: bool) -> float:
        block, x_in, args, kwargs = nnx.clone(row)
        if evaluating:
            block.eval()
        y = nnx.clone(block)(x_in, *nnx.clone(args), **nnx.clone(kwargs))
        return relative_error(block.inverse(y, *args, **kwargs), x_in)

    errors, evaluating = [], False
    for row in trial.blocks(x):
        try:
            errors.append(error(row, evaluating))
        except ValueError:  # a branch draws random numbers
            try:
                errors.append(error(row, evaluating := True))
            except ValueError as refused:
                return Check("inverse", None, str(refused)), ()
    if not errors:
        return Check("inverse", True, "no blocks"), ()
    worst = int(np.argmax(np.nan_to_num(errors, nan=np.inf)))
    found = f"relative error up to {errors[worst]:.1e}, in block {worst}"
    found += " (after `.eval()`)" * evaluating
    return Check("inverse", errors[worst] <= eps, found), tuple(errors)


def _gradients(got: dict, want: dict, eps: float) -> tuple[Check, dict[str, float]]:
    largest = max(float(np.linalg.norm(data(ct))) for ct in want.values())
    errors = {
        name: relative_error(got[name], want[name], eps * largest) for name in want
    }
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    found = f"relative error up to {errors[worst]:.1e}, of `{worst}`"
    return Check("gradients", errors[worst] <= eps, found), errors


def _state(got: Any, want: Any, eps: float) -> Check:
    got, want = leaves_of(got), leaves_of(want)
    wrong = [
        name
        for name, leaf in want.items()
        if not relative_error(got[name], leaf) <= (eps if is_inexact(leaf) else 0)
    ]
    found = "differs after a step: " + ", ".join(f"`{name}`" for name in wrong)
    return Check("state", not wrong, found if wrong else "updated once a step")


def _same(name: str, one: Any, other: Any, what: str) -> Check:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    same = all(np.array_equal(data(a), data(b), equal_nan=True) for a, b in pairs)
    return Check(name, same, f"{what} {'agree' if same else 'differ'}")


def _purity(trial: Trial, x: Array) -> Check:
    for i, (block, x_in, args, kwargs) in enumerate(trial.blocks(x)):
        streams = jnp.split(x_in, block._form()["streams"], block.axis)
        for k, name in enumerate(_labels(block)):
            others = streams[:k] + streams[k + 1 :]

            def branch(k=k, others=others, row=(block, args, kwargs)) -> Any:
                block, args, kwargs = nnx.clone(row)
                return block._evaluate(k, others, *unwrap(args, kwargs))

            check = _same(
                "purity", branch(), branch(), f"two calls of `{name}` of block {i}"
            )
            if not check.passed:
                return check
    return Check("purity", True, "each branch, called twice, agrees with itself")


def _labels(block: ReversibleBlock) -> list[str]:
    """Returns the names of a block's branches in a report, whoever wrote them."""
    return [name.lower() for name in block._names()]


def _evaluations(trial: Trial, x: Array) -> tuple[Check, dict[str, int]]:
    counts: collections.Counter[str] = collections.Counter()

    def spied(evaluate: Callable) -> Callable:
        """Adds a zero to the input that only a call of the host can give."""

        def tick(_: Any, name: str, dtype: Any) -> np.ndarray:
            counts[name] += 1
            return np.zeros((), dtype)

        @functools.wraps(evaluate)
        def branch(self: Any, step: int, others: Any, args: Any, kwargs: Any) -> Any:
            x = others[0]
            zero = jax.pure_callback(
                functools.partial(tick, name=_labels(self)[step], dtype=x.dtype),
                jax.ShapeDtypeStruct((), x.dtype),
                jax.lax.stop_gradient(jnp.sum(x)),
            )
            return evaluate(self, step, [o + zero for o in others], args, kwargs)

        return branch

    @functools.cache
    def spying(kind: type) -> type:
        return type(kind.__name__, (kind,), {"_evaluate": spied(kind._evaluate)})

    model, args, kwargs = trial.parts()
    expected: collections.Counter[str] = collections.Counter()
    for segment in segments_of(model):
        for name in _labels(segment.block):
            expected[name] += len(segment)
        segment.block.__class__ = spying(type(segment.block))
    spied_trial = Trial(model, args, kwargs)

    def count(run: Callable) -> dict[str, int]:
        counts.clear()
        jax.block_until_ready(_jit(run)(spied_trial.state, x))
        jax.effects_barrier()
        return {name: counts[name] for name in expected}

    forward = count(spied_trial.forward(call_model))
    step = count(spied_trial.step(call_model))
    passes = 1 if getattr(model, "store_activations", False) else 2
    # A compiler leaves out what no gradient needs.
    passed = all(
        forward[name] == times and step[name] <= passes * times
        for name, times in expected.items()
    )
    found = ", ".join(
        f"`{name}` {forward[name]} forward, {step[name]} in a step" for name in expected
    )
    return Check("evaluations", passed, found), step


def _given(jaxpr: Any, flags: Iterable[bool]) -> list[bool]:
    """Says which outputs of a program are inputs that are flagged, or their layout."""
    known = {id(v) for v, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    for eqn in jaxpr.eqns:
        flags = [id(v) in known for v in eqn.invars]
        if eqn.primitive.name in ("jit", "pjit"):
            out = _given(eqn.params["jaxpr"].jaxpr, flags)
        else:
            layout = eqn.primitive.name in ("reshape", "split", "slice", "squeeze")
            out = [layout and all(flags)] * len(eqn.outvars)
        known |= {id(v) for v, flag in zip(eqn.outvars, out, strict=True) if flag}
    return [id(v) in known for v in jaxpr.outvars]


def _residuals(trial: Trial, x: Array, got: tuple) -> tuple[Check, int]:
    def kept(state: Any, x: Array) -> list:
        pullback = jax.vjp(trial.forward(call_model), state, x, has_aux=True)[1]
        return jax.tree.leaves(pullback)

    program = jax.make_jaxpr(kept)(trial.state, x).jaxpr

    *given, _ = program.invars
    known = _given(program, [*(True for _ in given), False])
    leaves = {
        id(v): v.aval
        for v, is_given in zip(program.outvars, known, strict=True)
        if not is_given
    }
    size = sum(a.size * a.dtype.itemsize for a in leaves.values() if is_inexact(a))
    y, after, _ = got
    pairs = zip(leaves_of(trial.state).values(), leaves_of(after).values(), strict=True)
    changed = sum(
        new.nbytes
        for old, new in pairs
        if is_inexact(new) and not np.array_equal(data(old), data(new))
    )
    model, *_ = trial.parts()
    outputs: int | None = 1
    if isinstance(model, ReversibleSequential):
        outputs = trial.depth
    elif isinstance(model, ReversibleSequence):
        if model.anchor_every:
            outputs = -(-trial.depth // model.anchor_every)
        if model.store_activations:
            outputs = None
    found = f"{size:,} bytes, {size / max(y.nbytes, 1):.2f} times the output"
    passed = None if outputs is None else size <= outputs * y.nbytes + changed
    return Check("residuals", passed, found), size
