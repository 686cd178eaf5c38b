"""The drift of a user's model, block by block."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from revjax import _checks
from revjax._blocks import ReversibleBlock
from revjax._calls import call
from revjax._modes import Mode
from revjax._nnx import ReversibleSequence, ReversibleSequential
from revjax._trials import Model, segments_of


@dataclasses.dataclass(frozen=True)
class ReconstructionError:
    """What `reconstruction_error` found, for each block its recovered input.

    Attributes:
      absolute: The largest difference from the true input, `[blocks]`.
      relative: The norm of the difference relative to that of the input, `[blocks]`.
    """

    absolute: Array
    relative: Array


def reconstruction_error(
    model: Model, x: Any, *context: Any, **kwargs: Any
) -> ReconstructionError:
    """Measures how far the activations that come back are from the true ones.

    It runs the model, undoes its blocks from last to first as the backward pass does,
    and compares the input of each with the true one. Errors begin again at each anchor,
    and at each block of a `ReversibleSequential`; where nothing is undone (anchors with
    `"recompute"`, stored activations) they are zero. The model does not change.

    The true inputs are not stored but computed again, block by block, from `x`: in the
    memory of two sets of streams, at the cost of depth² / 2 block evaluations.

    Args:
      model: A block, a `ReversibleSequential` or a `ReversibleSequence`.
      x: An input, as for a call.
      *context: As in a call.
      **kwargs: As in a call.

    Returns:
      The errors of each block.

    Raises:
      TypeError: If `model` is none of these, or `x` no floating-point array.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from revjax import ExactAdditive, ReversibleCouplingBlock, ReversibleSequence
      >>> from revjax.diagnostics import reconstruction_error
      >>> def make_block(rngs, **options):
      ...     return ReversibleCouplingBlock(8, rngs=rngs, **options)
      >>> def exact_block(rngs):
      ...     return make_block(rngs, coupling=ExactAdditive(20))
      >>> x = jax.random.normal(jax.random.key(0), (4, 8))
      >>> stack = ReversibleSequence.create(make_block, 12, rngs=nnx.Rngs(0))
      >>> error = reconstruction_error(stack, x)
      >>> error.relative.shape, bool(0 < error.relative[0] < 0.01)
      ((12,), True)
      >>> exact = ReversibleSequence.create(exact_block, 12, rngs=nnx.Rngs(0))
      >>> float(reconstruction_error(exact, x).absolute.max())
      0.0
    """
    _checks.model(model, (ReversibleBlock, ReversibleSequential, ReversibleSequence))
    every = 0 if isinstance(model, ReversibleSequence) else 1
    undone = True
    if isinstance(model, ReversibleSequence) and model.anchor_every:
        every = model.anchor_every
        undone = model.between_anchors == "invert"
    if getattr(model, "store_activations", False):
        undone = False
    model = nnx.clone(model)
    segments = segments_of(model)
    blocks = sum(map(len, segments))
    if not undone or not blocks:
        _checks.stream(x, "x")
        return ReconstructionError(jnp.zeros(blocks), jnp.zeros(blocks))
    context, kwargs = nnx.clone((context, kwargs))
    errors = call(segments, Mode(), x, context, kwargs, errors_from=every)
    return ReconstructionError(*errors)
