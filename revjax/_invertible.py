"""What all blocks and stacks offer: to run, to be undone, and their determinants."""

from typing import Any

from flax import nnx
from jax import Array
from jax.typing import ArrayLike


class Invertible(nnx.Module):
    """The methods of blocks and stacks; a subclass says how to `_run`."""

    def _run(self, x: Any, args: tuple, kwargs: dict, **options: bool) -> Any:
        """Runs it, or undoes it if `inverse`; returns a pair if `log_det`."""
        raise NotImplementedError

    def __call__(self, x: ArrayLike, *context: Any, **kwargs: Any) -> Array:
        """Runs the block or the stack.

        Args:
          x: The input, `[..., dim, ...]`, floating-point or complex.
          *context: Further arguments of the branches: arrays, which receive gradients
            if they are floating-point; pytrees of them; NNX modules such as `nnx.Rngs`,
            which are updated; `revjax.PerBlock`, of which each block of a stack
            receives its own entry; anything else is static.
          **kwargs: The same, by keyword.

        Returns:
          The output, of the shape of `x`, in the dtype of the coupling's streams.
        """
        return self._run(x, context, kwargs)

    def inverse(self, y: ArrayLike, *context: Any, **kwargs: Any) -> Array:
        """Returns the input that gave `y`, with the variables as they are now.

        Args:
          y: An output of the block or the stack.
          *context: As in the call that gave `y`.
          **kwargs: The same.

        Returns:
          The input, up to rounding. No variable changes.

        Raises:
          ValueError: If a branch depends on variables that a call changes (RNG
            streams, counters) and that have therefore moved on since the call.
        """
        return self._run(y, context, kwargs, inverse=True)

    def forward_and_log_det(
        self, x: ArrayLike, *context: Any, **kwargs: Any
    ) -> tuple[Array, Array]:
        r"""Runs it, and returns $\log|\det \partial y / \partial x|$ too.

        Args:
          x: The input, `[batch, ...]`; an array of one axis is a single example.
          *context: As in a call.
          **kwargs: The same.

        Returns:
          The output, and the logarithm for each example, `[batch]`, in at least
          float32. For complex arrays it is that of the modulus of the complex
          determinant.

        Raises:
          TypeError: If a coupling has no `log_det`.
          ValueError: If the streams are split on the axis of the batch.
        """
        return self._run(x, context, kwargs, log_det=True)

    def inverse_and_log_det(
        self, y: ArrayLike, *context: Any, **kwargs: Any
    ) -> tuple[Array, Array]:
        r"""Undoes it, and returns $\log|\det \partial x / \partial y|$ too.

        Arguments and errors are those of `inverse` and `forward_and_log_det`.
        """
        return self._run(y, context, kwargs, inverse=True, log_det=True)
