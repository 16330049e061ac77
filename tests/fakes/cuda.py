"""cupy.cuda and cupy.cuda.runtime: devices, streams, memory, and properties of the driver."""

from __future__ import annotations

from types import ModuleType

from fakes import memory, products, races, streams
from fakes.machine import CUDARuntimeError, OutOfMemoryError, machine


class Device:
    """cupy.cuda.Device: by number, the current one of this thread without."""

    def __init__(self, device=None):
        self.id = machine().device if device is None else getattr(device, "id", int(device))
        self._before: list[int] = []

    def __enter__(self):
        self._before.append(machine().device)
        setDevice(self.id)
        return self

    def __exit__(self, *_):
        setDevice(self._before.pop())

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self):
        return hash(self.id)

    def use(self):
        setDevice(self.id)
        return self

    def synchronize(self) -> None:
        machine().count("device sync")
        for stream in machine().streams:
            if stream.device_id == self.id:
                stream.run()
                races.waited(stream)

    @property
    def mem_info(self):
        return machine().room(self.id)

    @property
    def pci_bus_id(self) -> str:
        return deviceGetPCIBusId(self.id)

    compute_capability = "90"


def getDeviceCount() -> int:
    machine().must_have_devices()
    return machine().devices


def getDevice() -> int:
    machine().must_have_devices()
    return machine().device


def setDevice(device) -> None:
    _must_exist(device)
    machine().here.device, machine().here.has_context = device, True


def deviceSynchronize() -> None:
    Device().synchronize()


def deviceGetPCIBusId(device) -> str:
    _must_exist(device)
    return f"0000:{16 + device:02X}:00.0"


def deviceCanAccessPeer(device, peer) -> int:
    _must_exist(device), _must_exist(peer)
    return int(machine().peers and device != peer)


def deviceEnablePeerAccess(peer) -> None:
    if not deviceCanAccessPeer(machine().device, peer):
        raise CUDARuntimeError(
            217, "cudaErrorPeerAccessUnsupported: peer access is not supported between these two "
            "devices"
        )  # fmt: skip


def getDeviceProperties(device) -> dict:
    _must_exist(device)
    return {
        "name": f"{machine().name} {device}".encode(),
        "totalGlobalMem": machine().memory_bytes,
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 4,
        "pciDomainID": 0,
        "pciBusID": 16 + device,
        "pciDeviceID": 0,
        "uuid": bytes([device]) * 16,
        "asyncEngineCount": 2,
    }


def memGetInfo() -> tuple[int, int]:
    return Device().mem_info


def driverGetVersion() -> int:
    return machine().driver


def runtimeGetVersion() -> int:
    return 13000


def streamSynchronize(stream) -> None:
    streams.by_pointer(stream).synchronize()


def is_available() -> bool:
    return bool(machine().devices)


def get_local_runtime_version() -> int:
    return runtimeGetVersion()


class MemoryPool:
    """cupy.get_default_memory_pool(): what it gives out goes back by itself."""

    def used_bytes(self) -> int:
        return machine().used(machine().device)

    total_bytes = used_bytes

    def free_all_blocks(self) -> None:
        return None


def _must_exist(device) -> None:
    machine().must_have_devices()
    if not 0 <= device < machine().devices:
        raise CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")


def modules() -> dict[str, ModuleType]:
    """Return cupy.cuda, and what of it is imported by name."""
    cuda, runtime, mem, stream, device = (
        ModuleType(f"cupy.cuda{name}") for name in ("", ".runtime", ".memory", ".stream", ".device")
    )
    for name in RUNTIME.split():
        setattr(runtime, name, globals().get(name) or getattr(memory, name))
    vars(runtime).update(KINDS)
    for name in ("MemoryPointer", "UnownedMemory", "alloc_pinned_memory", "PinnedMemoryPointer"):
        setattr(cuda, name, getattr(memory, name))
    for name in ("Stream", "ExternalStream", "Event", "get_current_stream", "get_elapsed_time"):
        setattr(cuda, name, getattr(streams, name))
    cuda.Device, cuda.MemoryPool, cuda.is_available = Device, MemoryPool, is_available
    cuda.get_local_runtime_version = get_local_runtime_version
    mem.OutOfMemoryError, mem.MemoryPointer = OutOfMemoryError, memory.MemoryPointer
    mem.UnownedMemory = memory.UnownedMemory
    stream.Stream, stream.Event, device.Device = streams.Stream, streams.Event, Device
    stream.get_current_stream = streams.get_current_stream
    device.get_cublas_handle = lambda: 1
    cuda.cublas = products.cublas()
    cuda.runtime, cuda.memory, cuda.stream, cuda.device = runtime, mem, stream, device
    return {m.__name__: m for m in (cuda, runtime, mem, stream, device)}


RUNTIME = (
    "CUDARuntimeError getDeviceCount getDevice setDevice deviceSynchronize deviceGetPCIBusId "
    "deviceCanAccessPeer deviceEnablePeerAccess getDeviceProperties memGetInfo driverGetVersion "
    "runtimeGetVersion streamSynchronize hostAlloc freeHost malloc free ipcGetMemHandle "
    "ipcOpenMemHandle ipcCloseMemHandle memcpy memcpyAsync memcpyPeerAsync memset memsetAsync"
)
KINDS = {
    "memcpyHostToHost": 0,
    "memcpyHostToDevice": 1,
    "memcpyDeviceToHost": 2,
    "memcpyDeviceToDevice": 3,
    "memcpyDefault": 4,
    "hostAllocDefault": 0,
    "hostAllocPortable": 1,
    "cudaIpcMemLazyEnablePeerAccess": 1,
}
