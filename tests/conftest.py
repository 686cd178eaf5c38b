import hypothesis
import jax
import pytest

# Three lines that find more bugs than most tests. Modules that run float32 programs as
# their users do set these options back for themselves.
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Programs here run once or twice: they compile quickly rather than well. What is kept,
# what is planned and what is counted is the same.
jax.config.update("jax_disable_most_optimizations", True)

# Values only: a new shape would be a new compilation.
hypothesis.settings.register_profile("few", max_examples=5, deadline=None)
hypothesis.settings.load_profile("few")


@pytest.fixture
def full_optimization():
    """For what is measured in a compiled program."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
