"""The size of each room, of each file, and the first lines of docstrings.

A room is a folder of modules. A new one adds a row to ROOMS; a commit that raises a limit says why.
`python tests/project/test_layout.py` writes docs/files.md, the list of all files, anew.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import hpctrain

ROOT = Path(hpctrain.__file__).parent
TESTS = Path(__file__).parents[1]
FILES = TESTS.parent / "docs" / "files.md"
MOST_LINES = 300
#: room: (most files, most lines), `__init__.py` included
ROOMS = {
    ".": (5, 520),
    "bench": (14, 1690),
    "bench/prediction": (9, 900),
    "bench/rivals": (5, 440),
    "bench/training_step": (4, 490),
    "bench/tuning": (4, 355),
    "chaos": (22, 2700),
    "checkpoint": (15, 2360),  # on disk, and in the memory of ranks
    "cluster": (8, 920),
    "cluster/netlab": (3, 410),
    "cluster/slurm": (13, 1920),
    "collectives": (23, 2300),
    "collectives/reductions": (5, 500),
    "commands": (27, 2210),
    "config": (5, 665),
    "core": (20, 1960),  # words on lost ranks
    "cost_model": (7, 1000),
    "data": (16, 1390),
    "doctor": (10, 950),
    "doctor/job": (12, 1650),
    "engines": (10, 1220),
    "engines/gossip": (7, 780),
    "engines/local_sgd": (4, 460),
    "engines/parameter_server": (12, 1800),
    "engines/synchronous": (9, 1200),
    "gradients": (10, 1480),  # the thread of a reducer that nobody closes ends
    "gradients/compress": (7, 900),
    "hardware": (7, 650),
    "jax": (8, 650),
    "nn": (23, 2760),  # parts of a model, and their gradients
    "nn/cuda": (6, 700),
    "nn/losses": (6, 480),
    "optim": (8, 1250),
    "parallel": (3, 150),
    "parallel/pipeline": (10, 1180),
    "parallel/schedules": (14, 1000),
    "parallel/timing": (7, 1050),
    "report": (12, 1350),  # losses of ranks on plots
    "run_files": (6, 620),
    "scaling": (10, 1590),
    "scaling/output": (7, 940),
    "scaling/trials": (4, 570),
    "slurm": (3, 400),  # jobs of Slurm from Python
    "torch": (18, 1980),
    "torch/modules": (13, 1300),
    "training": (27, 4010),  # models that are split over ranks, stragglers, losses
    "training/survival": (3, 350),
    "training/recipes": (1, 50),
    "transport": (3, 270),
    "transport/device": (6, 1010),
    "transport/gpu_probe": (7, 1120),
    "transport/mpi": (11, 1335),
    "transport/placement": (5, 925),
    "transport/shared_memory": (5, 720),
    "transport/threads": (6, 610),  # a signal ends the ranks that are threads
    "tuning": (10, 1480),
    "user_collectives": (4, 520),
    "watch": (13, 1620),  # records of whole nodes, and their diagnosis
    "watch/liveness": (8, 1030),  # losses that MPI does not detect
    "world": (11, 1080),  # worlds that survive lost ranks
}
#: longer files and their lines, which may only shrink
LONG: dict[str, int] = {}
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


def listing() -> str:
    """Return docs/files.md: each file of the package once, by its docstring's first line."""
    text = "# Files\n\nWritten by `python tests/project/test_layout.py` from the docstrings.\n"
    for room, files in rooms().items():
        folder = "hpctrain" if room == "." else f"hpctrain/{room}"
        text += f"\n## `{folder}/`\n\n"
        text += "".join(f"- `{p.name}`: {about}\n" for p in files if (about := subject(p)))
    return text


def subject(path: Path) -> str:
    """Return the first line of a module's docstring, which ends a line or a sentence."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def test_every_room_has_a_row_and_every_row_a_room():
    assert sorted(rooms()) == sorted(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_keeps_to_its_size(room):
    files = rooms()[room]
    most_files, most_lines = ROOMS[room]
    assert (len(files) <= most_files, sum(map(lines, files)) <= most_lines) == (True, True), (
        f"{room}: {len(files)} files of at most {most_files}, "
        f"{sum(map(lines, files))} lines of at most {most_lines}"
    )


def test_files_are_short():
    limits = {ROOT / name: maximum for name, maximum in LONG.items()}
    assert [p for p in ROOT.rglob("*.py") if lines(p) > limits.get(p, MOST_LINES)] == []


def test_the_top_level_is_small():
    entries = [p for p in ROOT.iterdir() if p.is_dir() or p.suffix == ".py"]
    entries = [p for p in entries if p.name != "__pycache__"]
    assert len(entries) <= 34  # a room for each guest; ht.slurm, pipelines, campaigns
    assert sum(p.is_file() for p in entries) <= 8


def test_the_list_of_files_is_complete():
    assert FILES.read_text() == listing(), "run: python tests/project/test_layout.py"


def test_tests_have_the_rooms_of_the_package():
    """Each folder of tests is a room's, or a row of tests/README.md; none but conftest is loose."""
    folders = {p.name for p in TESTS.iterdir() if p.is_dir() and p.name != "__pycache__"}
    listed = re.findall(r"^\| `(\w+)/`", (TESTS / "README.md").read_text(), flags=re.MULTILINE)
    assert folders - {p.name for p in ROOT.iterdir()} == set(listed)
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


if __name__ == "__main__":
    FILES.write_text(listing())
