"""Checks of couplings, of streams, and of what branches return for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from revjax._checks import describe, is_array, is_number, within


def stream_dtype(dtype: Any) -> np.dtype:
    """Checks the `dtype` of a coupling."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.inexact):
        msg = (
            "`dtype` must be a floating-point or complex dtype, or None to keep the "
            f"dtype of the input. Got {found or repr(dtype)}."
        )
        raise TypeError(msg)
    return found


def encodable(x: Any, dtype: Any) -> None:
    """Checks that a coupling's dtype loses no imaginary part."""
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        msg = (
            f"`dtype` of the coupling, {dtype}, cannot hold {describe(x)}: the "
            "imaginary part would be lost. Use `Additive(dtype=jnp.complex64)`, or "
            "pass `x.real`."
        )
        raise TypeError(msg)


def coupling(value: Any) -> None:
    """Checks a coupling."""
    methods = ("encode", "decode", "update", "combine", "recover", "pullback")
    if isinstance(value, type) or not all(hasattr(value, name) for name in methods):
        msg = (
            "`coupling` must be a coupling, such as `revjax.Additive()`. "
            f"Got {describe(value)}."
        )
        raise TypeError(msg)
    try:
        hash(value)
    except TypeError as error:
        msg = (
            "`coupling` must be hashable, since it is static. Got "
            f"{describe(value)}; make its class a frozen dataclass without arrays."
        )
        raise TypeError(msg) from error


def couplings(value: Any, steps: int) -> tuple:
    """Checks the coupling of a block, or one for each step; returns one for each."""
    if not isinstance(value, tuple):
        coupling(value)
        return (value,) * steps
    if len(value) != steps:
        msg = (
            "`coupling` must be one coupling, or a tuple with one for each of "
            f"{steps} branches. Got {describe(value)}."
        )
        raise ValueError(msg)
    for law in value:
        coupling(law)
    return value


def log_det(value: Any, x: Any, law: Any) -> None:
    """Checks what a coupling's `log_det` returned."""
    if getattr(value, "shape", None) != x.shape:
        msg = (
            f"`log_det` of the coupling {describe(law)} must return an array of the "
            f"stream's shape, {describe(x)}. Got {describe(value)}."
        )
        raise ValueError(msg)


def real_scale(s: Any) -> None:
    """Checks that a log-scale can be bounded."""
    if jnp.iscomplexobj(s):
        msg = (
            "`s` of an Affine coupling must be real, to be bounded. Got "
            f"{describe(s)}; return its real part."
        )
        raise TypeError(msg)


def two_streams(others: tuple, law: Any) -> None:
    """Checks that there is one other stream."""
    if len(others) != 1:
        msg = (
            f"`coupling` {describe(law)} is for blocks of two streams, such as "
            f"ReversibleHalfBlock. Got one of {len(others) + 1}."
        )
        raise ValueError(msg)


def no_log_det(law: Any) -> TypeError:
    """Returns the error for a coupling whose determinant is not known."""
    return TypeError(
        f"`coupling` must have a `log_det` here. Got {describe(law)}, which has none; "
        "write its method `log_det(h)`: log|dy/dx|, elementwise."
    )


def word_dtype(dtype: Any) -> np.dtype:
    """Checks the `dtype` of streams in fixed point."""
    found = stream_dtype(dtype)
    if found not in (np.float32, np.float64):
        msg = (
            "`dtype` of fixed-point streams must be float32 (32-bit integers) or "
            f"float64 (64-bit integers). Got {found}."
        )
        raise TypeError(msg)
    return found


def fixed_point(x: Any, words: np.dtype, fraction_bits: int) -> None:
    """Checks that an input can be held in fixed point."""
    if jnp.iscomplexobj(x):
        msg = (
            f"`x` must be real for fixed-point streams. Got {describe(x)}; use "
            "`Additive()`, or the real and imaginary parts as features."
        )
        raise TypeError(msg)
    most = 62 if words == np.float64 else 30
    expected = f"at most {most} for streams of {words}"
    within(fraction_bits <= most, fraction_bits, "fraction_bits", expected)
    if words == np.float64 and not jax.config.read("jax_enable_x64"):
        msg = (
            "`dtype` float64 of fixed-point streams needs 64-bit integers. Switch them "
            'on: `jax.config.update("jax_enable_x64", True)`.'
        )
        raise ValueError(msg)


def law(out: Any, x: Any, method: Callable) -> None:
    """Checks what a coupling's `combine` or `recover` returns for the stream `x`."""
    if (getattr(out, "shape", None), getattr(out, "dtype", None)) != (x.shape, x.dtype):
        msg = (
            f"`{getattr(method, '__qualname__', method)}` of the coupling must return "
            f"an array of the stream's shape and dtype, {describe(x)}. Got "
            f"{describe(out)}."
        )
        raise TypeError(msg)


def branch_outputs(h: Any, x: Any, arity: int, name: str) -> Any:
    """Checks what a branch returned for the stream `x`: `arity` arrays."""
    if arity == 1:
        return branch_output(h, x, name)
    if not isinstance(h, tuple | list) or len(h) != arity:
        msg = (
            f"{name} must return a tuple of {arity} arrays of the shape of the stream "
            f"that it changes, {describe(x)}, as its coupling asks. Got {describe(h)}."
        )
        raise TypeError(msg)
    return tuple(branch_output(part, x, name) for part in h)


def parts(h: Any, arity: int, axis: int, x: Any, name: str) -> Any:
    """Splits what a branch returned as one array where its coupling takes several."""
    if arity == 1 or not is_array(h) or not -h.ndim <= axis < h.ndim:
        return h
    size = x.shape[axis] * arity
    if h.shape[axis] != size:
        msg = (
            f"{name} must return {arity} arrays of the shape of the stream that it "
            f"changes, {describe(x)}, as its coupling asks, or one of size {size} on "
            f"axis {axis}. Got {describe(h)}."
        )
        raise ValueError(msg)
    return tuple(jnp.split(h, arity, axis))


def branch_output(h: Any, x: Any, name: str) -> jax.Array:
    """Checks what a branch returned for the stream `x`."""
    if not is_array(h) or not is_number(h.dtype):
        msg = (
            f"{name} must return one array of numbers, of the shape of the stream that "
            f"it changes, {describe(x)}. Got {describe(h)}."
        )
        raise TypeError(msg)
    if h.shape != x.shape:
        msg = (
            f"{name} must return an array of the shape of the stream that it changes, "
            f"{describe(x)}. Got {describe(h)}; a layer that changes the shape belongs "
            "between two stacks, not in a block."
        )
        raise ValueError(msg)
    if jnp.iscomplexobj(h) and not jnp.issubdtype(x.dtype, jnp.complexfloating):
        msg = (
            f"{name} returned {describe(h)} for a real stream, {describe(x)}. Return "
            "real numbers, or use complex streams: `Additive(dtype=jnp.complex64)`."
        )
        raise TypeError(msg)
    return jnp.asarray(h)


def same_streams(before: Any, after: Any, name: str) -> None:
    """Checks that all couplings of a stack represent the streams alike."""
    if before != after:
        msg = (
            "`coupling` must represent the streams alike in all blocks of a stack. "
            f"{name} has streams of {after}, those before it {before}; give all of "
            "them the same `dtype`, or the same `fraction_bits`."
        )
        raise ValueError(msg)
