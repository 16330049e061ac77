"""A stand-in for pynvml (nvidia-ml-py): GPUs, their NVLinks and MIG slices."""

from __future__ import annotations

from types import SimpleNamespace

GIB = 1 << 30


class NVMLError(Exception):
    pass


class Nvml:
    """Stands in for pynvml. `wires`: for each GPU, what each of its NVLinks leads to."""

    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_DEVICE_TYPE_SWITCH = 4, 2
    NVMLError = NVMLError

    def __init__(self, wires=((), ()), mig=0, gap=0, addresses=(), shares_memory=False):
        self.wires, self.mig, self.running = wires, mig, 0
        self.addresses = addresses or [f"00000000:1{i}:00.0" for i in range(10)]
        self.shares_memory = shares_memory
        self.gap = gap  # so many slices were removed, before those that are left

    def nvmlInit(self):
        self.running += 1

    def nvmlShutdown(self):
        self.running -= 1

    def nvmlSystemGetDriverVersion(self):
        return b"580.65.06"

    def nvmlDeviceGetCount(self):
        return len(self.wires)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"MIG-{handle[1]}" if isinstance(handle, tuple) else f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200"

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=self.addresses[handle].encode())

    def nvmlDeviceGetMemoryInfo(self, handle):
        if self.shares_memory:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=141 * GIB)

    def nvmlDeviceGetMigMode(self, handle):
        if self.mig is None:
            raise NVMLError("Not Supported")
        return [self.mig, self.mig]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if not self.gap <= index < self.gap + self.mig:
            raise NVMLError("Not Found")
        return handle, index

    def _end(self, handle, link):
        if link >= len(self.wires[handle]):
            raise NVMLError("Invalid Argument")
        return self.wires[handle][link]

    def nvmlDeviceGetNvLinkState(self, handle, link):
        return self._end(handle, link) != "down"

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return 2 if self._end(handle, link) == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        end = self._end(handle, link)
        return self.nvmlDeviceGetPciInfo(end if isinstance(end, int) else 9)


def functions() -> dict[str, object]:
    """Return what the module pynvml is to offer, of two GPUs with two NVLinks between them."""
    nvml = Nvml(((1, 1), (0, 0)))
    return {name: getattr(nvml, name) for name in dir(nvml) if name.upper().startswith("NVML")}
