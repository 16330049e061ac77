"""Which path holds between two places."""

from __future__ import annotations

import pytest

from hpctrain.transport.paths import BY_POINTER, STAGED, Place, Verdict, path_to

HERE = Place("n1", "GPU-a")
ROWS = [
    (Place("n1", "GPU-a"), "ipc"),
    (Place("n1", "GPU-b"), "cuda-aware"),
    (Place("n2", "GPU-a"), "gdr"),  # a MIG slice may bear one name on two nodes
    (Place("n2", "GPU-b"), "gdr"),
    (Place("n1", ""), "cuda-aware"),  # a rank on the CPU
]


@pytest.mark.parametrize(("there", "path"), ROWS)
def test_the_class_of_a_pair(there, path):
    assert path_to(Verdict("ipc", "cuda-aware", "gdr", ""), HERE, there) == path


def test_two_ranks_without_a_gpu_share_none():
    assert (
        path_to(Verdict("ipc", "staged", "gdr", ""), Place("n1", ""), Place("n1", "")) == "staged"
    )


@pytest.mark.parametrize("there", [there for there, _ in ROWS])
def test_without_a_trial_no_pointer_goes_to_mpi(there):
    assert path_to(STAGED, HERE, there) not in BY_POINTER
