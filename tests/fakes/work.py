"""Work on arrays of the device: what reads and writes them, put into the current stream."""

from __future__ import annotations

import numpy as np

from fakes import arrays, halves, races
from fakes.machine import Block, machine
from fakes.streams import get_current_stream


def evaluate(function, *args, waits: bool = False, **kwargs):
    """Return `function(*args, **kwargs)` as device arrays; `waits`: the shape depends on values."""
    name, function = races.name_of(function), halves.as_on_a_gpu(function)
    if kwargs.get("out") is not None:
        out = kwargs.pop("out")
        if not isinstance(out, arrays.ndarray):
            raise TypeError(f"Unsupported type {type(out)}")
        write(lambda x, *a, **k: function(*a, **k, out=x), out, *args, **kwargs)
        return out
    kwargs.pop("out", None)
    sources: list[arrays.ndarray] = []
    a, k = _hosts(args, sources), _hosts(kwargs, sources)
    if waits:
        machine().count("stream sync")
        get_current_stream().run()
        races.waited(get_current_stream())
    with np.errstate(all="ignore"):
        result = function(*a, **k)  # on a lazy machine only the shape is right as yet
    if isinstance(result, (tuple, list)):
        outcomes = [_chosen(single, sources) for single in result]
        _note_new(name, sources, outcomes)
        for outcome, value in outcomes:
            if value is not None:  # they are not computed again
                np.copyto(outcome._host, value)
        return type(result)(outcome for outcome, _ in outcomes)
    if not isinstance(result, (np.ndarray, np.generic)):
        return result
    outcome, value = _chosen(result, sources)
    _note_new(name, sources, [(outcome, value)])
    if value is not None:
        host = outcome._host
        if machine().lazy and not waits:
            if not outcome._keeper.is_recycled:
                spoil(host)
            get_current_stream().put(lambda: np.copyto(host, function(*a, **k)))
        else:
            np.copyto(host, value)
    return outcome


def write(function, x: arrays.ndarray, *args, written=(0,), **kwargs) -> None:
    """Let `function` write into `x`, or those arguments that are `written`, when its turn comes."""
    sources: list[arrays.ndarray] = []
    (target, *rest), k = _hosts((x, *args), sources), _hosts(kwargs, sources)

    def work() -> None:
        with np.errstate(all="ignore"):
            function(target, *rest, **k)

    if machine().races is not None:
        every = (x, *args)
        outs = [every[i] for i in written]
        reads = [span(y) for y in sources if not any(y is out for out in outs)]
        name = races.name_of(function)
        races.note(get_current_stream(), name, reads, map(span, outs))
    get_current_stream().put(work)


def span(x: arrays.ndarray) -> tuple[int, int]:
    """Return the address of the first byte of `x`, and the bytes to its last."""
    low, nbytes = host_span(x._host)
    return low - machine().away, nbytes


def host_span(x: np.ndarray) -> tuple[int, int]:
    """Return the same of an array of the host."""
    low = x.__array_interface__["data"][0]
    if x.flags.c_contiguous:
        return low, x.nbytes
    steps = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
    low += sum(step for step in steps if step < 0)
    return low, (sum(map(abs, steps)) + x.itemsize if x.size else 0)


def _note_new(name: str, sources: list[arrays.ndarray], outcomes) -> None:
    """Note that `sources` are read for outcomes that are new, not views."""
    if machine().races is not None:
        new = [span(x) for x, value in outcomes if value is not None and x.size]
        if new:
            races.note(get_current_stream(), name, map(span, sources), new)


def _hosts(x, sources: list[arrays.ndarray]):
    """Return `x` with NumPy's arrays in the place of ours, noted in `sources`."""
    if isinstance(x, arrays.ndarray):
        machine().must_be_on_current_device(x._device)
        sources.append(x)
        return x._host
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}")
    if isinstance(x, (tuple, list)) and type(x) in (tuple, list):
        return type(x)(_hosts(single, sources) for single in x)
    if isinstance(x, dict):
        return {name: _hosts(single, sources) for name, single in x.items()}
    return x


def _chosen(result, sources: list[arrays.ndarray]) -> tuple[arrays.ndarray, np.ndarray | None]:
    """Return a result as an array of the device: a view of a source; or new, and its value."""
    result = np.asarray(result)
    for source in sources:
        if result.size and np.may_share_memory(result, source._host):
            return wrapped(result, source), None
    result = result if result.base is None else result.copy()
    block, new = allocated(result.nbytes, result.dtype), arrays.ndarray.__new__(arrays.ndarray)
    host = np.ndarray(result.shape, result.dtype, block.bytes, strides=result.strides)
    new._fill(host, block, machine().device)
    return new, result


def allocated(nbytes: int, dtype: np.dtype) -> Block:
    return machine().allocate(nbytes, dtype.kind, get_current_stream())


def wrapped(host: np.ndarray, source: arrays.ndarray) -> arrays.ndarray:
    new = arrays.ndarray.__new__(arrays.ndarray)
    new._fill(host, source._keeper, source._device)
    return new


def spoil(x: np.ndarray) -> None:
    """Fill what is not computed yet: with numbers that are good as indices, if they are whole."""
    x.fill(np.nan if x.dtype.kind == "f" else 0)
