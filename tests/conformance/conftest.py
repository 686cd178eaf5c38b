from cases import builtin, load


def pytest_addoption(parser):
    parser.addoption(
        "--case",
        metavar="MODULE",
        help="check your own block: a module that defines `make_block` and `x`, and "
        "`args` and `kwargs` if a call takes context",
    )


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        module = metafunc.config.getoption("--case", default=None)
        cases = {module: load(module)} if module else builtin()
        metafunc.parametrize("case", list(cases.values()), ids=list(cases))
