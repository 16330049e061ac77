"""Tensors of PyTorch on the stand-in, and torch.cuda: streams, and their order, as on a GPU.

    with fakes.installed(lazy=True), tensors.cuda():
        x = tensors.on_cuda(torch.ones(4))            # is_cuda, device cuda:0, memory of device 0
        with torch.cuda.stream(torch.cuda.Stream()):
            x.add_(1)                                 # done when that stream is waited for

A tensor is one of the CPU inside. What changes it, or makes a new one, is put into the current
stream of PyTorch; copies to the host wait for that stream. PyTorch's streams other than the default
one are non-blocking: nothing orders them but events and waits.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from unittest.mock import patch

import torch

from fakes import arrays, races, streams
from fakes.machine import machine

#: Functions that wait for the stream, since the host needs the values.
TO_HOST = ("cpu", "item", "tolist", "numpy", "equal", "__bool__", "__float__", "__repr__")
_PLAIN = torch._C.DisableTorchFunctionSubclass


class CudaTensor(torch.Tensor):
    """A tensor of device 0."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))

    def data_ptr(self) -> int:
        with _PLAIN():
            return torch.Tensor.data_ptr(self) - (machine().away if self.numel() else 0)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.__name__
        stream = torch.cuda.current_stream().fake

        def run():
            with _PLAIN(), torch.no_grad():
                return function(*args, **kwargs)

        if name in TO_HOST:
            _note(stream, name, _flat(args), ())
            stream.synchronize()
            with _PLAIN():
                value = run()
                return value.clone().as_subclass(torch.Tensor) if name == "cpu" else value
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
            changed = _flat(args[:1])  # several by torch._foreach_copy_
            _note(stream, name, _flat(args[1:]), changed)
            stream.put(run)
            if _has_host_memory(_flat(args)):
                stream.synchronize()  # copies from and to pageable memory
            return args[0]
        if kwargs.get("out") is not None:
            _note(stream, name, _flat(args), [kwargs["out"]])
            stream.put(run)
            return kwargs["out"]
        result = run()
        if isinstance(result, torch.Tensor):
            return _later(result, run, stream, name, args)
        if isinstance(result, (tuple, list)) and any(isinstance(x, torch.Tensor) for x in result):
            return type(result)(_view(x) for x in result)  # split, unbind
        return result


def _has_host_memory(xs) -> bool:
    return not all(isinstance(x, CudaTensor) for x in xs)


def _flat(args) -> list[torch.Tensor]:
    """Return the tensors of arguments, also of lists of them."""
    flat = [x for arg in args for x in (arg if isinstance(arg, (tuple, list)) else (arg,))]
    return [x for x in flat if isinstance(x, torch.Tensor)]


def _note(stream, name: str, reads, writes) -> None:
    """Note work on tensors, for the detector of races."""
    with _PLAIN():
        races.note(stream, f"Tensor.{name}", map(_span, reads), map(_span, writes))


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first element of `x`, and the bytes to its last."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    nbytes = (last + 1) * x.element_size() if x.numel() else 0
    return (x.data_ptr() if nbytes else 0), nbytes


def _view(x):
    return torch.Tensor._make_subclass(CudaTensor, x)


def _later(result, run, stream, name, args):
    """Return a result on the device: a view of an argument, or memory that `stream` will fill."""
    with _PLAIN():
        place = result.untyped_storage().data_ptr()
        sources = _flat(args)
        if any(x is result for x in sources):
            return result
        if any(x.untyped_storage().data_ptr() == place for x in sources):
            return _view(result)
        result = on_cuda(result)
        if machine().lazy:
            result.fill_(float("nan") if result.is_floating_point() else 77)
    is_read = not name.endswith("_like") and not name.startswith("new_")
    _note(stream, name, sources if is_read else (), [result])

    def fill() -> None:
        value = run()
        with _PLAIN(), torch.no_grad():
            torch.Tensor.copy_(result, value)

    stream.put(fill)
    return result


#: Memory of tensors, also of those that are gone: PyTorch keeps it, and gives it to others in the
#: order of its stream, so that work which is still waiting may use it.
_cached: list = []


def on_cuda(x: torch.Tensor) -> CudaTensor:
    """Return a copy of `x`, of the CPU, in memory of the device."""
    block = machine().allocate(max(x.nbytes, 1))
    _cached.append(block)
    with _PLAIN():
        flat = torch.from_numpy(block.bytes)[: x.nbytes].view(x.dtype)
        own = torch.as_strided(flat, x.shape, x.contiguous().stride())
        own.copy_(x)
    return _view(own)


def as_tensor(x, *args, **kwargs):
    """torch.as_tensor: of an array of CuPy, in its memory."""
    if not isinstance(x, arrays.ndarray):
        return _AS_TENSOR(x, *args, **kwargs)
    with _PLAIN():
        return _view(torch.from_numpy(x._host))


_AS_TENSOR = torch.as_tensor


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device=None, fake=None):
        self.fake = streams.Stream(non_blocking=True) if fake is None else fake
        self.cuda_stream, self.device_index = self.fake.ptr, self.fake.device_id
        self.device = torch.device("cuda", self.device_index)

    def record_event(self):
        return self.fake.record()

    def wait_event(self, event) -> None:
        self.fake.wait_event(event)

    def synchronize(self) -> None:
        self.fake.synchronize()


_here = threading.local()


def current_stream(device=None) -> Stream:
    return getattr(_here, "stream", None) or default_stream()


def default_stream(device=None) -> Stream:
    return Stream(fake=streams.null_stream())


@contextmanager
def stream(new):
    before, _here.stream = getattr(_here, "stream", None), new
    try:
        yield
    finally:
        _here.stream = before


@contextmanager
def cuda():
    """Let torch.cuda be of the stand-in within the block."""
    own = {
        "is_initialized": lambda: True, "is_available": lambda: True, "Stream": Stream,
        "current_stream": current_stream, "default_stream": default_stream, "stream": stream,
    }  # fmt: skip
    with patch.multiple(torch.cuda, **own), patch.object(torch, "as_tensor", as_tensor):
        yield
    for location in machine().streams:
        location.run()
        races.waited(location)
    _cached.clear()
