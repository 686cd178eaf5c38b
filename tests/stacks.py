"""Blocks and stacks for the tests, and the oracle that they are held against."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from revjax import ReversibleCouplingBlock, ReversibleSequence, ReversibleSequential

HALF = 4  # the size of a stream on the axis of the split


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


class MLP(nnx.Module):
    def __init__(self, rngs, width=HALF, hidden=6):
        self.up = nnx.Linear(width, hidden, param_dtype=jnp.float64, rngs=rngs)
        self.down = nnx.Linear(hidden, width, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x, shift=None):
        return self.down(jnp.tanh(self.up(x if shift is None else x + shift)))


class Attention(nnx.Module):
    def __init__(self, rngs, width=HALF):
        self.qkv = nnx.Linear(width, 3 * width, param_dtype=jnp.float64, rngs=rngs)
        self.out = nnx.Linear(width, width, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x, mask, *, temperature):
        q, k, v = jnp.split(self.qkv(x), 3, -1)
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / temperature
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return self.out(jnp.einsum("bqk,bkd->bqd", weights, v))


class Convolution(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 2, (3, 3), param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x, gain):
        return jnp.tanh(self.conv(x)) * gain


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of block, with an input and the context that its branches take."""

    make_block: Callable[[nnx.Rngs], ReversibleCouplingBlock]
    x: Any
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)


def mlp_block(rngs, hidden=6):
    return ReversibleCouplingBlock(
        2 * HALF, MLP(rngs, hidden=hidden), MLP(rngs, hidden=hidden)
    )


def _attention_block(rngs):
    return ReversibleCouplingBlock(2 * HALF, Attention(rngs), Attention(rngs))


def _convolution_block(rngs, dim, axis):
    return ReversibleCouplingBlock(dim, Convolution(rngs), Convolution(rngs), axis=axis)


@functools.cache
def kind(name):
    if name == "mlp":
        return Kind(mlp_block, normal(0, 3, 2 * HALF), (normal(1, 1, HALF),))
    if name == "attention":
        causal = jnp.tril(jnp.ones((1, 5, 5), bool))
        return Kind(
            _attention_block,
            normal(0, 2, 5, 2 * HALF),
            (causal,),
            {"temperature": jnp.asarray(2.0)},
        )
    # The streams have the same shape either way.
    dim, axis = {"convolution": (4, -1), "convolution_split_on_height": (8, 1)}[name]
    shape = [2, 4, 5, 2]
    shape[axis] = dim
    return Kind(
        functools.partial(_convolution_block, dim=dim, axis=axis),
        normal(0, *shape),
        (),
        {"gain": normal(1, 1, 1, 1, 2)},
    )


def modes(depth):
    """The ways of running a sequence, by name, as options of `ReversibleSequence`."""
    every = {"1": 1, "2": 2, "3": 3, "depth": depth, "depth_plus_2": depth + 2}
    return {
        "reversible": {},
        "stored": {"store_activations": True},
        **{f"recompute_{name}": {"anchor_every": a} for name, a in every.items()},
        **{
            f"invert_{name}": {"anchor_every": a, "between_anchors": "invert"}
            for name, a in every.items()
        },
    }


def stack(blocks, mode="reversible"):
    """Builds a stack of copies of blocks, to be run in a mode or as a Sequential."""
    blocks = nnx.clone(nnx.List(blocks))
    if mode == "block":
        (block,) = blocks
        return block
    if mode == "sequential":
        return ReversibleSequential(blocks)
    return ReversibleSequence(blocks, **modes(len(blocks))[mode])


def blocks_of(model):
    if isinstance(model, ReversibleCouplingBlock):
        return [model]
    return [model[i] for i in range(len(model))]


def call(model, x, *args, **kwargs):
    return model(x, *args, **kwargs)


def inverse(model, y, *args, **kwargs):
    return model.inverse(y, *args, **kwargs)


def oracle(model, x, *args, **kwargs):
    """The stored stack in plain Python, under ordinary autodiff."""
    for block in blocks_of(model):
        x1, x2 = jnp.split(x, 2, block.axis)
        x1 = x1 + block.f(x2, *args, **kwargs)
        x2 = x2 + block.g(x1, *args, **kwargs)
        x = jnp.concatenate([x1, x2], block.axis)
    return x


def oracle_inverse(model, y, *args, **kwargs):
    for block in reversed(blocks_of(model)):
        y1, y2 = jnp.split(y, 2, block.axis)
        y2 = y2 - block.g(y1, *args, **kwargs)
        y1 = y1 - block.f(y2, *args, **kwargs)
        y = jnp.concatenate([y1, y2], block.axis)
    return y


def pure(model, run=call):
    """Takes a model apart: a function of parameters, other variables, input, context.

    The function returns the output and the other variables as the call leaves them.
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def function(params, rest, x, args, kwargs):
        fresh = nnx.merge(graphdef, params, rest, copy=True)
        y = run(fresh, x, *args, **kwargs)
        return y, nnx.state(fresh, nnx.Not(nnx.Param))

    return function, params, rest


def per_block(model, filter_, *states):
    """Returns variables of each block, however the model stores them."""
    filled = nnx.merge(nnx.graphdef(model), *(jax.tree.map(host, s) for s in states))
    return [nnx.to_pure_dict(nnx.state(b, filter_)) for b in blocks_of(filled)]


def host(a):
    """Returns an array, or a key's data, as a NumPy array: slices compile nothing."""
    is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(a) if is_key else a)


def planned(compiled):
    """What the compiler plans to allocate."""
    plan = compiled.memory_analysis()
    assert plan is not None
    return plan


def square(y):
    return jnp.sum(jnp.square(y)) / y.size


def train(model, x, *args, run=call, loss=square, transform=jax.jit, **kwargs):
    """Makes one forward and backward pass.

    Returns the output; for each block the gradients of its parameters, and its other
    variables after the pass; the gradients of the input and of float context.
    """
    function, params, rest = pure(model, run)

    def step(params, rest, x, args, kwargs):
        def evaluate(params, x, context):
            y, after = function(params, rest, x, *context)
            return loss(y), (y, after)

        (d_params, d_x, d_context), (y, after) = jax.grad(
            evaluate, (0, 1, 2), has_aux=True, allow_int=True
        )(params, x, (args, kwargs))
        d_context = [
            ct for ct in jax.tree.leaves(d_context) if ct.dtype != jax.dtypes.float0
        ]
        return y, d_params, d_x, d_context, after

    y, d_params, d_x, d_context, after = transform(step)(params, rest, x, args, kwargs)
    return {
        "y": y,
        "parameters": per_block(model, nnx.Param, d_params, rest),
        "input": d_x,
        "context": d_context,
        "state": per_block(model, nnx.Not(nnx.Param), params, after),
    }


def floats(tree):
    """The floating-point leaves of a tree, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in leaves
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


def assert_close(actual, expected, rtol=1e-9):
    """Every leaf agrees relatively; zeros to the last bits of the largest leaf."""
    actual, expected = floats(actual), floats(expected)
    largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in expected.values())
    assert largest > 0
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=1e-12 * largest)
