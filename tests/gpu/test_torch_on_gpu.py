"""PyTorch on a real GPU, where there is one: ranks of MPI that share it, and streams that are late.

    pytest tests/gpu/test_torch_on_gpu.py

The features of `torch.distributed` are compared with one process in float64, as on CPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from gpu import torch_streams  # noqa: E402
from guests import features  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no PyTorch with CUDA here"),
    pytest.mark.processes,
    pytest.mark.timeout(200),
]
HERE = Path(__file__).parent
#: Each is a job: what ends it leaves the others.
GROUPS = {
    "ddp": [name for name in features.FEATURES if name.startswith("ddp")],
    "shards": ["fsdp1", "fsdp2", "zero redundancy optimizer", "checkpoint", "async checkpoint"],
    "tensors": ["tensor parallel", "dtensor", "functional into out", "objects"],
    "pipelines": [
        "gpipe", "1f1b", "interleaved 1f1b", "looped bfs", "interleaved zero bubble",
        "zbv zero bubble", "dualpipev",
    ],
    "compiled": ["compiled functional", *features.SLOW_FEATURES],
}  # fmt: skip


@pytest.mark.parametrize("name", torch_streams.BODIES)
def test_streams_that_are_late(start, name):
    ended = start(HERE / "torch_streams.py", name, ranks=2).finish(timeout=180)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]


@pytest.mark.parametrize("name", GROUPS)
def test_features_equal_a_single_process(start, name):
    script = HERE.parent / "guests/features.py"
    environ = {"FEATURES_DEVICE": "cuda"}
    ended = start(script, *GROUPS[name], ranks=2, env=environ).finish(timeout=180)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
