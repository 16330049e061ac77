"""The GPU path between two ranks."""

from __future__ import annotations

import pytest

from hpctrain.transport.paths import (
    POINTER_PATHS,
    STAGED_VERDICT,
    RankPlace,
    Verdict,
    path_between,
    sends_by_pointer,
    thresholds_between,
)

LOCAL = RankPlace("n1", "GPU-a")
ROWS = [
    (RankPlace("n1", "GPU-a"), "ipc"),
    (RankPlace("n1", "GPU-b"), "cuda-aware"),
    (RankPlace("n2", "GPU-a"), "gdr"),  # a MIG slice may bear one name on two nodes
    (RankPlace("n2", "GPU-b"), "gdr"),
    (RankPlace("n1", ""), "cuda-aware"),  # a rank on the CPU
]


@pytest.mark.parametrize(("other", "path"), ROWS)
def test_the_class_of_a_pair(other, path):
    assert path_between(Verdict("ipc", "cuda-aware", "gdr", ""), LOCAL, other) == path


def test_two_ranks_without_a_gpu_share_none():
    assert (
        path_between(Verdict("ipc", "staged", "gdr", ""), RankPlace("n1", ""), RankPlace("n1", ""))
        == "staged"
    )


@pytest.mark.parametrize("other", [other for other, _ in ROWS])
def test_without_a_trial_no_pointer_goes_to_mpi(other):
    assert path_between(STAGED_VERDICT, LOCAL, other) not in POINTER_PATHS


STEPS = ((0, "staged"), (4096, "pointer"), (1 << 20, "staged"))


@pytest.mark.parametrize(
    ("path", "steps", "lengths"),
    [
        ("cuda-aware", STEPS, {0: False, 4095: False, 4096: True, 1 << 20: False}),
        ("gdr", STEPS[:2], {1: False, 1 << 30: True}),
        ("gdr", (), {0: True, 1 << 30: True}),
        ("staged", ((0, "pointer"),), {0: False, 1 << 30: False}),
        ("ipc", STEPS, {4096: False}),
    ],
)
def test_which_way_a_length_takes(path, steps, lengths):
    assert {n: sends_by_pointer(path, steps, n) for n in lengths} == lengths


@pytest.mark.parametrize(("other", "steps"), [(ROWS[0][0], ()), (ROWS[2][0], STEPS)])
def test_each_class_has_its_own_lengths(other, steps):
    verdict = Verdict("cuda-aware", "cuda-aware", "gdr", "", {"across": STEPS})
    assert thresholds_between(verdict, LOCAL, other) == steps
