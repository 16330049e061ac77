"""Stand-ins for CuPy and its GPUs on a machine without a GPU; they compute with NumPy.

    with fakes.installed(devices=2, lazy=True) as machine:     # or the fixtures `gpu`, `lazy_gpu`
        import cupy                                             # the stand-in
        ...
        assert machine.counts["D2H"] == 0

What is seen here is that the right calls are made in the right order, not that they work on a GPU.
`python -m fakes train ...` is `hpctrain train ...` on such a machine.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType

from fakes import arrays, cuda, functions, handoffs, products
from fakes.machine import CUDARuntimeError, ImplicitHostAccess, Machine, OutOfMemoryError, replaced
from fakes.machine import machine as machine_now

__all__ = [
    "CUDARuntimeError",
    "ImplicitHostAccess",
    "Machine",
    "OutOfMemoryError",
    "installed",
    "machine_now",
    "modules",
]


class _Cupy(ModuleType):
    """The module `cupy`: what is not set is looked up among the functions."""

    __version__ = "14.2.0"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(functions, name)


def modules() -> dict[str, ModuleType]:
    """Return the modules that Python is to find."""
    cupy, result = _Cupy("cupy"), cuda.modules()
    cupy.__spec__ = ModuleSpec("cupy", None)  # whoever asks whether there is a CuPy looks for it
    cupy.ndarray, cupy.cuda = arrays.ndarray, result["cupy.cuda"]
    cupy._core = products.module()
    cupy.get_default_memory_pool = lambda: cuda.MemoryPool()
    return {"cupy": cupy, **result}


@contextmanager
def installed(**options):
    """Let `import cupy` find the stand-in until the end of the block; yield its Machine."""
    result = modules()
    before = {name: sys.modules.get(name) for name in result}
    sys.modules.update(result)
    try:
        with replaced(Machine(**options)) as machine:
            with handoffs.watched() if machine.races else nullcontext():
                yield machine
            machine.drop_gone()
            if machine.races and machine.races.errors:
                raise machine.races.errors[0]
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
