from cases import builtin, load


def pytest_addoption(parser):
    parser.addoption(
        "--case",
        help="check your own block: `package.module:name` of a `cases.Case`",
    )


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        path = metafunc.config.getoption("--case", default=None)
        cases = {path: load(path)} if path else builtin()
        metafunc.parametrize("case", list(cases.values()), ids=list(cases))
