"""One reversible block: forward, inverse, and inverse and derivative together.

A block is a tuple of steps. A step changes one stream by a branch that sees only the
other streams, and so it can be undone. To undo it *and* to differentiate it, its branch
is evaluated once, at the same point, with `jax.vjp`.

A branch is a pure function of three lists of arrays,

    h, own, common, aux = branch(own, common, others)

where `own` are the variables of this block alone, `common` is what all blocks share
(context, tied parameters) and `others` are the streams that the step does not change.
It returns the update, both lists as they are after it (an array that it did not touch
comes back as the same array), and any further outputs. Nothing here tells parameters
from state: an array that a branch returns changed *is* state, and the value from before
the branch is what the backward pass replays.

A branch is traced once, to a jaxpr, when the stack is called, and that program runs in
both passes. So the backward pass computes what the forward pass computed, also where
Python or the user's contexts (matmul precision, say) would decide otherwise by then.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from revjax import _checks
from revjax._couplings import Coupling

Leaves = Sequence[Any]
Streams = tuple[Array, ...]
Branch = Callable[[list, list, tuple], tuple[Any, Leaves, Leaves, Any]]


def override(leaves: Leaves, part: Mapping[int, Any]) -> list:
    """Returns `leaves` with the entries of `part` in their places."""
    return [part.get(i, leaf) for i, leaf in enumerate(leaves)]


def is_inexact(leaf: Any) -> bool:
    """Says whether a value has a derivative: floating-point or complex."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype in which cotangents of shared values are summed: at least float32."""
    return np.promote_types(dtype, np.float32)


def widened(common: Leaves, moving: Iterable[int]) -> list:
    """Returns common arrays in the dtype in which autodiff is to sum their cotangents.

    Those that blocks change stay as they are.
    """
    return [
        leaf.astype(accumulator_dtype(leaf.dtype))
        if is_inexact(leaf) and i not in moving
        else leaf
        for i, leaf in enumerate(common)
    ]


def _narrow(leaf: Any, variable: Any) -> Any:
    dtype = variable.aval.dtype
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step of a block, its branch traced to a program.

    Attributes:
      stream: The index of the stream that the step changes.
      coupling: The law by which it is changed.
      jaxpr: The branch's program, over own, constants and common, and other streams.
      consts: The places in `common` of the values that the branch closed over.
      n_own: The number of the block's own arrays.
      n_common: The number of common arrays that the branch was given.
      reads_own, reads_common: What the branch's program uses of them.
      writes_own, writes_common: What it returns changed.
      needs_own, needs_common: What its update depends on.
      aux: The structure of the branch's further outputs.
      name: What error messages call the branch.
    """

    stream: int
    coupling: Coupling
    jaxpr: Any
    consts: tuple[int, ...]
    n_own: int
    n_common: int
    reads_own: frozenset[int]
    reads_common: frozenset[int]
    writes_own: frozenset[int]
    writes_common: frozenset[int]
    needs_own: frozenset[int]
    needs_common: frozenset[int]
    aux: Any
    name: str

    def __call__(
        self, own: Leaves, common: Leaves, others: Streams
    ) -> tuple[Array, list, list, list]:
        """Evaluates the branch. Returns its update, own, common and aux leaves.

        Common arrays may come in a wider dtype; see `widened`.
        """
        places = range(self.n_common)
        variables = self.jaxpr.invars[self.n_own : self.n_own + self.n_common]
        given = [_narrow(common[i], v) for i, v in zip(places, variables, strict=True)]
        consts = [
            _narrow(common[i], v)
            for i, v in zip(self.consts, self.jaxpr.constvars, strict=True)
        ]
        closed = ClosedJaxpr(self.jaxpr, consts)
        out = jaxpr_as_fun(closed)(*own, *given, *others)
        h, rest = out[0], out[1:]
        new_own = rest[: self.n_own]
        new_common = rest[self.n_own : self.n_own + self.n_common]
        own = override(own, {i: new_own[i] for i in self.writes_own})
        common = override(common, {i: new_common[i] for i in self.writes_common})
        return h, own, common, rest[self.n_own + self.n_common :]


def _needs(jaxpr: Any, outputs: Iterable[int]) -> set[int]:
    """Returns the places of a program's inputs that some of its outputs depend on."""
    needed = {id(jaxpr.outvars[i]) for i in outputs}
    for eqn in reversed(jaxpr.eqns):
        out = {i for i, v in enumerate(eqn.outvars) if id(v) in needed}
        if not out:
            continue
        read = range(len(eqn.invars))
        if eqn.primitive.name in ("jit", "pjit", "checkpoint", "remat2"):
            inner = eqn.params["jaxpr"]
            read = _needs(getattr(inner, "jaxpr", inner), out)
        needed |= {id(eqn.invars[i]) for i in read}
    return {i for i, v in enumerate(jaxpr.invars) if id(v) in needed}


def trace_step(
    branch: Branch,
    stream: int,
    coupling: Coupling,
    name: str,
    own: Leaves,
    common: Leaves,
    streams: Leaves,
    hoisted: list,
) -> tuple[Step, list, list]:
    """Traces a branch to the program that both passes run.

    Args:
      branch: The branch.
      stream: The index of the stream that it changes.
      coupling: How it changes it.
      name: What error messages call the branch.
      own: The block's own arrays, or their shapes and dtypes.
      common: Likewise the common arrays.
      streams: Likewise the streams.
      hoisted: Values that branches close over; those of this branch are appended.
        They come after `common` in the list that the step is called with.

    Returns:
      The step, and `own` and `common` as the branch leaves them.
    """
    x = streams[stream]
    others = tuple(streams[:stream]) + tuple(streams[stream + 1 :])

    def program(own: list, common: list, others: tuple) -> tuple:
        h, *rest = branch(own, common, others)
        h = _checks.branch_output(h, x, name)
        for law in (coupling.combine, coupling.recover):
            _checks.law(jax.eval_shape(law, x, h), x, law)
        return (h, *rest)

    closed, shapes = jax.make_jaxpr(program, return_shape=True)(
        list(own), list(common), others
    )
    jaxpr = closed.jaxpr
    _, new_own, new_common, aux = shapes
    first = len(common) + len(hoisted)
    consts = range(first, first + len(closed.consts))
    hoisted.extend(closed.consts)

    n_own, n_common = len(own), len(common)
    invars = jaxpr.invars[: n_own + n_common]
    after = jaxpr.outvars[1 : 1 + n_own + n_common]
    writes = {
        i
        for i, (old, new) in enumerate(zip(invars, after, strict=True))
        if new is not old
    }
    # An array that merely passes through is not read.
    outputs = [v for i, v in enumerate(jaxpr.outvars) if i == 0 or i - 1 in writes]
    outputs += jaxpr.outvars[1 + n_own + n_common :]
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in outputs}
    reads = {i for i, v in enumerate(invars) if id(v) in used}
    needs = _needs(jaxpr, {0})
    step = Step(
        stream=stream,
        coupling=coupling,
        jaxpr=jaxpr,
        consts=tuple(consts),
        n_own=n_own,
        n_common=n_common,
        reads_own=frozenset(i for i in reads if i < n_own),
        reads_common=frozenset(i - n_own for i in reads if i >= n_own)
        | frozenset(consts),
        writes_own=frozenset(i for i in writes if i < n_own),
        writes_common=frozenset(i - n_own for i in writes if i >= n_own),
        needs_own=frozenset(i for i in needs if i < n_own),
        needs_common=frozenset(i - n_own for i in needs if n_own <= i < len(invars)),
        aux=jax.tree.structure(aux),
        name=name,
    )
    return step, list(new_own), list(new_common)


def _split(streams: Streams, index: int) -> tuple[Array, Streams]:
    """Returns the stream at `index`, and the others."""
    return streams[index], streams[:index] + streams[index + 1 :]


def _place(stream: Array, others: Streams, index: int) -> Streams:
    """Undoes `_split`."""
    return (*others[:index], stream, *others[index:])


def forward(
    steps: Sequence[Step], own: Leaves, common: Leaves, streams: Streams
) -> tuple[Streams, Leaves, Leaves, list, list]:
    """Runs a block.

    Returns:
      The streams, the block's own arrays and the common ones after the block, the
      further outputs of each step, and for each step own and common as they were
      before it.
    """
    outputs, before = [], []
    for step in steps:
        before.append((own, common))
        x, others = _split(streams, step.stream)
        h, own, common, aux = step(own, common, others)
        streams = _place(step.coupling.combine(x, h), others, step.stream)
        outputs.append(aux)
    return streams, own, common, outputs, before


def _branch_of(
    step: Step,
    own: Leaves,
    common: Leaves,
    live: tuple[Iterable[int], Iterable[int], Iterable[int]],
    d_own: Mapping[int, Array],
    d_common: Mapping[int, Array],
    others: Streams,
) -> tuple:
    """Evaluates a branch as a function of what is differentiated.

    Returns:
      Its update, and by place those of its other outputs that have a cotangent.
    """
    h, *rest = step(override(own, d_own), override(common, d_common), others)
    return (
        h,
        *({i: out[i] for i in places} for out, places in zip(rest, live, strict=True)),
    )


def invert_and_vjp(
    steps: Sequence[Step],
    before: Sequence[tuple[Leaves, Leaves]],
    streams: Streams,
    streams_ct: Streams,
    own_ct: Mapping[int, Array],
    common_ct: Mapping[int, Array],
    outputs_ct: Sequence[Mapping[int, Array]],
    wanted_own: frozenset[int],
) -> tuple[Streams, Streams, dict[int, Array], dict[int, Array]]:
    """Undoes a block and pulls cotangents back through it, one evaluation a step.

    For each step, last to first, with `y` the stream that it changed:

        h, pullback = jax.vjp(branch, own, common, others)
        x = recover(y, h)
        x_ct, h_ct = vjp of combine at (x, h)
        own_ct, common_ct, others_ct += pullback(h_ct)

    Args:
      steps: The block's steps.
      before: For each step, own and common arrays as they were before it.
      streams: The block's output.
      streams_ct: Its cotangent.
      own_ct: The cotangents of the block's own arrays after it, by place; an array
        without one has a zero cotangent.
      common_ct: The same for the common arrays, in the dtype of an accumulator.
        Only arrays that are in here receive a cotangent.
      outputs_ct: For each step, the cotangents of its further outputs, by place.
      wanted_own: The places of own arrays whose cotangent is wanted.

    Returns:
      The block's input, its cotangent, and the cotangents of own and common arrays
      before the block.
    """
    own_ct, common_ct = dict(own_ct), dict(common_ct)
    for k in reversed(range(len(steps))):
        step, (own, common), further_ct = steps[k], before[k], outputs_ct[k]
        y, others = _split(streams, step.stream)
        y_ct, others_ct = _split(streams_ct, step.stream)

        # A value that an earlier step wrote passes its cotangent on to that step.
        written = frozenset[int]().union(*(s.writes_own for s in steps[:k]))
        d_own = {
            i: own[i]
            for i in sorted(step.reads_own & (wanted_own | written))
            if is_inexact(own[i])
        }
        d_common = {i: common[i] for i in sorted(step.reads_common & common_ct.keys())}
        out_own_ct = {i: own_ct.pop(i) for i in step.writes_own & own_ct.keys()}
        out_common_ct = {
            i: common_ct[i].astype(common[i].dtype)
            for i in step.writes_common & common_ct.keys()
        }
        for i in out_common_ct:
            common_ct[i] = jnp.zeros_like(common_ct[i])

        (h, *_), pullback = jax.vjp(
            functools.partial(
                _branch_of,
                step,
                own,
                common,
                (out_own_ct.keys(), out_common_ct.keys(), further_ct.keys()),
            ),
            d_own,
            d_common,
            others,
        )
        x = step.coupling.recover(y, h)
        x_ct, h_ct = step.coupling.pullback(x, h, y_ct)
        d_own_ct, d_common_ct, d_others_ct = pullback(
            (h_ct, out_own_ct, out_common_ct, dict(further_ct))
        )

        for i, ct in d_own_ct.items():
            own_ct[i] = own_ct[i] + ct if i in own_ct else ct
        for i, ct in d_common_ct.items():
            common_ct[i] = common_ct[i] + ct.astype(common_ct[i].dtype)
        others_ct = tuple(a + b for a, b in zip(others_ct, d_others_ct, strict=True))
        streams = _place(x, others, step.stream)
        streams_ct = _place(x_ct, others_ct, step.stream)
    return streams, streams_ct, own_ct, common_ct
