"""Every CUDA kernel of hpctrain, compiled by NVRTC as CuPy does, and what each needs of a GPU.

    python tests/gpu/kernel_sources.py [--archs sm_75,sm_90] [--json kernels.json]

Prints a table: of each family of kernels the most registers and shared memory of a kernel, and the
bytes that spill out of registers. No GPU is needed. Kernels of cupy.fuse: see test_on_cupy.py.
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cupy
import ml_dtypes
import numpy as np
from cupy_backends.cuda.libs import nvrtc

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
from cases import dtype_of

from hpctrain.collectives.reductions import bfloat16, cuda_sum
from hpctrain.collectives.reductions.operations import operation, operation_names, ufunc_of
from hpctrain.core.kernels import KINDS, written
from hpctrain.gradients import finite
from hpctrain.gradients.compress import orthonormal, top_k_cuda
from hpctrain.nn.cuda import attention, batch_norm, cross_entropy, im2col, layer_norm, philox
from hpctrain.optim.norms import SQUARES_KERNEL

FLOATS = [dtype for dtype in KINDS if "float" in dtype]
REALS = {"float32": "float", "float64": "double"}
#: The architectures of CUDA 13, of Turing to Blackwell; the first is that of `make check-gpu`.
ARCHITECTURES = ("sm_90", "sm_75", "sm_80", "sm_100", "sm_120")
SUMMED_ARRAYS = (2, 8)  # ranks of a node


class KernelNeeds(NamedTuple):
    """The resources of a kernel: registers of a thread, and bytes."""

    kernel: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


def families() -> dict[str, Iterator[str]]:
    """Return the CUDA sources of each family of kernels."""
    return {
        "dropout": (written(philox.SOURCE, dtype) for dtype in FLOATS),
        "layer norm": map(layer_norm.cuda_source, FLOATS),
        "cross-entropy": map(cross_entropy.cuda_source, FLOATS),
        "attention": map(attention.cuda_source, FLOATS),
        "convolution": (
            im2col.cuda_source(dtype, width, far)
            for dtype in FLOATS
            for width in (1, 16 // np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize)
            for far in (False, True)
        ),
        "batch norm": (
            batch_norm.cuda_source(dtype, far) for dtype in FLOATS for far in (False, True)
        ),
        "norms": (SQUARES_KERNEL.replace("REAL", real) for real in REALS.values()),
        "finite": (written(finite.SOURCE, dtype) for dtype in REALS),
        "compression": (
            make(kind)
            for make, of in (
                (bfloat16.kernel_source, np.dtype), (top_k_cuda.cuda_source, np.dtype),
                (orthonormal.cuda_source, str),
            )
            for kind in map(of, REALS)
        ),
        "sums": sums(),
    }  # fmt: skip


def sums() -> Iterator[str]:
    """Yield the sources of all operations, into one array and into all."""
    for dtype in KINDS:
        for op in operation_names(dtype_of(dtype)):
            ufunc = ufunc_of(operation(op, dtype_of(dtype)))
            if dtype.startswith("complex") and ufunc is np.add:
                continue  # the kernel of its parts
            for count in SUMMED_ARRAYS:
                for outs in (1, count):
                    name = f"{ufunc.__name__}_{count}_into_{outs}"
                    yield cuda_sum.kernel_source(name, count, outs, dtype, ufunc)


def toolkit_headers() -> list[str]:
    """Return the folders of CUDA's headers beside CuPy."""
    return glob.glob(os.path.join(os.path.dirname(cupy.__file__), "../nvidia/cu*/include"))


def compile_kernels(code: str, architecture: str = ARCHITECTURES[0]) -> list[KernelNeeds]:
    """Compile `code`; return what its kernels need. Raises ValueError with the compiler's words."""
    root = Path(cupy.__file__).parent / "_core/include"
    bundled = [root / "cupy/_cccl" / name for name in ("thrust", "libcudacxx", "cub")]
    program = nvrtc.createProgram(code, "k.cu", [], [])
    includes = [f"-I{path}" for path in (root, *bundled, *toolkit_headers())]
    # As CuPy compiles.
    own = ["--std=c++17", "-ftz=true", "-default-device", f"-arch={architecture}"]
    try:
        nvrtc.compileProgram(program, [*includes, *own, "--ptxas-options=-v"])
    except nvrtc.NVRTCError:
        raise ValueError(f"{nvrtc.getProgramLog(program)}\n{code}") from None
    assert nvrtc.getCUBIN(program)
    return read_needs(nvrtc.getProgramLog(program))


def read_needs(log: str) -> list[KernelNeeds]:
    """Return the resources of each kernel that the assembler's `log` names."""
    found = []
    for text in log.split("Compiling entry function '")[1:]:
        number = partial(_number, text)
        spilled_bytes = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        found.append(
            KernelNeeds(
                text.split("'")[0],
                number(r"Used (\d+) registers"),
                number(r"(\d+) bytes smem"),
                spilled_bytes,
            )
        )
    return found


def _number(text: str, pattern: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def summarize(name: str, architecture: str, codes: Sequence[str]) -> dict[str, object]:
    """Compile a family; return its row of the table."""
    kernels = [need for code in codes for need in compile_kernels(code, architecture)]
    return {
        "family": name,
        "architecture": architecture,
        "sources": len(codes),
        "kernels": len(kernels),
        "registers": max(need.registers for need in kernels),
        "shared_bytes": max(need.shared_bytes for need in kernels),
        "spilled_bytes": sum(need.spilled_bytes for need in kernels),
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--archs", default=",".join(ARCHITECTURES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    codes_by_family = {name: list(codes) for name, codes in families().items()}
    rows = []
    for architecture in options.archs.split(","):
        for name, codes in codes_by_family.items():
            rows.append(summarize(name, architecture, codes))
            print(*rows[-1].values(), sep="\t", flush=True)
    if options.json:
        about = {"nvrtc": ".".join(map(str, nvrtc.getVersion())), "cupy": cupy.__version__}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
