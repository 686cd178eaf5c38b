"""The text of `byte_lm.py`: reading, splitting, batches, and models that only count."""

from __future__ import annotations

import pathlib
import sysconfig
from typing import NoReturn

import numpy as np

HELD_OUT = 10  # the last tenth of the text is never trained on
EVAL_BYTES = 32768  # held-out bytes that are predicted, spread evenly over that tenth


class UsageError(Exception):
    """Something that the user can mend; the message says how."""


def fail(message: str) -> NoReturn:
    """Raises a `UsageError`."""
    raise UsageError(message)


def read_text(data: str | None) -> np.ndarray:
    """The bytes of `data`, or of the standard library's `.py` files, joined: uint8[n].

    Files and folders whose names begin with a dot are left out. The files are shuffled,
    always the same way, so that the held-out end of the text is not just the packages
    that the alphabet puts last.

    Raises:
      UsageError: if there is nothing at `data`, or no file in it, or no reading it.
    """
    if data is None:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        wanted = "the `.py` files of Python's standard library"
        found, left_out = root.rglob("*.py"), {"site-packages", "dist-packages"}
    else:
        root, wanted = pathlib.Path(data), "a file, or a folder of files"
        found, left_out = [root, *root.rglob("*")], {"__pycache__"}
    if not root.exists():
        fail(f"`--data` {root}: expected {wanted}; found nothing there.")
    try:
        paths = sorted(
            path
            for path in found
            if path.is_file()
            and not any(
                part in left_out or part.startswith(".")
                for part in path.relative_to(root).parts
            )
        )
        order = np.random.default_rng(0).permutation(len(paths))
        text = b"\n".join(paths[i].read_bytes() for i in order)
    except OSError as error:
        fail(f"`--data` {root}: expected {wanted} that can be read; found: {error}.")
    if not paths:
        fail(f"`--data` {root}: expected {wanted}; found a folder without files.")
    return np.frombuffer(text, np.uint8)


def split_text(
    text: np.ndarray, context: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """The part to train on, and the held-out rest: the last tenth of the bytes.

    Raises:
      UsageError: if the rest does not hold `context` bytes and the next one.
    """
    needed = HELD_OUT * (context + 1)
    if len(text) < needed:
        fail(
            f"`--data` {name} is too short. Expected {needed:,} bytes or more, so that"
            f" the held-out tenth has `--context` {context} bytes and one to predict;"
            f" found {len(text):,}."
        )
    cut = len(text) - len(text) // HELD_OUT
    return text[:cut], text[cut:]


def batch_at(
    text: np.ndarray, seed: int, step: int, batch: int, context: int
) -> np.ndarray:
    """The batch of a step, int32[batch, context + 1].

    It hangs on the seed and the step alone, so a resumed run sees what it would have
    seen without the interruption.
    """
    starts = np.random.default_rng([seed, step]).integers(
        0, len(text) - context, size=batch
    )
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def held_out_windows(text: np.ndarray, batch: int, context: int) -> np.ndarray:
    """Windows spread evenly over the text, int32[batches, batch, context + 1].

    They do not overlap. A short text gives a smaller batch rather than none.
    """
    size = context + 1
    count = max(1, min(EVAL_BYTES // context, len(text) // size))
    batch = min(batch, count)
    count -= count % batch
    starts = np.linspace(0, len(text) - size, count).astype(np.int64)
    windows = text[starts[:, None] + np.arange(size)].astype(np.int32)
    return windows.reshape(-1, batch, size)


def order_0_bits(text: np.ndarray, windows: np.ndarray) -> float:
    """Bits per byte of a model that knows how often each byte occurs in `text`.

    Every byte counts once more than it occurs, so that none is impossible. Predicted
    are the bytes that the language model predicts: all but the first of each window.
    """
    counts = np.bincount(text, minlength=256) + 1.0
    return float(-np.log2(counts / counts.sum())[windows[..., 1:]].mean())


def bigram_bits(text: np.ndarray, windows: np.ndarray) -> float:
    """Bits per byte of a model that knows how often each byte follows each other."""
    counts = np.ones(256 * 256)
    for at in range(0, len(text) - 1, 2**24):  # in pieces: a pair takes eight bytes
        piece = text[at : at + 2**24 + 1].astype(np.int64)
        counts += np.bincount(256 * piece[:-1] + piece[1:], minlength=256 * 256)
    counts = counts.reshape(256, 256)
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    return float(bits[windows[..., :-1], windows[..., 1:]].mean())
