"""The GPUs of a node, from simulated NVML."""

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
    assert (result.driver, nvml.running) == ("580.65.06", 0)
    assert result.gpus[1] == GpuInfo(1, "GPU-1", "NVIDIA H200", "0000:11:00.0", 141 * GIB)


@pytest.mark.parametrize("mig, slices", [(None, ()), (0, ()), (2, ("MIG-0", "MIG-1"))])
def test_slices(mig, slices, tmp_path):
    assert read_gpus(tmp_path, Nvml(mig=mig)).gpus[0].slices == slices


def test_slices_after_one_that_was_removed(tmp_path):
    assert read_gpus(tmp_path, Nvml(mig=1, gap=2)).gpus[0].slices == ("MIG-2",)


def test_a_gpu_without_memory_of_its_own(tmp_path):
    assert read_gpus(tmp_path, Nvml(shares_memory=True)).gpus[0].memory_bytes is None


def not_started():
    raise NVMLError("Driver/library version mismatch")


def without_init() -> Nvml:
    nvml = Nvml()
    nvml.nvmlInit = not_started
    return nvml


def without_driver_version() -> Nvml:
    nvml = Nvml()
    nvml.nvmlSystemGetDriverVersion = not_started
    return nvml


# the module -> its fault, what to do about it
FAULTS = {
    "not installed": (lambda: None, "nvidia-ml-py is not installed", "pip install nvidia-ml-py"),
    "not started": (without_init, "NVML: Driver/library version mismatch", "nvidia-smi"),
    "an error later": (without_driver_version, "NVML: Driver/library version", "nvidia-smi"),
}


@pytest.mark.parametrize("case", FAULTS)
@pytest.mark.parametrize("driver", ["580.65.06", None])
def test_a_driver_without_nvml_is_no_node_without_gpus(case, driver, tmp_path):
    make, fault, remedy = FAULTS[case]
    reported = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release"
    write(tmp_path / "proc/driver/nvidia", {"version": reported if driver else ""})
    result = read_gpus(tmp_path, make())
    assert result.gpus == () and result.driver == driver_version(tmp_path) == driver
    assert fault in result.fault and remedy in result.remedy


@pytest.mark.parametrize("case", FAULTS)
def test_no_gpu_at_all(case, tmp_path):
    assert read_gpus(tmp_path, FAULTS[case][0]()) == NodeGpus()
    assert driver_version(tmp_path) is None


def test_the_stand_in_has_names_of_nvidia_ml_py_alone():
    pynvml = pytest.importorskip("pynvml")  # its lowest version in `make test-lowest`
    names = {name for name in dir(Nvml) if name.lower().startswith("nvml")}
    assert len(names) > 10 and names <= set(dir(pynvml))
