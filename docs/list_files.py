"""Writes docs/files.md: each file of the package once, with its docstring's first line.

`make docs` runs it. The page is in no commit: it would change with most of them.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def subject(path: Path) -> str:
    """Return the first line of a module's docstring, which ends a line or a sentence."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def listing() -> str:
    """Return the page: a heading per folder, and a line per file that has a docstring."""
    text = "# Files\n\nWritten by `make docs` from the docstrings.\n"
    for init in sorted((ROOT / "hpctrain").rglob("__init__.py")):
        text += f"\n## `{init.parent.relative_to(ROOT)}/`\n\n"
        files = ((path.name, subject(path)) for path in sorted(init.parent.glob("*.py")))
        text += "".join(f"- `{name}`: {about}\n" for name, about in files if about)
    return text


if __name__ == "__main__":
    (ROOT / "docs" / "files.md").write_text(listing())
