"""Arrays of the device: NumPy inside, accessible to the stand-in alone.

What CuPy refuses is refused, and what CuPy would do by a silent copy to the host (float(), bool(),
iteration over numbers, tolist) is counted and refused too: the product must say `get`.
"""

from __future__ import annotations

import ctypes
import operator
from functools import partial

import numpy as np

from fakes import halves, races
from fakes.machine import ImplicitHostAccess, machine
from fakes.memory import MemoryPointer, UnownedMemory, pageable_or_pinned
from fakes.streams import get_current_stream
from fakes.work import allocated, evaluate, host_span, span, spoil, wrapped, write

NUMBERS = (int, float, complex, bool, np.generic)


class ndarray:
    """cupy.ndarray: `_host` lies in the memory of device `_device`, which `_keeper` keeps."""

    __slots__ = ("__weakref__", "_device", "_host", "_keeper")
    __array_priority__ = 100

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        dtype = np.dtype(dtype)
        if memptr is None:
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            keeper, device = allocated(nbytes, dtype), machine().device
            host = np.ndarray(shape, dtype, keeper.bytes, order=order or "C")
            if keeper.is_recycled:
                get_current_stream().put(partial(keeper.bytes.fill, 0xFF))
            elif machine().lazy:
                spoil(host)
        else:
            span = memptr.mem.size - (memptr.ptr - memptr.mem.ptr)
            raw = (ctypes.c_char * span).from_address(machine().host(memptr.ptr))
            host = np.ndarray(shape, dtype, raw, strides=strides, order=order or "C")
            keeper, device = memptr, memptr.device_id
        self._fill(host, keeper, device)

    def _fill(self, host, keeper, device) -> None:
        self._host, self._keeper, self._device = host, keeper, device

    # What is known without looking at the device.
    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    strides = property(lambda self: self._host.strides)
    flags = property(lambda self: self._host.flags)
    T = property(lambda self: wrapped(self._host.T, self))

    @property
    def device(self):
        from fakes.cuda import Device

        return Device(self._device)

    @property
    def data(self) -> MemoryPointer:
        start, nbytes, _ = machine().region(self._address) or (self._address, self.nbytes, 0)
        return MemoryPointer(
            UnownedMemory(start, nbytes, self, self._device), self._address - start
        )

    @property
    def _address(self) -> int:
        return self._host.__array_interface__["data"][0] - machine().away

    @property
    def __cuda_array_interface__(self) -> dict:
        contiguous = self._host.flags.c_contiguous
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self._address if self.size else 0, False),
            "version": 3,
            "strides": None if contiguous else self.strides,
            "stream": get_current_stream().ptr or 1,
        }

    def __dlpack_device__(self):
        return 2, self._device  # kDLCUDA

    def __dlpack__(self, stream=None, **_):
        capsule = self._host.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        tensor = pointer(capsule, b"dltensor")
        kind = (ctypes.c_int32 * 2).from_address(tensor + ctypes.sizeof(ctypes.c_void_p))
        kind[:] = self.__dlpack_device__()
        return capsule

    # To the host and back, in so many words.
    def get(self, stream=None, order="C", out=None, blocking=True):
        stream = stream or get_current_stream()
        out = np.empty(self.shape, self.dtype) if out is None else out
        if out.shape != self.shape or out.dtype != self.dtype:
            raise ValueError(f"expected {self.shape} {self.dtype}, seen {out.shape} {out.dtype}")
        machine().count("D2H", self.nbytes)
        pageable_or_pinned(out)
        races.note(stream, "get", [span(self)], [host_span(out)])
        stream.put(partial(np.copyto, out, self._host))
        if blocking:
            machine().count("stream sync")
            stream.run()
            races.waited(stream)
        return out

    def set(self, arr, stream=None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype or arr.shape != self.shape:
            raise ValueError(f"Shape or dtype mismatch. {arr.dtype} {self.dtype} {arr.shape}")
        machine().count("H2D", self.nbytes)
        # Pageable memory is read before the call returns; pinned memory when its turn comes.
        source = arr if pageable_or_pinned(arr) else arr.copy()
        stream = stream or get_current_stream()
        races.note(stream, "set", [host_span(source)], [span(self)])
        stream.put(partial(np.copyto, self._host, source))

    # Refused: nobody asked for a copy to the host.
    def _refuse(self, *_args, **_kwargs):
        machine().count("implicit")
        raise ImplicitHostAccess(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )

    __array__ = __float__ = __int__ = __bool__ = __index__ = __complex__ = _refuse
    tolist = item = tobytes = __contains__ = dump = tofile = _refuse
    __hash__ = None

    def __repr__(self) -> str:
        return f"<device array {self.shape} {self.dtype}>"  # a test that fails may show it

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self):
        if self.ndim < 2:
            self._refuse()
        return (self[i] for i in range(len(self)))

    # Work on the device.
    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__":
            return NotImplemented
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        return evaluate(ufunc, *inputs, **kwargs)

    def __array_function__(self, func, types, args, kwargs):
        from fakes import functions

        return getattr(functions, func.__name__)(*args, **kwargs)

    def __getitem__(self, key):
        return evaluate(lambda x, k: x[_round(x, k)], self, key, waits=_selects(key))

    def __setitem__(self, key, value) -> None:
        part = self._host[key] if machine().races is not None and _is_basic(key) else None
        if isinstance(part, np.ndarray):
            target, key = wrapped(part, self), Ellipsis
        else:
            target = self
        write(lambda x, k, v: x.__setitem__(_round(x, k), v), target, key, value)

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        if not copy and self.dtype == dtype:
            return self
        return evaluate(halves.plain(lambda x: x.astype(dtype)), self)

    def view(self, dtype=None):
        return wrapped(self._host.view(*([] if dtype is None else [dtype])), self)

    def reshape(self, *shape, order="C"):
        return evaluate(lambda x: x.reshape(*shape, order=order), self)

    def copy(self, order="C"):
        machine().count("D2D", self.nbytes)
        return evaluate(lambda x: x.copy(order), self)

    def fill(self, value) -> None:
        write(lambda x, v: x.fill(v), self, value)

    def sort(self, axis=-1) -> None:
        write(lambda x: x.sort(axis), self)

    def nonzero(self):
        return evaluate(lambda x: x.nonzero(), self, waits=True)


def _method(name: str):
    return lambda self, *args, **kwargs: evaluate(
        lambda x, *a, **k: getattr(x, name)(*a, **k), self, *args, **kwargs
    )


def _in_place(mode):
    def method(self, other):
        write(mode, self, other)
        return self

    return method


METHODS = (
    "sum max min mean prod any all argmax argmin argsort cumsum ravel flatten transpose swapaxes "
    "squeeze take clip dot round repeat"
)
BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
REST = "eq ne lt le gt ge neg pos abs invert"
for _name in METHODS.split():
    setattr(ndarray, _name, _method(_name))
for _name in f"{BINARY} {REST}".split():
    _mode = getattr(operator, f"__{_name}__")
    setattr(ndarray, f"__{_name}__", lambda self, *y, mode=_mode: evaluate(mode, self, *y))
for _name in BINARY.split():
    _mode = getattr(operator, f"__{_name}__")
    setattr(ndarray, f"__r{_name}__", lambda self, x, mode=_mode: evaluate(mode, x, self))
    if _name != "matmul":  # CuPy has none in place
        setattr(ndarray, f"__i{_name}__", _in_place(getattr(operator, f"__i{_name}__")))


def _round(x: np.ndarray, key):
    """Return `key` with indices beyond the end counted round again, as CuPy does, unasked."""
    keys = key if isinstance(key, tuple) else (key,)
    if any(k is None or k is Ellipsis for k in keys):
        return key
    outcome = [
        k % max(n, 1) if isinstance(k, np.ndarray) and k.dtype.kind in "iu" else k
        for k, n in zip(keys, x.shape, strict=False)
    ]
    return tuple(outcome) if isinstance(key, tuple) else outcome[0]


def _is_basic(key) -> bool:
    """Return whether an index is of slices and whole numbers: it selects a view."""
    keys = key if isinstance(key, tuple) else (key,)
    return all(k is None or k is Ellipsis or isinstance(k, (slice, int, np.integer)) for k in keys)


def _selects(key) -> bool:
    """Return whether an index picks by a mask: how many is known when it was read."""
    keys = key if isinstance(key, tuple) else (key,)
    return any(isinstance(k, ndarray) and k.dtype == bool for k in keys)
