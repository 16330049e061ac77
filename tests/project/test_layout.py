"""The size of each room, of each file, and the first lines of docstrings.

A room is a folder of modules. A commit that raises a limit says why.
"""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import hpctrain

ROOT = Path(hpctrain.__file__).parent
TESTS = Path(__file__).parents[1]
MOST_LINES = 300
MOST_FILES = 20  #: of a room, `__init__.py` included
#: rooms of more files, with headroom: a room near its limit is divided
WIDE = {
    "tools/chaos": 26, "collectives": 28, "commands": 32, "core": 26, "nn": 28, "torch": 24,
    "training": 32,
}  # fmt: skip
#: longer files and their lines, which may only shrink
LONG: dict[str, int] = {}
#: of the package's syntax trees; a number that only falls, or rises in a commit that says why
STATEMENTS = 50_870
CLAUSES = re.compile(r"(Return|Yield|Tell|Say)s? (what|who|whom|which|where|how|that which)\b")


def rooms() -> dict[str, list[Path]]:
    """Return the Python files of each folder with modules."""
    files: dict[str, list[Path]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        files.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    return files


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def first_lines(tree: ast.AST) -> list[str]:
    """Return the first line of each docstring of a module."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, holders)]
    return [text.splitlines()[0] for text in texts if text]


def test_rooms_have_few_files():
    counts = {room: len(files) for room, files in rooms().items()}
    assert {room for room in counts if counts[room] > WIDE.get(room, MOST_FILES)} == set(), counts


def test_files_are_short():
    limits = {ROOT / name: maximum for name, maximum in LONG.items()}
    assert [p for p in ROOT.rglob("*.py") if lines(p) > limits.get(p, MOST_LINES)] == []


def test_statements_do_not_grow():
    """Counted in syntax trees, so that neither long lines nor short comments lower the number."""
    nodes = (node for p in ROOT.rglob("*.py") for node in ast.walk(ast.parse(p.read_text())))
    assert sum(isinstance(node, ast.stmt) for node in nodes) <= STATEMENTS


def test_the_top_level_is_small():
    entries = [p for p in ROOT.iterdir() if p.is_dir() or p.suffix == ".py"]
    entries = [p for p in entries if p.name != "__pycache__"]
    assert len(entries) <= 25
    assert sum(p.is_file() for p in entries) <= 4


def test_the_list_of_files_is_complete():
    page = runpy.run_path(str(TESTS.parent / "docs" / "list_files.py"))["listing"]()
    listed = re.findall(r"^(?:## `hpctrain/?(.*)/`|- `(\w+\.py)`: .+)$", page, re.MULTILINE)
    assert sum(1 for _, name in listed if name and name != "__init__.py") == sum(
        path.name != "__init__.py" for files in rooms().values() for path in files
    )
    assert [room or "." for room, name in listed if not name] == [*rooms()]


def test_tests_have_the_rooms_of_the_package():
    """Rooms and folders of tests have the same names, but those that tests/README.md lists."""
    folders = {p.name for p in TESTS.iterdir() if p.is_dir() and p.name != "__pycache__"}
    names = {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"}
    page = (TESTS / "README.md").read_text()
    assert folders - names == set(re.findall(r"^\| `(\w+)/`", page, flags=re.MULTILINE))
    assert names - folders == set(re.findall(r"`hpctrain/(\w+)/`", page)) - {"NAME"}
    assert [p.name for p in TESTS.glob("*.py")] == ["conftest.py"]


def test_a_docstring_names_its_subject():
    """A first line such as "Return what ..." leaves the noun out."""
    trees = ((p.name, ast.parse(p.read_text())) for p in ROOT.rglob("*.py"))
    texts = [(name, text) for name, tree in trees for text in first_lines(tree)]
    assert len(texts) > 1000
    assert [(name, text) for name, text in texts if CLAUSES.match(text)] == []


def test_what_a_first_line_is():
    tree = ast.parse('"""One."""\ndef f():\n    """Return what is left.\n\n    More."""\n')
    assert first_lines(tree) == ["One.", "Return what is left."]
    assert [bool(CLAUSES.match(text)) for text in first_lines(tree)] == [False, True]
