"""The GPUs of a node, from simulated NVML, nvidia-smi and driver files."""

from __future__ import annotations

import pytest
from machines import write
from nvml import GIB, Nvml, NVMLError

from hpctrain.hardware.nvidia import GpuInfo, NodeGpus, driver_version, read_gpus

# what each GPU's NVLinks lead to -> links per pair
WIRES = {
    "none": (((), ()), {}),
    "direct": (((1, 1, "down"), (0, 0)), {(0, 1): 2}),
    "switch": ((("switch",) * 4, ("switch",) * 4, ("switch",) * 4),
               {(0, 1): 4, (0, 2): 4, (1, 2): 4}),
    "a ring": (((1, 2), (0, 2), (0, 1)), {(0, 1): 1, (0, 2): 1, (1, 2): 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", WIRES)
def test_nvlinks(case, tmp_path):
    wires, expected = WIRES[case]
    nvml = Nvml(wires)
    result = read_gpus(tmp_path, nvml)
    assert result.nvlinks == expected
    assert (result.data_source, result.driver, nvml.running) == ("NVML", "580.65.06", 0)
    assert result.gpus[1] == GpuInfo(1, "GPU-1", "NVIDIA H200", "0000:11:00.0", 141 * GIB)


@pytest.mark.parametrize("mig, slices", [(None, ()), (0, ()), (2, ("MIG-0", "MIG-1"))])
def test_slices(mig, slices, tmp_path):
    assert read_gpus(tmp_path, Nvml(mig=mig)).gpus[0].slices == slices


def test_slices_after_one_that_was_removed(tmp_path):
    assert read_gpus(tmp_path, Nvml(mig=1, gap=2)).gpus[0].slices == ("MIG-2",)


QUERY = """\
0, GPU-aaa, NVIDIA A100-SXM4-40GB, 00000000:07:00.0, 40960, 535.129.03
1, GPU-bbb, NVIDIA A100-SXM4-40GB, 00000000:0A:00.0, [N/A], 535.129.03
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV12\tPXB\t0-63
GPU1\tNV12\t X \tSYS\t64-127
NIC0\tPXB\tSYS\t X
"""


def smi(arguments):
    return TOPOLOGY if arguments[0] == "topo" else QUERY


def test_nvidia_smi_where_there_is_no_nvml(tmp_path):
    broken = Nvml()
    broken.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError("Driver Not Loaded"))
    result = read_gpus(tmp_path, broken, smi)
    name = "NVIDIA A100-SXM4-40GB"
    assert result == NodeGpus(
        "nvidia-smi",
        "535.129.03",
        (
            GpuInfo(0, "GPU-aaa", name, "0000:07:00.0", 40 * GIB),
            GpuInfo(1, "GPU-bbb", name, "0000:0a:00.0"),
        ),
        {(0, 1): 12},
    )


def test_the_drivers_files_where_nothing_runs(tmp_path):
    reported = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 35\nGPU UUID: \t GPU-ccc\nBus Location: x"
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release"
    write(tmp_path / "proc/driver/nvidia", {
        "gpus/0000:1b:00.0/information": reported, "version": version})  # fmt: skip
    result = read_gpus(tmp_path, None, lambda arguments: "")
    assert result.gpus == (GpuInfo(0, "GPU-ccc", "NVIDIA H200", "0000:1b:00.0"),)
    assert result.driver == driver_version(tmp_path) == "580.65.06"


def test_no_gpu_at_all(tmp_path):
    assert read_gpus(tmp_path) == NodeGpus()
    assert driver_version(tmp_path) is None


def test_the_stand_in_has_names_of_nvidia_ml_py_alone():
    pynvml = pytest.importorskip("pynvml")  # its lowest version in `make test-lowest`
    names = {name for name in dir(Nvml) if name.lower().startswith("nvml")}
    assert len(names) > 10 and names <= set(dir(pynvml))
