"""Blocks sorted into segments: the variables of alike neighbours are stacked."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from revjax._modules import Parts, Path


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
        parts = Parts.of(self.block)
        nodes = [
            node if path in self.shared else jax.tree.map(lambda a: a[i], node)
            for path, node in zip(parts.paths, parts.nodes, strict=True)
        ]
        return nnx.clone(parts.build(nodes))


def stack_alike(blocks: Sequence[Any]) -> list[Segment]:
    """Sorts blocks into segments and stacks the variables of each run."""
    parts = [Parts.of(block) for block in blocks]
    uses = collections.Counter(id(node) for p in parts for node in p.nodes)
    keys = [
        (p.frame, [(jnp.shape(a), jnp.result_type(a)) for a in p.leaves]) for p in parts
    ]

    def shared(a: int, b: int) -> list[bool] | None:
        """Says which variables two blocks share; `None` if they cannot be stacked."""
        if keys[a] != keys[b] or not blocks[a].stackable:
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
    keys = Parts.of(rngs.split(depth))

    def make(leaves: list) -> Parts:
        return Parts.of(make_block(keys.frame.fill(leaves)))

    # An object that two blocks, built apart, have in common comes from outside.
    pattern: list[bool] = []

    def probe(leaves: list) -> None:
        one, other = make(leaves).nodes, make(leaves).nodes
        pattern.extend(m is n for m, n in zip(one, other, strict=True))

    jax.eval_shape(jax.vmap(probe), keys.leaves)
    static: list[Parts] = []

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
