"""The functions of the module `cupy`: NumPy's, on memory of the device."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np

from fakes import kernels, races
from fakes.arrays import ndarray
from fakes.machine import machine
from fakes.streams import get_current_stream
from fakes.work import evaluate, host_span, span, write

#: Beside all ufuncs, what CuPy has too: each was looked up there.
_WORDS = (
    "matmul einsum dot vdot tensordot outer sum max min amax amin mean prod any all argmax argmin "
    "argsort sort cumsum concatenate stack hstack vstack split array_split where clip take "
    "take_along_axis reshape ravel transpose swapaxes moveaxis expand_dims squeeze broadcast_to "
    "repeat tile roll triu tril count_nonzero searchsorted bincount median var std nan_to_num "
    "isclose diff rollaxis flip pad"
)
FUNCTIONS = frozenset(_WORDS.split())
SHAPES = ("flatnonzero", "nonzero", "unique", "argwhere")  #: that depend on the values
NAMES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint16", "uint32",
         "uint64", "bool_", "dtype", "newaxis", "inf", "nan", "pi", "result_type", "iinfo",
         "finfo")  # fmt: skip


class Ufunc:
    """A ufunc of CuPy's: callable, and the methods that it has there."""

    def __init__(self, own: np.ufunc):
        self._own, self.__name__ = own, own.__name__

    def __call__(self, *args, **kwargs):
        *inputs, out = (*args, kwargs.pop("out", None))
        if len(args) > self._own.nin:
            *inputs, out = args
        return evaluate(self._own, *inputs, out=out, **kwargs)

    def reduce(self, x, *args, **kwargs):
        return evaluate(self._own.reduce, x, *args, **kwargs)

    def reduceat(self, x, indices, axis=0, dtype=None, out=None):
        return evaluate(self._own.reduceat, x, indices, axis=axis, dtype=dtype, out=out)

    def outer(self, x, y):
        return evaluate(self._own.outer, x, y)

    def at(self, x, indices, values):
        write(self._own.at, x, indices, values)


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def full(shape, fill_value, dtype=None, order="C"):
    x = empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order)
    x.fill(fill_value)
    return x


def zeros(shape, dtype=float, order="C"):
    return full(shape, 0, dtype, order)


def ones(shape, dtype=float, order="C"):
    return full(shape, 1, dtype, order)


def _like(make):
    return lambda x, dtype=None, order="K": make(_of_device(x).shape, dtype or x.dtype)


empty_like, zeros_like, ones_like = _like(empty), _like(zeros), _like(ones)


def full_like(x, fill_value, dtype=None):
    return full(_of_device(x).shape, fill_value, dtype or x.dtype)


def arange(*args, dtype=None):
    host = np.arange(*args, dtype=dtype)
    x = empty(host.shape, host.dtype)
    races.note(get_current_stream(), "arange", (), [span(x)])
    get_current_stream().put(partial(np.copyto, x._host, host))
    return x


def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    return array(a, dtype, copy=bool(copy))


def array(obj, dtype=None, copy=True, order="K", *, blocking=False):
    """Return device memory with what `obj` holds: a copy from the host is counted."""
    if isinstance(obj, ndarray):
        return obj.astype(obj.dtype if dtype is None else dtype, copy=copy)
    if isinstance(obj, (tuple, list)) and any(isinstance(x, ndarray) for x in obj):
        return evaluate(np.stack, list(obj))
    pinned = isinstance(obj, np.ndarray) and machine().is_pinned(obj.ctypes.data)
    # CuPy copies to pinned memory of its own first, but reads what is pinned when its turn comes.
    host = np.asarray(obj, dtype) if pinned and obj.flags.c_contiguous else np.array(obj, dtype)
    x = empty(host.shape, host.dtype)
    machine().count("H2D", host.nbytes)
    races.note(get_current_stream(), "array", [host_span(host)], [span(x)])
    get_current_stream().put(partial(np.copyto, x._host, host))
    return x


def ascontiguousarray(a, dtype=None):
    a = asarray(a, dtype)
    return a if a.flags.c_contiguous else a.copy()


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    """Return host memory with what `a` holds; what is there already is counted as no copy."""
    if isinstance(a, ndarray):
        return a.get(stream=stream, order=order, out=out, blocking=blocking)
    return np.asarray(a)


def copyto(dst, src, casting="same_kind", location=None):
    if isinstance(src, ndarray):
        machine().count("D2D", src.nbytes)
    write(lambda x, y: np.copyto(x, y, casting=casting), dst, src)


def fuse(*args, **kwargs):
    """cupy.fuse: here the function itself, operation by operation, and each call counted."""
    if not args:
        return partial(_fused, **kwargs)
    return _fused(*args, **kwargs)


def _fused(function, kernel_name=None):
    def call(*args):
        if any(isinstance(x, np.ndarray) for x in args):
            raise TypeError("fused functions take arrays of the device and numbers")
        machine().count("fused")
        return function(*args)

    return call


class RawKernel:
    """cupy.RawKernel: what its source would do is told by tests, in kernels.py."""

    def __init__(self, code, name, options=(), backend="nvrtc"):
        self._name, self._run = name, kernels.KERNELS[name]
        self._written = kernels.written(code, name)

    def __call__(self, grid, block, args, *, shared_mem=0, stream=None):
        machine().count("raw kernel")
        machine().count(self._name)

        def run(*hosts):
            self._run(grid, block, *hosts)

        run.__qualname__ = self._name
        write(run, *args, written=self._written)


def asfortranarray(a, dtype=None):
    return evaluate(np.asfortranarray, asarray(a, dtype))


def get_array_module(*args):
    import sys

    return sys.modules["cupy"] if any(isinstance(x, ndarray) for x in args) else np


def as_strided(x, shape=None, strides=None):
    return evaluate(lambda y: np.lib.stride_tricks.as_strided(y, shape, strides), x)


def shares_memory(a, b, max_work=None) -> bool:
    return np.shares_memory(a._host, b._host)


may_share_memory = shares_memory
lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided))


def _of_device(x) -> ndarray:
    if not isinstance(x, ndarray):
        raise TypeError(f"Unsupported type {type(x)}")
    return x


def __getattr__(name: str):
    """Return the function of NumPy's name, if CuPy has it."""
    result = getattr(np, name, None)
    if isinstance(result, np.ufunc) and name not in FUNCTIONS:
        return Ufunc(result)
    if name in FUNCTIONS:
        return partial(_call, result)
    if name in SHAPES:
        return partial(evaluate, result, waits=True)
    if name in NAMES:
        return result
    raise AttributeError(f"module 'cupy' (a stand-in) has no attribute '{name}'")


def _call(function, *args, **kwargs):
    sources = [x for x in (*args, *kwargs.values()) if isinstance(x, (ndarray, list, tuple))]
    if not sources:
        raise TypeError(f"Unsupported type {type(args[0])}")
    if isinstance(kwargs.get("dtype"), str):
        kwargs["dtype"] = np.dtype(kwargs["dtype"])
    return evaluate(function, *args, **kwargs)
