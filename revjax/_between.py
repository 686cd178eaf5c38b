"""What may stand between blocks: moves of features and pixels, as NNX modules."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
from flax import nnx

from revjax import _checks
from revjax._blocks import ReversibleBlock
from revjax._moves import Fold, Permute


class Permutation(ReversibleBlock):
    """A fixed permutation of the features, so that other features meet in a stream.

    In a `ReversibleSequence` it stands between blocks. It has no parameters, its
    inverse is exact, and its determinant is one.

    Args:
      indices: Feature `i` of the output is feature `indices[i]` of the input.
      axis: The axis of the features.

    Raises:
      TypeError: If `indices` are no ints, or `axis` is none.
      ValueError: If `indices` are not 0 to n - 1 in some order; at a call, if the input
        does not have n features.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from revjax import Permutation
      >>> flip = Permutation([2, 1, 0])
      >>> flip(jnp.array([1.0, 2.0, 3.0])).tolist()
      [3.0, 2.0, 1.0]
      >>> len(Permutation.random(8, rngs=nnx.Rngs(0)).indices)
      8
    """

    stackable: ClassVar[bool] = False

    def __init__(self, indices: Iterable[int], axis: int = -1) -> None:
        """Builds the permutation; see the class."""
        self.indices = _checks.permutation(indices)
        self.dim = len(self.indices)
        self.axis = axis
        self._form()

    @classmethod
    def random(cls, dim: int, axis: int = -1, *, rngs: nnx.Rngs) -> "Permutation":
        """Draws a permutation of `dim` features."""
        _checks.rngs(rngs, nnx.Rngs)
        return cls(
            jax.random.permutation(rngs(), _checks.depth(dim, "dim")).tolist(), axis
        )

    def _form(self) -> dict[str, Any]:
        _checks.integer(self.axis, "axis")
        return {
            "axis": self.axis,
            "dim": self.dim,
            "streams": 1,
            "couplings": (),
            "moves": (Permute(self.indices),),
        }


class Squeeze(ReversibleBlock):
    """Makes channels of squares of pixels: the way of flows to a coarser scale.

    `[batch, height, width, channels]` becomes
    `[batch, height / k, width / k, channels * k * k]`. In a `ReversibleSequence` it
    stands between blocks that split the channels. It has no parameters, an exact
    inverse, and a determinant of one.

    Args:
      factor: $k$.

    Raises:
      TypeError: If `factor` is no int.
      ValueError: If `factor` is not positive; at a call, if the input does not have
        four axes, or if height or width is no multiple of `factor`.

    Example:
      >>> import jax.numpy as jnp
      >>> from revjax import Squeeze
      >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> y = Squeeze(2)(x)
      >>> y.shape, y[0, 0, 0].tolist()
      ((1, 2, 2, 4), [0.0, 1.0, 4.0, 5.0])

    References:
      Dinh et al., *Density Estimation using Real NVP*, arXiv:1605.08803.
    """

    stackable: ClassVar[bool] = False

    def __init__(self, factor: int = 2) -> None:
        """Builds the module; see the class."""
        _checks.integer(factor, "factor")
        _checks.within(factor > 0, factor, "factor", "positive")
        self.factor = factor
        self.axis = -1
        self.dim = None

    def _form(self) -> dict[str, Any]:
        return {
            "axis": -1,
            "dim": None,
            "streams": 1,
            "couplings": (),
            "moves": (Fold(self.factor),),
        }
