"""Trains the byte-level model on float streams and on exact ones, side by side.

    python examples/exact.py                    # a quarter of an hour on two cores
    python examples/exact.py --depths 16 --steps 50

For 16 and 128 blocks, with float32 and bfloat16 branches, it prints how the loss falls
with streams that are floats (`Additive`) and with streams in fixed point
(`ExactAdditive`). At the end of each run it compares the gradient of one batch with
that of the same model in float64 with stored activations, and looks how large the
streams are.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.markdown import Markdown

import byte_data
from revjax import ReversibleSequence
from transformer import STREAMS, Transformer, TransformerConfig, next_byte_loss

BATCH, CURVE = 16, 4  # rows; how many points of the loss are shown


def gradient(config: TransformerConfig, params, tokens) -> np.ndarray:
    """Returns the gradient of the loss of one batch, as one float64 vector."""
    graphdef, _, other = nnx.split(
        Transformer(config, rngs=nnx.Rngs(0)), nnx.Param, ...
    )
    loss = functools.partial(next_byte_loss, train=True)
    grads, _ = jax.jit(jax.grad(loss, has_aux=True), static_argnums=2)(
        params, other, graphdef, tokens
    )
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(grads)]
    return np.concatenate(leaves)


def error(config: TransformerConfig, params, tokens) -> float:
    """Returns how far the gradient is from that in float64, relatively."""
    found = gradient(config, params, tokens)
    reference = dataclasses.replace(
        config, precision="float64", streams="float", mode="stored"
    )
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), params)
        true = gradient(reference, wide, tokens)
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def largest(model: Transformer, tokens) -> float:
    """Returns the largest magnitude in a stream, after any block."""
    x = model.byte_embedding(tokens) + model.position_embedding(
        jnp.arange(tokens.shape[1])
    )
    sizes, stack = [jnp.max(jnp.abs(x))], cast(ReversibleSequence, model.stack)
    for i in range(len(stack)):
        x = stack[i](x)
        sizes.append(jnp.max(jnp.abs(x)))
    return float(max(sizes))


def train(config: TransformerConfig, steps: int, text: np.ndarray) -> list[str]:
    """Trains one model; returns a row of the table."""
    graphdef, params, other = nnx.split(
        Transformer(config, rngs=nnx.Rngs(0)), nnx.Param, ...
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3, b2=0.95))
    moments = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, moments, tokens):
        loss = functools.partial(next_byte_loss, train=True)
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(
            params, other, graphdef, tokens
        )
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    losses = []
    for index in range(steps):
        tokens = byte_data.batch_at(text, 0, index, BATCH, config.context)
        params, moments, value = step(params, moments, tokens)
        losses.append(float(value) / math.log(2))
    quarters = np.array_split(losses, CURVE)
    tokens = byte_data.batch_at(text, 0, steps, BATCH, config.context)
    model = nnx.merge(graphdef, params, other)
    return [
        f"{config.depth}",
        config.precision,
        config.streams,
        *(f"{np.mean(quarter):.3f}" for quarter in quarters),
        f"{error(config, params, tokens):.1e}",
        f"{largest(model, tokens[:, :-1]):.0f}",
    ]


def main(argv: list[str] | None = None) -> list[list[str]]:
    """Prints the table as Markdown; returns its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--plain", action="store_true", help="Markdown as it is")
    options = parser.parse_args(argv)
    if options.steps < CURVE:
        parser.error(f"--steps must be at least {CURVE}, to show a curve")
    console = Console(width=120)
    text = byte_data.read_text(None)
    rows = []
    for depth in options.depths:
        for precision in ("float32", "bfloat16"):
            for streams in STREAMS:
                config = TransformerConfig(
                    depth=depth,
                    width=options.width,
                    precision=precision,
                    streams=streams,
                )
                rows.append(train(config, options.steps, text))
                console.print(" ".join(rows[-1]), style="dim")
    quarters = [f"bits per byte, quarter {i + 1}" for i in range(CURVE)]
    header = [
        "blocks", "branches", "streams", *quarters, "gradient error", "largest stream",
    ]  # fmt: skip
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    if options.plain:
        print(table)
    else:
        console.print(Markdown(table))
    return rows


if __name__ == "__main__":
    main()
