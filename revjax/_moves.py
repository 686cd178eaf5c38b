"""Moves of elements: what a block or a stack does to its streams besides adding.

Each is a frozen dataclass with `apply` and `undo`, on the streams and the axis on which
they are split.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from revjax import _checks

Streams = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Swap:
    """The two streams change places."""

    def apply(self, streams: Streams, axis: int) -> Streams:
        """Returns the streams in the opposite order."""
        return streams[::-1]

    undo = apply


@dataclasses.dataclass(frozen=True)
class Permute:
    """The elements on the axis, of all streams together, change places."""

    indices: tuple[int, ...]

    def apply(self, streams: Streams, axis: int) -> Streams:
        """Returns the elements in the order of `indices`."""
        (x,) = streams
        return (jnp.take(x, np.array(self.indices, np.int32), axis),)

    def undo(self, streams: Streams, axis: int) -> Streams:
        """Returns the elements in their own order."""
        (x,) = streams
        return (jnp.take(x, np.argsort(self.indices).astype(np.int32), axis),)


@dataclasses.dataclass(frozen=True)
class Fold:
    """Squares of pixels become channels; `[batch, height, width, channels]`."""

    factor: int

    def apply(self, streams: Streams, axis: int) -> Streams:
        """Returns fewer pixels of more channels."""
        (x,) = streams
        _checks.squeezable(x, self.factor, undo=False)
        k, (n, h, w, c) = self.factor, x.shape
        x = x.reshape(n, h // k, k, w // k, k, c)
        return (x.transpose(0, 1, 3, 5, 2, 4).reshape(n, h // k, w // k, c * k * k),)

    def undo(self, streams: Streams, axis: int) -> Streams:
        """Returns more pixels of fewer channels."""
        (x,) = streams
        _checks.squeezable(x, self.factor, undo=True)
        k, (n, h, w, c) = self.factor, x.shape
        x = x.reshape(n, h, w, c // (k * k), k, k)
        return (x.transpose(0, 1, 4, 2, 5, 3).reshape(n, h * k, w * k, c // (k * k)),)
