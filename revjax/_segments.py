"""NNX blocks taken apart: from modules to segments, from segments to arrays.

Only sorting is done here. Alike blocks are stacked to a segment; at a call, a segment's
variables become the `own` and `common` arrays of the core, and so does the context; and
what the branches changed is written back. Mathematics and memory are the core's.
"""

import collections
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from revjax import _checks
from revjax._block import Branch, override
from revjax._couplings import Coupling
from revjax._modes import Mode, run
from revjax._stack import BranchSpec, SegmentSpec, inverted, make_plan

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A module, or a call's context, taken apart.

    Attributes:
      graphdef: What is static.
      paths: Where its variables and bare arrays are.
      nodes: These variables, the very objects, and bare arrays.
    """

    graphdef: Any
    paths: tuple[Path, ...]
    nodes: list[Any]

    @classmethod
    def of(cls, node: Any) -> "_Parts":
        """Takes a node apart."""
        graphdef, state = nnx.split(node)
        flat = list(nnx.to_flat_state(state))
        return cls(graphdef, tuple(path for path, _ in flat), [n for _, n in flat])

    def build(self, nodes: Sequence[Any]) -> Any:
        """Returns such a module made of other variables."""
        return nnx.merge(
            self.graphdef, nnx.from_flat_state(zip(self.paths, nodes, strict=True))
        )

    @property
    def leaves(self) -> list[Any]:
        """The arrays in the variables."""
        return jax.tree.leaves(self.nodes)

    @property
    def frame(self) -> "_Frame":
        """The static half."""
        return _Frame(self.graphdef, self.paths, jax.tree.structure(self.nodes))

    def write(self, target: Any, new: Mapping[int, Array]) -> None:
        """Updates the variables of `target` whose arrays, by place, are new."""
        nodes = jax.tree.unflatten(
            jax.tree.structure(self.nodes), override(self.leaves, new)
        )
        owners = [k for k, n in enumerate(self.nodes) for _ in jax.tree.leaves(n)]
        changed = [(self.paths[k], nodes[k]) for k in sorted({owners[i] for i in new})]
        if changed:
            nnx.update(target, nnx.from_flat_state(changed))


@dataclasses.dataclass(frozen=True)
class _Frame:
    """The static half of a module or of a call's context; hashable.

    Attributes:
      graphdef, paths: As in `_Parts`.
      structure: The structure of the nodes, over their arrays.
    """

    graphdef: Any
    paths: tuple[Path, ...]
    structure: Any

    def fill(self, leaves: Sequence[Any]) -> Any:
        """Returns such a module that holds `leaves`, in variables of its own."""
        nodes = jax.tree.unflatten(self.structure, leaves)
        return nnx.merge(
            self.graphdef, nnx.from_flat_state(zip(self.paths, nodes, strict=True))
        )


class Segment(nnx.Module):
    """A run of alike blocks in a `ReversibleSequence`.

    Attributes:
      block: For one block, that block. For a run, a block whose variables have a
        leading axis of size `depth`, one entry for each block of the run.
      depth: The number of blocks, or `None` for one block without such an axis.
      shared: The paths of variables in `block` that do not have the axis, because all
        blocks of the run share them.
    """

    def __init__(
        self, block: Any, depth: int | None = None, shared: Iterable[Path] = ()
    ) -> None:
        """Builds the segment; see the class."""
        self.block = block
        self.depth = depth
        self.shared = tuple(shared)

    def __len__(self) -> int:
        """Returns the number of blocks."""
        return 1 if self.depth is None else self.depth

    def __getitem__(self, i: int) -> Any:
        """Returns a copy of block `i`."""
        if self.depth is None:
            return nnx.clone(self.block)
        parts = _Parts.of(self.block)
        nodes = [
            node if path in self.shared else jax.tree.map(lambda a: a[i], node)
            for path, node in zip(parts.paths, parts.nodes, strict=True)
        ]
        return nnx.clone(parts.build(nodes))


def stack_alike(blocks: Sequence[Any]) -> list[Segment]:
    """Sorts blocks into segments and stacks the variables of each run."""
    parts = [_Parts.of(block) for block in blocks]
    uses = collections.Counter(id(node) for p in parts for node in p.nodes)
    keys = [
        (p.frame, [(jnp.shape(a), jnp.result_type(a)) for a in p.leaves]) for p in parts
    ]

    def shared(a: int, b: int) -> list[bool] | None:
        """Says which variables two blocks share; `None` if they cannot be stacked."""
        if keys[a] != keys[b]:
            return None
        pairs = list(zip(parts[a].nodes, parts[b].nodes, strict=True))
        # A block's own variable that occurs elsewhere would be untied by stacking.
        if any(m is not n and uses[id(m)] + uses[id(n)] > 2 for m, n in pairs):
            return None
        return [m is n for m, n in pairs]

    segments, start = [], 0
    while start < len(blocks):
        stop = start + 1
        pattern = shared(start, stop) if stop < len(blocks) else None
        while stop < len(blocks) and shared(start, stop) == pattern is not None:
            stop += 1
        if pattern is None:
            segments.append(Segment(blocks[start]))
        else:
            run = parts[start:stop]
            nodes = [
                column[0]
                if is_shared
                else jax.tree.map(lambda *a: jnp.stack(a), *column)
                for is_shared, *column in zip(
                    pattern, *(p.nodes for p in run), strict=True
                )
            ]
            paths = itertools.compress(run[0].paths, pattern)
            segments.append(Segment(run[0].build(nodes), len(run), paths))
        start = stop
    return segments


def born_stacked(make_block: Callable, depth: int, rngs: nnx.Rngs) -> Segment:
    """Builds a segment of `depth` blocks under `jax.vmap`."""
    keys = _Parts.of(rngs.split(depth))

    def make(leaves: list) -> _Parts:
        return _Parts.of(make_block(keys.frame.fill(leaves)))

    # An object that two blocks, built apart, have in common comes from outside.
    pattern: list[bool] = []

    def probe(leaves: list) -> None:
        one, other = make(leaves).nodes, make(leaves).nodes
        pattern.extend(m is n for m, n in zip(one, other, strict=True))

    jax.eval_shape(jax.vmap(probe), keys.leaves)
    static: list[_Parts] = []

    def build(leaves: list) -> list:
        parts = make(leaves)
        nodes = list(zip(parts.nodes, pattern, strict=True))
        # What leaves this function by another way than `return` must not be traced.
        outside = [node if is_shared else None for node, is_shared in nodes]
        static.append(dataclasses.replace(parts, nodes=outside))
        return [None if is_shared else node for node, is_shared in nodes]

    own = jax.vmap(build)(keys.leaves)
    (parts,) = static
    nodes = [
        old if new is None else new for old, new in zip(parts.nodes, own, strict=True)
    ]
    return Segment(parts.build(nodes), depth, itertools.compress(parts.paths, pattern))


@dataclasses.dataclass(frozen=True)
class _SegmentFrame:
    """The static half of a segment.

    Attributes:
      block: The static half of its block.
      length: The number of blocks, as in `SegmentSpec`.
      places: For each array of the block, its place among the common arrays, or `None`
        if it is the blocks' own.
      axis, dim, coupling: The block's.
      names: What messages call the branches.
    """

    block: _Frame
    length: int | None
    places: tuple[int | None, ...]
    axis: int
    dim: int
    coupling: Coupling
    names: tuple[str, str]


@dataclasses.dataclass(frozen=True)
class _CallFrame:
    """The static half of a call."""

    segments: tuple[_SegmentFrame, ...]
    context: _Frame
    mode: Mode
    inverse: bool


def _branch(segment: _SegmentFrame, context: _Frame, method: str, name: str) -> Branch:
    """Makes a branch of the core out of a method of a block."""
    n_context = context.structure.num_leaves

    def branch(own: list, common: list, others: tuple) -> tuple:
        before = len(common) - n_context
        own_leaf = iter(own)
        leaves = [next(own_leaf) if p is None else common[p] for p in segment.places]
        block = segment.block.fill(leaves)
        args, kwargs = context.fill(common[before:])
        h = getattr(block, method)(*others, *args, **kwargs)
        block, given = _Parts.of(block), _Parts.of((args, kwargs))
        _checks.same_graph(segment.block, block.frame, name)
        _checks.same_context(context, given.frame, name)
        placed = list(zip(segment.places, block.leaves, strict=True))
        new_common = override(
            [*common[:before], *given.leaves],
            {p: leaf for p, leaf in placed if p is not None},
        )
        return h, [leaf for p, leaf in placed if p is None], new_common, ()

    return branch


def _traced(own: Any, common: Any, x: Array, *, frame: _CallFrame) -> tuple:
    """A call on arrays alone."""
    specs = []
    encoded = frame.segments[0].coupling.encode(x)
    for segment in frame.segments:
        _checks.split_axis(x, segment.axis, segment.dim)
        again = segment.coupling.encode(encoded)
        _checks.same_streams(encoded, again, segment.names[0])
        steps = tuple(
            BranchSpec(
                stream=i,
                branch=_branch(segment, frame.context, "fg"[i], name),
                coupling=segment.coupling,
                name=name,
            )
            for i, name in enumerate(segment.names)
        )
        specs.append(SegmentSpec(steps, segment.length, segment.axis % x.ndim))
    plan, hoisted = make_plan(specs, own, common, encoded)
    if frame.inverse:
        plan, own = inverted(plan), own[::-1]
    y, changed, moving, _ = run(plan, frame.mode, own, [*common, *hoisted], encoded)
    return y, changed, moving


# Compiled once for equal frames, shapes and dtypes.
_compiled = jax.jit(_traced, static_argnames="frame")


def _scalars_to_arrays(context: Any) -> Any:
    """Makes arrays of NumPy's scalars, which NNX takes for static attributes."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.generic) else leaf,
        context,
        is_leaf=lambda node: isinstance(node, nnx.Pytree),
    )


def _closes_over(block: Any) -> bool:
    """Says whether a branch is a function that may differ at the next call.

    What such a function closes over can change, and a compiled call would not know.
    """
    branches = [vars(block).get(name) for name in ("F", "G")]
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
    inverse: bool = False,
) -> Array:
    """Runs segments on `x` and writes back what the branches changed."""
    x = _checks.stream(x, "y" if inverse else "x")
    if not segments:
        return x
    context = _Parts.of(_scalars_to_arrays((args, kwargs)))
    blocks = [_Parts.of(segment.block) for segment in segments]

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
        own.append([a for a, p in zip(parts.leaves, places, strict=True) if p is None])
        block, last = segment.block, first + len(segment) - 1
        _checks.even(block.dim, "dim")
        _checks.integer(block.axis, "axis")
        _checks.coupling(block.coupling)
        frames.append(
            _SegmentFrame(
                block=parts.frame,
                length=segment.depth,
                places=tuple(places),
                axis=block.axis,
                dim=block.dim,
                coupling=block.coupling,
                names=_names(block, first, last if len(segments) > 1 or last else None),
            )
        )
        first = last + 1
    shared = len(common)
    frame = _CallFrame(tuple(frames), context.frame, mode, inverse)
    _checks.hashable(frame.context)
    _checks.hashable(frame.segments, "blocks")
    open_ = any(_closes_over(segment.block) for segment in segments)
    run_call = _traced if open_ else _compiled
    with _checks.reverse_mode():
        y, changed, moving = run_call(own, [*common, *context.leaves], x, frame=frame)

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


def _names(block: Any, first: int, last: int | None) -> tuple[str, str]:
    """Returns what messages call a block's branches."""
    where = type(block).__name__
    if last is not None:
        numbers = f"block {first}" if first == last else f"blocks {first}-{last}"
        where = f"{numbers} ({where})"
    f, g = block._names()
    return f"`{f}` of {where}", f"`{g}` of {where}"
