import dataclasses
import functools
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.test_util import check_grads
from stacks import (
    assert_close,
    call,
    inverse,
    kind,
    mlp_block,
    modes,
    normal,
    oracle,
    oracle_inverse,
    pure,
    square,
    stack,
    train,
)

from revjax import (
    Additive,
    ReversibleCouplingBlock,
    ReversibleSequence,
    reversible_scan,
)

# Not every combination, but every depth, branch, interval and way of building a stack
# with every mode: (mode, depth, branches, how it is built).
EAGER_AND_JITTED = [
    ("block", 1, "mlp", "list"),
    ("sequential", 7, "mlp", "list"),
    ("reversible", 8, "mlp", "create"),
    ("stored", 3, "attention", "list"),
    ("recompute_3", 8, "convolution", "list"),
    ("invert_2", 7, "mlp", "list"),
]
JITTED = [
    ("block", 1, "attention", "list"),
    ("block", 1, "convolution", "list"),
    ("block", 1, "convolution_split_on_height", "list"),
    ("sequential", 1, "convolution", "list"),
    ("sequential", 2, "mlp", "list"),
    ("sequential", 3, "attention", "list"),
    ("sequential", 8, "convolution", "list"),
    ("reversible", 1, "mlp", "create"),
    ("reversible", 2, "convolution_split_on_height", "create"),
    ("reversible", 3, "attention", "list"),
    ("reversible", 7, "convolution", "list"),
    ("stored", 1, "attention", "create"),
    ("stored", 2, "mlp", "list"),
    ("stored", 7, "convolution", "list"),
    ("stored", 8, "mlp", "create"),
    ("recompute_depth_plus_2", 1, "mlp", "create"),
    ("recompute_depth", 2, "mlp", "create"),
    ("recompute_2", 3, "attention", "list"),
    ("recompute_3", 7, "mlp", "list"),
    ("recompute_1", 8, "mlp", "create"),
    ("invert_depth_plus_2", 1, "attention", "create"),
    ("invert_1", 2, "mlp", "list"),
    ("invert_2", 3, "attention", "list"),
    ("invert_depth", 7, "convolution", "list"),
    ("invert_3", 8, "mlp", "create"),
]


def named(cases) -> Any:
    return parameterized.named_parameters(("_".join(map(str, c)), *c) for c in cases)


@functools.cache
def blocks(name, depth, built_from="list"):
    make_block = kind(name).make_block
    if built_from == "create":
        born = ReversibleSequence.create(make_block, depth, rngs=nnx.Rngs(depth))
        return [born[i] for i in range(depth)]
    rngs = nnx.Rngs(depth)
    return [make_block(rngs) for _ in range(depth)]


def build(mode, depth, name, built_from):
    if built_from == "list":
        return stack(blocks(name, depth), mode)
    return ReversibleSequence.create(
        kind(name).make_block, depth, rngs=nnx.Rngs(depth), **modes(depth)[mode]
    )


def eager(function):
    return function


@functools.cache
def expected_step(name, depth, built_from):
    plain = nnx.List(blocks(name, depth, built_from))
    k = kind(name)
    return train(plain, k.x, *k.args, run=oracle, transform=eager, **k.kwargs)


variants: Any = chex.variants  # its annotations do not say that it can be called


class _GradientTest(chex.TestCase):
    """For every parameter, the input and every float context."""

    def check(self, mode, depth, name, built_from):
        k, model = kind(name), build(mode, depth, name, built_from)
        actual = train(model, k.x, *k.args, transform=self.variant, **k.kwargs)
        expected = expected_step(name, depth, built_from)
        assert len(expected["context"]) == 1
        assert_close(actual["y"], expected["y"], rtol=1e-12)
        assert_close(actual["parameters"], expected["parameters"])
        assert_close(actual["input"], expected["input"])
        assert_close(actual["context"], expected["context"])


class GradientsEqualThoseOfTheStoredStackTest(_GradientTest):
    @variants(with_jit=True, without_jit=True)
    @named(EAGER_AND_JITTED)
    def test_eager_and_jitted(self, *case):
        self.check(*case)


@pytest.mark.slow
class MoreGradientsEqualThoseOfTheStoredStackTest(_GradientTest):
    @variants(with_jit=True)
    @named(JITTED)
    def test_jitted(self, *case):
        self.check(*case)


@functools.cache
def mixed_blocks():
    rngs = nnx.Rngs(3)
    wide, narrow = functools.partial(mlp_block, hidden=9), mlp_block
    makers = [narrow, narrow, narrow, wide, narrow, wide, wide]
    return [make(rngs) for make in makers]


@functools.cache
def expected_mixed_step():
    k, plain = kind("mlp"), nnx.List(mixed_blocks())
    return train(plain, k.x, *k.args, run=oracle, transform=eager)


@pytest.mark.parametrize(
    "mode",
    [
        "sequential",
        "reversible",
        "stored",
        "recompute_2",
        "recompute_depth",
        "invert_1",
        "invert_3",
        "invert_depth_plus_2",
    ],
)
def test_gradients_of_a_list_of_different_blocks_are_those_of_the_stored_stack(mode):
    k = kind("mlp")
    actual = train(stack(mixed_blocks(), mode), k.x, *k.args)
    assert_close(actual, expected_mixed_step())


def test_neighbours_that_are_alike_are_scanned_and_the_others_unrolled():
    sequence = ReversibleSequence(mixed_blocks())
    depths = [segment.depth for segment in sequence.segments]
    assert depths == [3, None, None, 2]


def test_blocks_that_split_on_different_axes_run_in_one_sequence():
    rngs = nnx.Rngs(0)

    def make(axis):
        size = 4 if axis == 0 else 2
        linear = nnx.Linear(size, size, param_dtype=float, rngs=rngs)
        return ReversibleCouplingBlock(4, linear, jnp.tanh, axis=axis)

    mixed = [make(axis) for axis in (0, -1, -1, 0)]
    x = normal(0, 4, 4)
    assert_close(train(stack(mixed), x), train(nnx.List(mixed), x, run=oracle))


# `reversible_scan` directly.


def branch(params, x, shift):
    w, b = params
    return jnp.tanh((x + shift) @ w + b)


def scan_oracle(params, streams, shift):
    x1, x2 = streams
    leaves, treedef = jax.tree.flatten(params)
    for block in zip(*leaves, strict=True):
        f_params, g_params = jax.tree.unflatten(treedef, block)
        x1 = x1 + branch(f_params, x2, shift)
        x2 = x2 + branch(g_params, x1, shift)
    return x1, x2


def scan_arguments(depth, seed=0, scale=1.0):
    params = tuple(
        (scale * normal(seed + i, depth, 4, 4), normal(seed + 2, depth, 1, 4))
        for i in range(2)
    )
    return params, (normal(seed + 3, 3, 4), normal(seed + 4, 3, 4)), normal(9, 1, 4)


def scan_loss(function, params, streams, shift):
    y1, y2 = function(params, streams, shift)
    return square(y1) + jnp.sum(jnp.sin(y2) * y1)


def run_scan(params, streams, shift, **options):
    return reversible_scan(branch, branch, params, streams, shift, **options)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("mode", ["reversible", "stored", "recompute_3", "invert_2"])
def test_gradients_of_reversible_scan_are_those_of_a_loop(mode, jit):
    arguments = scan_arguments(7)
    run = functools.partial(run_scan, **modes(7)[mode])
    gradients = jax.grad(functools.partial(scan_loss, run), (0, 1, 2))
    actual = (jax.jit(gradients) if jit else gradients)(*arguments)
    expected = jax.grad(functools.partial(scan_loss, scan_oracle), (0, 1, 2))
    assert_close(actual, expected(*arguments))


@jax.jit
def scan_and_loop_gradients(*arguments):
    return tuple(
        jax.grad(functools.partial(scan_loss, function), (0, 1, 2))(*arguments)
        for function in (run_scan, scan_oracle)
    )


@hypothesis.given(seed=st.integers(0, 2**16), scale=st.floats(0.0, 2.0))
def test_gradients_equal_the_oracles_for_any_values(seed, scale):
    assert_close(*scan_and_loop_gradients(*scan_arguments(3, seed, scale)), rtol=1e-8)


def test_gradients_agree_with_finite_differences():
    loss = jax.jit(functools.partial(scan_loss, run_scan))
    check_grads(loss, scan_arguments(3), order=1, modes=["rev"], rtol=1e-5)


# Values worked out by hand.


class Scale(nnx.Module):
    def __init__(self, factor):
        self.factor = nnx.Param(jnp.asarray(float(factor)))

    def __call__(self, x):
        return self.factor[...] * x


ALL = ["sequential", "reversible", "stored", "recompute_2", "invert_1"]


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize(
    ("depth", "loss", "y", "a", "b", "x"),
    [
        (1, lambda y: y[0] + y[1], [7, 37], [12], [7], [6, 19]),
        (1, lambda y: y[0], [7, 37], [2], [0], [1, 3]),
        (1, lambda y: y[1], [7, 37], [10], [7], [5, 16]),
        (2, lambda y: y[0] + y[1], [118, 627], [202, 222], [133, 118], [101, 322]),
        (2, lambda y: y[0] * y[1], [118, 627], [40124, 45029], [26383, 13924], None),
    ],
    ids=["sum", "first", "second", "sum_of_two", "product_of_two"],
)
def test_gradients_equal_those_worked_out_by_hand(mode, depth, loss, y, a, b, x):
    layers = [ReversibleCouplingBlock(2, Scale(3), Scale(5)) for _ in range(depth)]
    out = train(stack(layers, mode), jnp.asarray([1.0, 2.0]), loss=loss)
    found = [
        [float(block[name]["factor"]) for block in out["parameters"]] for name in "FG"
    ]
    assert out["y"].tolist() == y
    np.testing.assert_allclose(found, [a, b], rtol=1e-12)
    if x is not None:
        np.testing.assert_allclose(out["input"], x, rtol=1e-12)


@dataclasses.dataclass(frozen=True)
class NotUndone(Additive):
    """A coupling whose `recover` does not undo `combine`."""

    def recover(self, y, h):
        return y


def test_parameter_gradients_depend_on_what_is_rebuilt_and_linear_input_ones_do_not():
    def gradients(coupling, **options):
        made = ReversibleSequence(
            [
                ReversibleCouplingBlock(2, Scale(3), Scale(5), coupling=coupling)
                for _ in range(2)
            ],
            **options,
        )
        return train(made, jnp.asarray([1.0, 2.0]))

    right, wrong = gradients(Additive()), gradients(NotUndone())
    assert_close(wrong["input"], right["input"])
    # The last branch is evaluated at the output itself: its gradient is right anyway.
    for i, name in [(0, "F"), (0, "G"), (1, "F")]:
        parameter = [g["parameters"][i][name]["factor"] for g in (wrong, right)]
        assert abs(parameter[0] / parameter[1] - 1) > 0.1
    # With anchors the activations are not reconstructed, or from the next anchor only.
    assert_close(gradients(NotUndone(), anchor_every=2), right)
    assert_close(gradients(NotUndone(), store_activations=True), right)


# The inverse.


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("block", "convolution"),
        ("sequential", "mlp"),
        ("reversible", "attention"),
        ("stored", "mlp"),
        ("recompute_2", "mlp"),
        ("invert_3", "convolution"),
    ],
)
def test_the_inverse_of_the_output_is_the_input(mode, name):
    depth = 1 if mode == "block" else 7
    k, model = kind(name), stack(blocks(name, depth), mode)
    y = model(k.x, *k.args, **k.kwargs)
    assert float(jnp.max(jnp.abs(y - k.x))) > 0.1
    x = model.inverse(y, *k.args, **k.kwargs)
    chex.assert_trees_all_close(x, k.x, rtol=1e-12, atol=1e-12)
    y_again = model(model.inverse(k.x, *k.args, **k.kwargs), *k.args, **k.kwargs)
    chex.assert_trees_all_close(y_again, k.x, rtol=1e-12, atol=1e-12)


def test_a_list_of_different_blocks_is_undone():
    model, k = stack(mixed_blocks(), "invert_2"), kind("mlp")
    y = model(k.x, *k.args)
    chex.assert_trees_all_close(model.inverse(y, *k.args), k.x, rtol=1e-12, atol=1e-12)


@functools.cache
def expected_inverse_step(depth):
    k, plain = kind("mlp"), nnx.List(blocks("mlp", depth))
    return train(plain, k.x, *k.args, run=oracle_inverse, transform=eager)


@pytest.mark.parametrize(
    "mode", ["block", "sequential", "reversible", "stored", "recompute_3", "invert_2"]
)
def test_gradients_through_the_inverse_are_those_of_a_plain_inverse(mode):
    depth = 1 if mode == "block" else 7
    k, model = kind("mlp"), stack(blocks("mlp", depth), mode)
    actual = train(model, k.x, *k.args, run=inverse)
    assert_close(actual, expected_inverse_step(depth))


def test_gradients_through_the_inverse_of_different_blocks_are_the_plain_ones():
    k, plain = kind("mlp"), nnx.List(mixed_blocks())
    actual = train(stack(mixed_blocks(), "invert_2"), k.x, *k.args, run=inverse)
    expected = train(plain, k.x, *k.args, run=oracle_inverse, transform=eager)
    assert_close(actual, expected)


# Transformations of the gradient.

SECOND_ORDER = ["reversible", "stored", "recompute_2", "invert_2"]


@functools.cache
def expected_hessian_vector_product():
    return hessian_vector_product(scan_oracle, forward_over_reverse=False)


def hessian_vector_product(function, forward_over_reverse):
    arguments = scan_arguments(3)
    direction = jax.tree.map(jnp.cos, arguments)
    gradient = jax.grad(functools.partial(scan_loss, function), (0, 1, 2))

    def along(*arguments):
        parts = jax.tree.map(jnp.vdot, gradient(*arguments), direction)
        return sum(jax.tree.leaves(parts))

    def product(*arguments):
        if forward_over_reverse:
            return jax.jvp(gradient, arguments, direction)[1]
        return jax.grad(along, (0, 1, 2))(*arguments)

    return jax.jit(product)(*arguments)


@pytest.mark.parametrize("order", ["jvp_of_grad", "grad_of_grad"])
@pytest.mark.parametrize("mode", SECOND_ORDER)
def test_hessian_vector_products_are_those_of_the_stored_stack(mode, order):
    run = functools.partial(run_scan, **modes(3)[mode])
    actual = hessian_vector_product(run, order == "jvp_of_grad")
    assert_close(actual, expected_hessian_vector_product())


def module_hessian_vector_product(model, run):
    k = kind("attention")
    function, params, rest = pure(model, run)

    def loss(x):
        return square(function(params, rest, x, k.args, k.kwargs)[0])

    return jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (jnp.cos(x),))[1])(k.x)


@functools.cache
def expected_module_hessian_vector_product():
    return module_hessian_vector_product(nnx.List(blocks("attention", 2)), oracle)


@pytest.mark.parametrize("mode", ["sequential", "reversible"])
def test_hessian_vector_products_of_modules_are_those_of_the_stored_stack(mode):
    actual = module_hessian_vector_product(stack(blocks("attention", 2), mode), call)
    assert_close(actual, expected_module_hessian_vector_product())


def test_one_vjp_is_pulled_back_twice():
    arguments = scan_arguments(3)
    y, pullback = jax.vjp(run_scan, *arguments)
    first, again = pullback(y), pullback(y)
    chex.assert_trees_all_equal(first, again)
    doubled = pullback(jax.tree.map(lambda a: 2 * a, y))
    assert_close(doubled, jax.tree.map(lambda a: 2 * a, first))


@pytest.mark.parametrize("mode", ["reversible", "recompute_2", "invert_2"])
def test_vmap_of_grad_and_grad_of_vmap_equal_a_loop_over_examples(mode):
    params, _, shift = scan_arguments(3)
    batch = normal(5, 2, 4, 3, 4)
    run = functools.partial(run_scan, **modes(3)[mode])

    def loss(function, params, x):
        return scan_loss(function, params, (x[0], x[1]), shift)

    gradient = jax.grad(functools.partial(loss, run), (0, 1))
    plain = jax.jit(jax.grad(functools.partial(loss, scan_oracle), (0, 1)))
    each = [plain(params, batch[:, i]) for i in range(4)]
    expected = jax.tree.map(lambda *a: jnp.stack(a), *each)
    d_params, d_x = jax.jit(jax.vmap(gradient, (None, 1)))(params, batch)
    assert_close((d_params, d_x), expected)

    def total(params, batch):
        losses = jax.vmap(functools.partial(loss, run), (None, 1))(params, batch)
        return jnp.sum(losses)

    d_params, d_x = jax.jit(jax.grad(total, (0, 1)))(params, batch)
    summed = jax.tree.map(lambda a: jnp.sum(a, 0), expected[0])
    assert_close((d_params, jnp.moveaxis(d_x, 1, 0)), (summed, expected[1]))


def test_forward_mode_works_with_stored_activations():
    arguments = scan_arguments(3)
    direction = jax.tree.map(jnp.cos, arguments)
    run = functools.partial(run_scan, store_activations=True)
    actual = jax.jvp(run, arguments, direction)
    assert_close(actual, jax.jvp(scan_oracle, arguments, direction))
