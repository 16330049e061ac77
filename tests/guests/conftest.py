"""Tests of guests need PyTorch, those of JAX only JAX: without it, as in `make test`, they are not
collected."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import leftovers

WITHOUT_TORCH = {
    "test_jax.py", "test_jax_batches.py", "test_jax_behaviour.py", "test_attributes_jax.py",
}  # fmt: skip

collect_ignore = (
    []
    if find_spec("torch")
    else [p.name for p in Path(__file__).parent.glob("test_*.py") if p.name not in WITHOUT_TORCH]
)

if find_spec("torch"):
    # Autograd keeps hooks and what they hold, unseen by Python's collector: the memory of a lost
    # rank that is a thread stays. A process takes its memory along.
    leftovers.ALLOWED_PATHS["/memfd:hpctrain"] = "memory of lost ranks, held by hooks of PyTorch"
