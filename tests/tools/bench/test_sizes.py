"""Sizes as users type them, and the errors for invalid ones."""

from __future__ import annotations

import pytest

from hpctrain.core.errors import UsageError
from hpctrain.tools.bench import base
from hpctrain.tools.bench.base import check_host_memory
from hpctrain.tools.bench.units import parse_sizes, size_text
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

MIB = 1 << 20
SIZES = {
    "4": [4],
    "4B": [4],
    "4B:32B": [4, 8, 16, 32],
    "3B:20B": [3, 6, 12],
    "1KiB:1MiB*32": [1024, 32768, MIB],
    "64MiB, 8B,8": [8, 64 * MIB],
    "1K,1M,1kB": [1000, 1024, MIB],
    "2GiB": [2 << 30],
    "8B:8B": [8],
}
REFUSED = ("", "4X", "4B:", ":4B", "-4B", "1.5MiB", "8B:4B", "0B:4B", "4B:64B*1", "4B:64B*x", "1;2")


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text):
    assert parse_sizes(text) == SIZES[text]


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text):
    with pytest.raises(UsageError, match=r"--sizes: expected sizes such as .* seen"):
        parse_sizes(text)


@pytest.mark.parametrize("size", [0, 4, 1000, 1024, 3 * MIB, MIB + 4, 2 << 30])
def test_what_is_shown_can_be_typed(size):
    assert parse_sizes(size_text(size).replace(" ", "")) == [size]


def test_what_does_not_fit_is_refused_before_it_is_made(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    6144 kB\n")

    def fits(nbytes, rivals=False):
        return run_ranks(
            2, lambda link: check_host_memory(over_threads(link), nbytes, rivals, tmp_path)
        )

    fits(MIB)
    for nbytes, rivals in ((MIB + 1, False), (MIB, True)):
        with pytest.raises(UsageError, match=r"in each of 2 ranks on .* available"):
            fits(nbytes, rivals)


def test_ranks_that_see_other_sizes_of_free_memory_raise_one_error(monkeypatch):
    sizes = iter([3000 * MIB, 4000 * MIB])
    monkeypatch.setattr(base, "available_bytes", lambda root: next(sizes))
    with pytest.raises(UsageError, match="take at most 500 MiB") as refused:
        run_ranks(2, lambda link: check_host_memory(over_threads(link), 1000 * MIB, False))
    assert str(refused.value).count("needs") == 1
