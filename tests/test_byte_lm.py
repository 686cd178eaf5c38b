import csv
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import signal
import sysconfig
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import byte_data
import byte_lm
import byte_options
import byte_report
from transformer import Transformer, TransformerConfig, generate

TINY_MODEL: dict[str, Any] = {"depth": 2, "width": 16, "heads": 2, "context": 8}
TINY: dict[str, Any] = TINY_MODEL | {"batch": 2}
FLAGS = [f"--{name}={value}" for name, value in TINY.items()]
TEXT = pathlib.Path(byte_lm.__file__).read_bytes()
STEPS, STOPPED = 7, 3  # of the run below, and of its twin that Ctrl-C stops
CLOCKS = ("seconds", "bytes_per_second")
SCRATCH = {
    mode: {2: 2**20, 8: 2**22} for mode in ("reversible", "checkpoint", "stored")
}


@pytest.fixture(autouse=True, scope="module")
def jax_as_on_the_command_line():
    standard, allow = jax.numpy_dtype_promotion("standard"), "allow"
    with jax.enable_x64(False), standard, jax.numpy_rank_promotion(allow):
        yield


@pytest.fixture(autouse=True, scope="module")
def programs_compile_once(jax_as_on_the_command_line):
    """Runs of the same options share compiled programs, and get states of their own."""
    make = functools.cache(byte_lm.make_program)

    def make_program(options):
        program, state = make(options)
        return program, jax.tree.map(lambda x: x.copy(), state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_lm, "make_program", make_program)
        yield


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def saved(tmp_path, data):
    """A folder with all of a run that is looked at before it is resumed."""
    options = byte_options.make_options({**TINY, "data": str(data)}, None)
    about = {
        "options": dataclasses.asdict(options),
        "session": byte_options.Session().kept(),
        "sha256": hashlib.sha256(TEXT).hexdigest(),
        "seconds": 1.0,
    }
    state = byte_lm.TrainState({"weight": np.ones(1)}, {}, {})
    with byte_lm.open_checkpoints(tmp_path / "run") as checkpoints:
        byte_lm.save(checkpoints, 3, state, about)
    (tmp_path / "run" / "metrics.csv").write_text("step\n")
    return tmp_path / "run"


def checkpoint_steps(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("[0-9]*"))


def metrics(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def last_state(folder):
    options = byte_options.Options(**byte_lm.last_checkpoint(folder)[1]["options"])
    state = byte_lm.make_program(options)[1]
    with byte_lm.open_checkpoints(folder) as checkpoints:
        return byte_lm.restore(checkpoints, checkpoints.latest_step(), state)


def exit_code(argv):
    try:
        return byte_lm.main([str(word) for word in argv])
    except SystemExit as error:
        return error.code


# ------------------------------------------------------------------------- whole runs


def test_a_run_that_ctrl_c_stopped_goes_on_as_if_it_had_not(
    data, tmp_path, monkeypatch
):
    monkeypatch.setattr(byte_report, "scratch_memory", lambda *_: SCRATCH)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    argv = [*FLAGS, f"--data={data}", f"--steps={STEPS}", "--dropout=0.1"]
    argv += ["--eval-every=2", "--sample-length=20"]
    assert byte_lm.main([*argv, f"--out={whole}"]) == 0

    batch_at, usual = byte_data.batch_at, signal.getsignal(signal.SIGINT)

    def press_ctrl_c(text, seed, step, *sizes):
        if step == STOPPED - 1:
            signal.raise_signal(signal.SIGINT)
        return batch_at(text, seed, step, *sizes)

    with monkeypatch.context() as patch:
        patch.setattr(byte_data, "batch_at", press_ctrl_c)
        assert byte_lm.main([*argv, f"--out={stopped}"]) == 130
    assert signal.getsignal(signal.SIGINT) is usual
    assert checkpoint_steps(stopped) == [STOPPED]

    # A step that no checkpoint holds, as after a crash, is not kept.
    byte_report.add_row(stopped / "metrics.csv", {"step": STOPPED + 1, "loss": 9})
    assert byte_lm.main(["--resume", f"--out={stopped}"]) == 0
    assert checkpoint_steps(stopped) == [STOPPED, STEPS]

    rows, resumed = metrics(whole), metrics(stopped)
    for row in rows + resumed:
        assert all(float(row.pop(clock)) >= 0 for clock in CLOCKS)
    assert resumed == rows
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert [row["held_out_bits_per_byte"] != "" for row in rows] == [
        *(False, True, False, True, False, True),
        True,  # the last step
    ]
    leaves, resumed = (jax.tree.leaves(last_state(run)) for run in (whole, stopped))
    assert len(leaves) > 30
    for a, b in zip(leaves, resumed, strict=True):
        assert a.dtype == b.dtype
        assert (a == b).all()

    sample = (whole / "sample.txt").read_bytes()
    assert sample == (stopped / "sample.txt").read_bytes()
    assert sample.startswith(b"def ")
    assert len(sample) == len(b"def ") + 20
    summary = json.loads((whole / "summary.json").read_text())
    last = float(rows[-1]["held_out_bits_per_byte"])
    assert summary["bits_per_byte"]["this model"] == last
    assert len(summary["bits_per_byte"]) == 3
    for name in ("loss.png", "memory.png"):
        assert (stopped / name).read_bytes().startswith(b"\x89PNG")


def test_a_run_is_not_overwritten_unless_that_is_asked_for(saved, data, capsys):
    before = (saved / "metrics.csv").read_bytes()
    assert exit_code([*FLAGS, "--data", data, "--out", saved]) == 2
    assert (saved / "metrics.csv").read_bytes() == before
    error = capsys.readouterr().err
    assert "expected no run in it; found one" in error
    assert "`--overwrite` to delete it" in error


def test_bad_data_does_not_delete_the_run_that_was_to_be_overwritten(saved, tmp_path):
    argv = ["--overwrite", "--out", saved, "--data", tmp_path / "nothing"]
    assert exit_code(argv) == 2
    assert (saved / "metrics.csv").exists()


def test_resuming_with_other_options_names_all_that_differ(saved, data, capsys):
    argv = ["--resume", "--out", saved, "--depth=3", "--width=16", "--seed=4"]
    assert exit_code([*argv, "--data", data]) == 2
    assert (
        "byte_lm.py: error: `--resume` expected the options that the run began with;"
        " got: `--depth` is 2 in the run, 3 given; `--seed` is 0 in the run, 4 given."
    ) in capsys.readouterr().err


def test_resuming_on_a_changed_text_is_an_error(saved, data, capsys):
    data.write_bytes(TEXT + b"#")
    try:
        assert exit_code(["--resume", "--out", saved]) == 2
    finally:
        data.write_bytes(TEXT)
    assert f"`--data` {data}: expected the text that the run" in capsys.readouterr().err


def test_resuming_without_a_checkpoint_is_an_error(tmp_path, capsys):
    assert exit_code(["--resume"]) == 2
    assert "found no run. Name its folder with `--out`." in capsys.readouterr().err
    (tmp_path / "metrics.csv").touch()
    assert exit_code(["--resume", "--out", tmp_path]) == 2
    assert "found a run without one" in capsys.readouterr().err


def test_runs_without_a_folder_are_numbered_and_the_newest_is_resumed():
    def folder(**session):
        return byte_lm.choose_folder(byte_options.Session(**session)).as_posix()

    assert folder() == "runs/byte_lm-001"
    for number in ("001", "009", "010"):
        os.makedirs(f"runs/byte_lm-{number}/checkpoints/5")
    assert folder() == "runs/byte_lm-011"
    assert folder(resume=True) == "runs/byte_lm-010"


# ----------------------------------------------------------------------- the training


def losses(mode, steps=200):
    anchors = {"anchor_every": 3} if mode == "anchored" else {}
    changes = {"depth": 4, "mode": mode, "steps": steps}
    options = byte_options.make_options(TINY | changes | anchors, None)
    text = np.frombuffer(TEXT, np.uint8)
    program, state = byte_lm.make_program(options)
    found = []
    for step in range(steps):
        tokens = byte_data.batch_at(text, 0, step, options.batch, options.context)
        state, (loss, *_) = program.step(state, np.int32(step), tokens)
        found.append(float(loss))
    return np.array(found)


@pytest.fixture(scope="module")
def stored_losses():
    return losses("stored")


@pytest.mark.parametrize("mode", ["reversible", "anchored"])
def test_200_training_steps_have_the_losses_of_the_stored_stack(mode, stored_losses):
    found = losses(mode)
    np.testing.assert_allclose(found, stored_losses, rtol=1e-4)
    assert found[-20:].mean() < 0.8 * found[:5].mean()  # the model learns


def test_the_default_run_has_16_blocks_or_more():
    assert byte_options.make_options({}, None).depth >= 16


def test_kernels_are_decayed_and_nothing_else_is():
    config = byte_options.Options(**TINY)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    decayed, kept = [], []
    for path, _ in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param)):
        (decayed if byte_lm.is_kernel(path, None) else kept).append(
            jax.tree_util.keystr(path)
        )
    assert len(decayed) == 5  # qkv, out, up, out; the head
    assert len(kept) == 5  # two scales in a block; the head's; two embeddings
    assert all("kernel" in name for name in decayed)
    assert not any("kernel" in name for name in kept)


def test_scratch_memory_of_the_reversible_stack_does_not_grow_with_depth():
    scratch = byte_report.scratch_memory(TransformerConfig(**TINY_MODEL), batch=2)
    assert list(scratch) == ["reversible", "checkpoint", "stored"]
    for mode, sizes in scratch.items():
        assert list(sizes) == [2, 8]
        assert (sizes[8] > sizes[2]) is (mode != "reversible")
    table = byte_report.memory_table(scratch)
    assert table.row_count == 3


# --------------------------------------------------------------------------- the model


@nnx.jit
def logits_of(model, tokens):
    return model(tokens)


@pytest.fixture(scope="module")
def model():
    return nnx.jit(
        lambda: Transformer(TransformerConfig(**TINY_MODEL), rngs=nnx.Rngs(0))
    )()


@functools.partial(nnx.jit, static_argnums=2)
def write(model, key, temperature):
    return generate(model, jax.numpy.array([1, 2, 3]), 9, temperature, key)


def test_a_prediction_depends_on_earlier_bytes_only(model):
    tokens = np.arange(8, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 5] = 99
    before, after = (np.asarray(logits_of(model, t)) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=-1).all()


def test_the_first_loss_is_that_of_guessing_among_256_bytes(model):
    tokens = np.arange(9, dtype=np.int32)[None]
    logits = np.asarray(logits_of(model, tokens[:, :-1]), np.float64)[0]
    chosen = logits[np.arange(8), tokens[0, 1:]]
    loss = (np.log(np.exp(logits).sum(axis=-1)) - chosen).mean()
    assert loss == pytest.approx(math.log(256), rel=0.02)


def test_bfloat16_branches_leave_streams_parameters_and_logits_in_float32():
    config = TransformerConfig(**TINY_MODEL, precision="bfloat16")
    stream, x = (jax.ShapeDtypeStruct((1, 8, d), "float32") for d in (8, 16))

    def make_and_run(stream, x, tokens):
        model = Transformer(config, rngs=nnx.Rngs(0))
        stack: Any = model.stack
        block = stack[0]
        branches = block.F(stream), block.G(stream)
        rest = model.stack(x, train=False), model(tokens), nnx.state(model, nnx.Param)
        return branches, rest

    tokens = jax.ShapeDtypeStruct((1, 8), "int32")
    branches, rest = jax.eval_shape(make_and_run, stream, x, tokens)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(branches)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(rest)} == {"float32"}


def test_the_likeliest_bytes_are_those_of_a_model_that_is_called_byte_by_byte(model):
    text = [1, 2, 3]
    for _ in range(9):  # beyond the context of 8
        seen = text[-8:]
        padded = np.array([seen + [0] * (8 - len(seen))], np.int32)
        text.append(int(logits_of(model, padded)[0, len(seen) - 1].argmax()))
    assert write(model, jax.random.key(0), 0.0).tolist() == text[3:]


def test_a_sample_hangs_on_its_key(model):
    first, again, other = (write(model, jax.random.key(k), 1.0) for k in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()


# ---------------------------------------------------------------------------- the data


def test_the_split_is_disjoint_and_complete():
    text = np.arange(200).astype(np.uint8)
    training, held_out = byte_data.split_text(text, 8, "text")
    np.testing.assert_array_equal(np.concatenate([training, held_out]), text)
    assert len(held_out) == 20


def test_a_batch_hangs_on_the_seed_and_the_step_alone():
    text = np.arange(251).astype(np.uint8)
    batch = byte_data.batch_at(text, 3, 5, 4, 8)
    assert batch.shape == (4, 9)
    assert batch.dtype == np.int32
    assert (np.diff(batch) == 1).all()  # running text
    np.testing.assert_array_equal(batch, byte_data.batch_at(text, 3, 5, 4, 8))
    assert (batch != byte_data.batch_at(text, 3, 6, 4, 8)).any()
    assert (batch != byte_data.batch_at(text, 4, 5, 4, 8)).any()


def test_every_byte_of_the_training_text_can_be_in_a_batch():
    text = np.arange(20).astype(np.uint8)
    seen = {
        int(b)
        for step in range(50)
        for b in byte_data.batch_at(text, 0, step, 4, 8).flat
    }
    assert seen == set(range(20))


@pytest.mark.parametrize("length", [9, 10, 100, 1000])
def test_held_out_windows_do_not_overlap(length):
    places = np.arange(length) % 251
    windows = byte_data.held_out_windows(places.astype(np.uint8), 4, 8)
    assert windows.shape[2] == 9
    assert 1 <= windows.shape[1] <= 4
    assert windows.size <= length
    assert (np.diff(windows) % 251 == 1).all()


def test_counting_models_are_right_on_a_text_counted_by_hand():
    text = np.frombuffer(b"aabab", np.uint8)
    windows = np.frombuffer(b"aba", np.uint8).astype(np.int32)[None, None]  # b, then a
    # a: 3 of 5, b: 2 of 5; after a: a once, b twice; after b: a once. All plus one.
    order_0 = -(math.log2(3 / 261) + math.log2(4 / 261)) / 2
    bigram = -(math.log2(3 / 259) + math.log2(2 / 257)) / 2
    assert byte_data.order_0_bits(text, windows) == pytest.approx(order_0, rel=1e-12)
    assert byte_data.bigram_bits(text, windows) == pytest.approx(bigram, rel=1e-12)


def test_the_default_text_is_the_standard_library_without_installed_packages(
    tmp_path, monkeypatch
):
    for name in ("b.py", "a.py", "sub/c.py", "site-packages/no.py", "no.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name[:1] if "no" not in name else "NO")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    text = byte_data.read_text(None).tobytes()
    assert sorted(text.split(b"\n")) == [b"a", b"b", b"s"]
    assert byte_data.read_text(None).tobytes() == text


def test_a_folder_is_read_without_its_hidden_files(tmp_path):
    for name in ("a.txt", "deep/b", ".git/no", ".no", "__pycache__/no.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name[-1:].encode())
    text = byte_data.read_text(str(tmp_path)).tobytes()
    assert sorted(text.split(b"\n")) == [b"b", b"t"]


# ------------------------------------------------------------------------- bad options

WANTED = "expected a file, or a folder of files"
NEEDED = (
    "Expected 90 bytes or more, so that the held-out tenth has `--context` 8 bytes and"
    " one to predict"
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, f"`--data` {{}}: {WANTED}; found nothing there."),
        ({}, f"`--data` {{}}: {WANTED}; found a folder without files."),
        (b"", f"`--data` {{}} is too short. {NEEDED}; found 0."),
        (b"x" * 89, f"`--data` {{}} is too short. {NEEDED}; found 89."),
    ],
)
def test_bad_data_is_told_in_one_line(content, message, tmp_path, capsys):
    path = tmp_path / "text"
    if content == {}:
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert exit_code([*FLAGS, "--data", path]) == 2
    assert capsys.readouterr().err == f"byte_lm.py: error: {message.format(path)}\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--depth 0", "--depth: expected a whole number of 1 or more; got '0'"),
        ("--steps 1.5", "--steps: expected a whole number of 1 or more; got '1.5'"),
        ("--seed -1", "--seed: expected a whole number of 0 or more and below"),
        ("--learning-rate 0", "--learning-rate: expected a number above 0; got '0'"),
        ("--learning-rate nan", "expected a number above 0; got 'nan'"),
        ("--clip inf", "argument --clip: expected a number above 0; got 'inf'"),
        ("--dropout 1", "expected a number of 0 or more and below 1; got '1'"),
        ("--mode quick", "argument --mode: invalid choice: 'quick' (choose from"),
        ("--precision float16", "argument --precision: invalid choice: 'float16'"),
        ("--prompt=", "argument --prompt: expected one character or more; got ''"),
        ("--resume --overwrite", "--overwrite: expected without --resume; got both"),
        ("--dept 3", "unrecognized arguments: --dept 3"),
        ("--width 15", "`--width` expected an even number, for two streams; got 15."),
        ("--heads 3", "`--heads` expected a divisor of half of `--width`, 64; got 3."),
        ("--anchor-every 2", "`--anchor-every` expected `--mode anchored`; got"),
        ("--steps 5 --warmup 5", "`--warmup` expected less than `--steps` 5; got 5."),
    ],
)
def test_bad_options_are_told_with_what_was_expected(argv, message, tmp_path, capsys):
    assert exit_code(argv.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_file_where_the_folder_should_be_is_an_error(data, capsys):
    assert exit_code([*FLAGS, "--data", data, "--out", data]) == 2
    assert (
        f"`--out` {data}: expected a folder; found a file." in capsys.readouterr().err
    )
    argv = [*FLAGS, "--data", data, "--out", data / "below"]
    assert exit_code(argv) == 2
    assert "expected a folder to write to; found: " in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run(data, tmp_path, monkeypatch, capsys):
    def diverged(state, index, tokens):
        return state, (np.float32(np.nan), np.float32(0), np.float32(0))

    monkeypatch.setattr(byte_report, "scratch_memory", lambda *_: SCRATCH)
    program, state = byte_lm.make_program(byte_options.Options(**TINY, warmup=0))
    program = program._replace(step=diverged)
    monkeypatch.setattr(byte_lm, "make_program", lambda options: (program, state))
    assert exit_code([*FLAGS, "--data", data, "--out", tmp_path / "run"]) == 2
    assert (
        "Expected a finite loss; got nan at step 1. Try a smaller `--learning-rate`"
        " than 0.003."
    ) in capsys.readouterr().err
