"""Build a hollow GPU: CuPy's own wheel on a runtime whose kernels compute nothing.

    python tests/hollow/build.py FOLDER          # in an environment with cupy-cuda13x[ctk], gcc, nm
    . FOLDER/env.sh
    python -m hpctrain train digits --device gpu
    mpiexec -n 2 python -m hpctrain train digits --device gpu --set wire.algorithm=direct

All that CuPy does before a kernel runs is done: dtypes, shapes, casts, what it refuses, its own
compiler for an H100, launches, copies, memory, handles that other processes open. Device pointers
lead nowhere for anybody else. What comes out is whatever lay in memory; so a loss is told as 1, and
gradients as finite. The stand-ins of tests/fakes compute, by NumPy's rules.

Of CuPy one module is replaced, `cupy_backends.cuda.api.runtime`, made of the sources of the same
version (pip, Cython) with runtime.c in place of CUDA's; libcuda and libcublas by driver.c and by
functions that return 0.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from importlib import metadata
from pathlib import Path

import cupy_backends

LOCAL = Path(__file__).parent
CUPY = "cupy-cuda13x"
ENV = """export LD_PRELOAD={folder}/libcublas.so.13
export LD_LIBRARY_PATH={folder}:${{LD_LIBRARY_PATH:-}}
export PYTHONPATH={folder}/site:${{PYTHONPATH:-}}
export CUPY_ACCELERATORS= CUPY_CACHE_DIR={folder}/cache
"""
#: What is not to be made of values that nobody has computed.
PATCH = '''"""Losses are 1 and gradients finite: see tests/hollow/build.py."""
import importlib.abc
import importlib.util
import sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in ("hpctrain.nn.losses.sums", "hpctrain.gradients.mixed"):
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), patch(module))
        return spec


def patch(module):
    if module.__name__.endswith("sums"):
        told = lambda self: (self.fetch_numbers(), self.make_sums(1.0, 0, 0))[1]
        module.PendingSums.wait = told
    else:
        seen = module.MixedReplica._check_overflow
        fine = lambda self, key, sums: (seen(self, key, sums), (False, False))[1]
        module.MixedReplica._check_overflow = fine


sys.meta_path.insert(0, Finder())
'''


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(PATCH)
    sources, headers = downloaded(folder)
    runtime(folder, sources, headers)
    shared(folder, LOCAL / "driver.c", "libcuda.so.1")
    cublas(folder)
    (folder / "env.sh").write_text(ENV.format(folder=folder))
    print(f"now: . {folder}/env.sh")


def run(*words: object, **more: object) -> None:
    subprocess.run([str(word) for word in words], check=True, **more)


def downloaded(folder: Path) -> tuple[Path, Path]:
    """Return CuPy's sources and the headers that its wheel lacks; make a venv of tools."""
    version, pip = metadata.version(CUPY), folder / "tools" / "bin" / "pip"
    venv.create(folder / "tools", with_pip=True)
    run(pip, "install", "-q", "cython>=3.2,<3.3,!=3.2.6")
    run(pip, "install", "-q", "--no-deps", "--target", folder / "crt", "nvidia-cuda-crt==13.*")
    run(pip, "download", "-q", f"cupy=={version}", "--no-deps", "--no-binary", "cupy", "-d", folder,
        env={**os.environ, "CUPY_INSTALL_USE_STUB": "1"})  # fmt: skip
    with tarfile.open(folder / f"cupy-{version}.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    headers = folder / "crt" / "nvidia" / "cu13" / "include"
    (headers / "cuda_profiler_api.h").write_text(
        'extern "C" { int cudaProfilerStart(void); int cudaProfilerStop(void); }\n'
    )
    return folder / f"cupy-{version}", headers


def runtime(folder: Path, sources: Path, headers: Path) -> None:
    """Put a copy of the package `cupy_backends`, with our runtime, into the folder's site."""
    installed = Path(cupy_backends.__file__).parent
    shutil.copytree(installed, folder / "site" / "cupy_backends")
    api, code = "cupy_backends/cuda/api", folder / "runtime.cpp"
    constants = {"USE_CUDA_PYTHON": False, "CUDA_VERSION": 13000, "HIP_VERSION": 0,
                 "CUFFT_STATIC": False, "CYTHON_VERSION": "3"}  # fmt: skip
    reported = [
        word for name, value in constants.items() for word in ("-E", f"CUPY_{name}={value}")
    ]
    line = ["-3", "--cplus", "-X", "binding=False", *reported, "-o", code, f"{api}/runtime.pyx"]
    run(folder / "tools" / "bin" / "cython", *line, cwd=sources, stderr=subprocess.DEVNULL)
    code.write_text(code.read_text().replace('"../../cupy_', f'"{sources}/cupy_backends/cupy_'))
    cuda = installed.parent / "nvidia" / "cu13" / "include"
    include = [f"-I{path}" for path in (cuda, headers, sysconfig.get_paths()["include"])]
    flags = ["-w", "-O1", "-fPIC", *include, "-c"]
    run("g++", *flags, code, "-o", folder / "module.o")
    run("gcc", *flags, LOCAL / "runtime.c", "-o", folder / "runtime.o")
    parts = [folder / "module.o", folder / "runtime.o"]
    library = folder / "site" / api / f"runtime{sysconfig.get_config_var('EXT_SUFFIX')}"
    link = ["g++", "-shared", "-Wl,-Bsymbolic", "-o", library]
    run(*link, *parts, "-Wl,--unresolved-symbols=ignore-all")
    missing = [name for name in symbols(library, "U") if name.startswith("cuda")]
    rest = folder / "rest.c"
    rest.write_text("".join(f"int {name}() {{ return 801; }}\n" for name in missing))
    run("gcc", "-w", "-fPIC", "-c", rest, "-o", folder / "rest.o")
    run(*link, *parts, folder / "rest.o")


def cublas(folder: Path) -> None:
    """Make a libcublas whose functions do nothing, with the names of the real one."""
    real = Path(cupy_backends.__file__).parents[1] / "nvidia/cu13/lib/libcublas.so.13"
    own = ["cublasCreate_v2", "cublasGetVersion_v2"]
    names = {n for n in symbols(real, "T") if n.startswith("cublas")} - set(own)
    file = folder / "cublas.c"
    file.write_text(
        "void *malloc(unsigned long);\n"  # for glibc a library must need a version of something
        + "".join(f"int {name}() {{ return 0; }}\n" for name in sorted(names))
        + "int cublasCreate_v2(void **h) { return *h = malloc(8), 0; }\n"
        + "int cublasGetVersion_v2(void *h, int *v) { return *v = 130000, 0; }\n"
    )
    shared(folder, file, real.name)


def symbols(library: Path, kind: str) -> list[str]:
    """Return the names that a library has (T), or lacks (U)."""
    message = subprocess.run(["nm", "-D", str(library)], check=True, capture_output=True, text=True)
    words = [line.split() for line in message.stdout.splitlines()]
    return [word[-1].split("@")[0] for word in words if word[-2:-1] == [kind]]


def shared(folder: Path, source: Path, name: str) -> None:
    run("gcc", "-w", "-fPIC", "-shared", f"-Wl,-soname,{name}", source, "-o", folder / name)


if __name__ == "__main__":
    main()
