"""cupy._core._routines_linalg: the setting of TF32, which changes no result of the stand-in."""

from __future__ import annotations

import os
from types import ModuleType

import numpy as np

from fakes.machine import machine

COMPUTE_TYPE_DEFAULT, COMPUTE_TYPE_TF32 = 1, 7


def get_compute_type(dtype) -> int:
    """Return what products of `dtype` are made of; the first call looks at CUPY_TF32."""
    kinds, key = machine().compute_types, _key(dtype)
    if key not in kinds:
        allowed = key == "f" and int(os.getenv("CUPY_TF32", "0")) > 0
        set_compute_type(dtype, COMPUTE_TYPE_TF32 if allowed else COMPUTE_TYPE_DEFAULT)
    return kinds[key]


def set_compute_type(dtype, compute_type) -> None:
    if compute_type == COMPUTE_TYPE_TF32:
        machine().must_have_devices()  # CuPy asks for its compute capability
    elif compute_type != COMPUTE_TYPE_DEFAULT:
        raise ValueError(f"Unknown compute type: {compute_type}")
    machine().compute_types[_key(dtype)] = compute_type


def _key(dtype) -> str:
    char = np.dtype(dtype).char
    if char not in "efFdD":
        raise TypeError(f"dtype is not supported: {dtype}")
    return char.lower()


def module() -> ModuleType:
    """Return cupy._core, with what is used of it."""
    core, result = ModuleType("cupy._core"), ModuleType("cupy._core._routines_linalg")
    for name in ("COMPUTE_TYPE_DEFAULT", "COMPUTE_TYPE_TF32", "get_compute_type",
                 "set_compute_type"):  # fmt: skip
        setattr(result, name, globals()[name])
    core._routines_linalg = result
    return core
