"""The laws by which a branch's output changes a stream, and is undone.

A coupling is elementwise mathematics and nothing else: a frozen dataclass that
holds no arrays, so that it is hashable and equal when it is built again.
"""

import abc
import dataclasses
import math
from collections.abc import Hashable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from revjax import _checks, _law_checks


def wide(dtype: Any) -> np.dtype:
    """Returns a dtype, or float32 where it is narrower or no floating-point one."""
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return np.promote_types(dtype, np.float32) if inexact else np.dtype(np.float32)


class Coupling(abc.ABC):
    r"""What every coupling offers; subclass it to write a law of your own.

    A step of a block changes one stream, $x$, by the output $h$ of a branch
    that saw only the *other* streams:

    $$y = \mathrm{combine}(x, h), \qquad x = \mathrm{recover}(y, h).$$

    A subclass must implement `combine` and `recover`. That the one undoes the other
    is assumed, not verified: `revjax.diagnostics.check_reversible` does that. The
    derivative is taken from `combine` with `jax.vjp` and need not be written. A
    subclass should be a frozen dataclass without arrays: it is a static argument of
    compiled functions.

    Everything else has a default. `arity` is the number of arrays that a branch
    returns; where it is more than one, `h` is a tuple. `update` may mix the other
    streams into `h`. `log_det` is needed for densities alone. `encode`, `decode` and
    `representation` say how a stream is held while it runs through a stack.

    Attributes:
      arity: The number of arrays of the stream's shape that a branch returns.
      exact: Whether `recover` relies on the branch's bits being the same in both
        passes. The branch is then kept apart from what stands around it, lest the
        compiler fuses it differently.

    Example:
      >>> import dataclasses
      >>> import jax.numpy as jnp
      >>> from revjax import Coupling, reversible_scan
      >>> @dataclasses.dataclass(frozen=True)
      ... class Gated(Coupling):
      ...     gate: float = 0.5
      ...     def combine(self, x, h):
      ...         return x * self.gate + h
      ...     def recover(self, y, h):
      ...         return (y - h) / self.gate
      >>> def branch(w, x): return w * x
      >>> w, x = jnp.ones(1), jnp.ones(2)
      >>> y1, y2 = reversible_scan(branch, branch, (w, w), (x, x), coupling=Gated())
      >>> y1.tolist(), y2.tolist()
      ([1.5, 1.5], [2.0, 2.0])
    """

    arity: ClassVar[int] = 1
    exact: ClassVar[bool] = False

    def representation(self, dtype: DTypeLike) -> Hashable:
        """Says how `encode` represents arrays of a dtype: equal where it is alike."""
        return jax.eval_shape(self.encode, jax.ShapeDtypeStruct((), dtype)).dtype

    def encode(self, x: Array) -> Array:
        """Returns the stream as it is represented while it runs through a stack."""
        return x

    def decode(self, x: Array) -> Array:
        """Undoes `encode`: returns what branches see of a stream, and the output."""
        return x

    def update(self, h: Any, others: tuple[Array, ...]) -> Any:
        """Returns what `combine` takes, from the branch's output and its input.

        It may be any array or tuple of arrays; the derivative passes through.
        """
        return h

    @abc.abstractmethod
    def combine(self, x: Array, h: Any) -> Array:
        """Returns the changed stream, of the shape and dtype of `x`."""

    @abc.abstractmethod
    def recover(self, y: Array, h: Any) -> Array:
        """Returns the stream as it was before `combine`."""

    def pullback(self, x: Array, h: Any, y_ct: Array) -> tuple[Array, Any]:
        """Returns the cotangents of `x` and `h` from the one of `combine(x, h)`."""
        _, pullback = jax.vjp(self.combine, x, h)
        return pullback(y_ct)

    def log_det(self, h: Any) -> Array:
        r"""Returns $\log|\partial y / \partial x|$, elementwise, of the shape of `x`.

        It must not depend on `x`: the law is linear in the stream.
        """
        raise _law_checks.no_log_det(self)


@dataclasses.dataclass(frozen=True)
class Additive(Coupling):
    r"""Adds the branch's output to the stream.

    $$y = x + h, \qquad x = y - h$$

    A stream keeps its dtype, whatever the branch returns: `h` is cast to it. In
    floating point the subtraction gives `x` back up to rounding, and no further;
    `ExactAdditive` gives it back bit for bit.

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
            dtype = _law_checks.stream_dtype(self.dtype)
            object.__setattr__(self, "dtype", dtype)

    def encode(self, x: Array) -> Array:
        """Returns `x` in the dtype of the streams."""
        if self.dtype is None:
            return x
        _law_checks.encodable(x, self.dtype)
        return x.astype(self.dtype)

    def combine(self, x: Array, h: Any) -> Array:
        """Returns `x + h`."""
        return x + jnp.asarray(h, x.dtype)

    def recover(self, y: Array, h: Any) -> Array:
        """Returns `y - h`."""
        return y - jnp.asarray(h, y.dtype)

    def log_det(self, h: Any) -> Array:
        """Returns zeros."""
        return jnp.zeros_like(h)


Squash = Literal["tanh", "atan", "sigmoid"]


@dataclasses.dataclass(frozen=True)
class Affine(Coupling):
    r"""Scales and shifts the stream; the coupling of RealNVP.

    A branch returns a pair of arrays $(s, t)$ of the stream's shape. In the blocks it
    may return one array that is twice as large on the block's `axis`: $s$, then $t$.

    $$y = x \, e^{\sigma(s)} + t, \qquad x = (y - t) \, e^{-\sigma(s)}, \qquad
      \log|\partial y / \partial x| = \sigma(s)$$

    The log-scale is bounded by $|\sigma(s)| < b$, so that neither direction overflows:

    - `"tanh"`: $\sigma(s) = b \tanh(s)$;
    - `"atan"`: $\sigma(s) = b \, \tfrac{2}{\pi} \arctan(s)$, which saturates late;
    - `"sigmoid"`: $\sigma(s) = b \, (2 / (1 + e^{-s}) - 1)$, half as steep as tanh.

    Undoing divides by the scale, so drift grows where the scales are below one: each
    block costs up to $b / \ln 10$ decimal digits where it shrinks a stream by
    $e^{-b}$. A stream that was shrunk has lost digits, so this law cannot be exact in
    fixed point.

    Args:
      bound: $b$, positive.
      squash: $\sigma$, as above.

    Raises:
      TypeError: If `bound` is no number; at a call, if $s$ is complex.
      ValueError: If `bound` is not positive or `squash` none of the three.

    Example:
      >>> import jax.numpy as jnp
      >>> from revjax import Affine
      >>> law, x = Affine(bound=1.0), jnp.ones(2)
      >>> h = jnp.zeros(2), jnp.array([1.0, 2.0])  # the scale is exp(0)
      >>> law.combine(x, h).tolist(), law.log_det(h).tolist()
      ([2.0, 3.0], [0.0, 0.0])

    References:
      Dinh et al., *Density Estimation using Real NVP*, arXiv:1605.08803. Ardizzone et
      al., *Guided Image Generation with Conditional Invertible Neural Networks*,
      arXiv:1907.02392 (arctan).
    """

    bound: float = 2.0
    squash: Squash = "tanh"

    arity: ClassVar[int] = 2

    def __post_init__(self) -> None:
        """Checks the options."""
        object.__setattr__(self, "bound", _checks.real(self.bound, "bound"))
        _checks.within(self.bound > 0, self.bound, "bound", "a positive number")
        _checks.one_of(self.squash, "squash", ("tanh", "atan", "sigmoid"))

    def log_det(self, h: Any) -> Array:
        """Returns the bounded log-scale, in at least float32."""
        _law_checks.real_scale(h[0])
        # What rounds differently in exp(s) and exp(-s) is not undone.
        s = h[0].astype(wide(h[0].dtype))
        if self.squash == "atan":
            return self.bound * (2 / math.pi) * jnp.arctan(s)
        # A logistic function is a tanh of half its argument.
        return self.bound * jnp.tanh(s if self.squash == "tanh" else s / 2)

    def combine(self, x: Array, h: Any) -> Array:
        """Returns `x * exp(log_scale) + t`."""
        dtype = wide(x.dtype)
        scale, t = jnp.exp(self.log_det(h)).astype(dtype), h[1].astype(dtype)
        return (x.astype(dtype) * scale + t).astype(x.dtype)

    def recover(self, y: Array, h: Any) -> Array:
        """Returns `(y - t) * exp(-log_scale)`."""
        dtype = wide(y.dtype)
        scale, t = jnp.exp(-self.log_det(h)).astype(dtype), h[1].astype(dtype)
        return ((y.astype(dtype) - t) * scale).astype(y.dtype)


@dataclasses.dataclass(frozen=True)
class Inverse(Coupling):
    """A coupling run the other way: what undoes a step is a step itself."""

    coupling: Coupling

    def decode(self, x: Array) -> Array:
        """Returns what branches see of a stream."""
        return self.coupling.decode(x)

    def combine(self, x: Array, h: Any) -> Array:
        """Returns the stream before the coupling's step."""
        return self.coupling.recover(x, h)

    def recover(self, y: Array, h: Any) -> Array:
        """Returns the stream after the coupling's step."""
        return self.coupling.combine(y, h)
