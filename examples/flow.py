"""Trains a density of handwritten digits: an affine flow in constant memory.

    python examples/flow.py                 # about a minute on two cores
    python examples/flow.py --depth 16 --steps 3000 --out runs/deep.png

The data are scikit-learn's 1797 digits of 8 x 8 pixels, so nothing is downloaded. The
script prints bits per pixel on digits that were held out, beside those of a Gaussian of
full covariance, and draws digits that the flow made up.
"""

from __future__ import annotations

import argparse
import functools
import math
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jax import Array
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import revjax
from byte_options import number

LEVELS = 17  # a pixel is one of 0 to 16
PIXELS = 64
HELD_OUT = 300  # digits that are never trained on
DRAWS = 8  # of the noise in dequantization, over which figures are averaged
ALPHA = 0.005  # keeps the logits of 0 and 1 finite; the Gaussian does best with this
WIDTH = 64  # of a branch's hidden layers
BATCH = 256

# --------------------------------------------------------------------------- data


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images to train on and images held out, `[n, 64]`; the same ones every time."""
    images, _ = load_digits(return_X_y=True)
    images = np.random.default_rng(0).permutation(images.astype(np.float32))
    return images[HELD_OUT:], images[:HELD_OUT]


def dequantize(images: Array | np.ndarray, key: Array) -> Array:
    """Spreads each level evenly over its 17th of (0, 1).

    A density on bare levels could grow without bound. On spread ones its mean logarithm
    is at most that of the levels' probability, which is what counts in bits.
    """
    return (jnp.asarray(images) + jax.random.uniform(key, images.shape)) / LEVELS


def to_logits(x: Array) -> tuple[Array, Array]:
    """Takes (0, 1) to unbounded values; returns the log-determinant of that too."""
    p = ALPHA + (1 - 2 * ALPHA) * x
    log_p, log_q = jnp.log(p), jnp.log1p(-p)
    return log_p - log_q, jnp.sum(math.log(1 - 2 * ALPHA) - log_p - log_q, axis=-1)


def to_unit(logits: Array) -> Array:
    """Undoes `to_logits`, up to what a flow makes up outside of (0, 1)."""
    return jnp.clip((jax.nn.sigmoid(logits) - ALPHA) / (1 - 2 * ALPHA), 0, 1)


def bits_per_pixel(log_density: Array | np.ndarray) -> Array | np.ndarray:
    """Bits for a pixel's level, from the log-density of an image in (0, 1)^64.

    A level is a 17th of the unit interval: a density of one costs log2(17) bits.
    """
    return math.log2(LEVELS) - log_density / (PIXELS * math.log(2))


# -------------------------------------------------------------------------- models


class Branch(nnx.Module):
    """Log-scales and shifts of one half of the pixels, from the other half."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        half = PIXELS // 2
        self.up = nnx.Linear(half, WIDTH, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        # 1500 digits are few: without dropout the flow learns them by heart.
        self.drop = nnx.Dropout(0.6, rngs=rngs)
        # Zeros, so that training begins with a flow that changes nothing.
        zeros = nnx.initializers.zeros
        self.down = nnx.Linear(WIDTH, 2 * half, kernel_init=zeros, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Returns log-scales, before they are bounded, and shifts beside them."""
        h = nnx.gelu(self.mix(nnx.gelu(self.up(x))))
        return self.down(self.drop(h))


class Flow(nnx.Module):
    """A density of images: logits that a reversible stack makes Gaussian."""

    def __init__(self, depth: int, logits: Array, *, rngs: nnx.Rngs) -> None:
        law = revjax.Affine(bound=1.0, squash="atan")
        blocks: list = []
        for _ in range(depth):
            # Other pixels meet in a half each time.
            blocks.append(revjax.Permutation.random(PIXELS, rngs=rngs))
            F, G = Branch(rngs=rngs), Branch(rngs=rngs)
            block = revjax.ReversibleCouplingBlock(PIXELS, F, G, coupling=law)
            blocks.append(block)
        self.stack = revjax.ReversibleSequence(blocks)
        # Each pixel is standardized by what it is in the training images.
        self.mean = nnx.Variable(jnp.mean(logits, axis=0))
        self.scale = nnx.Variable(jnp.std(logits, axis=0))

    def log_density(self, x: Array) -> Array:
        """The log-density of each image in (0, 1)^64."""
        logits, log_det = to_logits(x)
        scale = self.scale[...]
        z, stack_log_det = self.stack.forward_and_log_det(
            (logits - self.mean[...]) / scale
        )
        log_det += stack_log_det - jnp.sum(jnp.log(scale))
        return log_det - jnp.sum(z**2 + math.log(2 * math.pi), axis=-1) / 2

    def sample(self, n: int, key: Array) -> Array:
        """Images in [0, 1]^64: the stack undone from Gaussian noise."""
        z = jax.random.normal(key, (n, PIXELS))
        return to_unit(self.stack.inverse(z) * self.scale[...] + self.mean[...])


def gaussian_log_density(data: Array, x: Array) -> np.ndarray:
    """The log-density at `x` of the Gaussian with the mean and covariance of `data`."""
    fit, test = (np.asarray(a, np.float64) for a in (data, x))
    factor = np.linalg.cholesky(np.cov(fit, rowvar=False))
    z = np.linalg.solve(factor, (test - fit.mean(0)).T)
    log_det = -np.log(np.diag(factor)).sum()
    return log_det - (z**2 + math.log(2 * math.pi)).sum(0) / 2


def gaussian_bits(
    training: np.ndarray, held_out: np.ndarray, key: Array
) -> dict[str, float]:
    """Bits per pixel on held-out images of a Gaussian in either space, by its name."""
    noise = jax.random.split(key)
    fit, test = (
        jnp.concatenate([dequantize(images, k) for k in jax.random.split(each, DRAWS)])
        for images, each in zip((training, held_out), noise, strict=True)
    )
    (fit_logits, _), (logits, log_det) = to_logits(fit), to_logits(test)
    log_densities = {
        "pixels": gaussian_log_density(fit, test),
        "logits": gaussian_log_density(fit_logits, logits) + np.asarray(log_det),
    }
    return {k: float(bits_per_pixel(v).mean()) for k, v in log_densities.items()}


# ------------------------------------------------------------------------ training


def is_kernel(path: tuple, _: Array) -> bool:
    """Whether weight decay is for this parameter."""
    return any(getattr(key, "key", None) == "kernel" for key in path)


def train(
    flow: Flow, images: np.ndarray, steps: int, key: Array, console: Console
) -> None:
    """Minimizes bits per pixel, with fresh noise and fresh digits in every step."""
    peak = 3e-3
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps + 1)
    adamw = optax.adamw(
        schedule,
        weight_decay=1.0,
        mask=functools.partial(jax.tree_util.tree_map_with_path, is_kernel),
    )
    optimizer = nnx.Optimizer(flow, adamw, wrt=nnx.Param)

    @nnx.jit
    def step(flow: Flow, optimizer: nnx.Optimizer, key: Array) -> Array:
        choice, noise = jax.random.split(key)
        x = dequantize(jax.random.choice(choice, images, (BATCH,)), noise)

        def loss(flow: Flow) -> Array:
            return jnp.mean(bits_per_pixel(flow.log_density(x)))

        bits, gradients = nnx.value_and_grad(loss)(flow)
        optimizer.update(flow, gradients)
        return bits

    for i in track(range(steps), "training", console=console):
        bits = step(flow, optimizer, jax.random.fold_in(key, i))
        if not math.isfinite(bits):
            msg = f"Expected a finite loss; got {bits} at step {i + 1}."
            raise FloatingPointError(msg)


def flow_bits(flow: Flow, images: np.ndarray, key: Array) -> float:
    """Bits per pixel on images, over several draws of the noise."""
    compute = nnx.jit(lambda flow, x: bits_per_pixel(flow.log_density(x)).mean())
    draws = jax.random.split(key, DRAWS)
    return float(np.mean([compute(flow, dequantize(images, k)) for k in draws]))


def draw(path: pathlib.Path, samples: Array, held_out: Array) -> None:
    """Draws samples, and true digits beside them, `[64, 64]` each in (0, 1)."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.4), layout="constrained")
    titles = "made up by the flow", "held-out digits"
    for ax, images, title in zip(axes, (samples, held_out), titles, strict=True):
        levels = np.minimum(np.floor(images * LEVELS), LEVELS - 1)
        digits = np.pad(levels.reshape(64, 8, 8), [(0, 0), (1, 1), (1, 1)])
        grid = digits.reshape(8, 8, 10, 10).transpose(0, 2, 1, 3).reshape(80, 80)
        ax.imshow(grid, cmap="gray")
        ax.set_title(title)
        ax.set_axis_off()
    figure.savefig(path, dpi=120)
    plt.close(figure)


class Figures(NamedTuple):
    """What a run measured."""

    flow_bits: float  # per pixel, held out
    gaussian_bits: float  # likewise, in the better space
    gaussian_space: str
    training_bits: float
    seconds: float


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The options; what is wrong with them is told before anything is trained."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=number(int, 1), default=1500, help="(default: %(default)s)")
    add("--depth", type=number(int, 1), default=8, help="blocks (default: %(default)s)")
    seed = number(int, 0, 2**32)
    add("--seed", type=seed, default=0, help="of all but the split (default: 0)")
    default = pathlib.Path("runs/flow.png")
    add(
        "--out", type=pathlib.Path, default=default, help="a PNG (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    if options.out.suffix != ".png" or options.out.is_dir():
        parser.error(f"argument --out: expected a file *.png; got '{options.out}'")
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: expected a folder to write to; found: {error}")
    return options


def main(argv: list[str] | None = None) -> Figures:
    """Trains a flow, measures it and draws its samples."""
    began = time.perf_counter()
    options = parse_options(argv)
    console = Console(highlight=False)
    training, held_out = read_digits()
    keys = jax.random.split(jax.random.key(options.seed), 5)

    logits, _ = to_logits(dequantize(training, keys[0]))
    flow = Flow(options.depth, logits, rngs=nnx.Rngs(options.seed))
    train(flow, training, options.steps, keys[1], console)
    flow.eval()  # without dropout: else neither a density nor undone

    by_space = gaussian_bits(training, held_out, keys[2])
    space = min(by_space, key=by_space.__getitem__)
    bits = flow_bits(flow, held_out, keys[3])
    of_training = flow_bits(flow, training, keys[3])
    samples = flow.sample(64, keys[4])
    draw(options.out, samples, dequantize(held_out[:64], keys[4]))

    seconds = time.perf_counter() - began
    table = Table("density", "bits per pixel, held out")
    table.add_row("uniform", f"{math.log2(LEVELS):.3f}")
    table.add_row(f"Gaussian of the {space}, full covariance", f"{by_space[space]:.3f}")
    table.add_row(f"flow of {options.depth} blocks", f"[bold]{bits:.3f}[/bold]")
    console.print(table)
    console.print(
        f"{of_training:.3f} on the training digits; {seconds:.0f} s;"
        f" samples in {options.out}"
    )
    return Figures(bits, by_space[space], space, of_training, seconds)


if __name__ == "__main__":
    main()
