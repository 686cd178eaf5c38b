"""Times a training step of a reversible stack beside the ordinary ways of running it.

    python examples/benchmark.py

The same stack of two-matrix MLP blocks runs as a reversible stack, as a `lax.scan` over
`jax.checkpoint` and as a plain `lax.scan`. All of them take turns in one process, round
after round, and what is printed are ratios within a round: absolute times of a
shared machine say little. Scratch memory is what the compiler plans, and exact.
"""

import argparse
import functools
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

import revjax

Params = tuple[tuple[Array, Array], tuple[Array, Array]]
Streams = tuple[Array, Array]


def branch(params: tuple[Array, Array], x: Array) -> Array:
    """Two matrix products: [batch, width] -> [batch, hidden] -> [batch, width]."""
    up, down = params
    return jax.nn.gelu(x @ up) @ down


def block(streams: Streams, params: Params) -> tuple[Streams, None]:
    """One additive block, as the body of a `lax.scan`."""
    x1, x2 = streams
    y1 = x1 + branch(params[0], x2)
    y2 = x2 + branch(params[1], y1)
    return (y1, y2), None


def stored(params: Params, streams: Streams) -> Streams:
    """Keeps all activations."""
    return lax.scan(block, streams, params)[0]


def checkpointed(params: Params, streams: Streams) -> Streams:
    """Keeps the input of each block and runs the block again."""
    return lax.scan(jax.checkpoint(block, prevent_cse=False), streams, params)[0]


def stack(**mode) -> Callable[[Params, Streams], Streams]:
    """Returns revjax's stack in one of its modes."""
    return functools.partial(revjax.reversible_scan, branch, branch, **mode)


def ways(depth: int) -> dict[str, Callable[[Params, Streams], Streams]]:
    """Everything that is compared."""
    every = max(1, round(depth**0.5))
    return {
        "scan of jax.checkpoint": checkpointed,
        "reversible": stack(),
        "reversible, exact streams": stack(coupling=revjax.ExactAdditive(20)),
        f"anchors every {every}, recompute": stack(anchor_every=every),
        f"anchors every {every}, invert": stack(
            anchor_every=every, between_anchors="invert"
        ),
        "store_activations": stack(store_activations=True),
        "scan, all stored": stored,
    }


def gradient(run: Callable[[Params, Streams], Streams]) -> jax.stages.Wrapped:
    """Returns the compiled gradient of a loss with respect to parameters and input."""

    def loss(params: Params, streams: Streams) -> Array:
        y1, y2 = run(params, streams)
        return jnp.sum(y1**2) + jnp.sum(y2**2)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


def scratch_mib(compiled: jax.stages.Compiled) -> float:
    """Returns the scratch memory that the compiler plans; NaN where it does not say."""
    plan = compiled.memory_analysis()
    return float("nan") if plan is None else plan.temp_size_in_bytes / 2**20


def inputs(depth: int, width: int, batch: int) -> tuple[Params, Streams]:
    """Random parameters, hidden layers four times as wide, and streams."""
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = ((depth, width, 4 * width), (depth, 4 * width, width))
    f_up, f_down, g_up, g_down = (
        0.3 * jax.random.normal(k, s) / s[1] ** 0.5
        for k, s in zip(keys, shapes + shapes, strict=False)
    )
    x1, x2 = (jax.random.normal(k, (batch, width)) for k in keys[4:])
    return ((f_up, f_down), (g_up, g_down)), (x1, x2)


def seconds(call: Callable[[], object]) -> float:
    """Returns how long one call takes until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def compare_steps(console: Console, options: argparse.Namespace) -> None:
    """Prints ratios of step time, and scratch memory."""
    depth = options.depth
    params, streams = inputs(depth, options.width, options.batch)
    compiled = {
        name: gradient(run).lower(params, streams).compile()
        for name, run in track(ways(depth).items(), "compiling", console=console)
    }
    calls = {n: functools.partial(c, params, streams) for n, c in compiled.items()}
    for call in calls.values():
        seconds(call)
    rounds = [
        {name: seconds(call) for name, call in calls.items()}
        for _ in track(range(options.rounds), "measuring", console=console)
    ]
    table = Table(
        title=f"{depth} blocks, width 2 x {options.width}, {options.batch} rows"
    )
    columns = "step / checkpoint", "min", "max", "/ reversible", "/ stored", "scratch"
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    first, last = next(iter(calls)), list(calls)[-1]
    for name, program in compiled.items():
        ratios = [r[name] / r[first] for r in rounds]
        others = (
            statistics.median(r[name] / r[other] for r in rounds)
            for other in ("reversible", last)
        )
        table.add_row(
            name,
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
            *(f"{ratio:.2f}" for ratio in others),
            f"{scratch_mib(program):,.1f} MiB",
        )
    console.print(table)
    spread = max(r[first] for r in rounds) / min(r[first] for r in rounds)
    if spread > 1.3:
        console.print(
            f"noisy: the same step took up to {spread:.2f} times as long as at best"
        )


def memory_against_depth(console: Console, options: argparse.Namespace) -> None:
    """Prints and draws what the compiler plans for one gradient, beyond its arguments.

    The arrays are abstract: nothing of that size is allocated.
    """
    depths = (8, 64, 512)
    kinds = {
        "reversible": stack(),
        "scan of jax.checkpoint": checkpointed,
        "scan, all stored": stored,
    }
    scratch: dict[str, list[float]] = {name: [] for name in kinds}
    for depth in track(depths, "compiling", console=console):
        arrays = jax.eval_shape(
            functools.partial(inputs, depth, options.width, options.batch)
        )
        for name, run in kinds.items():
            compiled = gradient(run).lower(*arrays).compile()
            scratch[name].append(scratch_mib(compiled))
    table = Table(
        title=f"scratch in MiB, width 2 x {options.width}, {options.batch} rows"
    )
    table.add_column("blocks", justify="right")
    for name in kinds:
        table.add_column(name, justify="right")
    for i, depth in enumerate(depths):
        table.add_row(str(depth), *(f"{scratch[name][i]:,.1f}" for name in kinds))
    console.print(table)
    if options.plot is None:
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in kinds:
        axes.plot(depths, scratch[name], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="blocks", ylabel="scratch memory / MiB")
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.minorticks_off()
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(options.plot, dpi=120)
    console.print(f"drawn: {options.plot}")


def eager_gradient(console: Console) -> None:
    """Prints the time of the second gradient call outside `jax.jit`."""

    def make_block(rngs: nnx.Rngs) -> revjax.ReversibleCouplingBlock:
        return revjax.ReversibleCouplingBlock(16, rngs=rngs)

    model = revjax.ReversibleSequence.create(make_block, 4, rngs=nnx.Rngs(0))
    x = jnp.ones((4, 16))

    def call() -> object:
        return nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)

    first, second = seconds(call), min(seconds(call) for _ in range(5))
    console.print(
        f"eager gradient of 4 blocks: first call {first * 1e3:,.0f} ms, "
        f"then {second * 1e3:.1f} ms"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            msg = f"expected a whole number above 0, got {text!r}"
            raise argparse.ArgumentTypeError(msg)
        return int(text)

    parser.add_argument("--depth", type=positive, default=16, help="blocks")
    parser.add_argument("--width", type=positive, default=256, help="of one stream")
    parser.add_argument("--batch", type=positive, default=1024, help="rows")
    parser.add_argument("--rounds", type=positive, default=7, help="times each")
    parser.add_argument("--plot", type=Path, help="PNG of memory against depth")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark."""
    options = parse(argv)
    console = Console(width=110)
    console.print(
        f"revjax {revjax.__version__}, jax {jax.__version__}, "
        f"{jax.devices()[0].device_kind} ({platform.machine()})"
    )
    memory_against_depth(console, options)
    compare_steps(console, options)
    eager_gradient(console)


if __name__ == "__main__":
    main()
