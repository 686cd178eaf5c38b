"""Fixtures of the tests and of the package's doctests."""

import jax
import pytest


@pytest.fixture
def jax_defaults():
    """Runs a test with JAX's defaults, as users do, whatever other tests have set."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


@pytest.fixture(autouse=True)
def _doctests_run_as_users_run_them(request):
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("jax_defaults")
