"""Stacks of alike blocks as a pure function of arrays, for any library of layers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from revjax import _checks, _law_checks
from revjax._couplings import Additive, Coupling
from revjax._inputs import give, merge, partition, take
from revjax._modes import BetweenAnchors, Mode, anchors, run
from revjax._plan import BranchSpec, SegmentSpec, make_plan
from revjax._step import Branch, Step


@functools.partial(
    jax.jit, static_argnames=("f", "g", "coupling", "mode", "depth", "rest", "has_aux")
)
def _scan(
    f, g, inputs, streams, arrays, drift, *, coupling, mode, depth, rest, has_aux
):
    """`reversible_scan` after its checks, compiled once for equal static arguments."""
    own, treedef = jax.tree.flatten(inputs)
    common, fill = arrays, merge(rest)

    def branch(function: Callable, index: int) -> Branch:
        def evaluate(own, common, others):
            params, entries = jax.tree.unflatten(treedef, own)
            h = function(params[index], *others, *give(fill(common), entries))
            h, aux = _checks.with_aux(h, f"`{'fg'[index]}`") if has_aux else (h, ())
            return h, own, common, aux

        return evaluate

    steps = tuple(
        BranchSpec(i, branch(function, i), coupling, f"`{name}`")
        for i, (name, function) in enumerate((("f", f), ("g", g)))
    )
    plan, hoisted = make_plan([SegmentSpec(steps, depth, None)], [own], common, streams)
    _checks.nothing_traced(hoisted)
    y, _, _, (outputs,), _ = run(plan, mode, [own], [*common, *hoisted], streams, drift)
    steps = (step for step in plan.segments[0].steps if isinstance(step, Step))
    aux = tuple(
        jax.tree.unflatten(step.aux, leaves)
        for step, leaves in zip(steps, outputs, strict=True)
    )
    y = tuple(map(coupling.decode, y))
    return (y, aux) if has_aux else y


def reversible_scan(
    f: Callable[..., Any],
    g: Callable[..., Any],
    params: tuple[Any, Any],
    streams: tuple[Array, Array],
    *context: Any,
    coupling: Coupling = Additive(),
    anchor_every: int = 0,
    between_anchors: BetweenAnchors = "recompute",
    store_activations: bool = False,
    has_aux: bool = False,
    drift: Array | None = None,
) -> Any:
    r"""Runs a stack of reversible blocks on a pair of streams, as a pure function.

    Block $i$ of `depth` computes, with its slice of the parameters,

    $$y_1 = x_1 + f(\theta_{f,i}, x_2), \qquad y_2 = x_2 + g(\theta_{g,i}, y_1),$$

    (`+` stands for the coupling) and the next block takes $(y_1, y_2)$. For the
    backward pass only the last output is kept: going back, $x_2 = y_2 - g(y_1)$ and
    $x_1 = y_1 - f(x_2)$, and each evaluation of $f$ and $g$ gives their derivative
    too. So the activation memory does not depend on the depth, and a training step
    costs what `jax.checkpoint` around each block costs.

    Args:
      f: `f(params_of_one_block, x2, *context)`, of the shape of `x1`. What it depends
        on and what is traced must come in as arguments.
      g: Likewise for the second stream. Pass the same function objects again and an
        eager call does not compile again.
      params: The pair `(f_params, g_params)` of pytrees of arrays, stacked on a leading
        axis of size `depth`.
      streams: The pair `(x1, x2)` of floating-point or complex arrays.
      *context: Further arguments of both branches, the same for every block. Arrays
        (floating-point ones receive the sum of their gradients over the blocks) and
        pytrees of them; `PerBlock`, of which each block receives its own entry;
        anything else is static and must be hashable.
      coupling: The law by which a stream changes.
      anchor_every: 0 keeps the output alone. `A > 0` keeps the streams at every A-th
        block. It need not divide the depth.
      between_anchors: `"recompute"` runs each chunk again from its anchor and keeps
        its activations for the moment (`jax.checkpoint`; memory of depth / A anchors
        and A blocks, no drift); `"invert"` undoes the chunk from the next
        anchor, so that rounding errors build up over at most A blocks.
      store_activations: Ordinary autodiff, whatever `anchor_every` is: for forward
        mode, debugging, comparison.
      drift: With anchors between which blocks are undone, a floating-point array
        `[anchors]`, one entry for each `anchor_every` blocks begun. Its values do not
        matter; its gradient is the relative distance of the streams at each anchor
        from what the backward pass made of them. The last anchor is the output. Under
        `jax.vmap` the drifts of the batch are added up.
      has_aux: Whether each branch returns a pair `(h, aux)`: besides the update a
        pytree of arrays, such as a loss that balances the load of experts.

    Returns:
      The pair `(y1, y2)`, of the shapes of `streams`, in the dtype of the coupling's
      streams. If `has_aux`, the pair of that pair and `(f_aux, g_aux)`, where each
      array has a leading axis of size `depth`; its gradient flows.

    Raises:
      TypeError: If `streams` is not a pair of floating-point or complex arrays, if a
        branch returns no array (or no pair, if `has_aux`), if an option is of the wrong
        type, or if static context is not hashable.
      ValueError: If a branch changes the shape of its stream, if leading axes of
        `params` disagree or are missing, if an option has a wrong value, or if a
        branch closes over a traced value.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from revjax import reversible_scan
      >>> def branch(w, x): return jnp.tanh(x @ w)
      >>> w = jax.random.normal(jax.random.key(0), (2, 12, 4, 4)) / 4
      >>> x = jnp.ones((3, 4)), jnp.zeros((3, 4))
      >>> y1, y2 = reversible_scan(branch, branch, (w[0], w[1]), x)
      >>> y1.shape
      (3, 4)

    References:
      Gomez et al., *The Reversible Residual Network: Backpropagation Without Storing
      Activations*, arXiv:1707.04585.
    """
    mode = Mode(anchor_every, between_anchors, store_activations)
    _checks.boolean(has_aux, "has_aux")
    _law_checks.coupling(coupling)
    for name, function in (("f", f), ("g", g)):
        _checks.static_function(function, name)
    _checks.pair(params, "params", "(f_params, g_params)")
    _checks.pair(streams, "streams", "(x1, x2)")
    depth = _checks.leading_axis(params)
    if drift is not None:
        _checks.measurable(mode, "drift")
        _checks.meter(drift, anchors(depth, anchor_every))
    x1, x2 = (coupling.encode(_checks.stream(x, "streams")) for x in streams)
    shared, entries = take(context, depth)
    arrays, rest = partition(shared)
    with _checks.reverse_mode():
        return _scan(
            f, g, (tuple(params), entries), (x1, x2), arrays, drift,
            coupling=coupling, mode=mode, depth=depth, rest=rest, has_aux=has_aux,
        )  # fmt: skip
