"""A call of NNX blocks, from their variables to the core's arrays and back.

Only sorting is done here. A segment's variables become the `own` and `common` arrays of
the core, and so does the context; what the branches changed is written back.
Mathematics and memory are the core's.
"""

import collections
import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from revjax import _checks, _law_checks
from revjax._apply import Form, Task, apply, log_det_of, no_log_det
from revjax._inputs import PerBlock, give, on_per_block, take, take_again
from revjax._modes import Mode
from revjax._modules import Frame, Parts
from revjax._segments import Segment
from revjax._step import Branch, override

# Nodes of a context that are taken apart as modules, not as plain pytrees.
CLOSED = (nnx.Pytree, nnx.Variable)


@dataclasses.dataclass(frozen=True)
class _SegmentFrame:
    """The static half of a segment.

    Attributes:
      block: The static half of its block.
      places: For each array of the block, its place among the common arrays, or `None`
        if it is the blocks' own.
      form: What its steps are made of.
    """

    block: Frame
    places: tuple[int | None, ...]
    form: Form


@dataclasses.dataclass(frozen=True)
class _CallFrame:
    """The static half of a call.

    Attributes:
      segments: Those of its segments.
      context: That of what all blocks receive.
      per_block: The structure of what each block receives its own entry of.
      task: What is wanted.
    """

    segments: tuple[_SegmentFrame, ...]
    context: Frame
    per_block: Any
    task: Task


def _branch(segment: _SegmentFrame, frame: _CallFrame, step: int) -> Branch:
    """Makes a branch of the core out of a step of a block."""
    n_context = frame.context.structure.num_leaves
    coupling, name = segment.form.couplings[step], segment.form.names[step]

    def branch(own: list, common: list, others: tuple) -> tuple:
        before = len(common) - n_context
        own_leaf = iter(own)
        leaves = [next(own_leaf) if p is None else common[p] for p in segment.places]
        entries = list(own_leaf)
        block = segment.block.fill(leaves)
        context = frame.context.fill(common[before:])
        per_block = jax.tree.unflatten(frame.per_block, entries)
        args, kwargs = give(context, per_block, CLOSED)
        h = block._evaluate(step, others, args, kwargs)
        h = _law_checks.parts(h, coupling.arity, segment.form.axis, others[0], name)
        block = Parts.of(block)
        _checks.same_graph(segment.block, block.frame, name)
        given = Parts.of(take_again(context, (args, kwargs), CLOSED))
        _checks.same_context(frame.context, given.frame, name)
        placed = list(zip(segment.places, block.leaves, strict=True))
        new_common = override(
            [*common[:before], *given.leaves],
            {p: leaf for p, leaf in placed if p is not None},
        )
        new_own = [leaf for p, leaf in placed if p is None]
        aux = log_det_of(coupling, h, others[0]) if frame.task.log_det else ()
        return h, [*new_own, *entries], new_common, aux

    return branch


def _traced(own: Any, common: Any, x: Array, drift: Any, *, frame: _CallFrame) -> tuple:
    """A call on arrays alone."""
    forms = [segment.form for segment in frame.segments]
    branches = [
        [_branch(segment, frame, i) for i in range(len(segment.form.couplings))]
        for segment in frame.segments
    ]
    return apply(forms, branches, frame.task, own, common, x, drift)[:3]


# Compiled once for equal frames, shapes and dtypes.
_compiled = jax.jit(_traced, static_argnames="frame")


def _scalars_to_arrays(context: Any) -> Any:
    """Makes arrays of NumPy's scalars, which NNX takes for static attributes."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.generic) else leaf,
        context,
        is_leaf=lambda node: isinstance(node, (PerBlock, *CLOSED)),
    )


def unwrap(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Returns a block's context as its branches receive it."""
    return on_per_block(lambda node: node[0].value, (args, kwargs), CLOSED)


def _closes_over(block: Any) -> bool:
    """Says whether a branch is a function that may differ at the next call.

    What such a function closes over can change, and a compiled call would not know.
    """
    branches = [*vars(block).values(), *getattr(block, "branches", ())]
    return any(
        inspect.ismethod(b)
        or isinstance(b, functools.partial)
        or bool(getattr(b, "__closure__", None))
        for b in branches
    )


def call(
    segments: Sequence[Segment],
    mode: Mode,
    x: Any,
    args: tuple,
    kwargs: dict,
    *,
    drift: Any = None,
    **options: Any,
) -> Any:
    """Runs segments on `x` and writes back what the branches changed.

    Args:
      segments: The stack.
      mode: How it is differentiated.
      x: Its input, or its output if it is undone.
      args: The context.
      kwargs: The context by keyword.
      drift: As for `run`.
      **options: Those of `Task`.

    Returns:
      The output; or a pair of it and the logarithm of the determinant, or a pair of
      errors, as `options` ask.
    """
    log_det = options.get("log_det", False)
    x = _checks.stream(x, "y" if options.get("inverse") else "x")
    if log_det:
        _checks.batched(x, [segment.block.axis for segment in segments])
    if not segments:
        return (x, no_log_det(x)) if log_det else x
    total = sum(len(segment) for segment in segments)
    passed, values = take(_scalars_to_arrays((args, kwargs)), total, CLOSED)
    context = Parts.of(passed)
    entries, per_block = jax.tree.flatten(values)
    blocks = [Parts.of(segment.block) for segment in segments]

    # Variables that all blocks of a segment share, or that occur in several segments.
    uses = collections.Counter(id(node) for parts in blocks for node in parts.nodes)
    common: list = []
    place_of: dict[int, range] = {}
    own, frames, first = [], [], 0
    for segment, parts in zip(segments, blocks, strict=True):
        places: list[int | None] = []
        for path, node in zip(parts.paths, parts.nodes, strict=True):
            leaves = jax.tree.leaves(node)
            if path not in segment.shared and uses[id(node)] == 1:
                places += [None] * len(leaves)
                continue
            if id(node) not in place_of:
                place_of[id(node)] = range(len(common), len(common) + len(leaves))
                common += leaves
            places += place_of[id(node)]
        stop = first + len(segment)
        own.append(
            [a for a, p in zip(parts.leaves, places, strict=True) if p is None]
            + [a[first] if segment.depth is None else a[first:stop] for a in entries]
        )
        block = segment.block
        frames.append(
            _SegmentFrame(
                parts.frame,
                tuple(places),
                Form(
                    length=segment.depth,
                    **block._form(),
                    names=_names(block, first, stop if total > 1 else None),
                ),
            )
        )
        first = stop
    shared = len(common)
    frame = _CallFrame(tuple(frames), context.frame, per_block, Task(mode, **options))
    _checks.hashable(frame.context)
    _checks.hashable(frame.segments, "blocks")
    open_ = any(_closes_over(segment.block) for segment in segments)
    run_call = _traced if open_ else _compiled
    with _checks.reverse_mode():
        y, changed, moving = run_call(
            own, [*common, *context.leaves], x, drift, frame=frame
        )

    for segment, parts, new, static in zip(
        segments, blocks, changed, frames, strict=True
    ):
        own_places = [i for i, p in enumerate(static.places) if p is None]
        fresh = {own_places[i]: leaf for i, leaf in new.items()}
        fresh |= {i: moving[p] for i, p in enumerate(static.places) if p in moving}
        parts.write(segment.block, fresh)
    context.write(
        (args, kwargs), {i - shared: leaf for i, leaf in moving.items() if i >= shared}
    )
    return y


def _names(block: Any, first: int, stop: int | None) -> tuple[str, ...]:
    """Returns what messages call a block's branches."""
    where = type(block).__name__
    if stop is not None:
        last = stop - 1
        numbers = f"block {first}" if first == last else f"blocks {first}-{last}"
        where = f"{numbers} ({where})"
    return tuple(f"`{name}` of {where}" for name in block._names())
