"""A call of blocks on arrays alone: how they are laid out, and what is wanted of them.

The adapters to libraries of layers sort their variables into arrays and make branches
of their modules; what a call does with these is the same for all, and here.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from revjax import _checks, _law_checks
from revjax._couplings import Coupling, wide
from revjax._modes import Mode, run
from revjax._plan import BranchSpec, SegmentSpec, inverted, make_plan, pack, unpack
from revjax._reconstruct import reconstruction
from revjax._step import Branch, Leaves, Move


@dataclasses.dataclass(frozen=True)
class Form:
    """What the steps of a run of alike blocks are made of; hashable.

    Attributes:
      length: The number of blocks, as in `SegmentSpec`.
      axis: The axis on which the input is split.
      dim: The size of the input on it, if it is known.
      streams: How many there are.
      couplings: The law of each step; step `i` changes stream `i`.
      moves: What follows the steps, as in `_moves`.
      names: What messages call the branch of each step.
    """

    length: int | None
    axis: int
    dim: int | None
    streams: int
    couplings: tuple[Coupling, ...]
    moves: tuple[Any, ...]
    names: tuple[str, ...]

    def spec(self, ndim: int, branches: Sequence[Branch] = ()) -> SegmentSpec:
        """Returns the segment for the core."""
        axis = self.axis % ndim
        laws = zip(branches, self.couplings, self.names, strict=bool(branches))
        steps = (BranchSpec(i, *rest) for i, rest in enumerate(laws))
        moves = (
            Move(*(functools.partial(f, axis=axis) for f in (m.apply, m.undo)))
            for m in self.moves
        )
        return SegmentSpec((*steps, *moves), self.length, axis, self.streams)

    def moved(self, x: Any, *, undo: bool) -> Any:
        """Returns the shape of the output for an input, or of the input."""
        spec = self.spec(x.ndim)
        for move in self.moves[::-1] if undo else self.moves:
            move = functools.partial(move.undo if undo else move.apply, axis=spec.axis)
            x = jax.eval_shape(lambda x, f=move: pack(f(unpack(x, spec)), spec), x)
        return x


@dataclasses.dataclass(frozen=True)
class Task:
    """What is wanted of a call.

    Attributes:
      mode: How the stack is differentiated.
      inverse: Whether it is undone.
      log_det: Whether the logarithm of the determinant is wanted too.
      errors_from: If not `None`, what is wanted is errors of reconstruction, where the
        streams are kept at every such block.
    """

    mode: Mode
    inverse: bool = False
    log_det: bool = False
    errors_from: int | None = None


def no_log_det(x: Any) -> Array:
    """Returns a zero for each example, in at least float32; one for one axis alone."""
    dtype = wide(jnp.finfo(x.dtype).dtype)
    return jnp.zeros(x.shape[: min(1, x.ndim - 1)], dtype)


def log_det_of(coupling: Coupling, h: Any, x: Array) -> Array:
    """Sums the logarithms of a step over all axes but that of the batch."""
    zero, log_det = no_log_det(x), coupling.log_det(h)
    _law_checks.log_det(log_det, x, coupling)
    axes = tuple(range(zero.ndim, log_det.ndim))
    return jnp.sum(jnp.real(log_det).astype(zero.dtype), axes)


def apply(
    forms: Sequence[Form],
    branches: Sequence[Sequence[Branch]],
    task: Task,
    own: Sequence[Leaves],
    common: Leaves,
    x: Array,
    drift: Array | None = None,
) -> tuple[Any, list, dict, list]:
    """Runs a stack, or undoes it.

    Args:
      forms: Those of its segments.
      branches: For each segment the branch of each step. If the determinant is wanted,
        its further output is `log_det_of` the step, and nothing else.
      task: What is wanted.
      own: For each segment its blocks' own arrays.
      common: The arrays that all blocks share.
      x: The input, or the output if the stack is undone.
      drift: As for `run`.

    Returns:
      What is wanted: the output, a pair of it and the logarithm of the determinant, or
      a pair of errors; for each segment its own arrays that changed, by place; common
      arrays that changed, by place; for each segment and step its further outputs.
    """
    laws = [law for form in forms for law in form.couplings]
    decode = laws[0].decode if laws else lambda x: x
    encoded = laws[0].encode(x) if laws else x
    shape = jax.eval_shape(lambda: encoded)
    if task.inverse:
        for form in reversed(forms):
            _checks.split_axis(shape, form.axis, form.dim, "y")
            shape = form.moved(shape, undo=True)
    specs, x_shape = [], shape
    for form, functions in zip(forms, branches, strict=True):
        _checks.split_axis(shape, form.axis, form.dim, "x")
        for law, name in zip(form.couplings, form.names, strict=True):
            formats = [c.representation(x.dtype) for c in (laws[0], law)]
            _law_checks.same_streams(formats[0], formats[1], name)
        specs.append(form.spec(x.ndim, functions))
        shape = form.moved(shape, undo=False)
    total = None
    if task.log_det:
        total = jax.eval_shape(lambda x: no_log_det(decode(x)), encoded)
    plan, hoisted = make_plan(specs, own, common, x_shape, total)
    common = [*common, *hoisted]
    if task.errors_from is not None:
        errors = reconstruction(plan, own, common, encoded, task.errors_from)
        return errors, [{} for _ in own], {}, []
    if task.inverse:
        plan, own = inverted(plan), own[::-1]
    y, changed, moving, outputs, total = run(
        plan, task.mode, own, common, encoded, drift
    )
    y = decode(y)
    if task.log_det:
        (log_det,) = total
        y = y, -log_det if task.inverse else log_det
    return y, changed, moving, outputs
