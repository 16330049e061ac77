"""Bad input of PyTorch scripts: one error that says what was expected and what to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpctrain.core.errors import UsageError
from hpctrain.torch import job
from hpctrain.transport.paths import Verdict

pytestmark = pytest.mark.either


@pytest.mark.parametrize("version", ["2.4.1", "2.12.1+cpu", "1.13.0"])
def test_an_old_pytorch_is_refused_unless_a_variable_allows_it(version, monkeypatch, caplog):
    with pytest.raises(UsageError, match=r"2\.13 or newer, seen .*pip install.*HPCTRAIN_OLD_TORCH"):
        job.check_version(version)
    monkeypatch.setenv("HPCTRAIN_OLD_TORCH", "1")
    job.check_version(version)
    assert f"2.13 or newer, seen {version}, which HPCTRAIN_OLD_TORCH allows" in caplog.text


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.14.0a0+gitdeadbee", "unknown"])
def test_newer_and_own_builds_are_tried(version):
    job.check_version(version)


@pytest.mark.parametrize(
    "variable, value, path, rank, warns",
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "cuda-aware", 0, True),
        ("PYTORCH_ALLOC_CONF", "a:1,backend:cudaMallocAsync", "gdr", 0, True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "cuda-aware", 1, False),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "ipc", 0, False),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", "cuda-aware", 0, False),
    ],
)
def test_memory_that_no_other_process_maps_is_named(caplog, variable, value, path, rank, warns):
    world = SimpleNamespace(rank=rank, verdict=Verdict("staged", path, "staged", ""))
    job.warn_of_allocator(world, {variable: value})
    assert bool(caplog.records) == warns
    assert not warns or f"{variable}={value.split(',')[-1]}: " in caplog.text


# One write per line: print() makes several, and lines of ranks would mix.
SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("hpctrain")
try:
    {call}
except Exception as error:
    sys.stdout.write("raised " + type(error).__name__ + " " + str(error).splitlines()[0] + "\\n")
    sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
"""
CALLS = {
    "dtype": (
        "dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))",
        "a reduction needs a tensor of torch.bool",
    ),
    "operation": (
        "dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR)",
        "op 'xor' is not defined for float32",
    ),
    "tag": ("dist.isend(torch.ones(2), 0, tag=-1)", "expected a tag in 0 .. "),
    "parts": (
        "dist.all_to_all_single(torch.empty(3), torch.empty(3))",
        "expected a first dimension divisible by 2, seen 3",
    ),
    "lengths": (
        "dist.reduce_scatter(torch.empty(2), [torch.ones(2), torch.ones(3)])",
        "reduce_scatter takes tensors of one length",
    ),
    "limit": (
        "import datetime; dist.group.WORLD.set_timeout(datetime.timedelta(hours=1))",
        "set_timeout: expected a limit of 0 to 1800 s",
    ),
    "aborted": (
        "g = dist.new_group(); g.abort(); dist.all_reduce(torch.ones(1), group=g)",
        "the process group was aborted",
    ),
    "PyTorch's refusals": (
        "dist.monitored_barrier()",
        "monitored_barrier is only implemented for GLOO backend",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_invalid_call_raises_on_each_rank(start, call):
    line, words = CALLS[call]
    ended = start("-c", SCRIPT.format(call=line), ranks=2).finish(timeout=60)
    assert ended.returncode == 0, ended.stderr
    raised = [text for text in ended.stdout.splitlines() if text.startswith("raised")]
    assert len(raised) == 2
    assert all(words in text for text in raised), raised


#: Calls of rank 1 beside calls of rank 0, of which one compared nothing; and words of the error.
DIFFERING = {
    "all to all": ("dist.all_reduce(x)", "dist.all_to_all_single(y, x)", "all_to_all of"),
    "all to all of another dtype": (
        "dist.all_to_all_single(y, x)",
        "dist.all_to_all_single(y.int(), x.int())",
        "rank 1 has all_to_all of torch.int32 on cpu",
    ),
    "parts that do not divide": (
        "dist.all_to_all_single(y, x)",
        "dist.all_to_all_single(y, x[:3])",
        "rank 1 has all_to_all: expected a first dimension divisible by 2, seen 3",
    ),
    "all to all of a list": ("dist.broadcast(x, 0)", "dist.all_to_all(z, [x, x])", "all_to_all of"),
    "uneven gather": (
        "dist.all_gather(z, x)",
        "dist.all_gather([x, y[:1]], y[:1])",
        "rank 1 has all_gather of torch.float32 on cpu with lengths [4, 1]",
    ),
    "own length": (
        "dist.all_gather([x, y[:1]], x)",
        "dist.all_gather([x, y[:1]], x)",
        "with lengths [4, 1] and its own of 4",
    ),
    "mean": (
        "dist.all_reduce(x)", "dist.all_reduce(x, dist.ReduceOp.AVG)",
        "rank 1 has all_reduce mean of torch.float32 4 on cpu",
    ),
    "mean of another length": (
        "dist.all_reduce(x, dist.ReduceOp.AVG)", "dist.all_reduce(x[:3], dist.ReduceOp.AVG)",
        "rank 1 has all_reduce mean of torch.float32 3 on cpu",
    ),
    "sparse": (
        "dist.all_reduce(x.to_sparse())", "dist.all_reduce(x[:3].to_sparse())",
        "rank 1 has all_reduce of sparse torch.float32 on cpu, shape (3,)",
    ),
}  # fmt: skip
DIFFERING_SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("hpctrain")
x, y, z = torch.ones(4), torch.ones(4), [torch.ones(4), torch.ones(4)]
for name, calls in {calls}.items():
    try:
        exec(calls[dist.get_rank()])
    except Exception as error:
        sys.stdout.write(name + ": " + type(error).__name__ + " " + str(error) + "\\n")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("reduction", ["fast", "ordered"])
def test_calls_that_differ_raise_one_error_on_all_ranks(start, reduction):
    code = DIFFERING_SCRIPT.format(calls={name: row[:2] for name, row in DIFFERING.items()})
    job = start("-c", code, ranks=2, env={"HPCTRAIN_REDUCTION": reduction}).finish(timeout=60)
    assert job.returncode == 0, job.stderr
    for name, (*_, words) in DIFFERING.items():
        errors = [
            text for text in job.stdout.splitlines() if text.startswith(f"{name}: UsageError")
        ]
        assert len(errors) == 2 and errors[0] == errors[1], (name, job.stdout)
        assert words in errors[0], errors


@pytest.mark.parametrize("backends", ["cpu:hpctrain,cuda:nccl", "cpu:gloo,cuda:hpctrain"])
def test_a_second_backend_for_other_devices_is_refused(start, backends):
    """PyTorch would drop it without a word."""
    code = f"import torch.distributed as dist; dist.init_process_group({backends!r})"
    job = start("-c", code, ranks=1).finish(timeout=60)
    assert job.returncode == 2
    assert f'expected "hpctrain" alone, seen "{backends}"' in job.stderr
