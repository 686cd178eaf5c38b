"""Every check of what a user passes in, and its message.

A message names the argument in backticks and says what was expected, what was found
and what to do.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def is_array(value: Any) -> bool:
    """Says whether a value is an array (or a traced one) rather than static."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def describe(value: Any) -> str:
    """Returns a description in one short line, such as `float32[4, 7]`."""
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        text = f"{value.dtype}{list(value.shape)}"
        plain = is_array(value) or isinstance(value, jax.ShapeDtypeStruct)
        return text if plain else f"{text} of type {kind}"
    if isinstance(value, tuple | list | dict | set):
        return f"a {kind} of length {len(value)}"
    text = repr(value)
    if "\n" in text or " at 0x" in text or len(text) > 60:
        return f"an object of type {kind}"
    return f"{text} of type {kind}"


def is_number(dtype: Any) -> bool:
    """Says whether values of a dtype can be added: neither a key nor an object."""
    return jnp.issubdtype(dtype, np.number) or dtype == np.bool_


def real(value: Any, name: str) -> float:
    """Checks a finite real number; returns it as Python's, which has no dtype."""
    if isinstance(value, bool) or not isinstance(
        value, int | float | np.integer | np.floating
    ):
        msg = f"`{name}` must be a number. Got {describe(value)}."
        raise TypeError(msg)
    within(bool(np.isfinite(value)), value, name, "finite")
    return float(value)


def within(condition: bool, value: Any, name: str, expected: str) -> None:
    """Checks a range."""
    if not condition:
        msg = f"`{name}` must be {expected}. Got {value}."
        raise ValueError(msg)


def one_of(value: Any, name: str, names: tuple[str, ...]) -> None:
    """Checks a choice."""
    if not isinstance(value, str) or value not in names:
        choices = f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
        msg = f"`{name}` must be {choices}. Got {describe(value)}."
        raise ValueError(msg)


def mode(anchor_every: Any, between_anchors: Any, store_activations: Any) -> None:
    """Checks the options that say how a stack is differentiated."""
    if isinstance(anchor_every, bool) or not isinstance(anchor_every, int | np.integer):
        msg = (
            "`anchor_every` must be an int: 0 to invert the whole stack, or A > 0 to "
            f"keep the streams at every A-th block. Got {describe(anchor_every)}."
        )
        raise TypeError(msg)
    if anchor_every < 0:
        msg = (
            "`anchor_every` must not be negative: 0 inverts the whole stack, A > 0 "
            f"keeps the streams at every A-th block. Got {anchor_every}."
        )
        raise ValueError(msg)
    one_of(between_anchors, "between_anchors", ("recompute", "invert"))
    boolean(store_activations, "store_activations")


def measurable(mode: Any, name: str) -> None:
    """Checks that there are anchors to measure drift against."""
    every, between, stored = dataclasses.astuple(mode)
    if stored or not every or between != "invert":
        msg = (
            f"`{name}` needs anchors between which blocks are undone: "
            '`anchor_every` > 0, `between_anchors="invert"`, no stored activations. '
            f"Got {every}, {between!r}, {stored}."
        )
        raise ValueError(msg)


def meter(drift: Any, anchors: int) -> None:
    """Checks the array whose gradient is the drift."""
    if not is_array(drift) or not jnp.issubdtype(drift.dtype, jnp.floating):
        msg = f"`drift` must be a floating-point array. Got {describe(drift)}."
        raise TypeError(msg)
    if drift.shape != (anchors,):
        msg = (
            f"`drift` must have shape [{anchors}], one entry for each anchor. Got "
            f"{describe(drift)}."
        )
        raise ValueError(msg)


def boolean(value: Any, name: str) -> None:
    """Checks an option that is on or off."""
    if not isinstance(value, bool):
        msg = f"`{name}` must be a bool, True or False. Got {describe(value)}."
        raise TypeError(msg)


def stream(x: Any, name: str) -> jax.Array:
    """Checks an input array; returns it without a weak type."""
    if not is_array(x) and not isinstance(x, float | complex):
        what = "the shape of " if isinstance(x, jax.ShapeDtypeStruct) else ""
        msg = (
            f"`{name}` must be a floating-point or complex array. Got {what}"
            f"{describe(x)}."
        )
        raise TypeError(msg)
    if not isinstance(x, float | complex) and not jnp.issubdtype(x.dtype, jnp.inexact):
        hint = "; convert it first, for example with `.astype(jnp.float32)`"
        msg = (
            f"`{name}` must be a floating-point or complex array. Got {describe(x)}"
            f"{hint if is_number(x.dtype) else ''}."
        )
        raise TypeError(msg)
    array = jnp.asarray(x)
    return jnp.asarray(array, array.dtype)


def split_axis(x: Any, axis: int, dim: int | None, name: str) -> None:
    """Checks that an input can be split in streams on `axis`."""
    if not -x.ndim <= axis < x.ndim:
        msg = (
            f"`axis` must be an axis of the input. Got axis {axis} for {describe(x)}, "
            f"which has {x.ndim} axes."
        )
        raise ValueError(msg)
    size = x.shape[axis]
    if dim is not None and size != dim:
        msg = (
            f"`{name}` must have size `dim` = {dim} on axis {axis}. Got size {size} "
            f"for {describe(x)}; build the block with `dim={size}`, or another `axis`."
        )
        raise ValueError(msg)


def divisible(size: Any, streams: int, name: str) -> None:
    """Checks a size that is split in streams."""
    integer(size, name)
    if size < 0 or size % streams:
        kind = "an even number" if streams == 2 else f"a multiple of {streams}"
        number = "two" if streams == 2 else streams
        msg = f"`{name}` must be {kind}, to be split in {number} streams. Got {size}."
        raise ValueError(msg)


def batched(x: Any, axes: Iterable[int]) -> None:
    """Checks that no stream is split on the axis of the batch."""
    if x.ndim > 1 and any(axis % x.ndim == 0 for axis in axes):
        msg = (
            "`axis` of a block must not be axis 0 where log-determinants are wanted: "
            f"it is that of the batch. Got {describe(x)}; split on another axis, or "
            "use `jax.vmap` over the batch."
        )
        raise ValueError(msg)


def permutation(indices: Any) -> tuple[int, ...]:
    """Checks a permutation."""
    array = hasattr(indices, "shape") or not isinstance(indices, Iterable)
    found = np.asarray(indices if array else list(indices))
    if found.ndim != 1 or not (
        np.issubdtype(found.dtype, np.integer) or not found.size
    ):
        msg = f"`indices` must be a list of ints. Got {describe(indices)}."
        raise TypeError(msg)
    ok = sorted(found.tolist()) == list(range(found.size))
    expected = f"the numbers 0 to {found.size - 1} in some order"
    within(ok, found.tolist(), "indices", expected)
    return tuple(found.tolist())


def squeezable(x: Any, factor: int, *, undo: bool) -> None:
    """Checks an image whose pixels become channels, or the other way round."""
    sizes = x.shape[3:] if undo else x.shape[1:3]
    if x.ndim != 4 or any(size % (factor**2 if undo else factor) for size in sizes):
        what = "channels" if undo else "height and width"
        msg = (
            f"`{'y' if undo else 'x'}` must be [batch, height, width, channels], with "
            f"{what} a multiple of {factor**2 if undo else factor}, for a factor of "
            f"{factor}. Got {describe(x)}."
        )
        raise ValueError(msg)


def branches(value: Any) -> list:
    """Checks the branches of a block of several streams."""
    if callable(value) or not isinstance(value, Iterable):
        msg = f"`branches` must be a list of modules. Got {describe(value)}."
        raise TypeError(msg)
    value = list(value)
    within(len(value) >= 2, len(value), "branches", "a list of at least two")
    for i, branch in enumerate(value):
        callable_(branch, f"branches[{i}]")
    return value


def with_aux(out: Any, name: str) -> tuple[Any, Any]:
    """Checks what a branch with further outputs returned."""
    if not isinstance(out, tuple) or len(out) != 2:
        msg = (
            f"{name} must return a pair `(h, aux)`, since `has_aux` is True. Got "
            f"{describe(out)}."
        )
        raise TypeError(msg)
    for path, leaf in jax.tree_util.tree_leaves_with_path(out[1]):
        if not is_array(leaf):
            msg = (
                f"`aux{jax.tree_util.keystr(path)}` of {name} must be an array. Got "
                f"{describe(leaf)}."
            )
            raise TypeError(msg)
    return out


def unchanged_types(before: Sequence[Any], after: Sequence[Any], name: str) -> None:
    """Checks that shared state is of one type from block to block."""
    for old, new in zip(before, after, strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            msg = (
                f"{name} changed a variable that blocks share from {describe(old)} to "
                f"{describe(new)}. Keep its shape and dtype, or give each block its "
                "own."
            )
            raise ValueError(msg)


def integer(value: Any, name: str) -> None:
    """Checks an int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        msg = f"`{name}` must be an int. Got {describe(value)}."
        raise TypeError(msg)


def depth(value: Any, name: str = "depth") -> int:
    """Checks a number of blocks, or of features."""
    integer(value, name)
    if value < 0:
        msg = f"`{name}` must not be negative. Got {value}."
        raise ValueError(msg)
    return int(value)


def maker(value: Any, kind: type) -> None:
    """Checks what builds the blocks of a stack."""
    if not callable(value) or isinstance(value, kind):
        msg = (
            "`make_block` must be a function that builds a block from an nnx.Rngs. Got "
            f"{describe(value)}."
        )
        raise TypeError(msg)


def stackable(block: Any) -> Any:
    """Checks that a block can be one of many alike."""
    if not block.stackable:
        msg = (
            "`make_block` must return a block with branches, to be stacked. Got a "
            f"{type(block).__name__}; put it in a list of blocks."
        )
        raise TypeError(msg)
    return block


def rngs(value: Any, kind: type) -> None:
    """Checks the randomness that blocks are built from."""
    if not isinstance(value, kind):
        msg = (
            f"`rngs` must be an nnx.Rngs, for example `nnx.Rngs(0)`. Got "
            f"{describe(value)}."
        )
        raise TypeError(msg)


def default_branch(value: Any, name: str) -> Any:
    """Checks that a default branch can be made; returns its randomness."""
    if value is None:
        msg = (
            f"`rngs` is needed to make the default branch `{name}`. Expected an "
            f"nnx.Rngs; got None. Pass `rngs=nnx.Rngs(0)`, or a module as `{name}`."
        )
        raise ValueError(msg)
    return value


def callable_(value: Any, name: str) -> None:
    """Checks a branch."""
    if isinstance(value, type) or not callable(value):
        msg = f"`{name}` must be a module or a function. Got {describe(value)}."
        raise TypeError(msg)


def static_function(value: Any, name: str) -> None:
    """Checks a branch that is a static argument."""
    callable_(value, name)
    try:
        hash(value)
    except TypeError as error:
        msg = (
            f"`{name}` must be hashable, since it is static: a function, for example. "
            f"Got {describe(value)}."
        )
        raise TypeError(msg) from error


def blocks(value: Any, kind: type, name: str = "blocks") -> list:
    """Checks a list of blocks, or what `make_block` built."""
    if isinstance(value, kind) or not isinstance(value, Iterable):
        msg = (
            f"`{name}` must be a list of reversible blocks. Got "
            f"{describe(value)}; pass `[block]` for a single block."
        )
        raise TypeError(msg)
    value = list(value)
    for i, block in enumerate(value):
        if not isinstance(block, kind):
            what = (
                f"`{name}[{i}]` must be"
                if name == "blocks"
                else f"`{name}` must return"
            )
            msg = (
                f"{what} a reversible block. Got "
                f"{describe(block)}; wrap your modules: "
                "`ReversibleCouplingBlock(dim, F, G)`."
            )
            raise TypeError(msg)
    return value


def model(value: Any, kinds: tuple[type, ...]) -> None:
    """Checks what is to be looked at."""
    if not isinstance(value, kinds):
        msg = (
            "`model` must be a reversible block, a ReversibleSequential or a "
            f"ReversibleSequence. Got {describe(value)}."
        )
        raise TypeError(msg)


def index(i: Any, length: int) -> int:
    """Checks an index; returns it without a sign."""
    integer(i, "index")
    if not -length <= i < length:
        msg = (
            f"`index` must be at least {-length} and less than {length}, the number of "
            f"blocks. Got {i}."
        )
        raise IndexError(msg)
    return int(i) % length


def same_graph(before: Any, after: Any, name: str) -> None:
    """Checks that a branch left its block's structure alone."""
    if before != after:
        changes = []
        for what, more, less in (("new", after, before), ("lost", before, after)):
            paths = set(more.paths) - set(less.paths)
            names = sorted(".".join(map(str, path)) for path in paths)
            changes += [f"{what} {key}" for key in names]
        found = ", ".join(changes) or "a changed attribute that is not an array"
        msg = (
            f"{name} must change nothing but the arrays in its variables. Got {found}. "
            "Create every variable in the module's constructor, and count in an "
            "nnx.Variable."
        )
        raise ValueError(msg)


def same_context(before: Any, after: Any, name: str) -> None:
    """Checks that a branch left the context's structure alone."""
    if before != after:
        msg = (
            f"{name} must not change the structure of its `context`. Return what it "
            "computes, or keep it in an nnx.Variable."
        )
        raise ValueError(msg)


def can_be_undone(constant: bool, name: str) -> None:
    """Checks that a branch returns the same in the inverse as in the call."""
    if not constant:
        msg = (
            f"{name} depends on variables that move on in each call, such as RNG "
            "streams or counters, so `inverse` cannot undo a call. Call `.eval()` on "
            "the model first, or pass what moves (a key, say) as context to both calls."
        )
        raise ValueError(msg)


@contextlib.contextmanager
def reverse_mode() -> Iterator[None]:
    """Says what to do where JAX refuses forward mode through the reversible rule."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        msg = (
            "Forward mode (jax.jvp, jax.jacfwd) cannot pass through a reversible "
            "stack, whose derivative is defined for reverse mode. Build the stack with "
            "`store_activations=True`, or take `jax.jacrev` or `jax.grad`."
        )
        raise TypeError(msg) from error


def pair(value: Any, name: str, meaning: str) -> None:
    """Checks a pair."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        msg = f"`{name}` must be a pair {meaning}. Got {describe(value)}."
        raise TypeError(msg)


def leading_axis(params: Any) -> int:
    """Returns the depth that all parameters have as their leading axis."""
    sizes: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tuple(params)):
        where = "params" + jax.tree_util.keystr(path)
        if not is_array(leaf):
            msg = f"`{where}` must be an array. Got {describe(leaf)}."
            raise TypeError(msg)
        if leaf.ndim == 0:
            msg = (
                f"`{where}` must have a leading axis, one entry for each block. Got "
                f"{describe(leaf)}."
            )
            raise ValueError(msg)
        sizes.setdefault(leaf.shape[0], f"{where}: {describe(leaf)}")
    if not sizes:
        msg = (
            "`params` must hold at least one array, whose leading axis is the number "
            "of blocks. Got none; for branches without parameters pass, for example, "
            "`(jnp.arange(depth), None)`."
        )
        raise ValueError(msg)
    if len(sizes) > 1:
        msg = (
            "`params` must agree in their leading axes, one entry for each block. Got "
            + " and ".join(sizes.values())
            + "."
        )
        raise ValueError(msg)
    return next(iter(sizes))


def hashable(static: Any, name: str = "context") -> None:
    """Checks what is not an array."""
    try:
        hash(static)
    except TypeError as error:
        msg = (
            f"`{name}` must consist of arrays (and pytrees of them) and of hashable "
            f"values, which are static. Got an unhashable one: {error}."
        )
        raise TypeError(msg) from error


def per_block(value: Any, blocks: int) -> None:
    """Checks what a `PerBlock` holds."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        where = "PerBlock" + jax.tree_util.keystr(path)
        if not is_array(leaf):
            msg = f"`{where}` must be an array. Got {describe(leaf)}."
            raise TypeError(msg)
        if not leaf.ndim or leaf.shape[0] != blocks:
            msg = (
                f"`{where}` must have a leading axis of size {blocks}, one entry for "
                f"each block. Got {describe(leaf)}; pass what all blocks share without "
                "`PerBlock`."
            )
            raise ValueError(msg)


def nothing_traced(hoisted: Sequence[Any]) -> None:
    """Checks that branches of a pure function close over no traced value."""
    for value in hoisted:
        if isinstance(value, Tracer):
            msg = (
                "`f` and `g` must not close over traced values. Found "
                f"{describe(value)}, which comes from a surrounding jax.grad, jax.jit "
                "or jax.vmap; pass it as `context`: `reversible_scan(f, g, params, "
                "streams, value)`."
            )
            raise ValueError(msg)


def backward_state(state: Any) -> None:
    """Checks what the backward pass is to update."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            msg = (
                f"`state{jax.tree_util.keystr(path)}` must be a floating-point array, "
                f"since its update comes as a gradient. Got {describe(leaf)}."
            )
            raise TypeError(msg)


def backward_update(state: Any, new: Any) -> None:
    """Checks what `update` made of `state`."""

    def types(tree: Any) -> Any:
        return jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a)), tree)

    if types(state) != types(new):
        msg = (
            "`update` must return arrays like `state`, "
            f"{jax.tree.map(describe, state)}. Got {jax.tree.map(describe, new)}."
        )
        raise TypeError(msg)
