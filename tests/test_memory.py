"""Memory is exact on a CPU: what autodiff keeps, and what the compiler plans."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from stacks import HALF, MLP, mlp_block, planned, square

from revjax import ReversibleCouplingBlock, ReversibleSequence, ReversibleSequential

ROWS = 64
X = jax.ShapeDtypeStruct((ROWS, 2 * HALF), jnp.float64)
ONE_OUTPUT = ROWS * 2 * HALF * 8


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def abstract(make, *args, **kwargs):
    """A model whose arrays are shapes: nothing of its size is allocated."""
    return nnx.split(nnx.eval_shape(lambda: make(*args, **kwargs)))


def created(depth, **options):
    return ReversibleSequence.create(mlp_block, depth, rngs=nnx.Rngs(0), **options)


def different(depth):
    """Blocks that cannot be stacked: neighbours differ in their hidden width."""
    rngs = nnx.Rngs(0)
    return [mlp_block(rngs, hidden=6 + i % 2) for i in range(depth)]


def residual_bytes(graphdef, params, x=X, method="__call__"):
    def run(params, x):
        return getattr(nnx.merge(graphdef, params), method)(x)

    kept = jax.eval_shape(lambda *args: jax.vjp(run, *args)[1], params, x)
    return nbytes(kept) - nbytes(params)


def scratch_bytes(graphdef, params, x=X):
    def loss(params, x):
        return square(nnx.merge(graphdef, params)(x))

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile()
    return planned(compiled).temp_size_in_bytes


@pytest.mark.parametrize("depth", [4, 64, 512])
def test_one_output_is_kept_at_every_depth(depth):
    assert residual_bytes(*abstract(created, depth)) == ONE_OUTPUT


@pytest.mark.parametrize("depth", [4, 64])
def test_one_output_is_kept_for_the_inverse_too(depth):
    assert residual_bytes(*abstract(created, depth), method="inverse") == ONE_OUTPUT


def test_what_is_kept_is_the_array_that_is_returned():
    graphdef, params = nnx.split(created(4))

    def run(params, x):
        return nnx.merge(graphdef, params)(x)

    y, pullback = jax.vjp(run, params, jnp.ones(X.shape))
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == y.shape]
    assert [leaf.unsafe_buffer_pointer() for leaf in kept] == [
        y.unsafe_buffer_pointer()
    ]


def test_a_list_of_different_blocks_keeps_one_output():
    model = abstract(lambda: ReversibleSequence(different(7)))
    assert residual_bytes(*model) == ONE_OUTPUT


def test_a_sequential_keeps_one_output_for_each_block():
    model = abstract(lambda: ReversibleSequential(different(7)))
    assert residual_bytes(*model) == 7 * ONE_OUTPUT


def test_scratch_is_the_same_at_depth_8_and_512():
    assert scratch_bytes(*abstract(created, 8)) == scratch_bytes(
        *abstract(created, 512)
    )


def test_residuals_and_scratch_of_the_stored_stack_grow_with_depth():
    shallow, deep = (abstract(created, d, store_activations=True) for d in (8, 512))
    assert residual_bytes(*deep) > 60 * residual_bytes(*shallow)
    assert scratch_bytes(*deep) > 30 * scratch_bytes(*shallow)


@pytest.mark.parametrize(("depth", "every"), [(16, 4), (16, 1), (15, 4), (7, 9)])
def test_anchors_keep_one_array_for_each_chunk(depth, every):
    chunks = -(-depth // every)
    invert = abstract(created, depth, anchor_every=every, between_anchors="invert")
    assert residual_bytes(*invert) == chunks * ONE_OUTPUT
    recompute = abstract(created, depth, anchor_every=every)
    # A recomputed chunk does not need the bias of its last layer.
    assert 0 <= chunks * ONE_OUTPUT - residual_bytes(*recompute) < ONE_OUTPUT


def test_scratch_between_anchors_is_that_of_one_block_or_of_one_chunk():
    reversible = scratch_bytes(*abstract(created, 64))
    invert = scratch_bytes(
        *abstract(created, 64, anchor_every=8, between_anchors="invert")
    )
    recompute = scratch_bytes(*abstract(created, 64, anchor_every=8))
    stored = scratch_bytes(*abstract(created, 64, store_activations=True))
    assert reversible < invert < recompute < stored / 3


def test_float_context_is_kept_once_and_not_for_each_block():
    graphdef, params = abstract(created, 16)
    shift = jax.ShapeDtypeStruct((ROWS, HALF), jnp.float64)

    def run(params, x, shift):
        return nnx.merge(graphdef, params)(x, shift)

    kept = jax.eval_shape(lambda *args: jax.vjp(run, *args)[1], params, X, shift)
    assert nbytes(kept) == nbytes((params, shift)) + ONE_OUTPUT


def test_variables_that_no_call_changes_are_not_copied_in_the_forward_pass():
    """A wide stack on few rows: its parameters would dominate what is planned."""

    def wide():
        def make_block(rngs):
            F, G = (MLP(rngs, width=64, hidden=256) for _ in range(2))
            return ReversibleCouplingBlock(128, F, G)

        return ReversibleSequence.create(make_block, 8, rngs=nnx.Rngs(0))

    graphdef, params = abstract(wide)
    x = jax.ShapeDtypeStruct((2, 128), jnp.float64)
    run = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))
    plan = planned(run.lower(params, x).compile())
    assert plan.temp_size_in_bytes + plan.output_size_in_bytes < nbytes(params) / 4
