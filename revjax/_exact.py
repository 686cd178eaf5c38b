"""Streams in fixed point, which come back bit for bit."""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from revjax import _checks, _law_checks
from revjax._couplings import Coupling

# A stream is an integer q, in units of 2**-fraction_bits. JAX differentiates nothing
# but floating-point arrays, so q travels as the *bits* of one: its sign, and |q|
# counted up from the smallest normal number. Such a word is always finite and normal,
# and NaN is left to say that a value did not fit. No arithmetic is done on words.


@dataclasses.dataclass(frozen=True)
class _Format:
    """How an integer stands in the words of a dtype."""

    dtype: Any
    integer: Any
    offset: int  # the bits of the smallest normal number
    limit: int  # the largest |q|

    @classmethod
    def of(cls, dtype: Any) -> "_Format":
        """Returns the format of words of float32 or float64."""
        dtype, info = np.dtype(dtype), np.finfo(dtype)
        integer = np.dtype(f"int{8 * dtype.itemsize}")
        offset = int(info.tiny.view(integer))
        return cls(dtype, integer, offset, int(info.max.view(integer)) - offset)

    def pack(self, q: Array, fits: Any) -> Array:
        """Returns words; NaN where a value does not fit."""
        sign = jnp.where(q < 0, np.iinfo(self.integer).min, 0).astype(self.integer)
        words = (jnp.abs(q) + self.offset) | sign
        words = lax.bitcast_convert_type(words, self.dtype)
        return jnp.where(fits, words, jnp.asarray(jnp.nan, self.dtype))

    def unpack(self, words: Array) -> Array:
        """Returns the integers, for words that are not NaN."""
        bits = lax.bitcast_convert_type(words, self.integer)
        size = (bits & np.iinfo(self.integer).max) - self.offset
        return jnp.where(bits < 0, -size, size)


# `_through(value, *terms)` returns `value`, with the derivative of the terms' sum.
# It is a primitive because JAX drops a `custom_jvp` inside a scan after the first
# derivative, so that second ones would silently be zero, and because
# `term - stop_gradient(term)` is not always zero in a compiled program: one of the two
# may be part of a fused multiply-add.
_through_p = Primitive("straight_through")
_through_p.def_impl(lambda value, *terms: value)
_through_p.def_abstract_eval(lambda value, *terms: value)
mlir.register_lowering(_through_p, lambda ctx, value, *terms: [value])
batching.defbroadcasting(_through_p)


def _through(value: Array, *terms: Array) -> Array:
    return _through_p.bind(value, *terms)


def _through_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Any]:
    y = _through(*primals)
    dots = (d.astype(y.dtype) for d in tangents[1:] if type(d) is not ad.Zero)
    return y, functools.reduce(jnp.add, dots)


ad.primitive_jvps[_through_p] = _through_jvp


def _add(words: Array, fraction_bits: int, sign: int, h: Array) -> Array:
    """Returns the words of `x + sign * round(h)`, without a derivative."""
    form = _Format.of(words.dtype)
    steps = jnp.round(sign * 2.0**fraction_bits * h.astype(form.dtype))
    # The float next to the limit is one above it. NaN compares false.
    fits = jnp.abs(steps) < form.limit
    steps = jnp.where(fits, steps, 0).astype(form.integer)
    q, room = form.unpack(words), form.limit - jnp.abs(steps)
    fits &= jnp.where(steps < 0, q >= -room, q <= room) & ~jnp.isnan(words)
    return form.pack(q + steps, fits)


@dataclasses.dataclass(frozen=True)
class ExactAdditive(Coupling):
    r"""Adds in fixed point, so that a stack of any depth is undone bit for bit.

    Inside a stack a stream is an integer $q$ that stands for $q / 2^b$. The branch's
    output is rounded to the same grid and added,

    $$q_y = q_x + \mathrm{round}(2^b h), \qquad q_x = q_y - \mathrm{round}(2^b h),$$

    and integer addition has an exact inverse. So there is no drift: the backward pass
    evaluates every branch at the very point of the forward pass, in float32 or in
    bfloat16 branches. Floats go in and come out; derivatives pass through the
    rounding as if it was not there (straight-through).

    A value that does not fit, an infinity or a NaN makes the output NaN from there on,
    and never wraps around. What fits (in parentheses for `dtype=jnp.float64`):

    | `fraction_bits` | quantum | largest magnitude |
    |---|---|---|
    | 10 | 9.8e-4 | 2.1e6 |
    | 16 | 1.5e-5 | 3.3e4 |
    | 20 | 9.5e-7 | 2.0e3 |
    | 24 | 6.0e-8 | 1.3e2 |
    | 28 | 3.7e-9 | 7.9 |
    | (40) | 9.1e-13 | 8.4e6 |

    The output is a float with 24 bits (53), so beyond $2^{24 - b}$ the stack's own
    `inverse` starts from a rounded output. The backward pass does not: it keeps the
    integers.

    Exactness needs a branch that gives the same bits when it is evaluated again. As XLA
    compiles for a CPU all branches that were tried do; not so with
    `jax_disable_most_optimizations`, and not where sums are taken in a varying order
    (atomic additions on a GPU). `measure_drift` of `ReversibleSequence` tells: it reads
    zero.

    Args:
      fraction_bits: $b$, the number of binary digits behind the point.
      dtype: What branches see of a stream, and the dtype of the output: float32, in
        32-bit integers, or float64, in 64-bit integers. `None` takes float64 for a
        float64 input, and float32 for every other.

    Raises:
      TypeError: If `fraction_bits` is no int, `dtype` neither of the two, or the input
        complex.
      ValueError: If `fraction_bits` is not between 0 and 30 (62 for float64).

    Example:
      >>> import jax.numpy as jnp
      >>> from revjax import ExactAdditive
      >>> law = ExactAdditive(fraction_bits=20)
      >>> x = law.encode(jnp.float32(0.1))
      >>> bool(law.recover(law.combine(x, 1e3), 1e3) == x)
      True
      >>> float(law.decode(law.combine(x, 1e4)))  # does not fit
      nan

    References:
      Maclaurin et al., *Gradient-based Hyperparameter Optimization through Reversible
      Learning*, arXiv:1502.03492 (fixed point). Bengio et al., *Estimating or
      Propagating Gradients Through Stochastic Neurons*, arXiv:1308.3432
      (straight-through).
    """

    fraction_bits: int = 20
    dtype: DTypeLike | None = None

    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Checks the options."""
        _checks.integer(self.fraction_bits, "fraction_bits")
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _law_checks.word_dtype(self.dtype))
        most = 62 if self.dtype in (None, np.dtype("float64")) else 30
        bits, what = self.fraction_bits, f"between 0 and {most}"
        _checks.within(0 <= bits <= most, bits, "fraction_bits", what)

    def _words(self, dtype: Any) -> np.dtype:
        """Returns the dtype of the words for an input."""
        return np.dtype(self.dtype or (dtype if dtype == np.float64 else np.float32))

    def representation(self, dtype: DTypeLike) -> Hashable:
        """Says how streams are represented: on which grid, in which words."""
        return "fixed point", self.fraction_bits, self._words(dtype)

    def encode(self, x: Array) -> Array:
        """Returns the words of `x`, rounded to the grid."""
        words = self._words(x.dtype)
        _law_checks.fixed_point(x, words, self.fraction_bits)
        zero = _Format.of(words).pack(jnp.zeros(x.shape, f"i{words.itemsize}"), True)
        return _through(_add(zero, self.fraction_bits, 1, x), x)

    def decode(self, x: Array) -> Array:
        """Returns the numbers that words stand for."""
        form = _Format.of(x.dtype)
        numbers = form.unpack(x).astype(form.dtype) * 2.0**-self.fraction_bits
        return _through(jnp.where(jnp.isnan(x), lax.stop_gradient(x), numbers), x)

    def combine(self, x: Array, h: Any) -> Array:
        """Returns the words of `x + round(h)`."""
        h = jnp.asarray(h, x.dtype)
        return _through(_add(x, self.fraction_bits, 1, h), x, h)

    def recover(self, y: Array, h: Any) -> Array:
        """Returns the words of `y - round(h)`."""
        h = jnp.asarray(h, y.dtype)
        return _through(_add(y, self.fraction_bits, -1, h), y, -h)

    def log_det(self, h: Any) -> Array:
        """Returns zeros: that of the law without rounding."""
        return jnp.zeros_like(h)
