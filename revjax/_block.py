"""One reversible block: forward, inverse, and inverse and derivative together.

A block is a tuple of steps. A step changes one stream by a branch that sees only the
other streams, and so it can be undone. To undo it *and* to differentiate it, its branch
is evaluated once, at the same point, with `jax.vjp`.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from revjax._step import Leaves, Move, Step, Streams, is_inexact, override, place, split


def forward(
    steps: Sequence[Step | Move], own: Leaves, common: Leaves, streams: Streams
) -> tuple[Streams, Leaves, Leaves, list, list]:
    """Runs a block.

    Returns:
      The streams, the block's own arrays and the common ones after the block, the
      further outputs of each step, and for each step own and common as they were
      before it.
    """
    outputs, before = [], []
    for step in steps:
        before.append((own, common))
        if isinstance(step, Move):
            streams = step.apply(streams)
            outputs.append([])
            continue
        x, others = split(streams, step.stream)
        h, own, common, aux = step(own, common, others)
        streams = place(step.coupling.combine(x, h), others, step.stream)
        outputs.append(aux)
    return streams, own, common, outputs, before


def _branch_of(
    step: Step,
    own: Leaves,
    common: Leaves,
    live: tuple[Iterable[int], Iterable[int], Iterable[int]],
    d_own: Mapping[int, Array],
    d_common: Mapping[int, Array],
    others: Streams,
) -> tuple:
    """Evaluates a branch as a function of what is differentiated.

    Returns:
      Its update, and by place those of its other outputs that have a cotangent.
    """
    h, *rest = step(override(own, d_own), override(common, d_common), others)
    return (
        h,
        *({i: out[i] for i in places} for out, places in zip(rest, live, strict=True)),
    )


def invert(
    steps: Sequence[Step | Move],
    before: Sequence[tuple[Leaves, Leaves]],
    streams: Streams,
) -> Streams:
    """Undoes a block, given own and common arrays as they were before each step."""
    for step, (own, common) in zip(reversed(steps), reversed(before), strict=True):
        if isinstance(step, Move):
            streams = step.undo(streams)
            continue
        y, others = split(streams, step.stream)
        h, *_ = step(own, common, others)
        streams = place(step.coupling.recover(y, h), others, step.stream)
    return streams


def invert_and_vjp(
    steps: Sequence[Step | Move],
    before: Sequence[tuple[Leaves, Leaves]],
    streams: Streams,
    streams_ct: Streams,
    own_ct: Mapping[int, Array],
    common_ct: Mapping[int, Array],
    outputs_ct: Sequence[Mapping[int, Array]],
    wanted_own: frozenset[int],
) -> tuple[Streams, Streams, dict[int, Array], dict[int, Array]]:
    """Undoes a block and pulls cotangents back through it, one evaluation a step.

    For each step, last to first, with `y` the stream that it changed:

        h, pullback = jax.vjp(branch, own, common, others)
        x = recover(y, h)
        x_ct, h_ct = vjp of combine at (x, h)
        own_ct, common_ct, others_ct += pullback(h_ct)

    Args:
      steps: The block's steps.
      before: For each step, own and common arrays as they were before it.
      streams: The block's output.
      streams_ct: Its cotangent.
      own_ct: The cotangents of the block's own arrays after it, by place; an array
        without one has a zero cotangent.
      common_ct: The same for the common arrays, in the dtype of an accumulator.
        Only arrays that are in here receive a cotangent.
      outputs_ct: For each step, the cotangents of its further outputs, by place.
      wanted_own: The places of own arrays whose cotangent is wanted.

    Returns:
      The block's input, its cotangent, and the cotangents of own and common arrays
      before the block.
    """
    own_ct, common_ct = dict(own_ct), dict(common_ct)
    for k in reversed(range(len(steps))):
        step, (own, common), further_ct = steps[k], before[k], outputs_ct[k]
        if isinstance(step, Move):
            streams, streams_ct = step.undo(streams), step.undo(streams_ct)
            continue
        y, others = split(streams, step.stream)
        y_ct, others_ct = split(streams_ct, step.stream)

        # A value that an earlier step wrote passes its cotangent on to that step.
        written = frozenset[int]().union(*(s.writes_own for s in steps[:k]))
        d_own = {
            i: own[i]
            for i in sorted(step.reads_own & (wanted_own | written))
            if is_inexact(own[i])
        }
        d_common = {i: common[i] for i in sorted(step.reads_common & common_ct.keys())}
        out_own_ct = {i: own_ct.pop(i) for i in step.writes_own & own_ct.keys()}
        out_common_ct = {
            i: common_ct[i].astype(common[i].dtype)
            for i in step.writes_common & common_ct.keys()
        }
        for i in out_common_ct:
            common_ct[i] = jnp.zeros_like(common_ct[i])

        (h, *_), pullback = jax.vjp(
            functools.partial(
                _branch_of,
                step,
                own,
                common,
                (out_own_ct.keys(), out_common_ct.keys(), further_ct.keys()),
            ),
            d_own,
            d_common,
            others,
        )
        x = step.coupling.recover(y, h)
        x_ct, h_ct = step.coupling.pullback(x, h, y_ct)
        d_own_ct, d_common_ct, d_others_ct = pullback(
            (h_ct, out_own_ct, out_common_ct, dict(further_ct))
        )

        for i, ct in d_own_ct.items():
            own_ct[i] = own_ct[i] + ct if i in own_ct else ct
        for i, ct in d_common_ct.items():
            common_ct[i] = common_ct[i] + ct.astype(common_ct[i].dtype)
        others_ct = tuple(a + b for a, b in zip(others_ct, d_others_ct, strict=True))
        streams = place(x, others, step.stream)
        streams_ct = place(x_ct, others_ct, step.stream)
        if step.exact:
            # One branch after the other: decoded streams are arrays of their own.
            streams, streams_ct = lax.optimization_barrier((streams, streams_ct))
    return streams, streams_ct, own_ct, common_ct
