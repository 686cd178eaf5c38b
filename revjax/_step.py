"""The steps of a block: a branch traced to a program, and a coupling; or a move.

A branch is a pure function of three lists of arrays,

    h, own, common, aux = branch(own, common, others)

where `own` are the variables of this block alone, `common` is what all blocks share
(context, tied parameters) and `others` are the streams that the step does not change.
It returns the update, both lists as they are after it (an array that it did not touch
comes back as the same array), and any further outputs. Nothing here tells parameters
from state: an array that a branch returns changed *is* state, and the value from before
the branch is what the backward pass replays.

A move is a step without a branch: the streams change places, or their elements do.

A branch is traced once, to a jaxpr, when the stack is called, and that program runs in
both passes. So the backward pass computes what the forward pass computed, also where
Python or the user's contexts (matmul precision, say) would decide otherwise by then.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from revjax import _law_checks
from revjax._couplings import Coupling, Inverse, wide

Leaves = Sequence[Any]
Streams = tuple[Array, ...]
Branch = Callable[[list, list, tuple], tuple[Any, Leaves, Leaves, Any]]


def override(leaves: Leaves, part: Mapping[int, Any]) -> list:
    """Returns `leaves` with the entries of `part` in their places."""
    return [part.get(i, leaf) for i, leaf in enumerate(leaves)]


def is_inexact(leaf: Any) -> bool:
    """Says whether a value has a derivative: floating-point or complex."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def widened(common: Leaves, moving: Iterable[int]) -> list:
    """Returns common arrays in the dtype in which autodiff is to sum their cotangents.

    Those that blocks change stay as they are.
    """
    return [
        leaf.astype(wide(leaf.dtype)) if is_inexact(leaf) and i not in moving else leaf
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
      update: The structure of its update, an array or a tuple.
      exact: Whether its bits must be the same in both passes; see `Coupling`.
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
    update: Any
    exact: bool
    name: str

    @property
    def effects(self) -> Any:
        """Effects of the branch, such as collectives."""
        return self.jaxpr.effects

    def inverted(self) -> "Step":
        """Returns the step that undoes this one; it changes no variable."""
        return dataclasses.replace(
            self,
            coupling=Inverse(self.coupling),
            writes_own=frozenset(),
            writes_common=frozenset(),
        )

    def __call__(
        self, own: Leaves, common: Leaves, others: Streams
    ) -> tuple[Any, list, list, list]:
        """Evaluates the branch. Returns its update, own, common and aux leaves.

        Common arrays may come in a wider dtype; see `widened`.
        """
        others = tuple(map(self.coupling.decode, others))
        if self.exact:
            others = lax.optimization_barrier(others)
        places = range(self.n_common)
        variables = self.jaxpr.invars[self.n_own : self.n_own + self.n_common]
        given = [_narrow(common[i], v) for i, v in zip(places, variables, strict=True)]
        consts = [
            _narrow(common[i], v)
            for i, v in zip(self.consts, self.jaxpr.constvars, strict=True)
        ]
        closed = ClosedJaxpr(self.jaxpr, consts)
        out = jaxpr_as_fun(closed)(*own, *given, *others)
        n_h = self.update.num_leaves
        h, rest = jax.tree.unflatten(self.update, out[:n_h]), out[n_h:]
        if self.exact:
            h = lax.optimization_barrier(h)
        new_own = rest[: self.n_own]
        new_common = rest[self.n_own : self.n_own + self.n_common]
        own = override(own, {i: new_own[i] for i in self.writes_own})
        common = override(common, {i: new_common[i] for i in self.writes_common})
        return h, own, common, rest[self.n_own + self.n_common :]


@dataclasses.dataclass(frozen=True)
class Move:
    """A step that only moves elements, and so is undone and differentiated exactly.

    Attributes:
      apply: Returns the streams after the step, given those before it.
      undo: Undoes `apply`. A permutation's inverse is its transpose, so cotangents go
        the same way.
    """

    apply: Callable[[Streams], Streams]
    undo: Callable[[Streams], Streams]

    effects: ClassVar[frozenset] = frozenset()
    reads_own: ClassVar[frozenset[int]] = frozenset()
    reads_common: ClassVar[frozenset[int]] = frozenset()
    writes_own: ClassVar[frozenset[int]] = frozenset()
    writes_common: ClassVar[frozenset[int]] = frozenset()

    def inverted(self) -> "Move":
        """Returns the step that undoes this one."""
        return Move(self.undo, self.apply)


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


def split(streams: tuple, index: int) -> tuple[Any, tuple]:
    """Returns the stream at `index`, and the others."""
    return streams[index], streams[:index] + streams[index + 1 :]


def place(stream: Array, others: Streams, index: int) -> Streams:
    """Undoes `split`."""
    return (*others[:index], stream, *others[index:])


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
    x, others = split(tuple(streams), stream)
    others = tuple(jax.eval_shape(coupling.decode, s) for s in others)

    def program(own: list, common: list, others: tuple) -> tuple:
        h, *rest = branch(own, common, others)
        h = _law_checks.branch_outputs(h, x, coupling.arity, name)
        h = coupling.update(h, others)
        for law in (coupling.combine, coupling.recover):
            _law_checks.law(jax.eval_shape(law, x, h), x, law)
        return (h, *rest)

    closed, shapes = jax.make_jaxpr(program, return_shape=True)(
        list(own), list(common), others
    )
    jaxpr = closed.jaxpr
    update, new_own, new_common, aux = shapes
    first = len(common) + len(hoisted)
    consts = range(first, first + len(closed.consts))
    hoisted.extend(closed.consts)

    n_own, n_common = len(own), len(common)
    invars = jaxpr.invars[: n_own + n_common]
    n_h = len(jax.tree.leaves(update))
    after = jaxpr.outvars[n_h : n_h + n_own + n_common]
    writes = {
        i
        for i, (old, new) in enumerate(zip(invars, after, strict=True))
        if new is not old
    }
    # An array that merely passes through is not read.
    updates = range(n_h)
    outputs = [
        v for i, v in enumerate(jaxpr.outvars) if i in updates or i - n_h in writes
    ]
    outputs += jaxpr.outvars[n_h + n_own + n_common :]
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in outputs}
    reads = {i for i, v in enumerate(invars) if id(v) in used}
    needs = _needs(jaxpr, updates)
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
        update=jax.tree.structure(update),
        exact=coupling.exact,
        name=name,
    )
    return step, list(new_own), list(new_common)
