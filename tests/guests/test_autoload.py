"""The entry point: registers a name, and does no more, whatever MPI is there."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.either

PROBE = """
import os, sys, time
before = dict(os.environ)
{first}
import torch
{then}
import torch.distributed as dist
print("registered", "hpctrain" in dist.Backend.backend_list)
print("mpi", "mpi4py.MPI" in sys.modules, "numpy-less", "hpctrain.world" in sys.modules)
print("changed", {{k for k in os.environ if os.environ.get(k) != before.get(k)}})
"""
#: how torch and hpctrain are imported, and the environment: whether the name is registered
ORDERS = {
    "torch alone": ("", "", {}, True),
    "hpctrain first": ("import hpctrain", "", {}, True),
    "torch first": ("", "import hpctrain.torch", {}, True),
    "hpctrain.torch first": ("import hpctrain.torch", "", {}, True),
    "switched off": ("", "", {"HPCTRAIN_TORCH": "0"}, False),
    "autoload off": ("", "", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, False),
    "autoload off, import": (
        "",
        "import hpctrain.torch",
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        True,
    ),
    "mpi4py absent": ("sys.modules['mpi4py'] = None", "", {}, True),
    "mpi broken": ("", "", {"MPI4PY_LIBMPI": "/no/such/libmpi.so"}, True),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_import_of_torch_registers_the_name_alone(start, order):
    first, then, env, expected = ORDERS[order]
    ended = start("-c", PROBE.format(first=first, then=then), env=env).finish(timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert f"registered {expected}" in ended.stdout
    assert "mpi False" in ended.stdout
    assert "changed set()" in ended.stdout


def test_an_error_at_registration_does_not_break_torch(start):
    code = """
import sys, types
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("hpctrain.torch."):
            raise RuntimeError("planted")
sys.meta_path.insert(0, Broken())
import torch
print("imported", torch.__version__)
"""
    ended = start("-c", code).finish(timeout=60)
    assert ended.returncode != 0 or "imported" in ended.stdout


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_start_no_mpi(start, tmp_path, method):
    """Children of a rank register the name as their parent did, and neither start nor end MPI."""
    script = tmp_path / "children.py"
    script.write_text(CHILDREN.format(method=method))
    ended = start(script, ranks=2).finish(timeout=90)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("child: mpi False") == 2
    assert ended.stdout.count("sum 1.0") == 2


CHILDREN = """
import multiprocessing, os, sys
import torch, torch.distributed as dist

def child():
    started = False
    if "mpi4py.MPI" in sys.modules and {method!r} != "fork":
        started = sys.modules["mpi4py.MPI"].Is_initialized()
    print("child: mpi", started, flush=True)

if __name__ == "__main__":
    dist.init_process_group("hpctrain")
    process = multiprocessing.get_context({method!r}).Process(target=child)
    process.start()
    process.join()
    x = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(x)
    print("sum", x.item(), flush=True)
    dist.destroy_process_group()
"""


# One write per rank: torchrun's children are unbuffered, and parts of two lines would mix.
RANKS = """
import sys, torch, torch.distributed as dist
dist.init_process_group({backend!r})
x = torch.full((1,), 1.0)
dist.all_reduce(x)
words = ("size", dist.get_world_size(), "sum", x.item(), "local", dist.get_node_local_rank(),
         "backend", dist.get_backend())
sys.stdout.write(" ".join(map(str, words)) + "\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["hpctrain", "gloo"])
def test_ranks_and_store_come_from_mpi_without_variables(start, backend):
    ended = start("-c", RANKS.format(backend=backend), ranks=3).finish(timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("size 3 sum 3.0 local") == 3
    assert sorted(line.split()[5] for line in ended.stdout.splitlines()) == ["0", "1", "2"]


def test_a_group_beside_a_default_group_of_gloo(start):
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ours, pair = dist.new_group(backend="hpctrain"), dist.new_group([0, 2], backend="hpctrain")
x = torch.full((1,), 1.0 + dist.get_rank())
dist.all_reduce(x, group=ours)
if dist.get_rank() != 1:
    dist.all_reduce(x, group=pair)
assert x.item() == (6.0 if dist.get_rank() == 1 else 12.0), x
dist.destroy_process_group()
"""
    ended = start("-c", code, ranks=3).finish(timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_alone_it_is_a_group_of_one(start):
    ended = start("-c", RANKS.format(backend="hpctrain")).finish(timeout=60)
    assert "size 1 sum 1.0 local 0 backend hpctrain" in ended.stdout, ended.stderr


def test_other_backends_have_their_own_error_without_a_launcher(start):
    ended = start("-c", RANKS.format(backend="gloo")).finish(timeout=60)
    assert "environment variable RANK expected, but not set" in ended.stderr


def test_scripts_of_torchrun_are_unchanged(start):
    """torchrun gives gloo its ranks; ours says that its ranks come from MPI."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    for backend, expected in (("gloo", "size 2 sum 2.0"), ("hpctrain", "ranks of MPI, 1, but")):
        code = RANKS.format(backend=backend)
        ended = start(*torchrun, sys.executable, "-c", code).finish(timeout=90)
        assert expected in ended.stdout + ended.stderr


def test_launched_by_hpctrain(start):
    words = ("-m", "hpctrain", "launch", "-n", "2", "--", sys.executable, "-c")
    ended = start(*words, RANKS.format(backend="hpctrain")).finish(timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("size 2 sum 2.0") == 2
