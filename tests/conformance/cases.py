"""What the conformance checks are run on."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from revjax import ReversibleCouplingBlock


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of block, with an input and the context that a call of it takes.

    Attributes:
      make_block: Builds one block from an `nnx.Rngs`; it is called under `jax.vmap`.
      x: An input, in float64 with parameters of float64, so that rounding hides
        nothing. In another dtype the tolerances are wider.
      args, kwargs: The context of a call.
    """

    make_block: Callable[[nnx.Rngs], ReversibleCouplingBlock]
    x: Any
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)


def load(module: str) -> Case:
    """Returns the case that a user's module describes, by the names of `Case`."""
    found = importlib.import_module(module)
    given = {
        field.name: getattr(found, field.name)
        for field in dataclasses.fields(Case)
        if hasattr(found, field.name)
    }
    missing = {"make_block", "x"} - given.keys()
    if missing:
        msg = f"`--case`: {module} must define {', '.join(sorted(missing))}."
        raise TypeError(msg)
    # A user's block need not keep to the strictness of these tests.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    return Case(**given)


class _MLP(nnx.Module):
    def __init__(self, rngs, width=4, hidden=6):
        self.up = nnx.Linear(width, hidden, param_dtype=jnp.float64, rngs=rngs)
        self.down = nnx.Linear(hidden, width, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class _Attention(nnx.Module):
    def __init__(self, rngs, width=4):
        self.qkv = nnx.Linear(width, 3 * width, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x, mask):
        q, k, v = jnp.split(self.qkv(x), 3, -1)
        scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", q, k), -1e9)
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)


class _Transformer(ReversibleCouplingBlock):
    def g(self, x, mask):
        return self.G(x)


def _normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def builtin() -> dict[str, Case]:
    """What is checked where no case is given."""
    return {
        "transformer": Case(
            lambda rngs: _Transformer(8, _Attention(rngs), _MLP(rngs)),
            _normal(1, 2, 5, 8),
            (jnp.tril(jnp.ones((1, 5, 5), bool)),),
        ),
    }
