"""NNX modules taken apart: what is static, and the arrays."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax import Array

from revjax._step import override

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Parts:
    """A module, or a call's context, taken apart.

    Attributes:
      graphdef: What is static.
      paths: Where its variables and bare arrays are.
      nodes: These variables, the very objects, and bare arrays.
    """

    graphdef: Any
    paths: tuple[Path, ...]
    nodes: list[Any]

    @classmethod
    def of(cls, node: Any) -> "Parts":
        """Takes a node apart."""
        graphdef, state = nnx.split(node)
        flat = list(nnx.to_flat_state(state))
        return cls(graphdef, tuple(path for path, _ in flat), [n for _, n in flat])

    def build(self, nodes: Sequence[Any]) -> Any:
        """Returns such a module made of other variables."""
        return nnx.merge(
            self.graphdef, nnx.from_flat_state(zip(self.paths, nodes, strict=True))
        )

    @property
    def leaves(self) -> list[Any]:
        """The arrays in the variables."""
        return jax.tree.leaves(self.nodes)

    @property
    def frame(self) -> "Frame":
        """The static half."""
        return Frame(self.graphdef, self.paths, jax.tree.structure(self.nodes))

    def write(self, target: Any, new: Mapping[int, Array]) -> None:
        """Updates the variables of `target` whose arrays, by place, are new."""
        nodes = jax.tree.unflatten(
            jax.tree.structure(self.nodes), override(self.leaves, new)
        )
        owners = [k for k, n in enumerate(self.nodes) for _ in jax.tree.leaves(n)]
        changed = [(self.paths[k], nodes[k]) for k in sorted({owners[i] for i in new})]
        if changed:
            nnx.update(target, nnx.from_flat_state(changed))


@dataclasses.dataclass(frozen=True)
class Frame:
    """The static half of a module or of a call's context; hashable.

    Attributes:
      graphdef, paths: As in `Parts`.
      structure: The structure of the nodes, over their arrays.
    """

    graphdef: Any
    paths: tuple[Path, ...]
    structure: Any

    def fill(self, leaves: Sequence[Any]) -> Any:
        """Returns such a module that holds `leaves`, in variables of its own."""
        nodes = jax.tree.unflatten(self.structure, leaves)
        return nnx.merge(
            self.graphdef, nnx.from_flat_state(zip(self.paths, nodes, strict=True))
        )
