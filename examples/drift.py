"""Measures what rounding in the reconstruction does to the gradients of a deep stack.

    python examples/drift.py

A reversible stack in floating point gets its activations back up to rounding, and the
error builds up from block to block. This script prints, over depth and weight scale,
how far the gradients are from those of the same stack in float64 with stored
activations: for the parameters, for the input, and, beside them, for the same stack
with stored activations in the same precision, which has rounding errors of its own.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from revjax import Additive, reversible_scan

WIDTH, BATCH = 64, 64  # of one stream; rows
# name: (dtype of the branches, dtype of the streams)
PRECISIONS = {
    "float32": (jnp.float32, jnp.float32),
    "bfloat16 branches": (jnp.bfloat16, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
}


def linear(weights: Array, x: Array) -> Array:
    """One matrix product, as the seed of many claims about exactness uses it."""
    return x.astype(weights.dtype) @ weights[0]


def mlp(weights: Array, x: Array) -> Array:
    """A pre-norm MLP: two matrix products with a nonlinearity between them."""
    mean_square = jnp.mean(x**2, axis=-1, keepdims=True)
    x = (x * jax.lax.rsqrt(mean_square + 1e-6)).astype(weights.dtype)
    return jax.nn.gelu(x @ weights[0]) @ weights[1]


def gradients(branch, weights, streams, precision, **mode) -> tuple[np.ndarray, ...]:
    """Returns the gradients of parameters and input, each as one float64 vector."""
    inner, outer = precision
    coupling = Additive(dtype=outer)

    def loss(weights: tuple[Array, Array], streams: tuple[Array, Array]) -> Array:
        params = jax.tree.map(lambda w: w.astype(inner), weights)
        y = reversible_scan(branch, branch, params, streams, coupling=coupling, **mode)
        # Rows of different weight; a mean square would hide small errors.
        rows = jnp.linspace(0.5, 1.5, BATCH, dtype=outer)[:, None]
        return sum((jnp.sum(rows * jnp.sin(s)) for s in y), jnp.zeros((), outer))

    wanted = jax.jit(jax.grad(loss, argnums=(0, 1)))(weights, streams)
    return tuple(
        np.concatenate(
            [np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(tree)]
        )
        for tree in wanted
    )


def error(found: np.ndarray, true: np.ndarray) -> float:
    """Returns the distance relative to the size of the truth."""
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


@jax.enable_x64(True)
def row(branch, depth: int, gain: float, precision: str) -> list[str]:
    """Measures one row of the table."""
    key = jax.random.key(depth)
    size = gain / WIDTH**0.5
    weights = tuple(
        size * jax.random.normal(k, (depth, 2, WIDTH, WIDTH), jnp.float64)
        for k in jax.random.split(key)
    )
    streams = tuple(
        jax.random.normal(k, (BATCH, WIDTH), jnp.float64)
        for k in jax.random.split(jax.random.fold_in(key, 1))
    )
    run = functools.partial(gradients, branch, weights, streams)
    exact = run((jnp.float64, jnp.float64), store_activations=True)
    found = run(PRECISIONS[precision])
    stored = run(PRECISIONS[precision], store_activations=True)
    anchored = run(PRECISIONS[precision], anchor_every=8, between_anchors="invert")
    values = [
        error(found[0], exact[0]),
        error(anchored[0], exact[0]),
        error(stored[0], exact[0]),
        error(found[1], exact[1]),
        error(stored[1], exact[1]),
    ]
    name = "linear" if branch is linear else "MLP"
    return [name, precision, f"{depth}", f"{gain:g}", *(f"{v:.1e}" for v in values)]


HEADER = [
    "branch",
    "precision",
    "depth",
    "weight scale",
    "parameters, reversible",
    "parameters, anchors every 8, invert",
    "parameters, stored",
    "input, reversible",
    "input, stored",
]


def main(argv: list[str] | None = None) -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--gains", type=float, nargs="+", default=[0.3, 1.0, 3.0])
    parser.add_argument(
        "--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS)
    )
    parser.add_argument("--plain", action="store_true", help="Markdown as it is")
    options = parser.parse_args(argv)
    console = Console(width=120)
    cases = [
        (branch, depth, gain, precision)
        for branch in (linear, mlp)
        for precision in options.precisions
        for gain in options.gains
        for depth in options.depths
        # Without a norm larger weights overflow: the streams grow by a power of depth.
        if branch is mlp or (precision == "float32" and gain <= 0.3)
    ]
    rows = [row(*case) for case in track(cases, "measuring", console=console)]
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    if options.plain:
        print(table)
    else:
        console.print(Markdown(table))


if __name__ == "__main__":
    main()
