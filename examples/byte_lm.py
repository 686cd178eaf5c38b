"""Trains a byte-level language model on a reversible stack.

    python examples/byte_lm.py              # on Python's standard library: minutes
    python examples/byte_lm.py --data my_texts --depth 48 --steps 2000
    python examples/byte_lm.py --resume     # goes on with the newest run

A run leaves `metrics.csv`, `loss.png`, `memory.png`, `sample.txt`, `summary.json` and
`checkpoints/` in its folder. Ctrl-C finishes the running step and saves it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import byte_data
import byte_report
from byte_options import (
    RUNS,
    Options,
    Session,
    make_options,
    make_session,
    parse_options,
)
from transformer import Transformer, generate, next_byte_loss

FILES = ("metrics.csv", "loss.png", "memory.png", "sample.txt", "summary.json")

# --------------------------------------------------------------------------- training


class TrainState(NamedTuple):
    """All that a step changes."""

    params: Any  # the nnx.Param variables
    other: Any  # the model's other variables: dropout's keys and counts
    optimizer: Any  # optax's state


class Program(NamedTuple):
    """The compiled functions of a run."""

    step: Callable[..., Any]  # (state, index, tokens) -> state, (loss, rate, norm)
    loss: Callable[..., Any]  # (state, tokens) -> loss, without dropout
    write: Callable[..., Any]  # (state, prompt, length, temperature, key) -> bytes


def is_kernel(path: tuple[Any, ...], _: Any) -> bool:
    """Whether a parameter is decayed: its axes do not tell, as scales are stacked."""
    return any(getattr(key, "key", None) == "kernel" for key in path)


def make_program(options: Options) -> tuple[Program, TrainState]:
    """The compiled functions, and the state before the first step."""

    def init() -> Any:
        model = Transformer(options, rngs=nnx.Rngs(options.seed))
        return nnx.split(model, nnx.Param, ...)

    graphdef = nnx.eval_shape(init)[0]
    # One program, compiled without effort since it runs once: a third of the time.
    quick = {"xla_backend_optimization_level": 0}
    params, other = jax.jit(lambda: init()[1:], compiler_options=quick)()

    peak, warmup = options.learning_rate, options.warmup or 0
    schedule = optax.warmup_cosine_decay_schedule(
        peak / max(1, warmup), peak, warmup, options.steps, end_value=0.05 * peak
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=options.weight_decay,
            mask=functools.partial(jax.tree_util.tree_map_with_path, is_kernel),
        ),
    )

    @functools.partial(jax.jit, donate_argnums=0)  # the old state's memory is reused
    def step(state: TrainState, index: jax.Array, tokens: jax.Array) -> Any:
        compute = jax.value_and_grad(next_byte_loss, has_aux=True)
        (loss, other), grads = compute(
            state.params, state.other, graphdef, tokens, train=True
        )
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        figures = loss, schedule(index), optax.tree.norm(grads)
        return TrainState(params, other, moments), figures

    @jax.jit
    def loss(state: TrainState, tokens: jax.Array) -> jax.Array:
        return next_byte_loss(*state[:2], graphdef, tokens, train=False)[0]

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def write(
        state: TrainState, prompt: Any, length: int, temp: float, key: Any
    ) -> Any:
        model = nnx.merge(graphdef, state.params, state.other)
        return generate(model, prompt, length, temp, key)

    return Program(step, loss, write), TrainState(params, other, optimizer.init(params))


def held_out_bits(program: Program, state: TrainState, windows: np.ndarray) -> float:
    """Bits per byte on the held-out windows."""
    losses = [float(program.loss(state, batch)) for batch in windows]
    return sum(losses) / len(losses) / math.log(2)


def write_sample(
    program: Program, state: TrainState, options: Options, session: Session
) -> bytes:
    """The prompt and what the model writes after it."""
    prompt = session.prompt.encode(errors="surrogateescape")
    seen = np.frombuffer(prompt, np.uint8)[-options.context :].astype(np.int32)
    key = jax.random.key(options.seed)
    length, temperature = session.sample_length, session.temperature
    written = program.write(state, seen, length, temperature, key)
    return prompt + np.asarray(written).astype(np.uint8).tobytes()


@contextlib.contextmanager
def ctrl_c_asks() -> Iterator[threading.Event]:
    """Ctrl-C sets the event; a second one interrupts as ever."""
    asked = threading.Event()

    def ask(*_: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------- the folder


def choose_folder(session: Session) -> pathlib.Path:
    """The run's folder. A run that is there is never lost unless that is asked for."""
    numbers = [int(p.name[8:]) for p in RUNS.glob("byte_lm-*") if p.name[8:].isdigit()]
    latest = max(numbers, default=0)
    number = max(1, latest) if session.resume else latest + 1
    folder = pathlib.Path(session.out or RUNS / f"byte_lm-{number:03}")
    holds_run = any((folder / n).exists() for n in ("metrics.csv", "checkpoints"))
    if folder.exists() and not folder.is_dir():
        byte_data.fail(f"`--out` {folder}: expected a folder; found a file.")
    if session.resume and not any((folder / "checkpoints").glob("[0-9]*")):
        found = "a run without one" if holds_run else "no run"
        byte_data.fail(
            f"`--resume` expected a run with a checkpoint in {folder}; found {found}."
            " Name its folder with `--out`."
        )
    if holds_run and not (session.resume or session.overwrite):
        byte_data.fail(
            f"`--out` {folder}: expected no run in it; found one. Give `--resume` to go"
            " on with it, `--overwrite` to delete it, or another `--out`."
        )
    return folder


def clear_folder(folder: pathlib.Path) -> None:
    """Makes the folder if need be, and deletes what an earlier run left in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "checkpoints").exists():
            shutil.rmtree(folder / "checkpoints")
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        (folder / "metrics.csv").touch()
    except OSError as error:
        byte_data.fail(
            f"`--out` {folder}: expected a folder to write to; found: {error}."
        )


def open_checkpoints(folder: pathlib.Path) -> ocp.CheckpointManager:
    """The run's checkpoints; the last two are kept."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager(folder.absolute() / "checkpoints", options=options)


def last_checkpoint(folder: pathlib.Path) -> tuple[int, dict[str, Any]]:
    """The step of the last checkpoint, and what `save` wrote about the run."""
    with open_checkpoints(folder) as checkpoints:
        step = checkpoints.latest_step()
        args = ocp.args.Composite(about=ocp.args.JsonRestore())
        return step, checkpoints.restore(step, args=args)["about"]


def restore(
    checkpoints: ocp.CheckpointManager, step: int, like: TrainState
) -> TrainState:
    """The state that was saved after a step; `like` tells its structure and shapes."""
    args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
    return checkpoints.restore(step, args=args)["state"]


def save(
    checkpoints: ocp.CheckpointManager,
    step: int,
    state: TrainState,
    about: dict[str, Any],
) -> None:
    """Saves all that a resumed run needs. Where it is in the data, `step` tells."""
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about)
    )
    checkpoints.save(step, args=args)


# ------------------------------------------------------------------------------- main


def run(argv: list[str] | None) -> int:
    """One session, from the options to the last table. Returns the exit code."""
    began = time.perf_counter()
    console = Console(highlight=False)
    given = parse_options(argv, __doc__)
    session = make_session(given)
    folder = choose_folder(session)
    first, about = last_checkpoint(folder) if session.resume else (0, {})
    options = make_options(given, about.get("options"))
    session = make_session({**about.get("session", {}), **given})

    text = byte_data.read_text(options.data)
    name = options.data or "Python's standard library"
    digest = hashlib.sha256(text.data).hexdigest()
    if about.get("sha256", digest) != digest:
        byte_data.fail(
            f"`--data` {name}: expected the text that the run began with; found"
            " another. Put it back, or begin a new run."
        )
    spent = about.get("seconds", 0.0)  # in the steps of earlier sessions
    about = {
        "options": dataclasses.asdict(options),
        "session": session.kept(),
        "sha256": digest,
    }
    training, held_out = byte_data.split_text(text, options.context, name)
    windows = byte_data.held_out_windows(held_out, options.batch, options.context)
    bits = {
        "order 0: how often a byte occurs": byte_data.order_0_bits(training, windows),
        "order 1 (bigram): what follows it": byte_data.bigram_bits(training, windows),
    }

    if not session.resume:
        clear_folder(folder)
        scratch = byte_report.scratch_memory(options, options.batch)
        console.print(byte_report.memory_table(scratch))
        byte_report.plot_memory(folder / "memory.png", scratch)
    program, state = make_program(options)
    size = sum(x.size for x in jax.tree.leaves(state.params))
    console.print(
        f"{options.depth} blocks, {size:,} parameters; {len(training):,} bytes to"
        f" train on, {len(held_out):,} held out; the run is in {folder}"
    )

    rows = byte_report.keep_rows(folder / "metrics.csv", first)
    times: list[float] = []  # seconds of each step of this session
    held = None  # bits per byte on held-out text after the last step, if measured
    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(None),
        TextColumn("{task.fields[figures]}"),
        console=console,
    )
    task = bar.add_task("", total=options.steps, completed=first, figures="")
    with open_checkpoints(folder) as checkpoints, ctrl_c_asks() as asked, bar:
        if session.resume:
            state = restore(checkpoints, first, state)
        for index in range(first, options.steps):
            started = time.perf_counter()
            tokens = byte_data.batch_at(
                training, options.seed, index, options.batch, options.context
            )
            state, figures = program.step(state, np.int32(index), tokens)
            loss, rate, norm = (float(figure) for figure in figures)
            times.append(time.perf_counter() - started)
            if not math.isfinite(loss):
                byte_data.fail(
                    f"Expected a finite loss; got {loss} at step {index + 1}. Try a"
                    f" smaller `--learning-rate` than {options.learning_rate}."
                )
            step, held = index + 1, None
            if step % session.eval_every == 0 or step == options.steps:
                held = held_out_bits(program, state, windows)
                bar.print(f"step {step}: {held:.3f} bits per byte on held-out text")
            seconds = spent + sum(times)
            speed = tokens[:, 1:].size / times[-1]
            row = {
                "step": step,
                "loss": loss,
                "bits_per_byte": loss / math.log(2),
                "learning_rate": rate,
                "gradient_norm": norm,
                "held_out_bits_per_byte": "" if held is None else held,
                "seconds": round(seconds, 3),
                "bytes_per_second": round(speed, 1),
            }
            rows.append(row)
            byte_report.add_row(folder / "metrics.csv", row)
            shown = f"loss {loss:.3f}, {loss / math.log(2):.3f} bits per byte"
            bar.update(task, completed=step, figures=f"{shown}, {speed:,.0f} bytes/s")
            due = step % session.checkpoint_every == 0 or step == options.steps
            if due or asked.is_set():
                save(checkpoints, step, state, {**about, "seconds": seconds})
            if asked.is_set():
                break

    byte_report.plot_loss(folder / "loss.png", rows, bits)
    if asked.is_set():
        console.print(
            f"Stopped after step {first + len(times)}, which is saved. Go on with:\n"
            f"  python {sys.argv[0]} --resume --out {folder}",
            soft_wrap=True,
        )
        return 130

    bits["this model"] = held or held_out_bits(program, state, windows)
    written = write_sample(program, state, options, session)
    (folder / "sample.txt").write_bytes(written)
    text = "".join(
        c if c.isprintable() or c in "\n\t" else "?"
        for c in written.decode(errors="replace")
    )
    console.print(text, markup=False)

    steady = times[1:] or times or [math.inf]  # the first step compiles
    speed = options.batch * options.context * len(steady) / sum(steady)
    seconds = time.perf_counter() - began
    console.print(byte_report.final_table(bits, seconds, speed))
    summary = {"bits_per_byte": bits, "seconds": seconds, "bytes_per_second": speed}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs one session. What the user can mend is told in a line, with exit code 2."""
    try:
        return run(argv)
    except byte_data.UsageError as error:
        print(f"byte_lm.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("byte_lm.py: interrupted outside of the training steps", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
