"""The scripts that make the figures of the README and the docs, at toy size."""

import pytest

import benchmark
import drift
import exact
from revjax import Additive

pytestmark = pytest.mark.usefixtures("jax_defaults")


@pytest.mark.slow
def test_the_benchmark_prints_ratios_and_draws_memory(capsys, tmp_path):
    plot = tmp_path / "memory.png"
    sizes = ["--depth", "4", "--width", "8", "--batch", "4", "--rounds", "2"]
    benchmark.main([*sizes, "--plot", str(plot)])
    printed = capsys.readouterr().out
    for part in (
        "step / checkpoint",
        "/ reversible",
        "/ stored",
        "eager gradient of 4 blocks",
    ):
        assert part in printed
    for way in (
        "reversible",
        "exact streams",
        "anchors every 2, invert",
        "scan, all stored",
    ):
        assert way in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_parameter_gradients_drift_where_input_gradients_do_not():
    """Input gradients of linear branches do not depend on the reconstruction."""
    row = drift.measure(drift.linear, 96, 0.3, "float32", Additive())
    assert row.parameters > 2 * row.stored
    assert row.input < 2 * row.input_stored


@pytest.mark.slow
def test_the_drift_table_has_a_row_for_each_case(capsys):
    drift.main(["--depths", "2", "--gains", "1", "--precisions", "float32", "--plain"])
    printed = capsys.readouterr().out.splitlines()
    rows = [line for line in printed if line.startswith("| MLP")]
    assert [row.split(" | ")[3] for row in rows] == [
        "`Additive()`",
        "`ExactAdditive(20)`",
    ]
    assert rows[1].split(" | ")[5] == "0.0e+00"
    assert sum(line.startswith("| `") for line in printed) == 6


@pytest.mark.slow
def test_exact_streams_train_as_float_streams_do():
    rows = exact.main(["--depths", "3", "--steps", "16", "--width", "16", "--plain"])
    assert len(rows) == 4
    for one, other in (rows[:2], rows[2:]):
        assert [one[2], other[2]] == ["float", "exact"]
        assert abs(float(one[6]) - float(other[6])) < 0.05
        assert float(other[7]) < 0.1
