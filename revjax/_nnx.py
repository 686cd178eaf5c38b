"""Reversible blocks and stacks as Flax NNX modules."""

from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from revjax import _checks
from revjax._calls import call, for_block
from revjax._couplings import Additive, Coupling
from revjax._modes import BetweenAnchors, Mode
from revjax._segments import Segment, born_stacked, stack_alike


class ReversibleCouplingBlock(nnx.Module):
    r"""A block that can be undone: two streams change each other in turn.

    The input is split evenly on `axis` into $x_1, x_2$. With `+` for the coupling,

    $$y_1 = x_1 + F(x_2), \qquad y_2 = x_2 + G(y_1),$$

    and $y_1, y_2$ are joined again. The inverse is

    $$x_2 = y_2 - G(y_1), \qquad x_1 = y_1 - F(x_2).$$

    So the backward pass keeps the output instead of the input and the activations of
    `F` and `G`, and evaluates each of them once more.

    A branch takes one stream and returns an array of the same shape. It may be any NNX
    module or function, with dropout, batch statistics or other variables inside: these
    are updated once a call. All arguments of the call after `x` go to both branches. To
    give them different ones, subclass the block and write its methods `f(self, x,
    *context)` and `g(self, x, *context)`; a branch whose method is written needs no
    `F` or `G`.

    Args:
      dim: The size of the input on `axis`; even.
      F: The branch that changes the first stream. `None` makes a linear layer without
        bias from `dim // 2` to `dim // 2`.
      G: The same for the second stream.
      coupling: The law by which a stream changes.
      axis: The axis on which the input is split.
      rngs: Randomness for the default branches; needed only where one is made.

    Raises:
      TypeError: If `coupling` is no coupling or `dim` no int; at a call, if `x` is no
        floating-point or complex array or a branch returns no array.
      ValueError: If `dim` is odd, if `rngs` is missing; at a call, if `x` does not have
        `dim` on `axis`, or if a branch changes the shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from revjax import ReversibleCouplingBlock
      >>> rngs = nnx.Rngs(0)
      >>> block = ReversibleCouplingBlock(8, F=nnx.Linear(4, 4, rngs=rngs), rngs=rngs)
      >>> x = jnp.ones((2, 8))
      >>> bool(jnp.allclose(block.inverse(block(x)), x, atol=1e-6))
      True

    References:
      Gomez et al., *The Reversible Residual Network: Backpropagation Without Storing
      Activations*, arXiv:1707.04585.
    """

    def __init__(
        self,
        dim: int,
        F: Callable[..., Array] | None = None,
        G: Callable[..., Array] | None = None,
        *,
        coupling: Coupling = Additive(),
        axis: int = -1,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Builds the block; see the class."""
        _checks.even(dim, "dim")
        _checks.coupling(coupling)
        _checks.integer(axis, "axis")
        self.dim = dim
        self.axis = axis
        self.coupling = coupling
        f, g = self._names()
        if F is not None or f == "F":
            self.F = self._branch("F", F, rngs)
        if G is not None or g == "G":
            self.G = self._branch("G", G, rngs)

    def _branch(self, name: str, branch: Any, rngs: nnx.Rngs | None) -> Any:
        if branch is None:
            given = _checks.default_branch(rngs, name)
            _checks.rngs(given, nnx.Rngs)
            half = self.dim // 2
            return nnx.Linear(half, half, use_bias=False, rngs=given)
        _checks.callable_(branch, name)
        return branch

    def _names(self) -> tuple[str, str]:
        """Returns what messages call the branches."""
        base = ReversibleCouplingBlock
        return (
            "F" if type(self).f is base.f else "f",
            "G" if type(self).g is base.g else "g",
        )

    def f(self, x: Array, *context: Any, **kwargs: Any) -> Array:
        """Returns what changes the first stream, given the second; may be rewritten."""
        return self.F(x, *context, **kwargs)

    def g(self, x: Array, *context: Any, **kwargs: Any) -> Array:
        """Returns what changes the second stream, given the first; may be rewritten."""
        return self.G(x, *context, **kwargs)

    def __call__(self, x: ArrayLike, *context: Any, **kwargs: Any) -> Array:
        """Runs the block.

        Args:
          x: The input, `[..., dim, ...]`, floating-point or complex.
          *context: Further arguments of the branches: arrays, which receive gradients
            if they are floating-point; pytrees of them; NNX modules such as `nnx.Rngs`,
            which are updated; `revjax.PerBlock`, of which each block of a stack
            receives its own entry; anything else is static.
          **kwargs: The same, by keyword.

        Returns:
          The output, of the shape of `x`, in the dtype of the coupling's streams.
        """
        return call([Segment(self)], Mode(), x, context, kwargs)

    def inverse(self, y: ArrayLike, *context: Any, **kwargs: Any) -> Array:
        """Returns the input that gave `y`, with the variables as they are now.

        Args:
          y: An output of the block.
          *context: As in the call that gave `y`.
          **kwargs: The same.

        Returns:
          The input, up to rounding. No variable changes.

        Raises:
          ValueError: If a branch depends on variables that a call changes (RNG
            streams, counters) and that have therefore moved on since the call.
        """
        return call([Segment(self)], Mode(), y, context, kwargs, inverse=True)


class ReversibleSequential(nnx.Module):
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

    def __init__(self, blocks: Iterable[ReversibleCouplingBlock]) -> None:
        """Builds the stack; see the class."""
        self.blocks = nnx.List(_checks.blocks(blocks, ReversibleCouplingBlock))

    def __len__(self) -> int:
        """Returns the number of blocks."""
        return len(self.blocks)

    def __getitem__(self, i: int) -> ReversibleCouplingBlock:
        """Returns block `i` itself."""
        return self.blocks[_checks.index(i, len(self))]

    def __call__(self, x: ArrayLike, *context: Any, **kwargs: Any) -> Array:
        """Runs the blocks in order; arguments as in `ReversibleCouplingBlock`."""
        y = _checks.stream(x, "x")
        for i, block in enumerate(self.blocks):
            args, named = for_block(i, len(self), context, kwargs)
            y = block(y, *args, **named)
        return y

    def inverse(self, y: ArrayLike, *context: Any, **kwargs: Any) -> Array:
        """Undoes the blocks, last to first; see `ReversibleCouplingBlock.inverse`."""
        x = _checks.stream(y, "y")
        for i in reversed(range(len(self))):
            args, named = for_block(i, len(self), context, kwargs)
            x = self.blocks[i].inverse(x, *args, **named)
        return x


class ReversibleSequence(nnx.Module):
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
        blocks: Iterable[ReversibleCouplingBlock],
        anchor_every: int = 0,
        *,
        between_anchors: BetweenAnchors = "recompute",
        store_activations: bool = False,
    ) -> None:
        """Builds the stack from a list; see the class."""
        Mode(anchor_every, between_anchors, store_activations)
        blocks = _checks.blocks(blocks, ReversibleCouplingBlock)
        self.segments = nnx.List(stack_alike(blocks))
        self.anchor_every = anchor_every
        self.between_anchors: BetweenAnchors = between_anchors
        self.store_activations = store_activations

    @classmethod
    def create(
        cls,
        make_block: Callable[[nnx.Rngs], ReversibleCouplingBlock],
        depth: int,
        anchor_every: int = 0,
        *,
        rngs: nnx.Rngs,
        between_anchors: BetweenAnchors = "recompute",
        store_activations: bool = False,
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

        Returns:
          The stack, with one segment.

        Raises:
          TypeError: If `make_block` returns no reversible block, `depth` is no int,
            or `rngs` is no `nnx.Rngs`.
          ValueError: If `depth` is negative.
        """
        _checks.maker(make_block)
        depth = _checks.depth(depth)
        _checks.rngs(rngs, nnx.Rngs)
        sequence = cls(
            [],
            anchor_every,
            between_anchors=between_anchors,
            store_activations=store_activations,
        )
        if depth:

            def make(rngs: nnx.Rngs) -> ReversibleCouplingBlock:
                made = [make_block(rngs)]
                return _checks.blocks(made, ReversibleCouplingBlock, "make_block")[0]

            sequence.segments.append(born_stacked(make, depth, rngs))
        return sequence

    def __len__(self) -> int:
        """Returns the number of blocks."""
        return sum(len(segment) for segment in self.segments)

    def __getitem__(self, i: int) -> ReversibleCouplingBlock:
        """Returns a copy of block `i`: changing it does not change the stack."""
        places = [
            (segment, k) for segment in self.segments for k in range(len(segment))
        ]
        segment, k = places[_checks.index(i, len(places))]
        return segment[k]

    def __call__(self, x: ArrayLike, *context: Any, **kwargs: Any) -> Array:
        """Runs the blocks in order; arguments as in `ReversibleCouplingBlock`."""
        return call(self.segments, self._mode(), x, context, kwargs)

    def inverse(self, y: ArrayLike, *context: Any, **kwargs: Any) -> Array:
        """Undoes the blocks, last to first; see `ReversibleCouplingBlock.inverse`."""
        return call(self.segments, self._mode(), y, context, kwargs, inverse=True)

    def _mode(self) -> Mode:
        return Mode(self.anchor_every, self.between_anchors, self.store_activations)
