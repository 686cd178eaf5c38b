"""What a layer learns from the backward pass alone."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from revjax import _checks


def on_backward(x: Any, state: Any, update: Callable[[Any, Any], Any]) -> Any:
    r"""Returns `x`, and in the backward pass hands its cotangent to `update`.

    The forward pass is the identity. In the backward pass, with $\bar x$ for the
    cotangent of `x`,

    $$\bar{\mathrm{state}} = \mathrm{update}(\mathrm{state}, \bar x),$$

    and `x` receives $\bar x$ unchanged. So a layer can count backward passes, or keep
    the norm of a gradient that is never stored, and the result arrives where gradients
    arrive: *as the gradient of* `state`. Take it from there and put it in place of the
    old value, in the same step in which an optimizer updates the parameters.

    In a branch of a reversible block `update` runs exactly once for each block and
    step, in every mode, and also when neither parameters nor the input of the stack are
    differentiated. A variable of the block keeps the values of the blocks apart. What
    blocks share receives the sum over the blocks, as every gradient does.

    Args:
      x: Arrays, passed through.
      state: Floating-point arrays: a float can count to 2**24.
      update: `update(state, x_ct)`, which returns arrays like `state`; a pure function.

    Returns:
      `x`.

    Raises:
      TypeError: If `state` holds anything but floating-point arrays, or if `update` is
        no function or returns anything else than arrays like `state`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from revjax import on_backward
      >>> def count(state, x_ct): return state + 1
      >>> def loss(x, calls): return jnp.sum(on_backward(x, calls, count) ** 2)
      >>> gradient, calls = jax.grad(loss, (0, 1))(jnp.ones(2), jnp.float32(7))
      >>> gradient.tolist(), float(calls)
      ([2.0, 2.0], 8.0)
    """
    _checks.callable_(update, "update")
    _checks.backward_state(state)
    return _identity(update, x, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _identity(update: Callable[[Any, Any], Any], x: Any, state: Any) -> Any:
    return x


def _forward(update: Callable[[Any, Any], Any], x: Any, state: Any) -> tuple[Any, Any]:
    return x, state


def _backward(
    update: Callable[[Any, Any], Any], state: Any, x_ct: Any
) -> tuple[Any, Any]:
    new = update(state, x_ct)
    _checks.backward_update(state, new)
    return x_ct, new


_identity.defvjp(_forward, _backward)
