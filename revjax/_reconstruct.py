"""How far what the backward pass recovers is from what was there.

This costs a number of block evaluations that is quadratic in depth, and hardly any
memory: the true streams at each block are computed again from the input.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from revjax import _block
from revjax._plan import Plan, repack, unpack
from revjax._stack import advance, distance, loop, replayed, run_and_keep
from revjax._step import Leaves, Streams


def _row(leaves: Any, k: Any) -> Any:
    return jax.tree.map(
        lambda a: lax.dynamic_index_in_dim(a, k, keepdims=False), leaves
    )


def reconstruction(
    plan: Plan, own: Sequence[Leaves], common: Leaves, x: Any, every: int
) -> tuple[Array, Array]:
    """Undoes a stack and compares the input of each block with the true one.

    Args:
      plan: The stack.
      own: Its own arrays.
      common: Its common arrays.
      x: Its input.
      every: The streams at every such block are kept, so that errors begin again.

    Returns:
      For each block the largest absolute difference, and the distance relative to the
      norm of what is true; two arrays `[blocks]`.
    """
    out, kept = run_and_keep(plan, own, common, x, keep=True)
    # The carry with which each segment begins.
    last = plan.segments[0]
    carry: tuple = unpack(x, last), {i: common[i] for i in plan.moving}, []
    starts = []
    for segment, leaves in zip(plan.segments, own, strict=True):
        carry, last = (repack(carry[0], last, segment), *carry[1:]), segment
        starts.append(carry)
        step = functools.partial(advance, segment, common, False)
        carry, _ = loop(step, carry, list(leaves), segment.length, backwards=False)

    found = unpack(out[0], last)
    first = sum(segment.blocks for segment in plan.segments)
    results: list[Any] = []
    rows = list(zip(plan.segments, own, kept, starts, strict=True))
    for segment, leaves, replay, start in rows[::-1]:
        found, last = repack(found, last, segment), segment
        first -= segment.blocks

        def true(k: Any, segment=segment, leaves=leaves, start=start) -> Streams:
            """Returns the streams before block `k` of the segment."""
            if segment.length is None:
                return (
                    advance(segment, common, False, start, leaves)[0][0]
                    if k
                    else start[0]
                )

            def body(i: Any, carry: tuple) -> tuple:
                return advance(segment, common, False, carry, _row(leaves, i))[0]

            return lax.fori_loop(0, k, body, start)[0]

        def undo(
            found: Streams, xs: tuple, segment=segment, true=true, first=first
        ) -> tuple[Streams, tuple]:
            k, leaves, replay = xs
            if every:
                kept = (first + k + 1) % every == 0
                found = lax.cond(kept, lambda: true(k + 1), lambda: found)
            before = replayed(leaves, common, replay)
            found = _block.invert(segment.steps, before, found)
            there = true(k)
            pairs = zip(found, there, strict=True)
            gaps = [jnp.abs(plan.decode(a) - plan.decode(b)) for a, b in pairs]
            absolute = jnp.max(jnp.stack([jnp.max(gap, initial=0) for gap in gaps]))
            return found, (absolute, distance(plan, found, there))

        if segment.length is None:
            found, errors = undo(found, (0, list(leaves), replay))
            errors = jax.tree.map(lambda a: a[None], errors)
        else:
            xs = jnp.arange(segment.length), list(leaves), replay
            found, errors = lax.scan(undo, found, xs, reverse=True)
        results.insert(0, errors)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)
