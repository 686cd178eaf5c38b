"""Measures what rounding in the reconstruction does to the gradients of a deep stack.

    python examples/drift.py

A reversible stack in floating point gets its activations back up to rounding, and the
error, the drift, builds up from block to block. This script prints two tables. One is
over depth, dtype and weight scale, with the additive coupling and with exact streams;
the other over depth, dtype and coupling. Each row tells the drift at the stack's input,
and how far gradients are from those of the same stack in float64 with stored
activations: for the parameters, for the input, and, beside them, for the same stack
with stored activations in the same precision, which has rounding errors of its own.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from revjax import (
    Additive,
    Affine,
    Coupling,
    ExactAdditive,
    Leapfrog,
    Momentum,
    Scaled,
    reversible_scan,
)

WIDTH, BATCH = 64, 64  # of one stream; rows
# name: (dtype of the branches, dtype of the streams)
PRECISIONS = {
    "float32": (jnp.float32, jnp.float32),
    "bfloat16 branches": (jnp.bfloat16, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
}
EXACT = ExactAdditive(fraction_bits=20)
LAWS = {
    "`Additive()`": Additive(),
    "`ExactAdditive(20)`": EXACT,
    "`Scaled(0.5)`": Scaled(0.5),
    "`Leapfrog(1.0)`": Leapfrog(1.0),
    "`Affine(0.1)`": Affine(0.1),
    "`Affine(1.0)`": Affine(1.0),
    "`Momentum(0.99)`": Momentum(0.99),
    "`Momentum(0.9)`": Momentum(0.9),
}


def linear(weights: Array, x: Array) -> Array:
    """One matrix product, as the seed of many claims about exactness uses it."""
    return x.astype(weights.dtype) @ weights[0]


def mlp(weights: Array, x: Array) -> Array:
    """A pre-norm MLP: two matrix products with a nonlinearity between them."""
    mean_square = jnp.mean(x**2, axis=-1, keepdims=True)
    x = (x * jax.lax.rsqrt(mean_square + 1e-6)).astype(weights.dtype)
    return jax.nn.gelu(x @ weights[0]) @ weights[1]


def scale_and_shift(weights: Array, x: Array) -> tuple[Array, Array]:
    """The same MLP for a coupling that takes a pair: the shift is the scale, turned."""
    h = mlp(weights, x)
    return h, jnp.roll(h, 1, -1)


def gradients(
    branch, weights, streams, inner, coupling, **mode
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the gradients of parameters and input, as float64 vectors, and the drift.

    For the drift there is a second half of the stack, which is not differentiated: what
    is recovered at its beginning is compared with the anchor there.
    """
    if coupling.arity == 2:
        branch = scale_and_shift

    def stack(weights: tuple, streams: tuple, **mode) -> Any:
        params = jax.tree.map(lambda w: w.astype(inner), weights)
        return reversible_scan(
            branch, branch, params, streams, coupling=coupling, **mode
        )

    def loss(weights: tuple, streams: tuple) -> Array:
        y = stack(weights, streams, **mode)
        # Rows of different weight; a mean square would hide small errors.
        rows = jnp.linspace(0.5, 1.5, BATCH, dtype=y[0].dtype)[:, None]
        return sum((jnp.sum(rows * jnp.sin(s)) for s in y), jnp.zeros((), y[0].dtype))

    wanted = jax.jit(jax.grad(loss, argnums=(0, 1)))(weights, streams)
    params, x = (
        np.concatenate(
            [np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(tree)]
        )
        for tree in wanted
    )
    return params, x, 0.0 if mode else drift(stack, weights, streams)


def drift(stack: Callable[..., Any], weights: tuple, streams: tuple) -> float:
    """Returns the relative error of what comes back after as many blocks as there are.

    The stack runs twice over, with an anchor in the middle; the blocks after the anchor
    are those before it.
    """
    depth = weights[0].shape[0]
    twice = jax.tree.map(lambda w: jnp.concatenate([w, w]), weights)

    def loss(meter: Array) -> Array:
        options = {"anchor_every": depth, "between_anchors": "invert", "drift": meter}
        y1, y2 = stack(twice, streams, **options)
        return jnp.sum(jnp.sin(y1)) + jnp.sum(jnp.sin(y2))

    return float(jax.jit(jax.grad(loss))(jnp.zeros(2, jnp.float32))[0])


def error(found: np.ndarray, true: np.ndarray) -> float:
    """Returns the distance relative to the size of the truth."""
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


class Row(NamedTuple):
    """What is measured; all errors are relative."""

    drift: float
    parameters: float
    anchored: float
    stored: float
    input: float
    input_stored: float
    lost: float  # by the walk back: reversible against stored in the same precision

    @property
    def one_percent(self) -> float:
        """The drift at which the walk loses 1 % of the gradient, in proportion."""
        return 0.01 * self.drift / self.lost if self.lost else 0.0


@jax.enable_x64(True)
def measure(branch, depth: int, gain: float, precision: str, law: Coupling) -> Row:
    """Measures one row of a table."""
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
    inner, outer = PRECISIONS[precision]
    narrow = tuple(s.astype(outer) for s in streams)
    run = functools.partial(gradients, branch, weights, narrow, inner)
    float_law = Additive() if law == EXACT else law
    true = gradients(
        branch, weights, streams, jnp.float64, float_law, store_activations=True
    )
    found = run(law)
    stored = run(law, store_activations=True)
    anchored = run(law, anchor_every=8, between_anchors="invert")
    return Row(
        drift=found[2],
        parameters=error(found[0], true[0]),
        anchored=error(anchored[0], true[0]),
        stored=error(stored[0], true[0]),
        input=error(found[1], true[1]),
        input_stored=error(stored[1], true[1]),
        lost=error(found[0], stored[0]),
    )


HEADER = [
    "depth", "drift", "parameters, reversible", "parameters, anchors every 8, invert",
    "parameters, stored", "input, reversible", "input, stored", "lost by the walk",
    "drift that loses 1 %",
]  # fmt: skip


def table(names: list[str], rows: list[tuple[list[str], Row]]) -> str:
    """Returns a table in Markdown."""
    lines = [[*names, *HEADER], ["---"] * (len(names) + len(HEADER))]
    # A value that does not fit makes exact streams NaN.
    shown = "does not fit"
    for words, row in rows:
        cells = [shown if np.isnan(v) else f"{v:.1e}" for v in row]
        # Where rounding alone differs there is nothing to tell.
        told = row.drift > 0 and 1e-6 < row.lost < 0.5
        lines.append([*words, *cells, f"{row.one_percent:.0e}" if told else "-"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: list[str] | None = None) -> None:
    """Prints the tables as Markdown."""
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
    console = Console(width=140)
    scales = [
        (branch, precision, gain, law, depth)
        for branch in (linear, mlp)
        for precision in options.precisions
        for gain in options.gains
        for law in ("`Additive()`", "`ExactAdditive(20)`")
        for depth in options.depths
        # Without a norm larger weights overflow: the streams grow by a power of depth.
        if branch is mlp or (precision == "float32" and gain <= 0.3)
        if law == "`Additive()`" or precision != "bfloat16"
    ]
    laws = [
        (mlp, precision, 1.0, law, depth)
        for precision in options.precisions
        if precision != "bfloat16"
        for law in list(LAWS)[2:]
        for depth in options.depths
    ]
    measured = [
        measure(branch, depth, gain, precision, LAWS[law])
        for branch, precision, gain, law, depth in track(
            [*scales, *laws], "measuring", console=console
        )
    ]
    over_scales = [
        (["linear" if b is linear else "MLP", p, f"{gain:g}", law, f"{depth}"], row)
        for (b, p, gain, law, depth), row in zip(scales, measured, strict=False)
    ]
    over_laws = [
        ([law, precision, f"{depth}"], row)
        for (_, precision, _, law, depth), row in zip(
            laws, measured[len(scales) :], strict=True
        )
    ]
    text = "\n\n".join(
        [
            table(["branch", "precision", "weight scale", "coupling"], over_scales),
            table(["coupling", "precision"], over_laws),
        ]
    )
    if options.plain:
        print(text)
    else:
        console.print(Markdown(text))


if __name__ == "__main__":
    main()
