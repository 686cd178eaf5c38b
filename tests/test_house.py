"""The picture that the package's files keep to, and what it promises about itself."""

import ast
import doctest
import importlib
import pathlib
import tomllib

import pytest

import revjax

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "revjax"
FILES = sorted(PACKAGE.rglob("*.py"))
files = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)

# A file imports those of lower rank alone.
RANKS = {
    "_checks": 0,
    "_backward": 1,
    "_law_checks": 1,
    "_inputs": 1,
    "_moves": 1,
    "_couplings": 2,
    "_exact": 3,
    "_integrators": 3,
    "_step": 3,
    "_block": 4,
    "_plan": 4,
    "_stack": 5,
    "_modes": 6,
    "_reconstruct": 6,
    "_apply": 7,
    "_scan": 7,
    "_invertible": 0,
    "_modules": 4,
    "_segments": 5,
    "_calls": 8,
    "_blocks": 9,
    "_between": 10,
    "_nnx": 10,
    "_trials": 11,
    "_drift": 12,
    "diagnostics": 13,
    "__init__": 14,
}
SPECIAL = ("__name__", "__setattr__", "__class__", "__qualname__")
# The only files that know Flax.
FLAX = {
    "_between", "_blocks", "_calls", "_drift", "_invertible", "_modules", "_nnx",
    "_segments", "_trials", "diagnostics",
}  # fmt: skip


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path):
    """Yields the names of imported modules, with imported names joined on."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(path):
    """Yields every dotted expression, such as `jax.lax.scan`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def own(path):
    """Yields the package's own files that a file imports."""
    for name in imports(path):
        head, *rest = name.split(".")
        if head == "revjax" and rest:
            yield rest[0]


def test_every_file_has_a_place_in_the_picture():
    assert {path.stem for path in FILES} == set(RANKS)
    assert {path.parent for path in FILES} == {PACKAGE}


@files
def test_imports_run_one_way(path):
    assert all(RANKS[name] < RANKS[path.stem] for name in own(path))


@files
def test_imports_stand_at_the_top_of_the_file(path):
    top = [n for n in tree(path).body if isinstance(n, ast.Import | ast.ImportFrom)]
    everywhere = [
        n for n in ast.walk(tree(path)) if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    assert len(top) == len(everywhere)


@files
def test_the_core_imports_no_flax(path):
    uses_flax = any(name.split(".")[0] == "flax" for name in imports(path))
    assert uses_flax <= (path.stem in FLAX)


@files
def test_only_public_jax_and_flax_is_used(path):
    for name in imports(path):
        library, *rest = name.split(".")
        if library in ("jax", "flax", "jaxlib"):
            assert not any(part.startswith("_") for part in rest), name
            assert not name.startswith("jax.core") or name == "jax.core.Tracer"
            assert library != "jaxlib"
    for name in attributes(path):
        library, *rest = name.split(".")
        if library in ("jax", "jnp", "lax", "flax", "nnx"):
            assert not any(part.startswith("_") for part in rest), name
            assert rest[0] != "core", name


@files
def test_private_attributes_are_the_packages_own(path):
    """No `variable._value` and the like: every private name is defined in the house."""
    defined = set()
    for node in (node for file in FILES for node in ast.walk(tree(file))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            name = node.attr
            assert name in defined or name in SPECIAL, name


@files
def test_no_file_has_more_than_400_lines(path):
    limit = 600 if path.name == "_checks.py" else 400  # a flat list of messages
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


@files
def test_no_assert_stands_for_what_a_user_got_wrong(path):
    asserts = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)]
    assert not asserts


def test_all_lists_the_public_names_in_order():
    names = revjax.__all__
    assert names == sorted(names)
    assert len(names) == len(set(names))
    assert all(hasattr(revjax, name) for name in names)
    exported = {
        alias.asname
        for node in tree(PACKAGE / "__init__.py").body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert exported == set(names)


def test_a_star_import_gives_the_public_names():
    names: dict = {}
    exec("from revjax import *", names)
    assert set(revjax.__all__) == names.keys() - {"__builtins__"}


@pytest.mark.parametrize("name", revjax.__all__)
def test_every_public_name_is_documented_by_a_doctest(name):
    public = getattr(revjax, name)
    module = importlib.import_module(public.__module__)
    (test, *_) = doctest.DocTestFinder(recurse=False).find(public, name, module)
    assert test.examples, f"{name} has no example"
    assert any(example.want for example in test.examples), "which shows no result"


def test_the_version_stands_in_one_place():
    assert revjax.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"] == {"path": "revjax/__init__.py"}
    holders = [path.name for path in FILES if revjax.__version__ in path.read_text()]
    assert holders == ["__init__.py"]


def test_the_type_annotations_are_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["revjax"]}  # the whole folder, with
    assert (PACKAGE / "py.typed").is_file()
