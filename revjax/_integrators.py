"""Laws that are steps of differential equations: scaled, damped, of second order."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from revjax import _checks, _law_checks
from revjax._couplings import Coupling, wide


@dataclasses.dataclass(frozen=True)
class Scaled(Coupling):
    r"""Adds a multiple of the branch's output: a scaled residual.

    $$y = x + \alpha h, \qquad x = y - \alpha h$$

    With $\alpha = 1 / \sqrt{\mathrm{depth}}$ the size of what passes through stays the
    same at any depth. In a `ReversibleHalfBlock`, $\alpha = 2 \Delta t$ is the midpoint
    rule for $\dot x = F(x)$. Drift is that of `Additive`. Under exact streams write the
    factor into the branch instead.

    Args:
      scale: $\alpha$.

    Raises:
      TypeError: If `scale` is no number.
      ValueError: If `scale` is not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> from revjax import Scaled
      >>> float(Scaled(0.5).combine(jnp.float32(1.0), 2.0))
      2.0

    References:
      Chang et al., *Reversible Architectures for Arbitrarily Deep Residual Neural
      Networks*, arXiv:1709.03698 (midpoint). De and Smith, *Batch Normalization Biases
      Residual Blocks Towards the Identity Function in Deep Networks*, arXiv:2002.10444.
    """

    scale: float

    def __post_init__(self) -> None:
        """Checks the scale."""
        object.__setattr__(self, "scale", _checks.real(self.scale, "scale"))

    def combine(self, x: Array, h: Any) -> Array:
        """Returns `x + scale * h`."""
        return x + self.scale * jnp.asarray(h, x.dtype)

    def recover(self, y: Array, h: Any) -> Array:
        """Returns `y - scale * h`."""
        return y - self.scale * jnp.asarray(h, y.dtype)

    def log_det(self, h: Any) -> Array:
        """Returns zeros."""
        return jnp.zeros_like(h)


@dataclasses.dataclass(frozen=True)
class Momentum(Coupling):
    r"""Mixes the branch's output into a stream that decays.

    $$y = \gamma x + (1 - \gamma) h, \qquad x = (y - (1 - \gamma) h) / \gamma$$

    In a Momentum ResNet the first stream is a velocity with this law, and the second
    adds the velocity to itself. With `def identity(v): return v`, written once so that
    the blocks of a list are alike:

        ReversibleCouplingBlock(
            dim, F, identity, coupling=(Momentum(0.9), Additive())
        )

    Undoing divides by $\gamma$ at every block, so rounding errors of the first stream
    grow by $\gamma^{-\mathrm{depth}}$ on the way back: at $\gamma = 0.9$ and 100 blocks
    by $4 \cdot 10^4$, between four and five decimal digits of the seven of float32. Use
    anchors in deep stacks. Information is lost to rounding in the forward pass already,
    so this law cannot be exact in fixed point as `ExactAdditive` is.

    Args:
      gamma: $0 < \gamma \le 1$.

    Raises:
      TypeError: If `gamma` is no number.
      ValueError: If `gamma` is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> from revjax import Momentum
      >>> float(Momentum(0.5).combine(jnp.float32(1.0), 2.0))
      1.5

    References:
      Sander et al., *Momentum Residual Neural Networks*, arXiv:2102.07870.
    """

    gamma: float

    def __post_init__(self) -> None:
        """Checks the factor."""
        object.__setattr__(self, "gamma", _checks.real(self.gamma, "gamma"))
        _checks.within(0 < self.gamma <= 1, self.gamma, "gamma", "0 < gamma <= 1")

    def combine(self, x: Array, h: Any) -> Array:
        """Returns `gamma * x + (1 - gamma) * h`."""
        return self.gamma * x + (1 - self.gamma) * jnp.asarray(h, x.dtype)

    def recover(self, y: Array, h: Any) -> Array:
        """Returns `(y - (1 - gamma) * h) / gamma`."""
        return (y - (1 - self.gamma) * jnp.asarray(h, y.dtype)) / self.gamma

    def log_det(self, h: Any) -> Array:
        """Returns `log(gamma)` everywhere."""
        return jnp.full_like(h, math.log(self.gamma), dtype=wide(h.dtype))


@dataclasses.dataclass(frozen=True)
class Leapfrog(Coupling):
    r"""The leapfrog rule for $\ddot x = F(x)$, in a `ReversibleHalfBlock`.

    The streams are two positions in time, $x_{n-1}$ and $x_n$. A block replaces the
    older one,

    $$x_{n+1} = 2 x_n - x_{n-1} + \Delta t^2 F(x_n),$$

    and swaps them. It undoes itself: $x_{n-1}$ follows from $x_{n+1}$ by the same rule.
    A rounding error of one position is one of the velocity, so drift grows faster with
    depth than that of `Additive`. It is not offered in fixed point.

    Args:
      step_size: $\Delta t$.

    Raises:
      TypeError: If `step_size` is no number.
      ValueError: If `step_size` is not finite; at a call, in a block of more than two
        streams.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from revjax import Leapfrog, ReversibleHalfBlock, ReversibleSequence
      >>> spring = ReversibleHalfBlock(2, lambda x: -x, coupling=Leapfrog(0.01))
      >>> swing = ReversibleSequence([spring] * 157)  # a quarter of a period
      >>> abs(float(swing(jnp.array([1.0, 1.0]))[1])) < 0.02
      True

    References:
      Chang et al., *Reversible Architectures for Arbitrarily Deep Residual Neural
      Networks*, arXiv:1709.03698.
    """

    step_size: float = 1.0

    def __post_init__(self) -> None:
        """Checks the step size."""
        step_size = _checks.real(self.step_size, "step_size")
        object.__setattr__(self, "step_size", step_size)

    def update(self, h: Any, others: tuple[Array, ...]) -> Any:
        """Returns `2 * x_n + step_size**2 * h`."""
        _law_checks.two_streams(others, self)
        (other,) = others
        return 2 * other + self.step_size**2 * jnp.asarray(h, other.dtype)

    def combine(self, x: Array, h: Any) -> Array:
        """Returns `h - x`."""
        return jnp.asarray(h, x.dtype) - x

    def recover(self, y: Array, h: Any) -> Array:
        """Returns `h - y`."""
        return jnp.asarray(h, y.dtype) - y

    def log_det(self, h: Any) -> Array:
        """Returns zeros: the derivative is -1."""
        return jnp.zeros_like(h)
