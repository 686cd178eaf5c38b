"""Stacks made ready to run: their branches traced, their segments in order."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from revjax import _checks
from revjax._couplings import Coupling
from revjax._step import Branch, Leaves, Move, Step, Streams, trace_step


@dataclasses.dataclass(frozen=True)
class BranchSpec:
    """A step before it is traced: which stream, by which branch and coupling."""

    stream: int
    branch: Branch
    coupling: Coupling
    name: str


@dataclasses.dataclass(frozen=True)
class SegmentSpec:
    """A run of alike blocks before their branches are traced.

    Attributes:
      steps: The steps of one block.
      length: The number of blocks, whose own arrays are stacked on axis 0. `None` for
        one block whose own arrays have no such axis.
      axis: The axis on which the input is split in streams; `None` if the streams are
        a tuple of arrays.
      streams: The number of streams.
    """

    steps: tuple[BranchSpec | Move, ...]
    length: int | None
    axis: int | None
    streams: int = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A run of alike blocks, ready to run."""

    steps: tuple[Step | Move, ...]
    length: int | None
    axis: int | None
    streams: int

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return 1 if self.length is None else self.length


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A whole stack, ready to run: the static half of every function below.

    Attributes:
      segments: In the order in which a call runs them.
      backwards: Whether a call runs the blocks of each segment from last to first.
      moving: The places of the common arrays that a call changes.
      total: Whether the further outputs of all steps, one array each, are summed: their
        shape and dtype, or `None`.
      backward: Programs of the backward pass, by what is differentiated, and by
        whether more than the output has a cotangent.
    """

    segments: tuple[Segment, ...]
    backwards: bool
    moving: tuple[int, ...]
    total: jax.ShapeDtypeStruct | None = None
    backward: dict = dataclasses.field(init=False, default_factory=dict)

    def nothing(self) -> list[Array]:
        """Returns the total of no terms; an empty list if there is none."""
        if self.total is None:
            return []
        return [jnp.zeros(self.total.shape, self.total.dtype)]

    def decode(self, x: Array) -> Array:
        """Returns what a stream stands for; the couplings of a stack agree on it."""
        steps = (step for segment in self.segments for step in segment.steps)
        laws = [step.coupling for step in steps if isinstance(step, Step)]
        return laws[0].decode(x) if laws else x


def unpack(x: Any, segment: SegmentSpec | Segment) -> Streams:
    """Splits an array in the streams of a segment."""
    if segment.axis is None:
        return tuple(x)
    return tuple(jnp.split(x, segment.streams, segment.axis))


def pack(streams: Streams, segment: SegmentSpec | Segment) -> Any:
    """Undoes `unpack`."""
    if segment.axis is None or len(streams) == 1:
        return streams if segment.axis is None else streams[0]
    return jnp.concatenate(streams, segment.axis)


def repack(
    streams: Streams, old: SegmentSpec | Segment, new: SegmentSpec | Segment
) -> Streams:
    """Splits again, where neighbouring segments do it in another way."""
    if (old.axis, old.streams) == (new.axis, new.streams):
        return streams
    return unpack(pack(streams, old), new)


def _entry(stacked: Array) -> Array:
    """Returns what a scan hands to a block, also where there is none."""
    return (
        lax.index_in_dim(stacked, 0, keepdims=False)
        if stacked.size
        else (jnp.empty(stacked.shape[1:], stacked.dtype))
    )


def make_plan(
    specs: Sequence[SegmentSpec],
    own: Sequence[Leaves],
    common: Leaves,
    x: Any,
    total: jax.ShapeDtypeStruct | None = None,
) -> tuple[Plan, list]:
    """Traces the branches of a stack.

    Args:
      specs: The segments.
      own: For each segment its blocks' own arrays.
      common: The arrays that all blocks share.
      x: The input, encoded.
      total: As in `Plan`.

    Returns:
      The plan, and the values that the branches close over, which follow `common` in
      the list that the plan is run with.
    """
    hoisted: list = []
    segments: list[Segment] = []
    streams = jax.eval_shape(functools.partial(unpack, segment=specs[0]), x)
    before = specs[0]
    for spec, leaves in zip(specs, own, strict=True):
        resplit = functools.partial(repack, old=before, new=spec)
        streams, before = jax.eval_shape(resplit, streams), spec
        block = list(leaves)
        if spec.length is not None:
            block = [jax.eval_shape(_entry, leaf) for leaf in block]
        after, steps = list(common), []
        for step in spec.steps:
            if isinstance(step, Move):
                streams = jax.eval_shape(step.apply, streams)
                steps.append(step)
                continue
            traced, block, after = trace_step(
                step.branch, step.stream, step.coupling, step.name,
                block, after, streams, hoisted,
            )  # fmt: skip
            _checks.unchanged_types(common, after, step.name)
            steps.append(traced)
        segment = Segment(tuple(steps), spec.length, spec.axis, spec.streams)
        segments.append(segment)
    written = {i for s in segments for step in s.steps for i in step.writes_common}
    return Plan(tuple(segments), False, tuple(sorted(written)), total), hoisted


def inverted(plan: Plan) -> Plan:
    """Returns the plan of the inverse, which reads variables and changes none."""
    for segment in plan.segments:
        written = frozenset[int]().union(*(s.writes_own for s in segment.steps))
        for step in segment.steps:
            if isinstance(step, Step):
                moved = step.needs_own & written | step.needs_common & set(plan.moving)
                _checks.can_be_undone(not moved, step.name)
    segments = (
        dataclasses.replace(s, steps=tuple(t.inverted() for t in reversed(s.steps)))
        for s in reversed(plan.segments)
    )
    return Plan(tuple(segments), not plan.backwards, (), plan.total)
