"""Imports: few arrows between rooms, and no new circle of files.

The import contract in pyproject.toml says which rooms may import which. Counted here is every
import in a file, in functions and for type checkers, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import grimp

#: pairs (room, other room that it imports); a number that only falls, or rises with a reason
ARROWS = 134
#: files that import each other; circles may only shrink
CIRCLES = {
    "jax": {"model", "replica"},
    "nn": {"model", "part"},
    "torch": {"autoload", "process_group", "rendezvous"},
    "torch.modules": {"model", "replica"},
    "transport": {"shared_memory.cuda_ipc", "shared_memory.host"},
}


def imports() -> dict[str, set[str]]:
    """Return the modules that each module imports, all by their names below `hpctrain.`."""
    graph = grimp.build_graph("hpctrain", cache_dir=None)
    names = graph.modules - {"hpctrain"}
    return {
        name.removeprefix("hpctrain."): {
            other.removeprefix("hpctrain.")
            for other in graph.find_modules_directly_imported_by(name)
            if other in names
        }
        for name in names
    }


def reachable(graph: Mapping[str, Set[str]], name: str) -> set[str]:
    """Return the nodes to which a way of one arrow or more leads from `name`."""
    reached: set[str] = set()
    new = {*graph[name]}
    while new:
        reached |= new
        new = {other for node in new for other in graph[node]} - reached
    return reached


def circular(graph: Mapping[str, Set[str]]) -> set[str]:
    """Return the nodes from which a way leads back to them."""
    return {name for name in graph if name in reachable(graph, name)}


def test_arrows_between_rooms_are_few():
    arrows = {
        (name.partition(".")[0], other.partition(".")[0])
        for name, others in imports().items()
        for other in others
    }
    between = {(room, other) for room, other in arrows if room != other}
    assert len(between) <= ARROWS, sorted(between)


def test_no_new_circle_of_files():
    known = {f"{room}.{file}" for room, files in CIRCLES.items() for file in files}
    assert circular(imports()) <= known


def test_what_a_circle_is():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circular(graph) == {"b", "c"}
    assert reachable(graph, "d") == {"a", "b", "c"}
