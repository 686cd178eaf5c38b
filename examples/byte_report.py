"""What `byte_lm.py` shows: scratch memory, metrics, plots and tables."""

from __future__ import annotations

import concurrent.futures
import csv
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from matplotlib.figure import Figure
from rich.table import Table

from transformer import Transformer, TransformerConfig, next_byte_loss

COLUMNS: tuple[str, ...] = (
    "step",
    "loss",  # nats per byte of the training batch
    "bits_per_byte",  # the same in bits
    "learning_rate",
    "gradient_norm",  # before clipping
    "held_out_bits_per_byte",  # empty where it was not measured
    "seconds",  # spent in training steps so far, over all sessions
    "bytes_per_second",  # of this step
)
MEANING = {
    "reversible": "computed back (reversible)",
    "anchored": "partly kept (anchored)",
    "checkpoint": "recomputed (jax.checkpoint)",
    "stored": "all kept (stored)",
}

Scratch = dict[str, dict[int, int]]  # bytes, by mode and depth


def lower_gradient(config: TransformerConfig, batch: int) -> Any:
    """The gradient of the loss, traced for shapes alone: no array is made."""

    def init() -> Any:
        return nnx.split(Transformer(config, rngs=nnx.Rngs(0)), nnx.Param, ...)

    graphdef, params, other = nnx.eval_shape(init)
    tokens = jax.ShapeDtypeStruct((batch, config.context + 1), jnp.int32)

    def gradient(params: Any, other: Any, tokens: jax.Array) -> Any:
        compute = jax.value_and_grad(next_byte_loss, has_aux=True)
        return compute(params, other, graphdef, tokens, train=True)

    return jax.jit(gradient).lower(params, other, tokens)


def scratch_memory(config: TransformerConfig, batch: int) -> Scratch:
    """Scratch bytes of the loss's gradient, as XLA plans them, at two depths.

    The depths are the model's own and four times that. The gradients are compiled and
    never run, so the compiler is told to spend no effort on fast machine code: it plans
    the same memory in half the time.
    """
    modes = ["reversible", "checkpoint", "stored"]
    modes += [config.mode] if config.mode not in modes else []
    keys = [(mode, n * config.depth) for mode in modes for n in (1, 4)]
    lowered = [
        lower_gradient(dataclasses.replace(config, mode=mode, depth=depth), batch)
        for mode, depth in keys
    ]

    def planned(lowered: Any) -> int:
        options = {"xla_backend_optimization_level": 0}
        compiled = lowered.compile(compiler_options=options)
        return compiled.memory_analysis().temp_size_in_bytes

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        sizes = dict(zip(keys, pool.map(planned, lowered), strict=True))
    return {
        mode: {depth: sizes[m, depth] for m, depth in keys if m == mode}
        for mode in modes
    }


def memory_table(scratch: Scratch) -> Table:
    """The figures of `scratch_memory` for the terminal."""
    table = Table(title="This program's own scratch memory, as XLA plans it")
    table.add_column("activations are")
    for depth in scratch["reversible"]:
        table.add_column(f"{depth} blocks", justify="right")
    for mode, sizes in scratch.items():
        cells = [f"{size / 2**20:,.1f} MiB" for size in sizes.values()]
        table.add_row(MEANING[mode], *cells)
    return table


def plot_memory(path: pathlib.Path, scratch: Scratch) -> None:
    """Bars of scratch memory, a group for each depth."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    width, depths = 0.8 / len(scratch), list(scratch["reversible"])
    for i, (mode, sizes) in enumerate(scratch.items()):
        places = [group + (i + 0.5) * width - 0.4 for group in range(len(depths))]
        heights = [size / 2**20 for size in sizes.values()]
        bars = axes.bar(places, heights, width, label=MEANING[mode])
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    axes.set_xticks(range(len(depths)), [f"{depth} blocks" for depth in depths])
    axes.set(ylabel="scratch memory, MiB", title="One gradient, as XLA plans it")
    axes.legend(title="activations are")
    figure.savefig(path, dpi=150)


def keep_rows(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """The rows of the metrics up to `step`; rewrites the file without later ones."""
    path.touch()
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return rows


def add_row(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Appends one row to the metrics."""
    with path.open("a", newline="") as file:
        csv.DictWriter(file, COLUMNS).writerow(row)


def plot_loss(
    path: pathlib.Path, rows: list[dict[str, Any]], counted: dict[str, float]
) -> None:
    """Bits per byte over the steps, with the models that count as lines."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = [int(row["step"]) for row in rows]
    bits = [float(row["bits_per_byte"]) for row in rows]
    axes.plot(steps, bits, alpha=0.6, label="training batch")
    held = [row for row in rows if row["held_out_bits_per_byte"] != ""]
    steps = [int(row["step"]) for row in held]
    bits = [float(row["held_out_bits_per_byte"]) for row in held]
    axes.plot(steps, bits, "o-", label="held out")
    for i, (name, value) in enumerate(counted.items()):
        axes.axhline(
            value, color=f"C{i + 2}", linestyle="--", label=f"{name}, held out"
        )
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, 8.5))
    axes.legend()
    figure.savefig(path, dpi=150)


def final_table(bits: dict[str, float], seconds: float, speed: float) -> Table:
    """Held-out bits per byte of all models, and how long the last of them took."""
    table = Table(title="On held-out text")
    table.add_column("model")
    table.add_column("bits per byte", justify="right")
    for name, value in bits.items():
        table.add_row(name, f"{value:.3f}")
    table.caption = f"{seconds:,.0f} seconds in all, {speed:,.0f} bytes per second"
    return table
