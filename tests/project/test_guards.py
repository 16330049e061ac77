"""What one function does for the whole package is done nowhere else in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hpctrain

ROOT = Path(hpctrain.__file__).parent


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield (file, name of the function, call) of each call in the package."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path.relative_to(ROOT).as_posix(), ast.unparse(node.func), node


#: Output beside core/printing.py and the console of core/fitted_table.py, and why it is none.
OUTPUT = {
    ("cluster/supervision.py", "os.write"): "bytes of the ranks, to their own terminal",
    ("core/signals.py", "os.write"): "while the main thread may hold the lock of stderr",
}


def test_text_is_printed_by_one_function():
    """Another would obey escape sequences and markup in recipes, host names and files."""
    printing = set()
    for file, name, call in calls():
        words = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        to_terminal = ast.unparse(call.args[0]) in ("1", "2") if call.args else False
        if (
            name in ("print", "click.echo", "click.secho", "Console", "Text.from_markup")
            or name.startswith(("sys.stdout.write", "sys.stderr.write"))
            or (name == "os.write" and to_terminal)
            or (name == "TextColumn" and words.get("markup") != "False")
            or (name.endswith("StreamHandler") and file not in ("cli.py", "core/progress.py"))
        ):
            printing.add((file, name))
    assert printing == OUTPUT.keys()
