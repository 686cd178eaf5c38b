"""Reversible blocks as Flax NNX modules."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from flax import nnx
from jax import Array

from revjax import _checks, _law_checks
from revjax._calls import call
from revjax._couplings import Additive, Coupling
from revjax._invertible import Invertible
from revjax._modes import Mode
from revjax._moves import Swap
from revjax._segments import Segment


class ReversibleBlock(Invertible):
    """What blocks of every kind have in common; not for direct use.

    A kind says what its steps are: step `i` changes stream `i` by what `_evaluate`
    returns, and moves follow. `_form` is what `_calls` asks for.
    """

    axis: int
    dim: int | None
    coupling: Any

    # Whether neighbours of the same structure may become one scan.
    stackable: ClassVar[bool] = True

    def _names(self) -> tuple[str, ...]:
        """Returns what messages call the branches, one for each step."""
        return ()

    def _evaluate(self, step: int, others: Any, args: tuple, kwargs: dict) -> Any:
        """Returns the update of a step."""
        raise NotImplementedError

    def _form(self) -> dict[str, Any]:
        """Returns `axis`, `dim`, `streams`, and by step `couplings`, then `moves`."""
        raise NotImplementedError

    def _run(self, x: Any, args: tuple, kwargs: dict, **options: bool) -> Any:
        return call([Segment(self)], Mode(), x, args, kwargs, **options)


class ReversibleCouplingBlock(ReversibleBlock):
    r"""A block that can be undone: two streams change each other in turn.

    The input is split evenly on `axis` into $x_1, x_2$. With `+` for the coupling,

    $$y_1 = x_1 + F(x_2), \qquad y_2 = x_2 + G(y_1),$$

    and $y_1, y_2$ are joined again. The inverse is

    $$x_2 = y_2 - G(y_1), \qquad x_1 = y_1 - F(x_2).$$

    So the backward pass keeps the output instead of the input and the activations of
    `F` and `G`, and evaluates each of them once more.

    A branch takes one stream and returns an array of the same shape. It may be any NNX
    module or function, with dropout, batch statistics or other variables inside: these
    are updated once a call. All arguments of the call after `x` go to both branches. To
    give them different ones, subclass the block and write its methods `f(self, x,
    *context)` and `g(self, x, *context)`; a branch whose method is written needs no
    `F` or `G`.

    Args:
      dim: The size of the input on `axis`; even.
      F: The branch that changes the first stream. `None` makes a linear layer without
        bias from `dim // 2` to `dim // 2` (twice that if the coupling takes a pair).
      G: The same for the second stream.
      coupling: The law by which a stream changes, or a pair of laws, of which the first
        stream takes one and the second the other.
      axis: The axis on which the input is split.
      rngs: Randomness for the default branches; needed only where one is made.

    Raises:
      TypeError: If `coupling` is no coupling or `dim` no int; at a call, if `x` is no
        floating-point or complex array or a branch returns no array.
      ValueError: If `dim` is odd, if `rngs` is missing; at a call, if `x` does not have
        `dim` on `axis`, or if a branch changes the shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from revjax import ReversibleCouplingBlock
      >>> rngs = nnx.Rngs(0)
      >>> block = ReversibleCouplingBlock(8, F=nnx.Linear(4, 4, rngs=rngs), rngs=rngs)
      >>> x = jnp.ones((2, 8))
      >>> bool(jnp.allclose(block.inverse(block(x)), x, atol=1e-6))
      True

    References:
      Gomez et al., *The Reversible Residual Network: Backpropagation Without Storing
      Activations*, arXiv:1707.04585.
    """

    def __init__(
        self,
        dim: int,
        F: Callable[..., Any] | None = None,
        G: Callable[..., Any] | None = None,
        *,
        coupling: Coupling | tuple[Coupling, Coupling] = Additive(),
        axis: int = -1,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Builds the block; see the class."""
        self.dim = dim
        self.axis = axis
        self.coupling = coupling
        laws = self._form()["couplings"]
        f, g = self._names()
        if F is not None or f == "F":
            self.F = _branch("F", F, dim // 2, laws[0], rngs)
        if G is not None or g == "G":
            self.G = _branch("G", G, dim // 2, laws[1], rngs)

    def _form(self) -> dict[str, Any]:
        return _form(self, 2, self.coupling)

    def _evaluate(self, step: int, others: Any, args: tuple, kwargs: dict) -> Any:
        return (self.f, self.g)[step](*others, *args, **kwargs)

    def _names(self) -> tuple[str, str]:
        """Returns what messages call the branches."""
        base = ReversibleCouplingBlock
        return (
            "F" if type(self).f is base.f else "f",
            "G" if type(self).g is base.g else "g",
        )

    def f(self, x: Array, *context: Any, **kwargs: Any) -> Any:
        """Returns what changes the first stream, given the second; may be rewritten."""
        return self.F(x, *context, **kwargs)

    def g(self, x: Array, *context: Any, **kwargs: Any) -> Any:
        """Returns what changes the second stream, given the first; may be rewritten."""
        return self.G(x, *context, **kwargs)


def _branch(
    name: str, branch: Any, size: int, coupling: Coupling, rngs: nnx.Rngs | None
) -> Any:
    """Returns a branch, or makes the default one."""
    if branch is None:
        given = _checks.default_branch(rngs, name)
        _checks.rngs(given, nnx.Rngs)
        _checks.within(size > 0, 2 * size, "dim", "positive for a default branch")
        return nnx.Linear(size, coupling.arity * size, use_bias=False, rngs=given)
    _checks.callable_(branch, name)
    return branch


def _form(
    block: ReversibleBlock,
    streams: int,
    couplings: Any,
    moves: tuple = (),
    steps: int | None = None,
) -> dict[str, Any]:
    """Checks what a block's steps are made of; its attributes may have changed."""
    _checks.divisible(block.dim, streams, "dim")
    _checks.integer(block.axis, "axis")
    return {
        "axis": block.axis,
        "dim": block.dim,
        "streams": streams,
        "couplings": _law_checks.couplings(
            couplings, streams if steps is None else steps
        ),
        "moves": moves,
    }


class ReversibleHalfBlock(ReversibleBlock):
    r"""A block of one branch, after which the streams change places.

    $$y_1 = x_2, \qquad y_2 = x_1 + F(x_2)$$

    with `+` for the coupling, undone by $x_2 = y_1$, $x_1 = y_2 - F(y_1)$. Two of them
    are one `ReversibleCouplingBlock`. With `Leapfrog` it is a step of
    $\ddot x = F(x)$, with `Scaled(2 * dt)` the midpoint rule of $\dot x = F(x)$.

    Args:
      dim: The size of the input on `axis`; even.
      F: The branch; `None` makes a linear layer, as in `ReversibleCouplingBlock`. Or
        write the method `f(self, x, *context)` of a subclass.
      coupling: The law by which the stream changes.
      axis: The axis on which the input is split.
      rngs: Randomness for the default branch.

    Raises:
      TypeError: As `ReversibleCouplingBlock`.
      ValueError: As `ReversibleCouplingBlock`.

    Example:
      >>> import jax.numpy as jnp
      >>> from revjax import ReversibleHalfBlock
      >>> block = ReversibleHalfBlock(2, lambda x: 10 * x)
      >>> y = block(jnp.array([1.0, 2.0]))
      >>> y.tolist(), block.inverse(y).tolist()
      ([2.0, 21.0], [1.0, 2.0])

    References:
      Chang et al., *Reversible Architectures for Arbitrarily Deep Residual Neural
      Networks*, arXiv:1709.03698.
    """

    def __init__(
        self,
        dim: int,
        F: Callable[..., Any] | None = None,
        *,
        coupling: Coupling = Additive(),
        axis: int = -1,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Builds the block; see the class."""
        self.dim = dim
        self.axis = axis
        self.coupling = coupling
        (law,) = self._form()["couplings"]
        if F is not None or self._names() == ("F",):
            self.F = _branch("F", F, dim // 2, law, rngs)

    def _form(self) -> dict[str, Any]:
        return _form(self, 2, self.coupling, (Swap(),), steps=1)

    def _names(self) -> tuple[str, ...]:
        return ("F" if type(self).f is ReversibleHalfBlock.f else "f",)

    def _evaluate(self, step: int, others: Any, args: tuple, kwargs: dict) -> Any:
        return self.f(*others, *args, **kwargs)

    def f(self, x: Array, *context: Any, **kwargs: Any) -> Any:
        """Returns what changes the first stream, given the second; may be rewritten."""
        return self.F(x, *context, **kwargs)


class ReversibleGroupBlock(ReversibleBlock):
    r"""A block of more than two streams, for wide inputs and narrow branches.

    The input is split evenly on `axis` into $C$ streams, one for each branch.

    $$y_1 = x_1 + f_1(x_2 + \dots + x_C), \qquad y_i = x_i + f_i(y_{i-1})$$

    with `+` in front of $f$ for the coupling. A branch sees one $C$-th of the features,
    so the parameters and the memory of a branch shrink with $C$.

    Args:
      dim: The size of the input on `axis`, a multiple of the number of branches.
      branches: At least two modules or functions, as `F` of `ReversibleCouplingBlock`.
      coupling: The law by which a stream changes, or a tuple with one for each branch.
      axis: The axis on which the input is split.

    Raises:
      TypeError: If a branch or coupling is none, or `dim` no int; at a call as
        `ReversibleCouplingBlock`.
      ValueError: If there are fewer than two branches, or `dim` is no multiple of their
        number; at a call as `ReversibleCouplingBlock`.

    Example:
      >>> import jax.numpy as jnp
      >>> from revjax import ReversibleGroupBlock
      >>> block = ReversibleGroupBlock(3, [jnp.square] * 3)
      >>> y = block(jnp.array([1.0, 2.0, 3.0]))
      >>> y.tolist(), block.inverse(y).tolist()
      ([26.0, 678.0, 459687.0], [1.0, 2.0, 3.0])

    References:
      Li et al., *Training Graph Neural Networks with 1000 Layers*, arXiv:2106.07476.
    """

    def __init__(
        self,
        dim: int,
        branches: Sequence[Callable[..., Any]],
        *,
        coupling: Coupling | tuple[Coupling, ...] = Additive(),
        axis: int = -1,
    ) -> None:
        """Builds the block; see the class."""
        self.branches = nnx.List(_checks.branches(branches))
        self.dim = dim
        self.axis = axis
        self.coupling = coupling
        self._form()

    def _form(self) -> dict[str, Any]:
        return _form(self, len(self.branches), self.coupling)

    def _names(self) -> tuple[str, ...]:
        return tuple(f"branches[{i}]" for i in range(len(self.branches)))

    def _evaluate(self, step: int, others: Any, args: tuple, kwargs: dict) -> Any:
        x = others[step - 1] if step else sum(others[1:], others[0])
        return self.branches[step](x, *args, **kwargs)
