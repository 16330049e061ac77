"""Seeded fuzzing: damaged bytes and JSON, run case by case within limits of time and memory.

A case is a function of a random number generator: it makes an input, lets it be read, and asserts
an oracle. Case 17 of "manifests" is always the same, whatever ran before it:

    campaign("manifests", 20_000, case)         a failure tells numbers
    case(generator("manifests", 17))            that one again
"""

from __future__ import annotations

import copy
import operator
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from limits import clock

from hpctrain.core.errors import HpctrainError

Generator = random.Random
SECONDS, MIB = 5.0, 256  # of one case; what a process may grow by in all of them
SHOWN = 5  # failures that a report lists

#: Values that take the place of one that was expected.
ODD: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400, 0.5, -0.0, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "0", "step", "\0", "\x1b[31m", "\ud800",
    "../../x", "~nobody/x", "a" * 5000, "é", [], {}, [[]], [{}], {"": None}, [None], [0, "0"],
)  # fmt: skip
#: Bytes that mean something in text files, and some that are no text.
TOKENS: Sequence[bytes] = (
    b"", b"\n", b"\r\n", b"\0", b"\0" * 64, b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[2J",
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u0000", b"\\ud800", b"null", b"true",
    b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"-1", b"0", b"3\n", b"{}\n", b"[" * 100_000,
)  # fmt: skip


def generator(name: str, number: int) -> Generator:
    """Return the random numbers of one case; the same on each version of Python."""
    return random.Random(f"{name} {number}")


def mutated(data: bytes, rng: Generator, most: int = 3) -> bytes:
    """Return `data` with one to `most` faults: flipped, cut, inserted, repeated, swapped bytes."""
    for _ in range(rng.randint(1, most)):
        data = rng.choice(_FAULTS)(data, rng)
    return data


def torn(data: bytes, rng: Generator) -> bytes:
    """Return the beginning of `data`, as a write leaves it that was cut off."""
    return data[: rng.randint(0, len(data))]


def mutated_json(value: Any, rng: Generator, most: int = 2) -> Any:
    """Return a copy of JSON with one to `most` entries replaced, dropped, doubled or moved."""
    for _ in range(rng.randint(1, most)):
        value = _with_a_fault(value, rng)
    return value


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each entry of a JSON value, () for itself first."""
    yield at
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield from paths_of(value[key], (*at, key))


def campaign(
    name: str,
    count: int,
    case: Callable[[Generator], object],
    seconds: float = SECONDS,
    mib: float = MIB,
) -> str:
    """Run `case` on `count` seeds; fail with the numbers of those that did; return a report.

    A case fails by any exception, or if it takes `seconds`; all together may grow the process by
    `mib`.
    """
    failed: dict[int, str] = {}
    began, before, slowest = time.monotonic(), _peak_mib(), 0.0
    for number in range(count):
        started, limit = time.monotonic(), clock() + seconds
        try:
            with limited(seconds):
                case(generator(name, number))
        except Exception:
            failed[number] = traceback.format_exc(limit=-4)
        if clock() > limit:  # the code under test may catch a TimeoutError
            failed.setdefault(number, f"took longer than {seconds} s")
        slowest = max(slowest, time.monotonic() - started)
    grown, spent = _peak_mib() - before, time.monotonic() - began
    report = (
        f"{name}: {count} cases, {len(failed)} failed, {spent:.1f} s, slowest {slowest:.2f} s, "
        f"peak +{grown:.0f} MiB of {_peak_mib():.0f}"
    )
    print(report)
    output = "\n".join(f"case {n}: {text}" for n, text in list(failed.items())[:SHOWN])
    assert not failed, f"{report}; numbers {list(failed)[:40]}\n{output}"
    assert grown <= mib, f"{report}; expected at most +{mib} MiB"
    return report


@contextmanager
def in_memory() -> Iterator[Path]:
    """Make a folder in memory, where there is one: thousands of files must not wait for a disk."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what is enclosed if it takes longer, at the pace of the machine.

    In the main thread alone.
    """
    end = clock() + seconds

    def late(*_: object) -> None:
        if (left := end - clock()) <= 0:
            raise TimeoutError(f"took longer than {seconds} s")
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.1))

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def value_or_refusal(read: Callable[[], Any], *names: object, exit_code: int = 2) -> Any:
    """Return what `read` returns, or the error by which it refuses: ours, clear and printable.

    Its text must have one of `names`, such as the path of the file; other errors pass.
    """
    try:
        return read()
    except HpctrainError as error:
        text = str(error)
        assert error.exit_code == exit_code, f"exit code {error.exit_code}: {text}"
        assert all(line.isprintable() for line in text.split("\n")), f"raw characters: {text!r}"
        assert len(text) < 5000, f"{len(text)} characters: {text[:200]!r}"
        assert not names or any(str(name) in text for name in names), f"no place in {text!r}"
        return error


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def _place(data: bytes, rng: Generator) -> tuple[int, int]:
    """Return the bounds of a part of `data`, short more often than long."""
    start = rng.randint(0, len(data))
    return start, min(len(data), start + rng.choice((1, 1, 2, 4, 16, 64, 4096)))


def _flip(data: bytes, rng: Generator) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _cut(data: bytes, rng: Generator) -> bytes:
    start, stop = _place(data, rng)
    return data[:start] + data[stop:]


def _overwrite(data: bytes, rng: Generator) -> bytes:
    start, stop = _place(data, rng)
    return data[:start] + rng.randbytes(stop - start) + data[stop:]


def _insert(data: bytes, rng: Generator) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _repeat(data: bytes, rng: Generator) -> bytes:
    start, stop = _place(data, rng)
    return data[:stop] + data[start:stop] * rng.randint(1, 3) + data[stop:]


def _swap(data: bytes, rng: Generator) -> bytes:
    bounds = sorted(rng.randint(0, len(data)) for _ in range(4))
    a, b, c, d = bounds
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


_FAULTS: Sequence[Callable[[bytes, Generator], bytes]] = (
    _flip, _cut, _overwrite, _insert, _repeat, _swap, torn,
)  # fmt: skip


def _with_a_fault(value: Any, rng: Generator) -> Any:
    path = rng.choice(list(paths_of(value)))
    if not path:
        return rng.choice(ODD)
    value = copy.deepcopy(value)
    table = reduce(operator.getitem, path[:-1], value)
    rng.choice((_replace, _replace, _remove, _double, _exchange))(table, path[-1], rng)
    return value


def _replace(table: Any, key: Any, rng: Generator) -> None:
    old = table[key]
    number = isinstance(old, int | float) and not isinstance(old, bool)
    table[key] = old + rng.choice((-1, 1, 64)) if number and rng.random() < 0.5 else rng.choice(ODD)


def _remove(table: Any, key: Any, rng: Generator) -> None:
    del table[key]


def _double(table: Any, key: Any, rng: Generator) -> None:
    if isinstance(table, list):
        table.insert(key, copy.deepcopy(table[key]))
    else:
        table[rng.choice((f"{key} ", f"{key}2", "", "\x1b", "format"))] = copy.deepcopy(table[key])


def _exchange(table: Any, key: Any, rng: Generator) -> None:
    keys = list(table) if isinstance(table, dict) else range(len(table))
    other = rng.choice(list(keys))
    table[key], table[other] = table[other], table[key]
