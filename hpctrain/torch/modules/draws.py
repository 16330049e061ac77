"""Random numbers of a forward pass that depend on samples, not on the ranks that hold them.

Each random call of a pass has a number: 0, 1, ... Where the first dim of its result is the batch,
sample i gets numbers of its own, from seed, step, i and the number of the call. Others, such as a
draw for the whole batch, come from PyTorch's generator, which begins anew with each piece of a
batch on each rank, and are announced.

    F.dropout(x)            x of (n, ...)       a mask for each sample
    torch.rand(n, 1)                            a number for each sample
    torch.rand(())                              a number for each piece: announced

The number of a call is the seed of PyTorch's generator, counted from that of the piece: so
`torch.utils.checkpoint` restores it where it computes a forward pass again. Calls are seen by a
TorchDispatchMode. That costs some microseconds per operation, so that it is left out once a first
pass had no random call. A random call in a later pass is noticed by the generator: that pass has
numbers of its rank, and the next ones are watched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.nn.dropout import DROPOUT_STREAM
from hpctrain.nn.layer import Key

log = logging.getLogger(__name__)
MAX_CALLS = 1 << 62
NUMBERS_PER_COUNTER, BITS = 4, 52
#: The part of a generator's state that says how much of it was used, when it begins.
_POSITION = slice(8, 24)
_UNUSED = torch.Generator().manual_seed(0).get_state().numpy()[_POSITION].tobytes()
_MANTISSA_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


class _Gradient(threading.local):
    """The gradient that a thread computes."""

    key: Any = None  #: None outside of one
    rows = seed = 0
    missed = False  #: whether a random call was not seen


_GRADIENT = _Gradient()


@contextmanager
def gradient_key(key: Key, rows: int) -> Iterator[None]:
    """Compute a gradient of `rows` samples in this thread: layers take `key`."""
    words = np.random.SeedSequence((key.seed, key.step, key.first)).generate_state(1)
    _GRADIENT.seed, _GRADIENT.missed = int(words[0]), False
    torch.default_generator.manual_seed(_GRADIENT.seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(_GRADIENT.seed)
    _GRADIENT.key, _GRADIENT.rows = key, rows
    try:
        yield
    finally:
        _GRADIENT.key = None


def recompute() -> None:
    """Begin backward: a forward pass from now on is a repeated one."""
    _GRADIENT.key = _GRADIENT.key._replace(recomputed=True)


def current_key() -> Key | None:
    """Return the key of the gradient that this thread computes; None outside of one."""
    return _GRADIENT.key


def is_batch(shape: torch.Size) -> bool:
    """Return whether the first dim of `shape` is the samples of the gradient of this thread."""
    return len(shape) > 0 and shape[0] == _GRADIENT.rows


def next_call_key() -> Key:
    """Return the key of the next random call, with its number as `layer`."""
    key, generator = _GRADIENT.key, torch.default_generator
    _GRADIENT.missed |= _is_used()
    number = generator.initial_seed() - _GRADIENT.seed
    generator.manual_seed(_GRADIENT.seed + number + 1)
    return key._replace(layer=number % MAX_CALLS)


def _is_used() -> bool:
    """Return whether PyTorch's generator was used since it was seeded."""
    return torch.default_generator.get_state().numpy()[_POSITION].tobytes() != _UNUSED


def uniform_rows(key: Key, shape: torch.Size) -> torch.Tensor:
    """Return numbers in (0, 1), float64 of `shape`; row i depends on sample key.first + i."""
    rows, features = shape[0], prod(shape[1:])
    blocks = -(-features // NUMBERS_PER_COUNTER)
    counter = np.array((key.first * blocks, key.step, key.layer, 1), np.uint64)
    stream = np.random.Philox(key=np.array((key.seed, DROPOUT_STREAM), np.uint64), counter=counter)
    words = stream.random_raw(rows * blocks * NUMBERS_PER_COUNTER).reshape(rows, -1)[:, :features]
    return torch.from_numpy(((words >> (64 - BITS)) + 0.5) * 2.0**-BITS).reshape(shape)


class SampleDraws(TorchDispatchMode):
    """Makes the random calls of forward passes, sample by sample; see above."""

    def __init__(self, is_compiled: bool):
        """`is_compiled`: the module is never watched, since PyTorch would not compile it then."""
        super().__init__()
        self._is_compiled = is_compiled
        self.is_on = not is_compiled
        self.has_seen = False  #: whether a forward pass has made a random call
        self._undrawing_operators: set[Any] = set()  # operators that draw nothing
        self._announced: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Import no compiler for `__torch_dispatch__`, which takes seconds: none compiles it."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operator, or draw in its place."""
        if func in self._undrawing_operators or current_key() is None:
            return func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            self._undrawing_operators.add(func)
            return func(*args, **(kwargs or {}))
        return self._draw_numbers(func, args, kwargs or {})

    def end_forward(self) -> None:
        """End a forward pass: leave the mode out of the next ones if no call was random."""
        if self.is_on:
            self.is_on = self.has_seen or not _GRADIENT.rows
        elif _GRADIENT.missed or _is_used():
            self.is_on = not self._is_compiled
            source = "compiled code" if self._is_compiled else "the first pass that draws any"
            self._announce_source(source)

    def _draw_numbers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = next_call_key()
        result = func(*args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        has_own, on_cpu = kwargs.get("generator") is not None, out.device.type == "cpu"
        if on_cpu and not has_own and not _is_used():  # attention without dropout, an empty batch
            return result
        self.has_seen = True
        draw = None if has_own else DRAWS.get(func.overloadpacket.__name__)
        if draw is None or not is_batch(out.shape):
            self._announce_source(str(func))
        elif out.numel():
            draw(result, uniform_rows(key, out.shape).to(out.device), args, kwargs)
        return result

    def _announce_source(self, name: str) -> None:
        if name not in self._announced and _GRADIENT.key.first == 0:
            log.warning(
                "module: random numbers of %s are of each rank and piece of a batch, not of each "
                "sample: results depend on the number of ranks",
                name,
            )
        self._announced.add(name)


def _uniform(u: torch.Tensor, low: float, high: float, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in [low, high), also after they were rounded to `dtype`."""
    bits = _MANTISSA_BITS.get(dtype)
    u = u if bits is None else torch.floor(u * 2**bits) / 2**bits
    return low + (high - low) * u


def _option(args: tuple[Any, ...], kwargs: dict[str, Any], i: int, name: str, default: Any) -> Any:
    return args[i] if len(args) > i else kwargs.get(name, default)


def _draw_dropout(out: Any, u: torch.Tensor, args: Any, kwargs: Any) -> None:
    x, p, train = args
    if train is not False and 0 < p < 1:
        values, mask = out
        mask.copy_(u >= p)
        torch.mul(x, mask, out=values).mul_(1 / (1 - p))


#: By the name of the operator: writes into its result what `u`, uniform in (0, 1), stands for.
DRAWS: dict[str, Callable[[Any, torch.Tensor, Any, Any], Any]] = {
    "native_dropout": _draw_dropout,
    "bernoulli": lambda out, u, args, kwargs: out.copy_(u < _option(args, kwargs, 1, "p", args[0])),
    "bernoulli_": lambda out, u, args, kwargs: out.copy_(u < _option(args, kwargs, 1, "p", 0.5)),
    "rand": lambda out, u, *_: out.copy_(_uniform(u, 0.0, 1.0, out.dtype)),
    "rand_like": lambda out, u, *_: out.copy_(_uniform(u, 0.0, 1.0, out.dtype)),
    "uniform_": lambda out, u, args, kwargs: out.copy_(
        _uniform(
            u,
            _option(args, kwargs, 1, "from", 0.0),
            _option(args, kwargs, 2, "to", 1.0),
            out.dtype,
        )
    ),
    "randn": lambda out, u, *_: out.copy_(torch.special.ndtri(u)),
    "randn_like": lambda out, u, *_: out.copy_(torch.special.ndtri(u)),
    "normal": lambda out, u, args, kwargs: out.copy_(
        args[0] + _option(args, kwargs, 1, "std", 1.0) * torch.special.ndtri(u)
    ),
    "normal_": lambda out, u, args, kwargs: out.copy_(
        _option(args, kwargs, 1, "mean", 0.0)
        + _option(args, kwargs, 2, "std", 1.0) * torch.special.ndtri(u)
    ),
    "exponential_": lambda out, u, args, kwargs: out.copy_(
        -torch.log(u) / _option(args, kwargs, 1, "lambd", 1.0)
    ),
}
