"""Inputs of the branches that differ from block to block."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from revjax import _checks


@jax.tree_util.register_pytree_node_class
class PerBlock:
    """Context of which each block receives its own entry.

    Wrap an argument of a stack's call in it, and block `i` receives entry `i` along the
    leading axis of every array in it: a layer's own mask, a drop-path rate, a position
    in depth. Floating-point arrays receive gradients, each entry that of its block.

    Args:
      value: A pytree of arrays, `[depth, ...]`.

    Raises:
      TypeError: At a call, if `value` holds anything but arrays.
      ValueError: At a call, if a leading axis is not the number of blocks.

    Example:
      >>> import jax.numpy as jnp
      >>> from revjax import PerBlock, reversible_scan
      >>> def branch(w, x, rate): return rate * w * x
      >>> w, x = jnp.ones(3), (jnp.ones(2), jnp.ones(2))
      >>> rates = PerBlock(jnp.array([1.0, 0.0, 0.0]))
      >>> y1, y2 = reversible_scan(branch, branch, (w, w), x, rates)
      >>> y1.tolist(), y2.tolist()
      ([2.0, 2.0], [3.0, 3.0])
    """

    def __init__(self, value: Any) -> None:
        """Wraps the arrays; see the class."""
        self.value = value

    def __repr__(self) -> str:
        """Returns how to build it."""
        return f"PerBlock({self.value!r})"

    def __getitem__(self, blocks: int | slice) -> "PerBlock":
        """Returns the entries of some of the blocks."""
        return PerBlock(jax.tree.map(lambda a: a[blocks], self.value))

    def tree_flatten(self) -> tuple[tuple, None]:
        """Takes it apart, as a pytree."""
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, static: None, children: tuple) -> "PerBlock":
        """Undoes `tree_flatten`."""
        return cls(*children)


class _Slot:
    """Stands in a context where a `PerBlock` was; static."""


_SLOT = _Slot()


def on_per_block(
    f: Callable[[PerBlock], Any], context: Any, closed: tuple[type, ...] = ()
) -> Any:
    """Replaces each `PerBlock` in a context; leaves nodes of type `closed` alone."""
    return jax.tree.map(
        lambda node: f(node) if isinstance(node, PerBlock) else node,
        context,
        is_leaf=lambda node: isinstance(node, (PerBlock, *closed)),
    )


def take(context: Any, blocks: int, closed: tuple[type, ...] = ()) -> tuple[Any, list]:
    """Takes the values of each `PerBlock` out of a context, after a check."""
    values: list = []

    def out(node: PerBlock) -> _Slot:
        _checks.per_block(node.value, blocks)
        values.append(node.value)
        return _SLOT

    return on_per_block(out, context, closed), values


def take_again(context: Any, given: Any, closed: tuple[type, ...] = ()) -> Any:
    """Undoes `give`, also where a branch has written into the containers.

    Returns:
      The context; what has changed its structure, or has none like it, as it is.
    """
    leaves, treedef = jax.tree.flatten(
        context, is_leaf=lambda node: isinstance(node, closed)
    )
    try:
        after = treedef.flatten_up_to(given)
    except ValueError:
        return given
    slots = (old is _SLOT for old in leaves)
    return treedef.unflatten(
        _SLOT if slot else new for slot, new in zip(slots, after, strict=True)
    )


def give(context: Any, values: list, closed: tuple[type, ...] = ()) -> Any:
    """Puts values back where `take` took them out."""
    value = iter(values)
    return jax.tree.map(
        lambda node: next(value) if node is _SLOT else node,
        context,
        is_leaf=lambda node: isinstance(node, closed),
    )


def for_block(
    i: int, blocks: int, context: Any, closed: tuple[type, ...] = ()
) -> tuple[tuple, dict]:
    """Returns the context, `(args, kwargs)`, of one of several blocks called apart."""

    def entry(node: PerBlock) -> PerBlock:
        _checks.per_block(node.value, blocks)
        return node[i : i + 1]

    return on_per_block(entry, context, closed)


def partition(tree: Any) -> tuple[list, tuple]:
    """Takes the arrays out of a tree; the rest is hashable and static."""
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if _checks.is_array(leaf)]
    rest = tuple(None if _checks.is_array(leaf) else (leaf,) for leaf in leaves)
    _checks.hashable(rest)
    return arrays, (rest, treedef)


def merge(rest: tuple) -> Callable[[Sequence[Any]], Any]:
    """Returns what undoes `partition`."""
    static, treedef = rest

    def merge(arrays: Sequence[Any]) -> Any:
        array = iter(arrays)
        leaves = [next(array) if s is None else s[0] for s in static]
        return jax.tree.unflatten(treedef, leaves)

    return merge
