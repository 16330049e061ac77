"""The size of classes and of calls, and questions for a type, in the rooms of the central objects.

A table names what exceeds a limit, with its present number: a number may only shrink, and
an entry within the limit goes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any

import pytest

import hpctrain

ROOT = Path(hpctrain.__file__).parent
ROOMS = ("engines", "torch", "training", "transport", "world")
MOST_MEMBERS = 15  #: public fields, properties and methods of a class
MOST_POSITIONAL = 5
MOST_PARAMETERS = 8
ERRORS = ("Error", "Killed")

#: classes and functions that another library prescribes
PRESCRIBED_CLASSES = {"torch/process_group.py ProcessGroup": "torch calls each method by its name"}
PRESCRIBED_FUNCTIONS = {
    "torch/modules/layers.py _Normalization.forward": "torch.autograd.Function",
}
#: public members of larger classes
MEMBERS: dict[str, int] = {}
#: positional parameters, of functions with more
POSITIONAL: dict[str, int] = {
    "training/trainer.py Trainer.__init__": 11,
    "world/calls/arguments.py validate_arguments": 6,
}
#: parameters, of functions with more
PARAMETERS: dict[str, int] = {
    "training/trainer.py Trainer.__init__": 12,
    "training/trainer.py Trainer.fit": 14,
}
#: questions for a class of the package, an attribute or a default, by file
QUESTIONS: dict[str, int] = {
    "torch/modules/acceptance.py": 2,
    "torch/modules/buffers.py": 1,
    "torch/modules/direct_gradients.py": 1,
    "torch/modules/draws.py": 1,
    "torch/modules/loss_modules.py": 2,
    "torch/modules/losses.py": 5,
    "torch/modules/model.py": 3,
    "torch/modules/optimizers/attributes.py": 3,
    "torch/modules/optimizers/bound.py": 1,
    "torch/modules/optimizers/conversion.py": 4,
    "torch/modules/optimizers/schedulers.py": 2,
    "torch/modules/row_reader.py": 2,
    "torch/modules/samplers.py": 4,
    "torch/operations.py": 1,
    "training/arguments.py": 6,
    "training/callbacks.py": 8,
    "training/centered_loss.py": 1,
    "training/checkpointer.py": 1,
    "training/dry_run.py": 1,
    "training/journal.py": 1,
    "training/loading.py": 5,
    "training/loggers/run_loggers.py": 1,
    "training/loop.py": 1,
    "training/orders.py": 1,
    "training/runs.py": 2,
    "training/split_model.py": 3,
    "training/stragglers.py": 1,
    "training/suspicions.py": 1,
    "training/tasks.py": 1,
    "training/trainer.py": 1,
    "transport/abort.py": 1,
    "transport/device/gpus.py": 1,
    "transport/gpu_probe/mpi_claims.py": 2,
    "transport/machine.py": 1,
    "transport/mpi/installation.py": 1,
    "transport/mpi/startup.py": 1,
    "transport/script.py": 1,
    "world/process.py": 1,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each file of the rooms."""
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text()) for p in paths}


def definitions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield each class and function with its name, within classes and functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | Function):
            yield f"{owner}{node.name}", node
            yield from definitions(node, f"{owner}{node.name}.")
        else:
            yield from definitions(node, owner)


def is_record(node: ast.ClassDef) -> bool:
    """Tell whether instances hold values alone: a frozen dataclass, a tuple or a dictionary."""
    texts = [ast.unparse(x) for x in (*node.bases, *node.decorator_list)]
    return any("frozen=True" in x or x.endswith(("NamedTuple", "TypedDict")) for x in texts)


def members(node: ast.ClassDef) -> int:
    """Return the number of public members: defined in the body, or assigned to `self`.

    The fields of a record are not counted, its methods and properties are.
    """
    names = {x.name for x in node.body if isinstance(x, Function)}
    if is_record(node):
        return sum(not name.startswith("_") for name in names)
    for x in ast.walk(node):
        if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store):
            names |= {x.attr} if ast.unparse(x.value) == "self" else set()
    for x in node.body:
        targets = x.targets if isinstance(x, ast.Assign) else [getattr(x, "target", None)]
        names |= {y.id for y in targets if isinstance(y, ast.Name)}
    return sum(not name.startswith("_") for name in names)


def positional(node: Function) -> int:
    """Return the number of positional parameters, without `self` and `cls`."""
    names = [x.arg for x in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def parameters(node: Function) -> int:
    return positional(node) + len(node.args.kwonlyargs)


def own_names(tree: ast.Module) -> set[str]:
    """Return the names of a file for classes and modules of the package, other than errors."""
    names = {x.name for x in ast.walk(tree) if isinstance(x, ast.ClassDef)}
    for x in ast.walk(tree):
        if isinstance(x, ast.ImportFrom) and (x.module or "").split(".")[0] == "hpctrain":
            names |= {y.asname or y.name for y in x.names}
    return {name for name in names if not name.endswith(ERRORS)}


def questions(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield each question that can choose a mode.

    They are `hasattr`, `getattr` with a default, and `isinstance`, `issubclass` or a pattern of a
    class of the package. Errors are none: to distinguish them is what their classes are for.
    """
    own = own_names(tree)
    for node in ast.walk(tree):
        classes = ast.unparse(node.cls) if isinstance(node, ast.MatchClass) else ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3):
                yield node
            if node.func.id in ("isinstance", "issubclass"):
                classes = ast.unparse(node.args[1])
        names = [name for name in re.findall(r"[\w.]+", classes) if not name.endswith(ERRORS)]
        if any(name.split(".")[0] in own for name in names):
            yield node


def numbers(kind: type | UnionType, count: Callable[[Any], int]) -> dict[str, int]:
    """Return the count of each definition of a kind, by file and name."""
    return {
        f"{file} {name}": count(node)
        for file, tree in trees().items()
        for name, node in definitions(tree)
        if isinstance(node, kind)
    }


LIMITS = {
    "members": (ast.ClassDef, members, MOST_MEMBERS, MEMBERS, PRESCRIBED_CLASSES),
    "positional": (Function, positional, MOST_POSITIONAL, POSITIONAL, PRESCRIBED_FUNCTIONS),
    "parameters": (Function, parameters, MOST_PARAMETERS, PARAMETERS, PRESCRIBED_FUNCTIONS),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_interfaces_are_small(limit):
    kind, count, most, exceptions, prescribed = LIMITS[limit]
    counts = numbers(kind, count)
    assert len(counts) > 100
    assert {name for name in prescribed if name not in counts} == set()
    large = {name: n for name, n in counts.items() if n > most and name not in prescribed}
    assert large == exceptions  # a number that fell is lowered there, too


def test_modes_are_not_chosen_by_questions():
    """What differs is assembled where it is made: its methods are called without a question."""
    counts = {file: len([*questions(tree)]) for file, tree in trees().items()}
    assert {file: n for file, n in counts.items() if n} == QUESTIONS


PLANTED = """
from hpctrain.torch.modules.losses import TorchLoss
from hpctrain import engines
from hpctrain.core.errors import UsageError
import torch

class Link:
    rank: int
    size = 2

    def __init__(self, first, /, second, *, third):
        self.first, self._second = first, second

    def send(self):
        def inner(a, b, c, d, e, f): ...

@dataclass(frozen=True)
class Record:
    one: int

class Pair(NamedTuple):
    one: int

isinstance(loss, TorchLoss)
isinstance(options, torch.nn.Module | engines.AllReduce)
isinstance(error, UsageError | engines.LostError)
isinstance(x, torch.Tensor)
hasattr(x, "rate")
getattr(x, "rate", None)
getattr(x, "rate")
match x:
    case Link(): ...
    case dict(): ...
"""


def test_what_exceeds_a_limit():
    tree = ast.parse(PLANTED)
    nodes = dict(definitions(tree))
    assert [*nodes] == ["Link", "Link.__init__", "Link.send", "Link.send.inner", "Record", "Pair"]
    assert [members(nodes[name]) for name in ("Link", "Record", "Pair")] == [4, 0, 0]
    counts = [(positional(x), parameters(x)) for x in nodes.values() if isinstance(x, Function)]
    assert counts == [(2, 3), (0, 0), (6, 6)]
    lines = [ast.unparse(x) for x in questions(tree)]
    assert lines == [
        "isinstance(loss, TorchLoss)",
        "isinstance(options, torch.nn.Module | engines.AllReduce)",
        "hasattr(x, 'rate')",
        "getattr(x, 'rate', None)",
        "Link()",
    ]
