"""What a user got wrong is said at trace time, word for word as it is tested here."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from revjax import (
    Additive,
    Coupling,
    PerBlock,
    ReversibleCouplingBlock,
    ReversibleSequence,
    ReversibleSequential,
    reversible_scan,
)

X = np.ones((2, 4), np.float32)
STACKS = (ReversibleSequential, ReversibleSequence)


def same(x, *context, **kwargs):
    return x


class Scale(nnx.Module):
    """A branch with a parameter; `then` is what goes wrong after it."""

    def __init__(self, then=same):
        self.w = nnx.Param(jnp.ones((), jnp.float32))
        self.then = then

    def __call__(self, x, *context):
        return self.then(x * self.w[...].astype(x.dtype), *context)


def block(F=None, G=None, dim=4, **options: Any):
    return ReversibleCouplingBlock(dim, F or Scale(), G or Scale(), **options)


class Written(ReversibleCouplingBlock):
    """A subclass with a branch of its own."""

    def __init__(self, then):
        super().__init__(4)
        self.then = then
        self.w = nnx.Param(jnp.ones((), jnp.float32))

    def f(self, x, *context):
        return self.then(x * self.w[...])

    def g(self, x, *context):
        return x


# How to make a model around two blocks (or one), and what it calls their branches.
FRAMES = {
    "block": (lambda make: make(), "ReversibleCouplingBlock"),
    "sequential": (
        lambda make: ReversibleSequential([make(), make()]),
        "ReversibleCouplingBlock",
    ),
    "sequence": (
        lambda make: ReversibleSequence([make(), make()]),
        "blocks 0-1 (ReversibleCouplingBlock)",
    ),
    "anchored": (
        lambda make: ReversibleSequence([make(), make()], 1),
        "blocks 0-1 (ReversibleCouplingBlock)",
    ),
    "create": (
        lambda make: ReversibleSequence.create(
            lambda rngs: make(), 2, rngs=nnx.Rngs(0)
        ),
        "blocks 0-1 (ReversibleCouplingBlock)",
    ),
}
frames = pytest.mark.parametrize(
    ("build", "where"), list(FRAMES.values()), ids=list(FRAMES)
)

# Ways to call a model: all of them see the error while JAX traces, or before.
CALLS = (
    lambda model, x: model(x),
    lambda model, x: jax.jit(lambda: model(x))(),
    lambda model, x: jax.eval_shape(lambda: model(x)),
    lambda model, x: nnx.jit(lambda model: model(x))(model),
    lambda model, x: nnx.grad(lambda model: model(x).sum())(model),
)


@functools.cache
def good(build):
    """A model without a fault, for the tests of inputs."""
    return build(block)


def says(error, message, function, *args, **kwargs):
    """Checks that a call raises exactly this."""
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert str(caught.value) == message
    assert type(caught.value) is error


def every_call_says(error, message, model, x):
    for call in CALLS:
        says(error, message, call, model, x)


# --- the input ----------------------------------------------------------------------


@frames
@pytest.mark.parametrize(
    ("x", "found"),
    [
        (np.ones((2, 4), np.int32), "int32[2, 4]"),
        (np.ones((2, 4), np.bool_), "bool[2, 4]"),
    ],
)
def test_an_integer_or_bool_input_is_refused(build, where, x, found):
    message = (
        "`{}` must be a floating-point or complex array. Got "
        f"{found}; convert it first, for example with `.astype(jnp.float32)`."
    )
    model = good(build)
    every_call_says(TypeError, message.format("x"), model, x)
    says(TypeError, message.format("y"), model.inverse, x)


def test_a_traced_integer_input_is_refused():
    message = (
        "`x` must be a floating-point or complex array. Got int32[2, 4]; convert it "
        "first, for example with `.astype(jnp.float32)`."
    )
    says(TypeError, message, jax.jit(block()), np.ones((2, 4), np.int32))


@frames
@pytest.mark.parametrize(
    ("x", "found"),
    [
        (None, "None of type NoneType"),
        ("text", "'text' of type str"),
        ([[1.0, 2.0, 3.0, 4.0]], "a list of length 1"),
        (3, "3 of type int"),
        (np.array([["a"] * 4], object), "object[1, 4]"),
        (nnx.Param(jnp.ones((2, 4), jnp.float32)), "float32[2, 4] of type Param"),
    ],
    ids=["none", "text", "list", "int", "objects", "variable"],
)
def test_an_input_that_is_no_array_is_refused(build, where, x, found):
    message = f"`x` must be a floating-point or complex array. Got {found}."
    every_call_says(TypeError, message, good(build), x)


def test_a_prng_key_as_input_is_refused():
    keys = jax.random.split(jax.random.key(0), 4)
    message = f"`x` must be a floating-point or complex array. Got {keys.dtype}[4]."
    says(TypeError, message, block(), keys)


@frames
@pytest.mark.parametrize("size", [5, 6])
def test_an_input_without_dim_on_the_axis_is_refused(build, where, size):
    message = (
        f"`x` must have size `dim` = 4 on axis -1. Got size {size} for float32[2, "
        f"{size}]; build the block with `dim={size}`, or another `axis`."
    )
    model = good(build)
    x = np.ones((2, size), np.float32)
    every_call_says(ValueError, message, model, x)
    says(ValueError, message.replace("`x`", "`y`"), model.inverse, x)


@frames
@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_the_input_does_not_have_is_refused(build, where, axis):
    message = (
        f"`axis` must be an axis of the input. Got axis {axis} for float32[2, 4], "
        "which has 2 axes."
    )
    every_call_says(ValueError, message, build(lambda: block(axis=axis)), X)


def test_a_scalar_input_has_no_axis_to_split():
    message = (
        "`axis` must be an axis of the input. Got axis -1 for float32[], which has 0 "
        "axes."
    )
    says(ValueError, message, block(), jnp.float32(1.0))


def test_a_later_block_that_does_not_fit_the_input_is_refused():
    message = (
        "`x` must have size `dim` = 6 on axis -1. Got size 4 for float32[2, 4]; build "
        "the block with `dim=4`, or another `axis`."
    )
    for stack in STACKS:
        every_call_says(ValueError, message, stack([block(), block(dim=6)]), X)


# --- the block's arguments ----------------------------------------------------------


@pytest.mark.parametrize("dim", [3, -1, -2])
def test_an_odd_or_negative_dim_is_refused(dim):
    message = f"`dim` must be an even number, to be split in two streams. Got {dim}."
    says(ValueError, message, ReversibleCouplingBlock, dim, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (4.0, "4.0 of type float"),
        (True, "True of type bool"),
        ("4", "'4' of type str"),
        (None, "None of type NoneType"),
        ((4, 4), "a tuple of length 2"),
    ],
)
@pytest.mark.parametrize("name", ["dim", "axis"])
def test_a_dim_or_axis_that_is_no_int_is_refused(name, value, found):
    options = {"dim": 4, "axis": -1} | {name: value}
    message = f"`{name}` must be an int. Got {found}."
    says(TypeError, message, block, **options)


@pytest.mark.parametrize("name", ["F", "G"])
def test_a_default_branch_needs_rngs(name):
    message = (
        f"`rngs` is needed to make the default branch `{name}`. Expected an nnx.Rngs; "
        f"got None. Pass `rngs=nnx.Rngs(0)`, or a module as `{name}`."
    )
    branches = {"F": same, "G": same} | {name: None}
    says(ValueError, message, ReversibleCouplingBlock, 4, **branches)


@pytest.mark.parametrize(
    ("rngs", "found"), [(0, "0 of type int"), (np.zeros(2), "float64[2]")]
)
def test_rngs_of_another_type_are_refused_by_default_branches(rngs, found):
    message = f"`rngs` must be an nnx.Rngs, for example `nnx.Rngs(0)`. Got {found}."
    says(TypeError, message, ReversibleCouplingBlock, 4, rngs=rngs)


@pytest.mark.parametrize(
    ("branch", "found"),
    [
        (3, "3 of type int"),
        ("relu", "'relu' of type str"),
        ([same], "a list of length 1"),
        (nnx.Linear, "the class Linear"),
    ],
    ids=["int", "text", "list", "class"],
)
@pytest.mark.parametrize("name", ["F", "G"])
def test_a_branch_that_cannot_be_called_is_refused(name, branch, found):
    message = f"`{name}` must be a module or a function. Got {found}."
    says(TypeError, message, block, **{name: branch})


@dataclasses.dataclass
class Unhashable(Coupling):
    strength: float = 1.0

    def combine(self, x, h):
        return x + self.strength * h

    def recover(self, y, h):
        return y - self.strength * h


class Wordy:
    def __repr__(self):
        return "first line\nsecond line"


@pytest.mark.parametrize(
    ("coupling", "message"),
    [
        (
            "additive",
            "`coupling` must be a coupling, such as `revjax.Additive()`. Got "
            "'additive' of type str.",
        ),
        (
            Additive,
            "`coupling` must be a coupling, such as `revjax.Additive()`. Got the class "
            "Additive.",
        ),
        (
            Wordy(),
            "`coupling` must be a coupling, such as `revjax.Additive()`. Got an object "
            "of type Wordy.",
        ),
        (
            Unhashable(),
            "`coupling` must be hashable, since it is static. Got "
            "Unhashable(strength=1.0) of type Unhashable; make its class a frozen "
            "dataclass without arrays.",
        ),
    ],
    ids=["text", "class", "wordy", "unhashable"],
)
def test_a_coupling_that_is_none_is_refused(coupling, message):
    says(TypeError, message, block, coupling=coupling)
    says(TypeError, message, scan, coupling=coupling)


@pytest.mark.parametrize(
    ("dtype", "found"),
    [(jnp.int32, "int32"), ("bool", "bool"), ("float33", "'float33'"), (3.0, "3.0")],
)
def test_a_coupling_dtype_that_is_not_floating_point_is_refused(dtype, found):
    message = (
        "`dtype` must be a floating-point or complex dtype, or None to keep the dtype "
        f"of the input. Got {found}."
    )
    says(TypeError, message, Additive, dtype)


# --- what a branch returns ----------------------------------------------------------

NO_ARRAY = (
    "must return one array of numbers, of the shape of the stream that it changes, "
    "float32[2, 2]. Got {}."
)
OTHER_SHAPE = (
    "must return an array of the shape of the stream that it changes, float32[2, 2]. "
    "Got {}; a layer that changes the shape belongs between two stacks, not in a block."
)
COMPLEX = (
    "returned {} for a real stream, float32[2, 2]. Return real numbers, or use complex "
    "streams: `Additive(dtype=jnp.complex64)`."
)
BAD_OUTPUTS = {
    "more": (
        lambda x: jnp.concatenate([x, x], -1),
        ValueError,
        OTHER_SHAPE,
        "float32[2, 4]",
    ),
    "transposed": (lambda x: x[None], ValueError, OTHER_SHAPE, "float32[1, 2, 2]"),
    "column": (lambda x: x[:, :1], ValueError, OTHER_SHAPE, "float32[2, 1]"),
    "row": (lambda x: x[0], ValueError, OTHER_SHAPE, "float32[2]"),
    "scalar": (lambda x: x.sum(), ValueError, OTHER_SHAPE, "float32[]"),
    "none": (lambda x: None, TypeError, NO_ARRAY, "None of type NoneType"),
    "tuple": (lambda x: (x, x), TypeError, NO_ARRAY, "a tuple of length 2"),
    "dict": (lambda x: {"x": x}, TypeError, NO_ARRAY, "a dict of length 1"),
    "number": (lambda x: 0.0, TypeError, NO_ARRAY, "0.0 of type float"),
    "variable": (nnx.Param, TypeError, NO_ARRAY, "float32[2, 2] of type Param"),
    "objects": (
        lambda x: np.full((2, 2), None),
        TypeError,
        NO_ARRAY,
        "object[2, 2]",
    ),
    "keys": (
        lambda x: jax.random.split(jax.random.key(0, impl="rbg"), (2, 2)),
        TypeError,
        NO_ARRAY,
        "key<rbg>[2, 2]",
    ),
    "complex": (
        lambda x: jax.lax.complex(x, x),
        TypeError,
        COMPLEX,
        "complex64[2, 2]",
    ),
}


@frames
@pytest.mark.parametrize("fault", BAD_OUTPUTS)
@pytest.mark.parametrize("name", ["F", "G"])
def test_a_branch_must_return_an_array_like_its_stream(build, where, fault, name):
    then, error, text, found = BAD_OUTPUTS[fault]
    branch: Any = {name: Scale(then)}
    model = build(lambda: block(**branch))
    message = f"`{name}` of {where} {text.format(found)}"
    for call in CALLS if name == "G" and fault in ("column", "none") else CALLS[2:3]:
        says(error, message, call, model, X)
    says(error, message, jax.eval_shape, model.inverse, X)


@pytest.mark.parametrize("name", ["f", "g"])
@pytest.mark.parametrize("fault", BAD_OUTPUTS)
def test_a_branch_of_reversible_scan_must_return_an_array_like_its_stream(fault, name):
    then, error, text, found = BAD_OUTPUTS[fault]
    functions = {"f": scale, "g": scale} | {name: lambda p, x: then(x * p)}
    message = f"`{name}` {text.format(found)}"
    for options in ({}, {"anchor_every": 2}, {"store_activations": True}):
        says(error, message, scan, **functions, **options)
    says(error, message, jax.eval_shape, functools.partial(scan, **functions))
    gradient = jax.grad(lambda x: scan(**functions, streams=(x, x))[0].sum())
    says(error, message, gradient, STREAMS[0])


def test_a_written_branch_is_called_by_the_name_of_its_method():
    message = "`f` of {} " + OTHER_SHAPE.format("float32[2, 1]")
    model = Written(lambda x: x[:, :1])
    every_call_says(ValueError, message.format("Written"), model, X)
    model = ReversibleSequence([block(), Written(lambda x: x[:, :1])])
    every_call_says(ValueError, message.format("block 1 (Written)"), model, X)


def test_the_message_says_which_of_several_blocks_it_means():
    message = "`G` of block 2 (ReversibleCouplingBlock) " + NO_ARRAY.format(
        "None of type NoneType"
    )
    blocks = [block(), block(), block(G=Scale(lambda x: None)), block(same)]
    every_call_says(TypeError, message, ReversibleSequence(blocks), X)


# --- what a branch does to its module, its context and its surroundings -------------


class Adds(Scale):
    def __call__(self, x, *context):
        self.seen = nnx.BatchStat(x)
        return super().__call__(x)


class Loses(Scale):
    def __call__(self, x, *context):
        h = super().__call__(x)
        del self.w
        return h


class Counts(Scale):
    calls = 0

    def __call__(self, x, *context):
        self.calls += 1
        return super().__call__(x)


CHANGED = (
    "`F` of {} must change nothing but the arrays in its variables. Got {}. Create "
    "every variable in the module's constructor, and count in an nnx.Variable."
)


@frames
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Adds, "new F.seen"),
        (Loses, "lost F.w"),
        (Counts, "a changed attribute that is not an array"),
    ],
)
def test_a_branch_that_changes_the_structure_of_its_module_is_refused(
    build, where, kind, found
):
    message = CHANGED.format(where, found)
    model = build(lambda: block(kind()))
    every_call_says(ValueError, message, model, X)
    says(ValueError, message, model.inverse, X)


@frames
def test_a_branch_that_changes_the_structure_of_its_context_is_refused(build, where):
    def writes(x, notes):
        notes["x"] = x
        return x

    message = (
        f"`F` of {where} must not change the structure of its `context`. Return what "
        "it computes, or keep it in an nnx.Variable."
    )
    model = build(lambda: block(Scale(writes)))
    says(ValueError, message, model, X, {"a": X})
    says(ValueError, message, jax.jit(model), X, {"a": X})


@pytest.mark.parametrize(
    ("new", "found"),
    [
        (np.zeros(3, np.float32), "float32[3]"),
        (np.zeros(2, np.float16), "float16[2]"),
    ],
)
def test_a_shared_variable_must_keep_its_shape_and_dtype(new, found):
    class Grows(nnx.Module):
        def __init__(self):
            self.last = nnx.BatchStat(jnp.zeros(2, jnp.float32))

        def __call__(self, x):
            self.last.set_value(jnp.asarray(new))
            return x

    shared = Grows()
    message = (
        "`F` of blocks 0-1 (ReversibleCouplingBlock) changed a variable that blocks "
        f"share from float32[2] to {found}. Keep its shape and dtype, or give each "
        "block its own."
    )
    stack = ReversibleSequence([block(shared), block(shared)])
    every_call_says(ValueError, message, stack, X)


MOVES = (
    "`F` of {} depends on variables that move on in each call, such as RNG streams or "
    "counters, so `inverse` cannot undo a call. Call `.eval()` on the model first, or "
    "pass what moves (a key, say) as context to both calls."
)


@frames
def test_an_inverse_that_draws_random_numbers_is_refused(build, where):
    model = build(lambda: block(nnx.Dropout(0.5, rngs=nnx.Rngs(0))))
    says(ValueError, MOVES.format(where), model.inverse, X)
    says(ValueError, MOVES.format(where), jax.eval_shape, model.inverse, X)
    nnx.view(model, deterministic=True).inverse(X)  # which switches dropout off


@frames
def test_an_inverse_that_draws_from_rngs_in_its_context_is_refused(build, where):
    def noisy(x, rngs):
        return x + jax.random.normal(rngs(), x.shape, x.dtype)

    model = build(lambda: block(Scale(noisy)))
    says(ValueError, MOVES.format(where), model.inverse, X, nnx.Rngs(0))


class Advances(nnx.Module):
    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros((), X.dtype))

    def __call__(self, x):
        self.calls[...] += 1
        return x * self.calls[...]


class Watches(nnx.Module):
    """Changes what it never reads for its output, also inside jit and checkpoint."""

    def __init__(self):
        self.mean = nnx.BatchStat(jnp.zeros(2, X.dtype))

    def __call__(self, x):
        @jax.jit
        @jax.checkpoint
        def forward(x, mean):
            return 2 * x, 0.9 * mean + jnp.mean(x, 0)

        x, self.mean[...] = forward(x, self.mean[...])
        return x


@frames
def test_an_inverse_that_depends_on_a_counter_is_refused(build, where):
    model = build(lambda: block(Advances()))
    says(ValueError, MOVES.format(where), model.inverse, X)


def test_an_inverse_beside_which_state_moves_is_run():
    model = ReversibleSequence([block(Watches()) for _ in range(3)])
    np.testing.assert_allclose(model.inverse(model(X)), X, rtol=1e-6)


class NoHash:
    __hash__ = None  # type: ignore[assignment]


UNHASHABLE = (
    "`context` must consist of arrays (and pytrees of them) and of hashable values, "
    "which are static. Got an unhashable one: unhashable type: '{}'."
)


@frames
@pytest.mark.parametrize("value", [{1, 2}, NoHash()], ids=["set", "object"])
def test_static_context_must_be_hashable(build, where, value):
    message = UNHASHABLE.format(type(value).__name__)
    model = build(lambda: block(same, same))
    says(TypeError, message, model, X, value)
    says(TypeError, message, model, X, mask={"deep": [value]})
    says(TypeError, message, model.inverse, X, value)
    says(TypeError, message, jax.jit(lambda x: model(x, value)), X)


def test_static_context_of_reversible_scan_must_be_hashable():
    message = UNHASHABLE.format("set")
    says(TypeError, message, scan, context=({1, 2},))
    says(TypeError, message, jax.jit(lambda: scan(context=({"a": {1, 2}},))))


# --- the options of a stack ---------------------------------------------------------

NO_INT = (
    "`anchor_every` must be an int: 0 to invert the whole stack, or A > 0 to keep the "
    "streams at every A-th block. Got {}."
)
BAD_OPTIONS = [
    (
        {"anchor_every": -1},
        ValueError,
        "`anchor_every` must not be negative: 0 inverts the whole stack, A > 0 keeps "
        "the streams at every A-th block. Got -1.",
    ),
    ({"anchor_every": True}, TypeError, NO_INT.format("True of type bool")),
    ({"anchor_every": 2.0}, TypeError, NO_INT.format("2.0 of type float")),
    ({"anchor_every": None}, TypeError, NO_INT.format("None of type NoneType")),
    ({"anchor_every": "2"}, TypeError, NO_INT.format("'2' of type str")),
    ({"anchor_every": np.array(2.0)}, TypeError, NO_INT.format("float64[]")),
    ({"anchor_every": [1, 2]}, TypeError, NO_INT.format("a list of length 2")),
    (
        {"between_anchors": "reverse"},
        ValueError,
        "`between_anchors` must be 'recompute' or 'invert'. Got 'reverse' of type str.",
    ),
    (
        {"between_anchors": None},
        ValueError,
        "`between_anchors` must be 'recompute' or 'invert'. Got None of type NoneType.",
    ),
    (
        {"between_anchors": np.zeros(2)},
        ValueError,
        "`between_anchors` must be 'recompute' or 'invert'. Got float64[2].",
    ),
    (
        {"store_activations": 1},
        TypeError,
        "`store_activations` must be a bool, True or False. Got 1 of type int.",
    ),
    (
        {"store_activations": None},
        TypeError,
        "`store_activations` must be a bool, True or False. Got None of type NoneType.",
    ),
    (
        {"store_activations": "yes"},
        TypeError,
        "`store_activations` must be a bool, True or False. Got 'yes' of type str.",
    ),
]


def bad_options(keep=lambda value: True):
    rows = [row for row in BAD_OPTIONS if keep(*row[0].values())]
    names = [str(options) for options, *_ in rows]
    return pytest.mark.parametrize(("options", "error", "message"), rows, ids=names)


@bad_options()
def test_a_bad_option_is_refused_when_the_stack_is_made(options, error, message):
    def make_block(rngs):
        return block()

    says(error, message, ReversibleSequence, [block()], **options)
    says(error, message, ReversibleSequence, [], **options)
    create = functools.partial(ReversibleSequence.create, rngs=nnx.Rngs(0))
    says(error, message, create, make_block, 2, **options)
    says(error, message, create, make_block, 0, **options)


@bad_options()
def test_a_bad_option_of_reversible_scan_is_refused(options, error, message):
    says(error, message, scan, **options)
    says(error, message, jax.eval_shape, lambda: scan(**options))


# Flax itself refuses to make an array or a list a static attribute.
@bad_options(lambda value: not isinstance(value, list | np.ndarray))
def test_an_option_that_was_made_bad_later_is_refused(options, error, message):
    stack = ReversibleSequence([block(), block()])
    for name, value in options.items():
        setattr(stack, name, value)
    every_call_says(error, message, stack, X)
    says(error, message, stack.inverse, X)


# --- the blocks of a stack ----------------------------------------------------------

WRAP = (
    "must {} a reversible block. Got {}; wrap your modules: "
    "`ReversibleCouplingBlock(dim, F, G)`."
)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "None of type NoneType"),
        (ReversibleCouplingBlock, "the class ReversibleCouplingBlock"),
        ([], "a list of length 0"),
        (same, "an object of type function"),
        (Scale(), "an object of type Scale"),
    ],
    ids=["none", "class", "list", "function", "module"],
)
def test_a_block_that_is_not_reversible_is_refused(stack, value, found):
    message = "`blocks[1]` " + WRAP.format("be", found)
    says(TypeError, message, stack, [block(), value])
    says(TypeError, message, stack, iter([block(), value]))


@pytest.mark.parametrize("stack", STACKS)
def test_a_stack_in_a_list_of_blocks_is_refused(stack):
    message = "`blocks[0]` " + WRAP.format("be", f"an object of type {stack.__name__}")
    says(TypeError, message, stack, [stack([block()])])


@pytest.mark.parametrize("stack", STACKS)
def test_a_single_block_is_not_a_list_of_blocks(stack):
    message = (
        "`blocks` must be a list of reversible blocks. Got {}; pass `[block]` "
        "for a single block."
    )
    found = "an object of type ReversibleCouplingBlock"
    says(TypeError, message.format(found), stack, block())
    says(TypeError, message.format("3 of type int"), stack, 3)
    says(TypeError, message.format("None of type NoneType"), stack, None)


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (None, "None of type NoneType"),
        ([], "a list of length 0"),
        (Scale(), "an object of type Scale"),
        (ReversibleCouplingBlock, "the class ReversibleCouplingBlock"),
    ],
    ids=["none", "list", "module", "class"],
)
def test_make_block_must_return_a_block(made, found):
    message = "`make_block` " + WRAP.format("return", found)
    create = functools.partial(ReversibleSequence.create, rngs=nnx.Rngs(0))
    says(TypeError, message, create, lambda rngs: made, 2)


@pytest.mark.parametrize(
    ("value", "found"),
    [("block", "'block' of type str"), (None, "None of type NoneType")],
)
@pytest.mark.parametrize("depth", [0, 2])
def test_make_block_must_be_a_function(value, found, depth):
    message = (
        "`make_block` must be a function that builds a block from an nnx.Rngs. Got "
        f"{found}."
    )
    create = functools.partial(ReversibleSequence.create, rngs=nnx.Rngs(0))
    says(TypeError, message, create, value, depth)


@pytest.mark.parametrize(
    ("depth", "found"),
    [
        (True, "True of type bool"),
        (2.0, "2.0 of type float"),
        (None, "None of type NoneType"),
        ("2", "'2' of type str"),
        (np.array(2.0), "float64[]"),
    ],
)
def test_a_depth_that_is_no_int_is_refused(depth, found):
    message = f"`depth` must be an int. Got {found}."
    create = functools.partial(ReversibleSequence.create, rngs=nnx.Rngs(0))
    says(TypeError, message, create, lambda rngs: block(), depth)


def test_a_negative_depth_is_refused():
    create = functools.partial(ReversibleSequence.create, rngs=nnx.Rngs(0))
    message = "`depth` must not be negative. Got -1."
    says(ValueError, message, create, lambda rngs: block(), -1)


@pytest.mark.parametrize(
    ("rngs", "found"),
    [
        (0, "0 of type int"),
        (None, "None of type NoneType"),
        (nnx.Rngs, "the class Rngs"),
        (np.zeros(2, np.uint32), "uint32[2]"),
        (nnx.Rngs(0).params, "an object of type RngStream"),
    ],
    ids=["int", "none", "class", "key", "stream"],
)
@pytest.mark.parametrize("depth", [0, 2])
def test_create_refuses_rngs_of_another_type(rngs, found, depth):
    message = f"`rngs` must be an nnx.Rngs, for example `nnx.Rngs(0)`. Got {found}."
    create = ReversibleSequence.create
    says(TypeError, message, create, lambda rngs: block(), depth, rngs=rngs)


def test_blocks_must_agree_on_the_dtype_of_the_streams():
    stack = ReversibleSequence(
        [block(), block(), block(coupling=Additive(jnp.bfloat16))]
    )
    message = (
        "`coupling` must represent the streams alike in all blocks of a stack. `F` of "
        "block 2 (ReversibleCouplingBlock) has streams of bfloat16, those before it "
        "float32; give all of them the same `dtype`, or the same `fraction_bits`."
    )
    every_call_says(ValueError, message, stack, X)
    says(ValueError, message, stack.inverse, X)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("index", [3, -4])
def test_an_index_without_a_block_is_refused(stack, index):
    message = (
        "`index` must be at least -3 and less than 3, the number of blocks. Got "
        f"{index}."
    )
    stack = stack([block() for _ in range(3)])
    says(IndexError, message, lambda: stack[index])


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(
    ("index", "found"),
    [
        (1.0, "1.0 of type float"),
        (True, "True of type bool"),
        (slice(0, 1), "slice(0, 1, None) of type slice"),
    ],
)
def test_an_index_that_is_no_int_is_refused(stack, index, found):
    stack = stack([block() for _ in range(3)])
    says(TypeError, f"`index` must be an int. Got {found}.", lambda: stack[index])


# --- reversible_scan ----------------------------------------------------------------

PARAMS = np.ones(3, np.float32), np.ones(3, np.float32)
STREAMS = np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)


def scale(p, x, *context):
    return x * p


def scan(f=scale, g=scale, params=PARAMS, streams=STREAMS, context=(), **options):
    return reversible_scan(f, g, params, streams, *context, **options)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "None of type NoneType"),
        (np.ones((2, 3), np.float32), "float32[2, 3]"),
        ((), "a tuple of length 0"),
        (PARAMS[:1], "a tuple of length 1"),
        ([*PARAMS, *PARAMS], "a list of length 4"),
        ({"f": PARAMS[0], "g": PARAMS[1]}, "a dict of length 2"),
    ],
    ids=["none", "array", "empty", "one", "four", "dict"],
)
@pytest.mark.parametrize(
    ("name", "meaning"), [("params", "(f_params, g_params)"), ("streams", "(x1, x2)")]
)
def test_params_and_streams_must_be_pairs(name, meaning, value, found):
    message = f"`{name}` must be a pair {meaning}. Got {found}."
    says(TypeError, message, scan, **{name: value})
    says(TypeError, message, jax.eval_shape, lambda: scan(**{name: value}))


def test_the_streams_must_be_floating_point_arrays():
    hint = "; convert it first, for example with `.astype(jnp.float32)`"
    for value, found in (
        (np.ones((2, 2), np.int32), "int32[2, 2]" + hint),
        (None, "None of type NoneType"),
        ([1.0, 2.0], "a list of length 2"),
    ):
        message = f"`streams` must be a floating-point or complex array. Got {found}."
        says(TypeError, message, scan, streams=(STREAMS[0], value))


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (
            (PARAMS[0], PARAMS[1][:2]),
            ValueError,
            "`params` must agree in their leading axes, one entry for each block. Got "
            "params[0]: float32[3] and params[1]: float32[2].",
        ),
        (
            ({"w": PARAMS[0], "b": [PARAMS[1][:1]]}, PARAMS[1]),
            ValueError,
            "`params` must agree in their leading axes, one entry for each block. Got "
            "params[0]['b'][0]: float32[1] and params[0]['w']: float32[3].",
        ),
        (
            (PARAMS[0], {"scale": np.float32(1.0)}),
            ValueError,
            "`params[1]['scale']` must have a leading axis, one entry for each block. "
            "Got float32[].",
        ),
        (
            (PARAMS[0], 1.0),
            TypeError,
            "`params[1]` must be an array. Got 1.0 of type float.",
        ),
        (
            (None, {}),
            ValueError,
            "`params` must hold at least one array, whose leading axis is the number "
            "of blocks. Got none; for branches without parameters pass, for example, "
            "`(jnp.arange(depth), None)`.",
        ),
    ],
    ids=["disagree", "disagree within f", "scalar", "number", "none"],
)
def test_params_must_have_one_leading_axis(params, error, message):
    says(error, message, scan, params=params)
    says(error, message, jax.eval_shape, lambda: scan(params=params))
    says(error, message, jax.grad(lambda x: scan(params=params)[0].sum()), 1.0)


@pytest.mark.parametrize("name", ["f", "g"])
def test_a_branch_of_reversible_scan_must_be_a_function(name):
    message = f"`{name}` must be a module or a function. Got 3 of type int."
    says(TypeError, message, scan, **{name: 3})


@pytest.mark.parametrize("name", ["f", "g"])
@pytest.mark.parametrize(
    "options",
    [{}, {"anchor_every": 2}, {"store_activations": True}],
    ids=["reversible", "anchored", "stored"],
)
@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: jax.grad(f)(jnp.float32(1.0)),
        lambda f: jax.jit(f)(jnp.float32(1.0)),
        lambda f: jax.vmap(f)(jnp.ones(3, jnp.float32)),
        lambda f: jax.eval_shape(f, jnp.float32(1.0)),
        lambda f: jax.lax.map(f, jnp.ones(3, jnp.float32)),
    ],
    ids=["grad", "jit", "vmap", "eval_shape", "map"],
)
def test_a_branch_that_closes_over_a_traced_value_is_refused(
    transformed, options, name
):
    def loss(value):
        closure = {name: lambda p, x: x * p * value}
        return scan(**closure, **options)[0].sum()

    message = (
        "`f` and `g` must not close over traced values. Found float32[], which comes "
        "from a surrounding jax.grad, jax.jit or jax.vmap; pass it as `context`: "
        "`reversible_scan(f, g, params, streams, value)`."
    )
    says(ValueError, message, transformed, loss)


# --- complex input ------------------------------------------------------------------


@frames
def test_complex_input_is_refused_where_the_streams_are_real(build, where):
    model = build(lambda: block(coupling=Additive(jnp.float32)))
    message = (
        "`dtype` of the coupling, float32, cannot hold complex64[2, 4]: the imaginary "
        "part would be lost. Use `Additive(dtype=jnp.complex64)`, or pass `x.real`."
    )
    every_call_says(TypeError, message, model, X.astype(np.complex64))


# --- what is found out at a call ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Summed(Coupling):
    """A law that loses the shape in one direction."""

    wrong: str

    def combine(self, x, h):
        return x.sum() if self.wrong == "combine" else x + h

    def recover(self, y, h):
        return (y - h).astype(jnp.float16) if self.wrong == "recover" else y - h


@frames
@pytest.mark.parametrize(
    ("wrong", "found"), [("combine", "float32[]"), ("recover", "float16[2, 2]")]
)
def test_a_coupling_must_keep_the_streams_shape_and_dtype(build, where, wrong, found):
    message = (
        f"`Summed.{wrong}` of the coupling must return an array of the stream's shape "
        f"and dtype, float32[2, 2]. Got {found}."
    )
    model = build(lambda: block(coupling=Summed(wrong)))
    every_call_says(TypeError, message, model, X)


def test_a_coupling_without_laws_cannot_be_made():
    with pytest.raises(TypeError, match=r"abstract methods? '?combine"):
        Coupling()  # type: ignore[abstract]


@frames
def test_a_blocks_static_attributes_must_be_hashable(build, where):
    def make():
        made = block(same, same)
        made.option = NoHash()  # type: ignore[attr-defined]
        return made

    model = build(make)
    message = (
        "`blocks` must consist of arrays (and pytrees of them) and of hashable "
        "values, which are static. Got an unhashable one: unhashable type: 'NoHash'."
    )
    says(TypeError, message, model, X)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dim", 3, "`dim` must be an even number, to be split in two streams. Got 3."),
        ("axis", 1.0, "`axis` must be an int. Got 1.0 of type float."),
        (
            "coupling",
            "additive",
            "`coupling` must be a coupling, such as `revjax.Additive()`. Got "
            "'additive' of type str.",
        ),
    ],
)
def test_options_of_a_block_are_checked_again_when_it_is_called(name, value, message):
    changed = block()
    setattr(changed, name, value)
    error = ValueError if name == "dim" else TypeError
    says(error, message, changed, X)


@pytest.mark.parametrize("stack", STACKS)
def test_an_empty_stack_refuses_what_a_full_one_refuses(stack):
    message = (
        "`{}` must be a floating-point or complex array. Got int32[2]; convert it "
        "first, for example with `.astype(jnp.float32)`."
    )
    x = np.ones(2, np.int32)
    says(TypeError, message.format("x"), stack([]), x)
    says(TypeError, message.format("y"), stack([]).inverse, x)


class NoHashBranch:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, params, x):
        return x


@pytest.mark.parametrize("name", ["f", "g"])
def test_a_branch_of_reversible_scan_must_be_hashable(name):
    message = (
        f"`{name}` must be hashable, since it is static: a function, for example. Got "
        "an object of type NoHashBranch."
    )
    says(TypeError, message, scan, **{name: NoHashBranch()})


# --- forward mode -------------------------------------------------------------------

FORWARD_MODE = (
    "Forward mode (jax.jvp, jax.jacfwd) cannot pass through a reversible stack, whose "
    "derivative is defined for reverse mode. Build the stack with "
    "`store_activations=True`, or take `jax.jacrev` or `jax.grad`."
)
FORWARD = {
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
}


@frames
@pytest.mark.parametrize("transform", list(FORWARD))
def test_forward_mode_names_what_to_do(build, where, transform):
    model = build(block)
    if getattr(model, "anchor_every", 0):
        model.between_anchors = "invert"
    says(TypeError, FORWARD_MODE, FORWARD[transform], model)


@pytest.mark.parametrize("transform", list(FORWARD))
@pytest.mark.parametrize("options", [{"store_activations": True}, {"anchor_every": 1}])
def test_forward_mode_works_where_blocks_only_run_forward(transform, options):
    stack = ReversibleSequence([block(), block()], **options)
    want = jax.jacrev(ReversibleSequence([block(), block()]))(X)
    if transform == "jvp":
        want = jnp.einsum("abcd,cd->ab", want, X)
    for f in (stack, jax.jit(stack)):
        got = FORWARD[transform](f)
        got = got[1] if transform == "jvp" else got
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_forward_mode_of_reversible_scan_names_what_to_do():
    w = np.ones(3, np.float32)
    says(TypeError, FORWARD_MODE, jax.jvp, lambda w: scan(params=(w, w)), (w,), (w,))


def test_a_context_with_entries_of_single_blocks_may_not_be_restructured_either():
    def writes(x, notes, rate):
        notes["x"] = x
        return x

    message = (
        "`F` of ReversibleCouplingBlock must not change the structure of its "
        "`context`. Return what it computes, or keep it in an nnx.Variable."
    )
    rate = PerBlock(np.ones(1, np.float32))
    says(ValueError, message, block(Scale(writes)), X, {"a": X}, rate)
