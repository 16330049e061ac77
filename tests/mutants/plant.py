"""Errors to plant in the package, drawn by seed: six kinds, each line of the package alike.

    python tests/mutants/plant.py --seed 34 --count 60 >tests/mutants/mutants.jsonl

A mutant replaces one statement or a part of one. It has the text before and after, so that
a list stays valid while the package changes around its lines. `hpctrain/torch` and `hpctrain/jax`
are left out: their tests are those of `make test-guests`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUESTS = ("torch", "jax")
DTYPES = {"float64": "float32", "float32": "float16", "int64": "int32", "uint64": "uint32",
          "int32": "int16", "uint8": "int8", "complex128": "complex64"}  # fmt: skip
WAITS = ("wait", "wait_all", "wait_any", "barrier", "join", "synchronize", "flush", "fsync",
         "settle", "settled", "drain", "close", "free", "start")  # fmt: skip
CHECKS = ("check", "refuse", "require", "must", "validate", "assert", "verify")
NEXT = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


@dataclass(frozen=True)
class Mutant:
    """One planted error: `before` of `file`, the `index`-th of equal texts, becomes `after`."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    index: int = 0

    def apply(self, root: Path) -> Callable[[], int]:
        """Change the file below `root`; return a function that restores it."""
        path = root / self.file
        text = path.read_text()
        parts = text.split(self.before)
        if len(parts) < self.index + 2:
            raise LookupError(f"{self.file} has no longer: {self.before}")
        begin, end = parts[: self.index + 1], parts[self.index + 1 :]
        path.write_text(self.before.join(begin) + self.after + self.before.join(end))
        return lambda: path.write_text(text)


def sign(node: ast.AST) -> ast.AST | None:
    """Subtract in place of an addition, and vice versa; drop a minus."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Add, ast.Sub)):
        if any(isinstance(n, (ast.JoinedStr, ast.List, ast.Tuple)) for n in ast.walk(node)):
            return None  # texts and lists have no difference
        if any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(node)):
            return None
        node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return node.operand
    return None


def off_by_one(node: ast.AST) -> ast.AST | None:
    """Count one more, or include a bound that was excluded."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in NEXT and len(node.ops) == 1:
        node.ops = [NEXT[type(node.ops[0])]()]
        return node
    return None


def dropped_wait(node: ast.AST) -> ast.AST | None:
    """Drop a statement that waits, orders or closes."""
    return ast.Pass() if _called(node) in WAITS else None


def swapped_arguments(node: ast.AST) -> ast.AST | None:
    """Swap the first two arguments of a call."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    first, second = node.args[:2]
    if ast.dump(first) == ast.dump(second) or any(
        isinstance(a, ast.Starred) for a in node.args[:2]
    ):
        return None
    node.args[:2] = second, first
    return node


def wrong_dtype(node: ast.AST) -> ast.AST | None:
    """Take the next smaller dtype, or the signed one."""
    if isinstance(node, ast.Attribute) and node.attr in DTYPES:
        node.attr = DTYPES[node.attr]
        return node
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in DTYPES:
        return ast.Constant(DTYPES[node.value])
    return None


def missing_check(node: ast.AST) -> ast.AST | None:
    """Drop a raise under a condition, or a call that checks."""
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and not node.orelse:
        node.test = ast.Constant(value=False)
        return node
    return ast.Pass() if _called(node).lstrip("_").startswith(CHECKS) else None


def _called(node: ast.AST) -> str:
    """Return the name that an expression statement calls."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return ""
    called = node.value.func
    return getattr(called, "attr", getattr(called, "id", ""))


KINDS = (sign, off_by_one, dropped_wait, swapped_arguments, wrong_dtype, missing_check)


def candidates(file: Path, root: Path) -> Iterator[Mutant]:
    """Yield each mutant of a file, in the order of its lines."""
    text = file.read_text()
    tree = ast.parse(text)
    silent = set(_not_executed(tree))
    for node in ast.walk(tree):
        if not isinstance(node, (ast.expr, ast.stmt)) or id(node) in silent:
            continue
        for kind in KINDS:
            changed = kind(copy.deepcopy(node))
            if changed is None:
                continue
            before = ast.get_source_segment(text, node) or ""
            after = ast.unparse(ast.fix_missing_locations(changed))
            after = after.replace("\n", "\n" + " " * node.col_offset)
            if isinstance(changed, (ast.BinOp, ast.Compare)):
                after = f"({after})"
            name, index = (
                file.relative_to(root).as_posix(),
                text[: _offset(text, node)].count(before),
            )
            yield Mutant(name, node.lineno, kind.__name__, before, after, index)


def _offset(text: str, node: ast.AST) -> int:
    lines = text.splitlines(keepends=True)
    column = len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
    return sum(map(len, lines[: node.lineno - 1])) + column


def _not_executed(tree: ast.AST) -> Iterator[int]:
    """Yield the nodes of annotations, texts with values in them, and of `TYPE_CHECKING`."""
    for node in ast.walk(tree):
        quiet: list[ast.AST] = []
        if isinstance(node, ast.JoinedStr):
            quiet = [node]
        elif isinstance(node, ast.arg) and node.annotation:
            quiet = [node.annotation]
        elif isinstance(node, ast.FunctionDef) and node.returns:
            quiet = [node.returns]
        elif isinstance(node, ast.AnnAssign):
            quiet = [node.annotation]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            quiet = [node]
        for root in quiet:
            yield from map(id, ast.walk(root))


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """Draw `count` mutants: equally many of each kind, each line of the package alike."""
    rng = random.Random(seed)
    kinds: dict[str, dict[tuple[str, int], list[Mutant]]] = {kind.__name__: {} for kind in KINDS}
    for file in sorted((root / "hpctrain").rglob("*.py")):
        if file.relative_to(root).parts[1] not in GUESTS:
            for mutant in candidates(file, root):
                kinds[mutant.kind].setdefault((mutant.file, mutant.line), []).append(mutant)
    result: list[Mutant] = []
    for kind, lines in kinds.items():
        number = count // len(kinds) + (list(kinds).index(kind) < count % len(kinds))
        result += [rng.choice(lines[line]) for line in rng.sample(sorted(lines), number)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--seed", type=int, default=34)
    parser.add_argument("--count", type=int, default=60)
    options = parser.parse_args()
    for mutant in draw(options.root, options.seed, options.count):
        print(json.dumps(asdict(mutant)))


if __name__ == "__main__":
    main()
