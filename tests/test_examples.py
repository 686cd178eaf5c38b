"""The scripts that make the figures of the README and the docs, at toy size."""

import pytest

import benchmark
import drift

pytestmark = pytest.mark.usefixtures("jax_defaults")


@pytest.mark.slow
def test_the_benchmark_prints_ratios_and_draws_memory(capsys, tmp_path):
    plot = tmp_path / "memory.png"
    sizes = ["--depth", "4", "--width", "8", "--batch", "4", "--rounds", "2"]
    benchmark.main([*sizes, "--plot", str(plot)])
    printed = capsys.readouterr().out
    for part in ("step / checkpoint", "step / stored", "eager gradient of 4 blocks"):
        assert part in printed
    for way in ("reversible", "anchors every 2, invert", "scan, all stored"):
        assert way in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_parameter_gradients_drift_where_input_gradients_do_not():
    """Input gradients of linear branches do not depend on the reconstruction."""
    parameters, _, stored, of_input, _ = map(
        float, drift.row(drift.linear, 96, 0.3, "float32")[4:]
    )
    assert parameters > 2 * stored
    assert of_input < 2 * stored


def test_the_drift_table_has_a_row_for_each_case(capsys):
    drift.main(["--depths", "2", "--gains", "1", "--precisions", "float32", "--plain"])
    rows = [r for r in capsys.readouterr().out.splitlines() if r.startswith("| MLP")]
    assert len(rows) == 1
    assert rows[0].startswith("| MLP | float32 | 2 | 1 |")
