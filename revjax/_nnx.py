"""Stacks of reversible blocks as Flax NNX modules."""

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from revjax import _checks
from revjax._apply import no_log_det
from revjax._blocks import ReversibleBlock
from revjax._calls import CLOSED, call
from revjax._inputs import for_block
from revjax._invertible import Invertible
from revjax._modes import BetweenAnchors, Mode, anchors
from revjax._segments import born_stacked, stack_alike


class ReversibleSequential(Invertible):
    """Reversible blocks one after the other, each differentiated on its own.

    Each block keeps its own output, so that activation memory grows with depth, but by
    one array a block. For memory that does not grow use `ReversibleSequence`.

    Args:
      blocks: The blocks, kept as they are in `blocks`.

    Raises:
      TypeError: If one of `blocks` is not a reversible block.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from revjax import ReversibleCouplingBlock, ReversibleSequential
      >>> rngs = nnx.Rngs(0)
      >>> stack = ReversibleSequential(
      ...     [ReversibleCouplingBlock(8, rngs=rngs) for _ in range(3)]
      ... )
      >>> len(stack), stack(jnp.ones((2, 8))).shape
      (3, (2, 8))
    """

    def __init__(self, blocks: Iterable[ReversibleBlock]) -> None:
        """Builds the stack; see the class."""
        self.blocks = nnx.List(_checks.blocks(blocks, ReversibleBlock))

    def __len__(self) -> int:
        """Returns the number of blocks."""
        return len(self.blocks)

    def __getitem__(self, i: int) -> Any:
        """Returns block `i` itself."""
        return self.blocks[_checks.index(i, len(self))]

    def _run(self, x: Any, args: tuple, kwargs: dict, **options: bool) -> Any:
        inverse, log_det = options.get("inverse", False), options.get("log_det", False)
        y = _checks.stream(x, "y" if inverse else "x")
        blocks = list(enumerate(self.blocks))
        log_dets = []
        for i, block in reversed(blocks) if inverse else blocks:
            context = for_block(i, len(self), (args, kwargs), CLOSED)
            y = block._run(y, *context, **options)
            if log_det:
                y, term = y
                log_dets.append(term)
        return (y, sum(log_dets, no_log_det(y))) if log_det else y


class Drift(nnx.Variable):
    """The drift at each anchor of a stack; it arrives as this variable's gradient.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from revjax import Drift, ReversibleCouplingBlock, ReversibleSequence
      >>> stack = ReversibleSequence.create(
      ...     lambda rngs: ReversibleCouplingBlock(8, rngs=rngs), 12, 4,
      ...     between_anchors="invert", measure_drift=True, rngs=nnx.Rngs(0),
      ... )
      >>> both = nnx.DiffState(0, (nnx.Param, Drift))
      >>> def loss(stack, x): return jnp.sum(stack(x) ** 2)
      >>> x = jax.random.normal(jax.random.key(0), (4, 8))
      >>> gradients = nnx.grad(loss, argnums=both)(stack, x)
      >>> drift = nnx.pop(gradients, Drift)["drift"][...]
      >>> drift.shape, bool(0 < drift[0] < 1e-5), float(drift[-1])
      ((3,), True, 0.0)
    """


class ReversibleSequence(Invertible):
    r"""Reversible blocks in activation memory that does not grow with depth.

    The whole stack is differentiated by one rule that keeps the final output. The
    backward pass walks the blocks from last to first: it undoes a block and
    pulls the cotangents through it, with one further evaluation of each branch.

    Blocks in a list may differ. Neighbours that are alike (the same graph, shapes and
    dtypes) become one *segment*: their variables are stacked on a new leading axis and
    the segment is one `lax.scan`, compiled once whatever its depth. Other blocks are
    unrolled. Variables that several blocks share, and blocks that occur several times,
    are not stacked but stay shared, and receive the sum of their gradients.

    The sequence takes its blocks over: a stacked block's variables are copies, and the
    objects in the list are no part of the sequence. See a block with `sequence[i]`, and
    what is stacked in `sequence.segments`.

    Args:
      blocks: The blocks. None at all is the identity.
      anchor_every: 0 keeps the output alone and undoes the whole stack. `A > 0` keeps
        the streams at every A-th block; A need not divide the depth.
      between_anchors: `"recompute"` runs each chunk again from its anchor and keeps its
        activations for the moment (`jax.checkpoint`; no drift, memory of depth / A
        anchors and A blocks). `"invert"` undoes the chunk from the next
        anchor, so that rounding errors build up over at most A blocks.
      store_activations: Ordinary autodiff, whatever `anchor_every` is: for forward
        mode, debugging, comparison.
      measure_drift: With anchors between which blocks are undone: whether to compare,
        in the backward pass, what was recovered with each anchor. The stack then has a
        variable `drift` of type `revjax.Drift`, `[anchors]`, and the relative distances
        arrive as its gradient. The last anchor is the output, whose drift is zero.
        Under `jax.vmap` the drifts of the batch are added up.

    Raises:
      TypeError: If one of `blocks` is not a reversible block, or an option is of the
        wrong type; at a call, as `ReversibleCouplingBlock`.
      ValueError: If an option has a wrong value; at a call, as
        `ReversibleCouplingBlock`, or if the blocks do not agree on the dtype of the
        streams.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from revjax import ReversibleCouplingBlock, ReversibleSequence
      >>> stack = ReversibleSequence.create(
      ...     lambda rngs: ReversibleCouplingBlock(8, rngs=rngs), 12, rngs=nnx.Rngs(0)
      ... )
      >>> len(stack), stack(jnp.ones((2, 8))).shape
      (12, (2, 8))

    References:
      Gomez et al., *The Reversible Residual Network: Backpropagation Without Storing
      Activations*, arXiv:1707.04585. Chen et al., *Training Deep Nets with Sublinear
      Memory Cost*, arXiv:1604.06174 (anchors).
    """

    def __init__(
        self,
        blocks: Iterable[ReversibleBlock],
        anchor_every: int = 0,
        *,
        between_anchors: BetweenAnchors = "recompute",
        store_activations: bool = False,
        measure_drift: bool = False,
    ) -> None:
        """Builds the stack from a list; see the class."""
        Mode(anchor_every, between_anchors, store_activations)
        _checks.boolean(measure_drift, "measure_drift")
        blocks = _checks.blocks(blocks, ReversibleBlock)
        self.segments = nnx.List(stack_alike(blocks))
        self.anchor_every = anchor_every
        self.between_anchors: BetweenAnchors = between_anchors
        self.store_activations = store_activations
        self.measure_drift = measure_drift
        self._meter()

    def _meter(self) -> None:
        if self.measure_drift:
            _checks.measurable(self._mode(), "measure_drift")
            self.drift = Drift(jnp.zeros(anchors(len(self), self.anchor_every)))

    @classmethod
    def create(
        cls,
        make_block: Callable[[nnx.Rngs], ReversibleBlock],
        depth: int,
        anchor_every: int = 0,
        *,
        rngs: nnx.Rngs,
        between_anchors: BetweenAnchors = "recompute",
        store_activations: bool = False,
        measure_drift: bool = False,
    ) -> "ReversibleSequence":
        """Builds a stack of alike blocks, whose variables are born stacked.

        Args:
          make_block: Builds one block from its `nnx.Rngs`. It runs under `jax.vmap`.
            Variables that it takes from outside are shared by all blocks.
          depth: The number of blocks.
          anchor_every: As in the class.
          rngs: Randomness; each block receives keys of its own.
          between_anchors: As in the class.
          store_activations: As in the class.
          measure_drift: As in the class.

        Returns:
          The stack, with one segment.

        Raises:
          TypeError: If `make_block` returns no reversible block, `depth` is no int,
            or `rngs` is no `nnx.Rngs`.
          ValueError: If `depth` is negative.
        """
        _checks.maker(make_block, ReversibleBlock)
        depth = _checks.depth(depth)
        _checks.rngs(rngs, nnx.Rngs)
        sequence = cls(
            [],
            anchor_every,
            between_anchors=between_anchors,
            store_activations=store_activations,
            measure_drift=measure_drift,
        )
        if depth:

            def make(rngs: nnx.Rngs) -> ReversibleBlock:
                made = [make_block(rngs)]
                (block,) = _checks.blocks(made, ReversibleBlock, "make_block")
                return _checks.stackable(block)

            sequence.segments.append(born_stacked(make, depth, rngs))
            sequence._meter()
        return sequence

    def __len__(self) -> int:
        """Returns the number of blocks."""
        return sum(len(segment) for segment in self.segments)

    def __getitem__(self, i: int) -> Any:
        """Returns a copy of block `i`: changing it does not change the stack."""
        places = [
            (segment, k) for segment in self.segments for k in range(len(segment))
        ]
        segment, k = places[_checks.index(i, len(places))]
        return segment[k]

    def _run(self, x: Any, args: tuple, kwargs: dict, **options: bool) -> Any:
        drift = None
        if self.measure_drift and not options.get("inverse"):
            _checks.measurable(self._mode(), "measure_drift")
            drift = self.drift[...]
        return call(
            self.segments, self._mode(), x, args, kwargs, drift=drift, **options
        )

    def _mode(self) -> Mode:
        return Mode(self.anchor_every, self.between_anchors, self.store_activations)
