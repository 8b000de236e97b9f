"""A fixture's name says which fixture it is."""

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests import ROOT

OVERRIDDEN = """
import pytest

@pytest.fixture
def server(): ...

class TestServer:
    @pytest.fixture(scope="class", name="server")
    def _server(self): ...
"""


def fixtures(code: str) -> Iterator[str]:
    """The name of each fixture that the code defines."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            called = isinstance(decorator, ast.Call)
            if ast.unparse(decorator.func if called else decorator).split(".")[-1] == "fixture":
                named = [each.value for each in decorator.keywords if each.arg == "name"] if called else []
                yield ast.literal_eval(named[0]) if named else node.name


def several_homes(files: dict[str, str]) -> dict[str, list[str]]:
    """Each name that several fixtures have, with their files."""
    homes = defaultdict[str, list[str]](list)
    for file, code in files.items():
        for name in fixtures(code):
            homes[name].append(file)
    return {name: found for name, found in homes.items() if len(found) > 1}


def test_fixture_that_overrides_another_one_is_found() -> None:
    assert several_homes({"a.py": OVERRIDDEN}) == {"server": ["a.py", "a.py"]}


def test_every_fixture_has_one_home() -> None:
    """Merge fixtures that do the same into the nearest common conftest.py; give others another
    name, or parametrize one of them indirectly."""
    files = {str(file.relative_to(ROOT)): file.read_text() for file in sorted((ROOT / "tests").rglob("*.py"))}
    assert several_homes(files) == {}
