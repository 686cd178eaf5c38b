"""The options of `byte_lm.py`: what they are, and which values fit together."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

from byte_data import fail
from transformer import MODES, PRECISIONS, STREAMS, TransformerConfig

RUNS = pathlib.Path(
    "runs"
)  # of runs that name no folder: byte_lm-001, byte_lm-002, ...
PASSING = ("out", "resume", "overwrite")  # options of one session alone


@dataclasses.dataclass(frozen=True)
class Options(TransformerConfig):
    """What a run's numbers hang on. They are fixed once it has begun."""

    data: str | None = None  # a file or folder; None is the standard library
    batch: int = 16  # texts in a step, of `context` bytes each
    steps: int = 300
    learning_rate: float = 3e-3  # the peak, after the warm-up
    warmup: int | None = None  # steps; None is a tenth of all, 50 at the most
    weight_decay: float = 0.1  # of the kernels, by AdamW
    clip: float = 1.0  # the largest norm of a gradient
    seed: int = 0  # of the parameters, the batches and dropout


@dataclasses.dataclass(frozen=True)
class Session:
    """What may differ from one session of a run to the next.

    A resumed run keeps what is not given anew.
    """

    out: str | None = None  # the run's folder; None is a new one, or the newest
    resume: bool = False
    overwrite: bool = False
    checkpoint_every: int = 100  # steps
    eval_every: int = 100  # steps
    prompt: str = "def "  # the sample's beginning
    sample_length: int = 300  # bytes
    temperature: float = 0.7  # of the sample

    def kept(self) -> dict[str, Any]:
        """What the next session takes over."""
        options = dataclasses.asdict(self)
        return {n: v for n, v in options.items() if n not in PASSING}


def number(
    kind: type, low: float, high: float = math.inf, *, above: bool = False
) -> Callable[[str], Any]:
    """A parser of finite numbers from `low` on (not `low` itself if `above`)."""
    wanted = "a whole number" if kind is int else "a number"
    wanted += f" above {low:g}" if above else f" of {low:g} or more"
    wanted += f" and below {high:g}" if high < math.inf else ""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value < high or (above and value == low):
            msg = f"expected {wanted}; got {text!r}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return parse


def parse_options(argv: list[str] | None, description: str | None) -> dict[str, Any]:
    """The options given in `argv`, and no others: `--resume` must tell them apart."""
    parser = argparse.ArgumentParser(
        prog="byte_lm.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    defaults = dataclasses.asdict(Options()) | dataclasses.asdict(Session())
    count, amount = functools.partial(number, int), functools.partial(number, float)

    def add(group: Any, name: str, text: str, kind: Any = str) -> None:
        flag, default = "--" + name.replace("_", "-"), defaults[name]
        if kind is bool:
            group.add_argument(flag, help=text, action="store_true")
            return
        text += f" (default: {default!r})" if default is not None else ""
        how = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        group.add_argument(flag, help=text, **how)

    model = parser.add_argument_group("model")
    add(model, "depth", "reversible blocks", count(1))
    add(model, "width", "channels of both streams together", count(2))
    add(model, "heads", "attention heads, sharing width / 2", count(1))
    add(model, "context", "bytes that the model looks back on", count(1))
    add(model, "dropout", "share of a branch's output", amount(0, 1))
    add(model, "mode", "where the backward pass gets activations", MODES)
    add(model, "anchor_every", "blocks between anchors, if anchored", count(1))
    add(model, "precision", "of the branches; streams are float32", PRECISIONS)
    add(model, "streams", "float32, or fixed point that is undone exactly", STREAMS)
    training = parser.add_argument_group("training")
    add(training, "data", "file or folder (default: Python's standard library)")
    add(training, "batch", "texts in a step", count(1))
    add(training, "steps", "steps in all", count(1))
    add(training, "learning_rate", "its peak", amount(0, above=True))
    add(training, "warmup", "steps (default: a tenth, 50 at the most)", count(0))
    add(training, "weight_decay", "of the kernels", amount(0))
    add(training, "clip", "largest norm of a gradient", amount(0, above=True))
    add(training, "seed", "of parameters, batches and dropout", count(0, 2**32))
    session = parser.add_argument_group("session (free to change with --resume)")
    add(session, "out", f"the run's folder (default: {RUNS}/byte_lm-001, ...)")
    add(session, "resume", "go on with the run in --out, or with the newest", bool)
    add(session, "overwrite", "delete the run that is in --out", bool)
    add(session, "checkpoint_every", "steps between checkpoints", count(1))
    add(session, "eval_every", "steps between looks at held-out text", count(1))
    add(session, "prompt", "beginning of the sample")
    add(session, "sample_length", "bytes to write after it", count(1))
    add(session, "temperature", "of the sample; 0: likeliest byte", amount(0))

    given = vars(parser.parse_args(argv))
    if given.get("prompt") == "":
        parser.error("argument --prompt: expected one character or more; got ''")
    if "resume" in given and "overwrite" in given:
        parser.error("argument --overwrite: expected without --resume; got both")
    if "data" in given:
        given["data"] = str(pathlib.Path(given["data"]).absolute())
    return given


def make_session(given: dict[str, Any]) -> Session:
    """The session's options among `given`, and the defaults of the others."""
    names = [field.name for field in dataclasses.fields(Session)]
    return Session(**{name: given[name] for name in names if name in given})


def make_options(given: dict[str, Any], saved: dict[str, Any] | None) -> Options:
    """The run's options: `saved` if it is resumed, or else `given` and the defaults.

    Raises:
      UsageError: if given ones differ from saved ones, or do not fit together.
    """
    names = [field.name for field in dataclasses.fields(Options)]
    given = {name: given[name] for name in names if name in given}
    differing = [n for n in given if saved is not None and given[n] != saved[n]]
    if saved is not None and differing:
        found = "; ".join(
            f"`--{n.replace('_', '-')}` is {saved[n]!r} in the run, {given[n]!r} given"
            for n in differing
        )
        fail(f"`--resume` expected the options that the run began with; got: {found}.")
    options = Options(**(given if saved is None else saved))
    width, heads, mode = options.width, options.heads, options.mode
    if width % 2:
        fail(f"`--width` expected an even number, for two streams; got {width}.")
    if width // 2 % heads:
        fail(
            f"`--heads` expected a divisor of half of `--width`, {width // 2};"
            f" got {heads}."
        )
    if "anchor_every" in given and mode != "anchored":
        fail(f"`--anchor-every` expected `--mode anchored`; got `--mode {mode}`.")
    warmup = options.warmup
    if warmup is None:
        warmup = min(50, options.steps // 10)
    if warmup >= options.steps:
        fail(f"`--warmup` expected less than `--steps` {options.steps}; got {warmup}.")
    return dataclasses.replace(options, warmup=warmup)
