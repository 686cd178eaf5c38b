"""Stacks: segments of blocks under one rule of differentiation.

The stack's forward pass is a `lax.scan` for each segment. Its derivative is one
`jax.custom_vjp` (`reversible`, `_reversible_fwd`, `_reversible_bwd`) that saves the
final output and walks the blocks backwards, undoing each and pulling the cotangents
through it.
The other ways of running a stack are made of the same parts: `store_activations` is
`stored` under ordinary autodiff, and a stack with anchors is a scan over chunks of it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from revjax import _block
from revjax._couplings import wide
from revjax._plan import Plan, Segment, pack, repack, unpack
from revjax._step import Leaves, is_inexact, override


def loop(
    body: Callable, carry: Any, xs: Any, length: int | None, *, backwards: bool
) -> tuple[Any, Any]:
    """Runs `body` once, or over the leading axis of `xs`."""
    if length is None:
        return body(carry, xs)
    return lax.scan(body, carry, xs, length, reverse=backwards)


def advance(
    segment: Segment, common: Leaves, keep: bool, carry: tuple, own: Leaves
) -> tuple[tuple, tuple]:
    """Runs one block; a body of `loop`.

    Returns:
      The streams, the common arrays that move, and the total; and the own arrays that
      changed, the further outputs unless they are summed, and, to `keep`, what the
      replay of each branch needs: the arrays that it reads and that an earlier branch
      has changed, as they were before it.
    """
    streams, moving, total = carry
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
    if total:
        total = [sum((term for leaves in outputs for term in leaves), *total)]
        outputs = [[] for _ in outputs]
    carry = streams, moving, total
    return carry, (changed, outputs, replay if keep else None)


def run_and_keep(
    plan: Plan, own: Sequence[Leaves], common: Leaves, x: Any, *, keep: bool
) -> tuple[tuple[Any, list, dict, list, list], list]:
    """Runs the stack; returns the outputs of `stored`, and what the replay needs."""
    last = plan.segments[0]
    carry = unpack(x, last), {i: common[i] for i in plan.moving}, plan.nothing()
    changed, outputs, kept = [], [], []
    for segment, leaves in zip(plan.segments, own, strict=True):
        carry, last = (repack(carry[0], last, segment), *carry[1:]), segment
        carry, (new_own, further, replay) = loop(
            functools.partial(advance, segment, common, keep),
            carry,
            list(leaves),
            segment.length,
            backwards=plan.backwards,
        )
        changed.append(new_own)
        outputs.append(further)
        kept.append(replay)
    streams, moving, total = carry
    return (pack(streams, last), changed, moving, outputs, total), kept


def stored(plan: Plan, own: Sequence[Leaves], common: Leaves, x: Any) -> Any:
    """Runs the stack under ordinary autodiff.

    Returns:
      The output; for each segment its own arrays that changed, by place; the common
      arrays that changed, by place; for each segment and step its further outputs; and
      their total, if the plan asks for it instead, or an empty list.
    """
    return run_and_keep(plan, own, common, x, keep=False)[0]


def _flags(leaves: Leaves) -> list[Array]:
    """Says which arrays are differentiated, in the shapes of empty arrays.

    JAX may trace the forward rule once for each set of differentiated arguments and yet
    keep one tree of residuals for all, so that set cannot be static data in the tree.
    """
    wanted = (p.perturbed and is_inexact(p.value) for p in leaves)
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
    return {
        i: _given(jnp.zeros(ct.shape, ct.dtype), ct)
        for i, ct in items
        if is_inexact(ct)
    }


def _live(cts: Any) -> dict[int, Array]:
    """Returns the cotangents that are there, by place; the others are zero."""
    items = cts.items() if isinstance(cts, dict) else enumerate(cts)
    return _dense({i: ct for i, ct in items if not _is_zero(ct)})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def reversible(
    plan: Plan, own: Sequence[Leaves], common: Leaves, x: Any, watch: Any
) -> Any:
    """As `stored`; its derivative keeps one output and undoes the blocks.

    Args:
      plan: As for `stored`.
      own: As for `stored`.
      common: As for `stored`.
      x: As for `stored`.
      watch: `None`, or a pair `(echo, drift)` whose values do not matter. As cotangents
        `echo` receives the input as the backward pass got it back, and a one, and
        `drift` the distance of the output from what the echo of the next stack brings.

    Returns:
      What `stored` returns, and an echo for the output, or `None`.
    """
    out = stored(plan, own, common, x)
    return *out, None if watch is None else echo_of(out[0])


def _blank(a: Array) -> Array:
    """Returns zeros like an array, on the same batch axes and devices."""
    return jnp.where(jnp.isnan(a), 0, jnp.zeros_like(a))


def echo_of(x: Any) -> tuple[Any, Array]:
    """Returns zeros like `x`, and a zero; see `_blank`."""
    zeros = jax.tree.map(_blank, x)
    first = jnp.real(jax.tree.leaves(zeros)[0])
    return zeros, jnp.sum(first.astype(wide(first.dtype)))


def _reversible_fwd(
    plan: Plan, own: Any, common: Any, x: Any, watch: Any
) -> tuple[Any, Any]:
    """Runs the stack and traces the backward pass, within the user's named axes.

    By the time that JAX asks for the backward pass it has left them, and a branch's
    collectives would not find theirs. What is not known yet is whether state and
    further outputs will have cotangents: usually not.
    """
    flags = [_flags(leaves) for leaves in own], _flags(common)
    own, common, x = jax.tree.map(lambda p: p.value, (own, common, x))
    out, kept = run_and_keep(plan, own, common, x, keep=True)
    # Of the meter its dtype is needed.
    meter = None if watch is None else jnp.zeros((0,), watch[1].value.dtype)
    residuals = flags, own, common, out[0], kept
    key, y, further = _wanted(flags), out[0], out[1:]

    def trace(further_ct: tuple) -> tuple:
        walk = functools.partial(_walk_back, plan)
        return jax.make_jaxpr(walk, return_shape=True)(residuals, y, *further_ct)

    echo = None if watch is None else echo_of(y)
    plan.backward[key, False] = trace(_further(further, lambda _: {}))
    if any(step.effects for s in plan.segments for step in s.steps):
        plan.backward[key, True] = trace(_further(further, _dense))
    return (*out, echo), (residuals, meter)


def _further(cts: Sequence, choose: Callable[[Any], dict]) -> tuple:
    """Chooses among the cotangents of what a stack returns besides its output."""
    changed, moving, outputs, total = cts
    return (
        [choose(new) for new in changed],
        choose(moving),
        [[choose(leaves) for leaves in segment] for segment in outputs],
        choose(total),
    )


def _reversible_bwd(plan: Plan, saved: Any, cts: Any) -> tuple:
    residuals, meter = saved
    flags, _, _, y, _ = residuals
    y_ct, *further, echo_ct = cts
    y_ct = jax.tree.map(_given, jax.tree.map(_blank, y), y_ct)
    further_ct = _further(further, _live)
    some = bool(jax.tree.leaves(further_ct))
    traced = plan.backward.get((_wanted(flags), some))
    if traced is None:
        *d_args, x = _walk_back(plan, residuals, y_ct, *further_ct)
    else:
        if some:
            further_ct = _further(further, _dense)
        program, result = traced
        leaves = jaxpr_as_fun(program)(*jax.tree.leaves((residuals, y_ct, further_ct)))
        *d_args, x = jax.tree.unflatten(jax.tree.structure(result), leaves)
    if meter is None:
        return *d_args, None
    found, heard = jax.tree.map(_given, echo_of(y), echo_ct)
    # After the last stack there is nobody to send an echo.
    drift = jnp.where(heard == 0, 0, distance(plan, found, y))
    return *d_args, ((x, jnp.ones_like(heard)), drift.astype(meter.dtype))


def _is_zero(ct: Any) -> bool:
    return isinstance(ct, jax.custom_derivatives.SymbolicZero)


def _given(zeros: Array, ct: Any) -> Array:
    return zeros if _is_zero(ct) else ct


def distance(plan: Plan, found: Any, true: Any) -> Array:
    """Returns the distance of streams, relative to the norm of the true ones."""

    def norm(streams: Any) -> Array:
        squares = (jnp.sum(jnp.square(jnp.abs(a))) for a in jax.tree.leaves(streams))
        return jnp.sqrt(sum(squares))

    def decoded(streams: Any) -> Any:
        streams = jax.tree.map(plan.decode, streams)
        return jax.tree.map(lambda a: a.astype(wide(a.dtype)), streams)

    found, true = decoded(found), decoded(true)
    gap = norm(jax.tree.map(jnp.subtract, found, true))
    return jnp.where(gap == 0, 0, gap / norm(true))


def replayed(leaves: Leaves, common: Leaves, replay: list) -> list:
    """Returns own and common arrays of a block as they were before each step."""
    return [(override(leaves, own), override(common, moving)) for own, moving in replay]


def _retreat(
    segment: Segment,
    common: Leaves,
    wanted_own: frozenset[int],
    total_ct: Mapping[int, Array],
    carry: tuple,
    xs: tuple,
) -> tuple[tuple, dict[int, Array]]:
    """Undoes one block and pulls the cotangents through it; a body of `loop`."""
    streams, streams_ct, common_ct = carry
    leaves, replay, new_ct, further_ct = xs
    if total_ct:  # that of a sum is that of each term
        further_ct = [total_ct] * len(further_ct)
    before = replayed(leaves, common, replay)
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
    total_ct: Mapping[int, Array],
) -> tuple[list, list, Any, Any]:
    """Returns the cotangents of own arrays, common ones and the input; the input."""
    flags, own, common, y, kept = residuals
    *wanted, wanted_common = _wanted(flags)
    common_ct = {}
    for i, leaf in enumerate(common):
        if is_inexact(leaf) and (i in wanted_common or i in plan.moving):
            dtype = wide(leaf.dtype)
            ct = moving_ct.get(i)
            zero = ct is None
            common_ct[i] = jnp.zeros_like(leaf, dtype) if zero else ct.astype(dtype)

    last = plan.segments[-1]
    carry = unpack(y, last), unpack(y_ct, last), common_ct
    own_ct = []
    rows = zip(plan.segments, own, kept, changed_ct, outputs_ct, wanted, strict=True)
    for segment, leaves, replay, new_ct, further_ct, wanted_own in list(rows)[::-1]:
        streams, streams_ct, common_ct = carry
        streams, streams_ct = (repack(s, last, segment) for s in (streams, streams_ct))
        last = segment
        carry, d_own = loop(
            functools.partial(_retreat, segment, common, wanted_own, total_ct),
            (streams, streams_ct, common_ct),
            (list(leaves), replay, new_ct, further_ct),
            segment.length,
            backwards=not plan.backwards,
        )
        own_ct.append([d_own.get(i) for i in range(len(leaves))])
    streams, streams_ct, common_ct = carry
    d_common = [
        common_ct[i].astype(leaf.dtype) if i in wanted_common else None
        for i, leaf in enumerate(common)
    ]
    return own_ct[::-1], d_common, pack(streams_ct, last), pack(streams, last)


reversible.defvjp(_reversible_fwd, _reversible_bwd, symbolic_zeros=True)
