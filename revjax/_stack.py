"""Stacks: segments of blocks under one rule of differentiation.

The stack's forward pass is a `lax.scan` for each segment. Its derivative is one
`jax.custom_vjp` (`reversible`, `_reversible_fwd`, `_reversible_bwd`) that saves the
final output and walks the blocks backwards, undoing each and pulling the cotangents
through it.
The other ways of running a stack are made of the same parts: `store_activations` is
`stored` under ordinary autodiff, and a stack with anchors is a scan over chunks of it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from revjax import _block, _checks
from revjax._block import Branch, Leaves, Step, Streams, override
from revjax._couplings import Coupling, Inverse


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
    """

    steps: tuple[BranchSpec, ...]
    length: int | None
    axis: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A run of alike blocks, ready to run."""

    steps: tuple[Step, ...]
    length: int | None
    axis: int | None

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
      backward: Programs of the backward pass, by what is differentiated, and by
        whether more than the output has a cotangent.
    """

    segments: tuple[Segment, ...]
    backwards: bool
    moving: tuple[int, ...]
    backward: dict = dataclasses.field(init=False, default_factory=dict)


def _unpack(x: Any, axis: int | None) -> Streams:
    return tuple(x) if axis is None else tuple(jnp.split(x, 2, axis))


def _pack(streams: Streams, axis: int | None) -> Any:
    return streams if axis is None else jnp.concatenate(streams, axis)


def _repack(streams: Streams, axis: int | None, new_axis: int | None) -> Streams:
    """Splits on another axis, where neighbouring segments do not agree on it."""
    if axis == new_axis:
        return streams
    return _unpack(_pack(streams, axis), new_axis)


def loop(
    body: Callable, carry: Any, xs: Any, length: int | None, *, backwards: bool
) -> tuple[Any, Any]:
    """Runs `body` once, or over the leading axis of `xs`."""
    if length is None:
        return body(carry, xs)
    return lax.scan(body, carry, xs, length, reverse=backwards)


def _advance(
    segment: Segment, common: Leaves, keep: bool, carry: tuple, own: Leaves
) -> tuple[tuple, tuple]:
    """Runs one block; a body of `loop`.

    Returns:
      The streams and the common arrays that move; and the own arrays that changed, the
      further outputs, and, to `keep`, what the replay of each branch needs: the arrays
      that it reads and that an earlier branch has changed, as they were before it.
    """
    streams, moving = carry
    streams, new_own, new_common, outputs, before = _block.forward(
        segment.steps, own, override(common, moving), streams
    )
    written: frozenset[int] = frozenset()
    replay = []
    for step, (own_before, common_before) in zip(segment.steps, before, strict=True):
        read = {i: own_before[i] for i in step.reads_own & written}
        read_common = {i: common_before[i] for i in step.reads_common & moving.keys()}
        replay.append((read, read_common))
        written |= step.writes_own
    changed = {i: new_own[i] for i in written}
    moving = {i: new_common[i] for i in moving}
    return (streams, moving), (changed, outputs, replay if keep else None)


def _run_and_keep(
    plan: Plan, own: Sequence[Leaves], common: Leaves, x: Any, *, keep: bool
) -> tuple[tuple[Any, list, dict, list], list]:
    """Runs the stack; returns the outputs of `stored`, and what the replay needs."""
    axis = plan.segments[0].axis
    carry = _unpack(x, axis), {i: common[i] for i in plan.moving}
    changed, outputs, kept = [], [], []
    for segment, leaves in zip(plan.segments, own, strict=True):
        carry = _repack(carry[0], axis, segment.axis), carry[1]
        axis = segment.axis
        carry, (new_own, further, replay) = loop(
            functools.partial(_advance, segment, common, keep),
            carry,
            list(leaves),
            segment.length,
            backwards=plan.backwards,
        )
        changed.append(new_own)
        outputs.append(further)
        kept.append(replay)
    return (_pack(carry[0], axis), changed, carry[1], outputs), kept


def stored(plan: Plan, own: Sequence[Leaves], common: Leaves, x: Any) -> Any:
    """Runs the stack under ordinary autodiff.

    Returns:
      The output; for each segment its own arrays that changed, by place; the common
      arrays that changed, by place; for each segment and step its further outputs.
    """
    return _run_and_keep(plan, own, common, x, keep=False)[0]


def _flags(leaves: Leaves) -> list[Array]:
    """Says which arrays are differentiated, in the shapes of empty arrays.

    JAX may trace the forward rule once for each set of differentiated arguments and yet
    keep one tree of residuals for all, so that set cannot be static data in the tree.
    """
    wanted = (p.perturbed and _block.is_inexact(p.value) for p in leaves)
    return [jnp.zeros((0, int(flag)), bool) for flag in wanted]


def _wanted(flags: tuple[list, list]) -> tuple[frozenset[int], ...]:
    """Undoes `_flags`: the places of what is differentiated, by segment, in common."""
    own, common = flags
    return tuple(
        frozenset(i for i, flag in enumerate(group) if flag.shape[-1])
        for group in (*own, common)
    )


def _dense(cts: Any) -> dict[int, Array]:
    """Returns the cotangents of what has one, by place."""
    items = cts.items() if isinstance(cts, dict) else enumerate(cts)
    return {i: _instantiate(ct, ct) for i, ct in items if _block.is_inexact(ct)}


def _live(cts: Any) -> dict[int, Array]:
    """Returns the cotangents that are there, by place; the others are zero."""
    items = cts.items() if isinstance(cts, dict) else enumerate(cts)
    zero = jax.custom_derivatives.SymbolicZero
    return _dense({i: ct for i, ct in items if not isinstance(ct, zero)})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def reversible(plan: Plan, own: Sequence[Leaves], common: Leaves, x: Any) -> Any:
    """As `stored`; its derivative keeps one output and undoes the blocks."""
    return stored(plan, own, common, x)


def _reversible_fwd(plan: Plan, own: Any, common: Any, x: Any) -> tuple[Any, Any]:
    """Runs the stack and traces the backward pass, within the user's named axes.

    By the time that JAX asks for the backward pass it has left them, and a branch's
    collectives would not find theirs. What is not known yet is whether state and
    further outputs will have cotangents: usually not.
    """
    flags = [_flags(leaves) for leaves in own], _flags(common)
    own, common, x = jax.tree.map(lambda p: p.value, (own, common, x))
    out, kept = _run_and_keep(plan, own, common, x, keep=True)
    residuals = flags, own, common, out[0], kept
    key, y, further = _wanted(flags), out[0], out[1:]

    def trace(further_ct: tuple) -> tuple:
        walk = functools.partial(_walk_back, plan)
        return jax.make_jaxpr(walk, return_shape=True)(residuals, y, *further_ct)

    plan.backward[key, False] = trace(_further(further, lambda _: {}))
    if any(step.jaxpr.effects for s in plan.segments for step in s.steps):
        plan.backward[key, True] = trace(_further(further, _dense))
    return out, residuals


def _further(cts: Sequence, choose: Callable[[Any], dict]) -> tuple[list, dict, list]:
    """Chooses among the cotangents of what a stack returns besides its output."""
    changed, moving, outputs = cts
    return (
        [choose(new) for new in changed],
        choose(moving),
        [[choose(leaves) for leaves in segment] for segment in outputs],
    )


def _reversible_bwd(plan: Plan, residuals: Any, cts: Any) -> tuple[Any, Any, Any]:
    flags, _, _, y, _ = residuals
    y_ct = jax.tree.map(_instantiate, y, cts[0])
    further_ct = _further(cts[1:], _live)
    some = bool(jax.tree.leaves(further_ct))
    traced = plan.backward.get((_wanted(flags), some))
    if traced is None:
        return _walk_back(plan, residuals, y_ct, *further_ct)
    if some:
        further_ct = _further(cts[1:], _dense)
    program, result = traced
    leaves = jaxpr_as_fun(program)(*jax.tree.leaves((residuals, y_ct, further_ct)))
    return jax.tree.unflatten(jax.tree.structure(result), leaves)


def _retreat(
    segment: Segment,
    common: Leaves,
    wanted_own: frozenset[int],
    carry: tuple,
    xs: tuple,
) -> tuple[tuple, dict[int, Array]]:
    """Undoes one block and pulls the cotangents through it; a body of `loop`."""
    streams, streams_ct, common_ct = carry
    leaves, replay, new_ct, further_ct = xs
    before = [
        (override(leaves, own), override(common, moving)) for own, moving in replay
    ]
    streams, streams_ct, own_ct, common_ct = _block.invert_and_vjp(
        segment.steps,
        before,
        streams,
        streams_ct,
        new_ct,
        common_ct,
        further_ct,
        wanted_own,
    )
    d_own = {
        i: own_ct[i] if i in own_ct else jnp.zeros_like(leaves[i]) for i in wanted_own
    }
    return (streams, streams_ct, common_ct), d_own


def _walk_back(
    plan: Plan,
    residuals: Any,
    y_ct: Any,
    changed_ct: Sequence[Mapping[int, Array]],
    moving_ct: Mapping[int, Array],
    outputs_ct: Sequence[Sequence[Mapping[int, Array]]],
) -> tuple[list, list, Any]:
    """Returns the cotangents of a stack's own and common arrays, and of its input."""
    flags, own, common, y, kept = residuals
    *wanted, wanted_common = _wanted(flags)
    common_ct = {}
    for i, leaf in enumerate(common):
        if _block.is_inexact(leaf) and (i in wanted_common or i in plan.moving):
            dtype = _block.accumulator_dtype(leaf.dtype)
            ct = moving_ct.get(i)
            zero = ct is None
            common_ct[i] = jnp.zeros_like(leaf, dtype) if zero else ct.astype(dtype)

    axis = plan.segments[-1].axis
    carry = _unpack(y, axis), _unpack(y_ct, axis), common_ct
    own_ct = []
    rows = zip(plan.segments, own, kept, changed_ct, outputs_ct, wanted, strict=True)
    for segment, leaves, replay, new_ct, further_ct, wanted_own in list(rows)[::-1]:
        streams, streams_ct, common_ct = carry
        streams = _repack(streams, axis, segment.axis)
        streams_ct = _repack(streams_ct, axis, segment.axis)
        axis = segment.axis
        carry, d_own = loop(
            functools.partial(_retreat, segment, common, wanted_own),
            (streams, streams_ct, common_ct),
            (list(leaves), replay, new_ct, further_ct),
            segment.length,
            backwards=not plan.backwards,
        )
        own_ct.append([d_own.get(i) for i in range(len(leaves))])
    _, streams_ct, common_ct = carry
    d_common = [
        common_ct[i].astype(leaf.dtype) if i in wanted_common else None
        for i, leaf in enumerate(common)
    ]
    return own_ct[::-1], d_common, _pack(streams_ct, axis)


def _instantiate(primal: Array, ct: Any) -> Array:
    if isinstance(ct, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(primal.shape, primal.dtype)
    return ct


reversible.defvjp(_reversible_fwd, _reversible_bwd, symbolic_zeros=True)


def _entry(stacked: Array) -> Array:
    """Returns what a scan hands to a block, also where there is none."""
    return (
        lax.index_in_dim(stacked, 0, keepdims=False)
        if stacked.size
        else (jnp.empty(stacked.shape[1:], stacked.dtype))
    )


def make_plan(
    specs: Sequence[SegmentSpec], own: Sequence[Leaves], common: Leaves, x: Any
) -> tuple[Plan, list]:
    """Traces the branches of a stack.

    Args:
      specs: The segments.
      own: For each segment its blocks' own arrays.
      common: The arrays that all blocks share.
      x: The input, encoded.

    Returns:
      The plan, and the values that the branches close over, which follow `common` in
      the list that the plan is run with.
    """
    hoisted: list = []
    segments = []
    for spec, leaves in zip(specs, own, strict=True):
        streams = jax.eval_shape(functools.partial(_unpack, axis=spec.axis), x)
        block = list(leaves)
        if spec.length is not None:
            block = [jax.eval_shape(_entry, leaf) for leaf in block]
        after, steps = list(common), []
        for step in spec.steps:
            traced, block, after = _block.trace_step(
                step.branch, step.stream, step.coupling, step.name,
                block, after, streams, hoisted,
            )  # fmt: skip
            _checks.unchanged_types(common, after, step.name)
            steps.append(traced)
        segments.append(Segment(tuple(steps), spec.length, spec.axis))
    written = {i for s in segments for step in s.steps for i in step.writes_common}
    return Plan(tuple(segments), False, tuple(sorted(written))), hoisted


def inverted(plan: Plan) -> Plan:
    """Returns the plan of the inverse, which reads variables and changes none."""
    for segment in plan.segments:
        written = frozenset[int]().union(*(s.writes_own for s in segment.steps))
        for step in segment.steps:
            moved = step.needs_own & written | step.needs_common & set(plan.moving)
            _checks.can_be_undone(not moved, step.name)

    def inverted_step(step: Step) -> Step:
        return dataclasses.replace(
            step,
            coupling=Inverse(step.coupling),
            writes_own=frozenset(),
            writes_common=frozenset(),
        )

    segments = (
        dataclasses.replace(s, steps=tuple(map(inverted_step, reversed(s.steps))))
        for s in reversed(plan.segments)
    )
    return Plan(tuple(segments), not plan.backwards, ())
