"""A causal byte-level Transformer on a reversible stack.

Bytes come in, and for every position the logits of the next byte come out:

    x = embedding of the byte + embedding of the position      [batch, time, width]
    (x1, x2) = the two halves of x, the two streams
    x1 = x1 + attention(x2)     |  `depth` times; from the streams after a block
    x2 = x2 + mlp(x1)           |  the streams before it can be computed again
    logits = head(normalized (x1, x2))                         [batch, time, 256]

The backward pass therefore needs the last streams only, and `revjax` keeps no others.
The branches work on one stream, so they are `width / 2` channels wide.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from revjax import (
    Additive,
    Coupling,
    ExactAdditive,
    ReversibleCouplingBlock,
    ReversibleSequence,
)

VOCABULARY = 256  # a token is a byte
MODES = ("reversible", "anchored", "stored", "checkpoint")
PRECISIONS = ("float32", "bfloat16")
STREAMS = ("float", "exact")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """What the model is, and how its stack runs.

    `mode` changes where the backward pass takes its activations from, and no
    parameter: "reversible" computes them back from the last output, "anchored" keeps
    every `anchor_every`-th block's and recomputes the others, "stored" keeps them all,
    and "checkpoint" keeps every block's input, by `jax.checkpoint` and no `revjax`.
    """

    depth: int = 16  # blocks; each is one attention and one MLP
    width: int = 128  # channels of both streams together
    heads: int = 2  # attention heads; each has width / 2 / heads channels
    context: int = 64  # the longest text, in bytes, that the model looks back on
    dropout: float = 0.0  # share of every branch's output that is dropped in training
    mode: str = "reversible"
    anchor_every: int = 4  # blocks from one anchor to the next; used by "anchored"
    precision: str = "float32"  # of the branches; streams are float32 or wider
    streams: str = "float"  # or "exact": in fixed point, undone bit for bit

    @property
    def dtype(self) -> Any:
        """The dtype that the branches compute in."""
        return jnp.dtype(self.precision)

    @property
    def coupling(self) -> Coupling:
        """How the streams are held, and changed."""
        if self.streams == "exact":
            return ExactAdditive(fraction_bits=20)  # up to 2,000, in steps of 1e-6
        return Additive(dtype=jnp.promote_types(self.dtype, jnp.float32))


class Attention(nnx.Module):
    """Normalize, look at all earlier positions, project back."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        size, dtype = config.width // 2, config.dtype
        self.heads = config.heads
        self.norm = nnx.LayerNorm(size, use_bias=False, dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(size, 3 * size, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = output_layer(size, config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        """The update of the other stream, [batch, time, width / 2]."""
        batch, time, size = x.shape
        qkv = self.qkv(self.norm(x))
        q, k, v = jnp.split(
            qkv.reshape(batch, time, 3 * self.heads, size // self.heads), 3, axis=2
        )
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        update = self.out(seen.reshape(batch, time, size))
        return self.dropout(update, deterministic=not train)


class MLP(nnx.Module):
    """Normalize, widen four times, bend, project back."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        size, dtype = config.width // 2, config.dtype
        self.norm = nnx.LayerNorm(size, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(size, 4 * size, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = output_layer(4 * size, config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        """The update of the other stream, [batch, time, width / 2]."""
        update = self.out(jax.nn.gelu(self.up(self.norm(x))))
        return self.dropout(update, deterministic=not train)


def output_layer(
    inputs: int, config: TransformerConfig, *, rngs: nnx.Rngs
) -> nnx.Linear:
    """The last layer of a branch, small enough that deep stacks start out tame.

    A stream is added to `depth` times. With a variance of about 1 / depth each, the
    sum of the updates is as large as one of them would be, at every depth.
    """
    return nnx.Linear(
        inputs,
        config.width // 2,
        use_bias=False,
        dtype=config.dtype,
        kernel_init=nnx.initializers.variance_scaling(
            1.0 / config.depth, "fan_in", "truncated_normal"
        ),
        rngs=rngs,
    )


class CheckpointedStack(nnx.Module):
    """The yardstick: the same blocks, each under `jax.checkpoint`, in one scan."""

    def __init__(self, make_block: Any, depth: int, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.split_rngs(splits=depth)(nnx.vmap(make_block))(rngs)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        """Runs the blocks; the backward pass has every block's input, no more."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(streams: Any, block: ReversibleCouplingBlock) -> Any:
            x1, x2 = streams
            x1 = x1 + block.f(x2, train=train).astype(x1.dtype)
            x2 = x2 + block.g(x1, train=train).astype(x2.dtype)
            return x1, x2

        return jnp.concatenate(run(tuple(jnp.split(x, 2, axis=-1)), self.blocks), -1)


class Transformer(nnx.Module):
    """Embedding, the stack, head."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width = config.width
        # The byte is as large as all updates of its stream together, so that the head
        # sees it from the first step on; the position is a tenth of that.
        normal = nnx.initializers.normal
        self.byte_embedding = nnx.Embed(
            VOCABULARY, width, embedding_init=normal(1.0), rngs=rngs
        )
        self.position_embedding = nnx.Embed(
            config.context, width, embedding_init=normal(0.1), rngs=rngs
        )

        def make_block(rngs: nnx.Rngs) -> ReversibleCouplingBlock:
            return ReversibleCouplingBlock(
                width,
                F=Attention(config, rngs=rngs),
                G=MLP(config, rngs=rngs),
                coupling=config.coupling,
                rngs=rngs,
            )

        if config.mode == "checkpoint":
            self.stack = CheckpointedStack(make_block, config.depth, rngs=rngs)
        else:
            self.stack = ReversibleSequence.create(
                make_block,
                config.depth,
                config.anchor_every if config.mode == "anchored" else 0,
                store_activations=config.mode == "stored",
                rngs=rngs,
            )
        self.norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(
            width,
            VOCABULARY,
            use_bias=False,
            kernel_init=normal(0.02),  # near log(256) at the start
            rngs=rngs,
        )

    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        """Logits of the next byte, float32[batch, time, 256], for int32[batch, time].

        `train` turns dropout on.
        """
        positions = self.position_embedding(jnp.arange(tokens.shape[1]))
        x = self.byte_embedding(tokens) + positions[None]
        return self.head(self.norm(self.stack(x, train=train)))


def next_byte_loss(
    params: Any, other: Any, graphdef: Any, tokens: jax.Array, *, train: bool
) -> tuple[jax.Array, Any]:
    """Mean cross-entropy of bytes 1, 2, ... of `tokens` given those before, in nats.

    The model comes in the parts of `nnx.split(model, nnx.Param, ...)`, so that `params`
    alone can be differentiated. Returns the loss and what `other` is afterwards.
    """
    model = nnx.merge(graphdef, params, other, copy=True)
    logits = model(tokens[:, :-1], train=train)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(), nnx.split(model, nnx.Param, ...)[2]


def generate(
    model: Transformer, prompt: jax.Array, length: int, temperature: float, key: Any
) -> jax.Array:
    """Writes `length` bytes after `prompt`, int32[n] with n from 1 to the context.

    `temperature` 0 takes the likeliest byte every time; 1 draws from the model's
    distribution. Only the last `context` bytes are looked at. The window keeps one
    size, so that the program compiles once: what lies after the text is zeros, which
    a causal model cannot see.
    """
    size = model.config.context
    graphdef, state = nnx.split(model)

    def write_one(carry: Any, key: Any) -> Any:
        window, filled = carry
        model = nnx.merge(graphdef, state, copy=True)
        logits = model(window[None])[0, filled - 1]
        if temperature == 0:
            byte = jnp.argmax(logits)
        else:
            byte = jax.random.categorical(key, logits / temperature)
        byte = byte.astype(window.dtype)
        window = jnp.where(filled == size, jnp.roll(window, -1), window)
        window = window.at[jnp.minimum(filled, size - 1)].set(byte)
        return (window, jnp.minimum(filled + 1, size)), byte

    window = jnp.zeros(size, jnp.int32).at[: len(prompt)].set(prompt)
    start = (window, jnp.asarray(len(prompt), jnp.int32))
    return jax.lax.scan(write_one, start, jax.random.split(key, length))[1]
