"""Repeatable runs of a user's model, for the diagnostics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from revjax._blocks import ReversibleBlock
from revjax._calls import CLOSED, call
from revjax._inputs import for_block
from revjax._modes import Mode
from revjax._nnx import Drift, ReversibleSequence, ReversibleSequential
from revjax._segments import Segment
from revjax._step import is_inexact

Model = ReversibleBlock | ReversibleSequential | ReversibleSequence


def call_model(model: Model, x: Array, args: tuple, kwargs: dict) -> Array:
    return model(x, *args, **kwargs)


def segments_of(model: Model) -> list[Segment]:
    if isinstance(model, ReversibleBlock):
        return [Segment(model)]
    if isinstance(model, ReversibleSequential):
        return [Segment(block) for block in model.blocks]
    return list(model.segments)


def call_stored(model: Model, x: Array, args: tuple, kwargs: dict) -> Array:
    return call(segments_of(model), Mode(store_activations=True), x, args, kwargs)


class Trial:
    """A model and its context, taken apart so that every run starts from the same."""

    def __init__(self, model: Model, args: tuple, kwargs: dict) -> None:
        self.graphdef, self.state = nnx.split((model, args, kwargs))
        self.depth = sum(len(segment) for segment in segments_of(model))

    def parts(self, state: Any = None) -> tuple[Model, tuple, dict]:
        """Returns the model and its context, in variables of their own."""
        state = self.state if state is None else state
        return nnx.merge(self.graphdef, state, copy=True)

    def forward(self, run: Callable) -> Callable:
        """Returns a function of variables and input: output, variables after it."""

        def function(state: Any, x: Array) -> tuple[Array, Any]:
            model, args, kwargs = self.parts(state)
            y = run(model, x, args, kwargs)
            return y, nnx.state((model, args, kwargs))

        return function

    def step(self, run: Callable) -> Callable:
        """Returns a function to output, variables after a step, gradients by path."""
        function = self.forward(run)

        def step(state: Any, x: Array) -> tuple[Array, Any, dict[str, Array]]:
            y, pullback, after = jax.vjp(function, state, x, has_aux=True)
            y_ct = jax.random.normal(jax.random.key(0), y.shape, y.dtype)
            d_state, d_x = pullback(y_ct)
            # A meter's gradient is no gradient.
            d_state = nnx.filter_state(d_state, nnx.Not(Drift))
            gradients = {
                k: ct for k, ct in leaves_of(d_state).items() if is_inexact(ct)
            }
            return y, after, {**gradients, "input": d_x}

        return step

    def blocks(self, x: Array) -> list[tuple[Any, Array, tuple, dict]]:
        """Returns each block with its input and its context."""
        model, args, kwargs = self.parts()
        single = isinstance(model, ReversibleBlock)
        rows = []
        for i in range(self.depth):
            block = nnx.clone(model if single else model[i])
            given = for_block(i, self.depth, (args, kwargs), CLOSED)
            rows.append((block, x, *given))
            x = nnx.clone(block)(x, *nnx.clone(given[0]), **nnx.clone(given[1]))
        return rows


def leaves_of(state: Any) -> dict[str, Array]:
    """Returns the arrays of a split model and context, by name."""
    names = {}
    for (root, *path), leaf in nnx.to_flat_state(state):
        where = ".".join(map(str, path))
        name = where if root == 0 else f"context.{where}"
        for inner, array in jax.tree_util.tree_leaves_with_path(leaf):
            names[name + jax.tree_util.keystr(inner[1:])] = array
    return names


def data(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    wide = np.complex128 if jnp.iscomplexobj(leaf) else np.float64
    return np.asarray(leaf, wide if is_inexact(leaf) else None)


def relative_error(got: Any, want: Any, floor: float = 0.0) -> float:
    """Returns the error relative to the norm of `want`, or to `floor` if larger."""
    got, want = data(got), data(want)
    scale = max(float(np.linalg.norm(want)), floor)
    with np.errstate(invalid="ignore"):  # inf - inf
        error = float(np.linalg.norm(got - want))
    return error if not error else error / scale if scale else np.inf
