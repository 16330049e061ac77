"""A stand-in for CuPy whose GPU memory is files that other processes map, as IPC handles do.

Installed by `install` as a package `cupy` in a folder for PYTHONPATH, and nvml.py as `pynvml`. With
FAKE_CRASH set its pointers lead nowhere for anybody but its own memcpy: an MPI that touches them
crashes, as one that knows nothing of GPUs does. With FAKE_IPC=refused no handle opens, as in some
containers.
"""

from __future__ import annotations

from pathlib import Path

SOURCE = """
import ctypes, mmap, os, tempfile

AWAY = (1 << 45) if os.environ.get("FAKE_CRASH") else 0
COUNT = int(os.environ.get("FAKE_GPUS", "2"))

class CUDARuntimeError(RuntimeError):
    pass

class Runtime:
    CUDARuntimeError = CUDARuntimeError

    def __init__(self):
        self.files = {}

    def getDeviceCount(self):
        return COUNT

    def runtimeGetVersion(self):
        return 13000

    def deviceGetPCIBusId(self, ordinal):
        return f"0000:{0x13 + ordinal:02X}:00.0"

    def malloc(self, nbytes):
        descriptor, path = tempfile.mkstemp(dir="/dev/shm")
        os.ftruncate(descriptor, nbytes)
        pointer = self._mapped(descriptor, nbytes) - AWAY
        self.files[pointer] = (descriptor, path)
        os.unlink(path)
        return pointer

    def _mapped(self, descriptor, nbytes):
        pages = mmap.mmap(descriptor, nbytes)
        self.kept = getattr(self, "kept", []) + [pages]
        return ctypes.addressof(ctypes.c_char.from_buffer(pages))

    def memcpy(self, to, source, nbytes, kind):
        if not (kind == 1 or kind == 2 or kind == 4):
            raise CUDARuntimeError("cudaErrorInvalidMemcpyDirection")
        to += AWAY if kind in (1, 4) else 0
        source += AWAY if kind in (2, 4) else 0
        ctypes.memmove(to, source, nbytes)

    def deviceSynchronize(self):
        pass

    def ipcGetMemHandle(self, pointer):
        descriptor = self.files[pointer][0]
        return f"/proc/{os.getpid()}/fd/{descriptor}".encode()

    def ipcOpenMemHandle(self, handle):
        if os.environ.get("FAKE_IPC") == "refused":
            raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")
        descriptor = os.open(handle.decode(), os.O_RDWR)
        return self._mapped(descriptor, os.fstat(descriptor).st_size) - AWAY

    def ipcCloseMemHandle(self, pointer):
        pass

class Device:
    def __init__(self, ordinal):
        if ordinal >= COUNT:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    def use(self):
        pass

class cuda:
    runtime = Runtime()
    Device = Device

class ndarray:
    pass
"""


NVML = """
import nvml
globals().update(nvml.functions())
"""


def install(folder: Path) -> Path:
    """Write `cupy` and a `pynvml` below `folder`, which is to be on the path; return `folder`."""
    (folder / "pynvml").mkdir(parents=True)
    (folder / "pynvml" / "__init__.py").write_text(NVML)
    (folder / "cupy").mkdir()
    (folder / "cupy" / "__init__.py").write_text(SOURCE)
    return folder
