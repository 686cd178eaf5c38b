"""The README says what is so: its code runs and its commands are those of CI."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON = CODE.findall(README)
PAGES = [
    page
    for page in sorted((ROOT / "docs").glob("*.md"))
    if CODE.search(page.read_text(encoding="utf-8"))
]


# Somebody who copies the code has JAX's defaults.
pytestmark = pytest.mark.usefixtures("jax_defaults")


def command(name):
    """Returns the command under a marker, as `.ci/run` finds it."""
    pattern = rf"<!-- {name} command -->\n```bash\n(.*?)^```$"
    (found,) = re.findall(pattern, README, re.DOTALL | re.MULTILINE)
    return found.rstrip("\n")


def test_the_readme_has_code_to_run():
    assert PYTHON


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_the_code_of_the_readme_runs(code):
    names = {"__name__": "readme"}
    exec(compile(code, str(ROOT / "README.md"), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_each_page_runs_as_one_program(page):
    code = "\n".join(CODE.findall(page.read_text(encoding="utf-8")))
    exec(compile(code, str(page), "exec"), {"__name__": page.stem})


def test_the_guide_has_code_to_run():
    assert ROOT / "docs" / "guide.md" in PAGES


@pytest.mark.parametrize("name", ["main", "test"])
def test_each_command_is_one_line_to_copy(name):
    line = command(name)
    assert "\n" not in line
    assert line.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert subprocess.run(["bash", "-n", "-c", line], check=False).returncode == 0


def test_the_main_command_runs_an_example_that_exists():
    script = command("main").split()[-1]
    assert script == "examples/byte_lm.py"
    assert (ROOT / script).is_file()


def test_ci_runs_the_readmes_test_command():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    finder = re.search(
        r'^test_command="\$\((awk .*?)\)"$', ci, re.DOTALL | re.MULTILINE
    )
    assert finder
    found = subprocess.run(
        ["bash", "-c", finder[1]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.rstrip("\n") == command("test")
    assert 'bash -euo pipefail -c "$test_command"' in ci


def test_no_figure_is_left_to_be_measured():
    assert "TBD" not in README


def test_every_test_that_the_readme_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)`[^|]*\|", README)
    assert named
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", README):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\b", text, re.MULTILINE), f"{file}::{name}"


def test_every_file_that_the_readme_links_to_exists():
    for target in re.findall(r"\]\((?!https?:|#)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
    for target in re.findall(r"`((?:examples|notebooks|tests|docs)/[\w./]+)`", README):
        assert (ROOT / target).exists(), target
