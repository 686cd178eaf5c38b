"""The laws by which a branch's output changes a stream, and is undone.

A coupling is elementwise mathematics and nothing else: a frozen dataclass that
holds no arrays, so that it is hashable and equal when it is built again.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from revjax import _checks


class Coupling(abc.ABC):
    r"""What every coupling offers; subclass it to write a law of your own.

    A step of a block changes one stream, $x$, by the output $h$ of a branch
    that saw only the *other* streams:

    $$y = \mathrm{combine}(x, h), \qquad x = \mathrm{recover}(y, h).$$

    A subclass must implement `combine` and `recover`. That the one undoes the other
    is assumed, not verified. The derivative is taken from `combine` with `jax.vjp`
    and need not be written. A subclass should be a frozen dataclass without arrays:
    it is a static argument of compiled functions.

    Example:
      >>> import dataclasses
      >>> import jax.numpy as jnp
      >>> from revjax import Coupling, reversible_scan
      >>> @dataclasses.dataclass(frozen=True)
      ... class Scaled(Coupling):
      ...     scale: float = 0.5
      ...     def combine(self, x, h):
      ...         return x + self.scale * h
      ...     def recover(self, y, h):
      ...         return y - self.scale * h
      >>> def branch(w, x): return w * x
      >>> w, x = jnp.ones(1), jnp.ones(2)
      >>> y1, y2 = reversible_scan(branch, branch, (w, w), (x, x), coupling=Scaled())
      >>> y1.tolist(), y2.tolist()
      ([1.5, 1.5], [1.75, 1.75])
    """

    def encode(self, x: Array) -> Array:
        """Returns the stream as it is represented while it runs through a stack."""
        return x

    @abc.abstractmethod
    def combine(self, x: Array, h: Array) -> Array:
        """Returns the changed stream, of the shape and dtype of `x`."""

    @abc.abstractmethod
    def recover(self, y: Array, h: Array) -> Array:
        """Returns the stream as it was before `combine`."""

    def pullback(self, x: Array, h: Array, y_ct: Array) -> tuple[Array, Array]:
        """Returns the cotangents of `x` and `h` from the one of `combine(x, h)`."""
        _, pullback = jax.vjp(self.combine, x, h)
        return pullback(y_ct)


@dataclasses.dataclass(frozen=True)
class Additive(Coupling):
    r"""Adds the branch's output to the stream.

    $$y = x + h, \qquad x = y - h$$

    A stream keeps its dtype, whatever the branch returns: `h` is cast to it. In
    floating point the subtraction gives `x` back up to rounding, and no further.

    Args:
      dtype: The dtype of the streams inside the stack and of its output, for example
        `jnp.float32` around branches that compute in bfloat16. `None` keeps the
        dtype of the input.

    Raises:
      TypeError: If `dtype` is not a floating-point or complex dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from revjax import Additive
      >>> law = Additive()
      >>> float(law.recover(law.combine(jnp.float32(1.0), 2.0), 2.0))
      1.0

    References:
      Dinh et al., *NICE: Non-linear Independent Components Estimation*,
      arXiv:1410.8516. Gomez et al., *The Reversible Residual Network*,
      arXiv:1707.04585.
    """

    dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        """Normalizes the dtype, so that equal couplings compare equal."""
        if self.dtype is not None:
            dtype = _checks.stream_dtype(self.dtype)
            object.__setattr__(self, "dtype", dtype)

    def encode(self, x: Array) -> Array:
        """Returns `x` in the dtype of the streams."""
        if self.dtype is None:
            return x
        _checks.encodable(x, self.dtype)
        return x.astype(self.dtype)

    def combine(self, x: Array, h: Any) -> Array:
        """Returns `x + h`."""
        return x + jnp.asarray(h, x.dtype)

    def recover(self, y: Array, h: Any) -> Array:
        """Returns `y - h`."""
        return y - jnp.asarray(h, y.dtype)


@dataclasses.dataclass(frozen=True)
class Inverse(Coupling):
    """A coupling run the other way: what undoes a step is a step itself."""

    coupling: Coupling

    def encode(self, x: Array) -> Array:
        """Returns the stream as the coupling represents it."""
        return self.coupling.encode(x)

    def combine(self, x: Array, h: Array) -> Array:
        """Returns the stream before the coupling's step."""
        return self.coupling.recover(x, h)

    def recover(self, y: Array, h: Array) -> Array:
        """Returns the stream after the coupling's step."""
        return self.coupling.combine(y, h)
