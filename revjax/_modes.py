"""The ways of running a stack: what the forward pass keeps, and what is done again.

They are all made of the two ways of `_stack`: to keep the activations, and to
keep one output and undo the blocks. A stack with anchors is a scan over chunks
of either.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from revjax import _checks
from revjax._plan import Plan
from revjax._stack import echo_of, loop, reversible, stored
from revjax._step import Leaves, override, widened

BetweenAnchors = Literal["recompute", "invert"]


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a stack is differentiated; see `reversible_scan` for the meaning."""

    anchor_every: int = 0
    between_anchors: BetweenAnchors = "recompute"
    store_activations: bool = False

    def __post_init__(self) -> None:
        """Checks the options."""
        _checks.mode(self.anchor_every, self.between_anchors, self.store_activations)


def _chunks(plan: Plan, every: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Cuts a stack at every `every`-th block.

    Returns:
      Runs of equal chunks: how many there are, and what one is made of, as pairs of
      a segment's index and a number of its blocks. Only chunks inside one segment
      come in numbers above one.
    """
    chunks: list[list[tuple[int, int]]] = [[]]
    room = every
    for index, segment in enumerate(plan.segments):
        left = segment.blocks
        while left:
            if not room:
                chunks.append([])
                room = every
            blocks = min(room, left)
            chunks[-1].append((index, blocks))
            left, room = left - blocks, room - blocks
    runs = []
    for chunk, group in itertools.groupby(chunks):
        count = len(list(group))
        scanned = len(chunk) == 1 and plan.segments[chunk[0][0]].length is not None
        runs += [(count, chunk)] if scanned else [(1, chunk)] * count
    return runs


def _cut(leaf: Array, sizes: Sequence[int]) -> Sequence[Array]:
    return [leaf] if len(sizes) == 1 else lax.split(leaf, sizes)


def anchors(blocks: int, every: int) -> int:
    """Returns how many chunks a stack is cut into, each with the anchor at its end."""
    return -(-blocks // every) if every else 0


@functools.partial(jax.checkpoint, static_argnums=(0,))
def _recomputed(plan: Plan, own: Any, common: Leaves, x: Any, watch: None) -> tuple:
    """As `reversible`; keeps its input and runs again, under ordinary autodiff."""
    return *stored(plan, own, common, x), watch


def _chunk(
    chunk_run: Callable, plan: Plan, common: Leaves, carry: tuple, xs: tuple
) -> tuple[tuple, tuple]:
    """Runs one chunk; a body of `loop`."""
    x, moving, total, echo = carry
    own, drift = xs
    x, changed, moving, outputs, terms, echo = chunk_run(
        plan, own, override(common, moving), x, None if drift is None else (echo, drift)
    )
    total = [a + b for a, b in zip(total, terms, strict=True)]
    return (x, moving, total, echo), (changed, outputs)


@jax.custom_vjp
def _first_echo(x: Any, drift: Array) -> Any:
    """Returns an echo that is differentiated if `drift` is."""
    return echo_of(x)


_first_echo.defvjp(lambda x, drift: (echo_of(x), None), lambda _, ct: (None, None))


def _run_chunks(
    chunk_run: Callable,
    plan: Plan,
    every: int,
    own: Any,
    common: Leaves,
    x: Any,
    drift: Array | None,
) -> Any:
    """Runs the stack chunk by chunk, so that autodiff keeps what lies between chunks.

    A segment that whole chunks fit in is a scan over chunks, of scans over blocks.
    """
    runs = _chunks(plan, every)
    first, echo = 0, None
    if drift is not None:
        echo = _first_echo(lax.stop_gradient(x), drift)
        drift += echo[1].astype(drift.dtype)  # on the batch axes and devices of `x`
    # The own arrays of each segment in pieces, one for each run that it takes part in.
    order = -1 if plan.backwards else 1
    pieces: list[Iterator] = []
    for index, (segment, leaves) in enumerate(zip(plan.segments, own, strict=True)):
        sizes = [count * n for count, chunk in runs for i, n in chunk if i == index]
        cut = [leaves] if segment.length is None else None
        if cut is None:
            columns = [_cut(leaf, sizes[::order])[::order] for leaf in leaves]
            cut = [[column[p] for column in columns] for p in range(len(sizes))]
        pieces.append(iter(cut))

    moving, total = {i: common[i] for i in plan.moving}, plan.nothing()
    results: list[list] = [[] for _ in plan.segments]
    for count, chunk in runs:
        part = dataclasses.replace(
            plan,
            segments=tuple(
                dataclasses.replace(
                    plan.segments[i],
                    length=None if plan.segments[i].length is None else n,
                )
                for i, n in chunk
            ),
        )
        leaves = [next(pieces[i]) for i, _ in chunk]
        meter = None if drift is None else drift[first : first + count]
        first += count
        if count > 1:
            n = chunk[0][1]
            leaves = [[a.reshape(count, n, *a.shape[1:]) for a in leaves[0]]]
        elif meter is not None:
            meter = meter[0]
        (x, moving, total, echo), (changed, outputs) = loop(
            functools.partial(_chunk, chunk_run, part, common),
            (x, moving, total, echo),
            (leaves, meter),
            count if count > 1 else None,
            backwards=plan.backwards,
        )
        if count > 1:
            changed, outputs = jax.tree.map(
                lambda a: lax.collapse(a, 0, 2), (changed, outputs)
            )
        for (i, _), new, further in zip(chunk, changed, outputs, strict=True):
            results[i].append((new, further))

    joined = [
        parts[0]
        if len(parts) == 1
        else jax.tree.map(lambda *a: jnp.concatenate(a), *parts[::order])
        for parts in results
    ]
    changed, outputs = ([pair[i] for pair in joined] for i in range(2))
    return x, changed, moving, outputs, total


def run(
    plan: Plan,
    mode: Mode,
    own: Sequence[Leaves],
    common: Leaves,
    x: Any,
    drift: Array | None = None,
) -> Any:
    """Runs a stack in the given mode.

    Args:
      plan: The stack.
      mode: How it is differentiated.
      own: Its own arrays.
      common: Its common arrays.
      x: Its input, encoded.
      drift: With anchors between which blocks are undone, an array `[anchors]` whose
        cotangent is the drift at each.

    Returns:
      What `stored` returns.
    """
    blocks = sum(segment.blocks for segment in plan.segments)
    if not (mode.store_activations or (mode.anchor_every and blocks)):
        out: Any = reversible(plan, own, common, x, None)
        return out[:-1]
    common = widened(common, plan.moving)
    if mode.store_activations:
        return stored(plan, own, common, x)
    chunk_run = reversible if mode.between_anchors == "invert" else _recomputed
    return _run_chunks(chunk_run, plan, mode.anchor_every, own, common, x, drift)
