"""The inside of a netlab: process 1 of its namespaces makes hosts, then runs mpiexec.

    python -m hpctrain.cluster.netlab.namespaces '{"hosts": 4, "bits": 1000000000, ...}' mpiexec ...

Each host is a shell that enters namespaces of its own, sets up its end of a veth pair and says
"up"; the other end it puts on the bridge, in the namespace of process 1. /dev/shm is a file system
of the lab's own, and of each host's own: no MPI finds another host's shared memory, and whatever
ranks leave there goes with the lab.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

NETWORK = "10.99.0.0/24"
INTERFACE = (
    "lab"  # the bridge, and each host's end of its link: one name suits all of MPI's options
)
SHM = "/dev/shm"
SSH = f"{SHM}/ssh"

_LAB = f"""
mount -t tmpfs tmpfs {SHM}
ip link set lo up
ip link add name {INTERFACE} type bridge
ip addr add {{address}}/24 dev {INTERFACE}
ip link set {INTERFACE} up
"""

# UCX looks for network devices in /sys, which shows those of the namespace that mounted it. The far
# end of the link goes to the namespace of process 1, the lab's. Congestion control is Linux's own
# default also where this machine has another: `bbr` sends at the rate of the last second, and a
# rank that turns to another partner meets two connections that each keep to half of its link.
_HOST = f"""
hostname h{{host}}
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs {SHM}
ip link set lo up
ip link add name {INTERFACE} type veth peer name v{{host}} netns 1
ip addr add {{address}}/24 dev {INTERFACE}
{{shape_host_end}}
ip link set {INTERFACE} up
ip route replace {NETWORK} dev {INTERFACE} src {{address}} congctl cubic
nsenter --target 1 --net sh -ec '
  {{shape_bridge_end}}
  ip link set v{{host}} master {INTERFACE} up'
echo up
"""

_IN_NAMESPACES = ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-ec"]

# Called as `ssh [OPTIONS] ADDRESS COMMAND...`; entering a mount namespace loses the folder. What
# runs on a host keeps to the host's cores.
_SSH = f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
read -r pid cores < {SHM}/$1; shift
exec taskset -c $cores nsenter --target $pid --net --uts --ipc --mount \\
  sh -c 'cd "$0" && eval "$1"' "$PWD" "$*"
"""


def address(host: int) -> str:
    """Return the address of host 1, 2, ...; 254 is where mpiexec runs."""
    return NETWORK.replace("0/24", str(host))


def cores_of(host: int, lab: Mapping[str, int], cores: Sequence[int]) -> Sequence[int]:
    """Return the cores of host 1, 2, ...: its own where there are as many as ranks, else all."""
    share = len(cores) // lab["hosts"]
    return cores[(host - 1) * share : host * share] if share >= lab["ranks_per_host"] else cores


def shape(bits: int, device: str) -> str:
    """Return the tc command that lets `bits` per second out of `device`.

    A burst is 2 ms long: far below any message of interest, enough for the clock to keep up.
    """
    burst = min(max(bits // 8 // 500, 1 << 16), 1 << 18)
    return f"tc qdisc add dev {device} root tbf rate {bits}bit burst {burst} latency 50ms"


def probe_script() -> str:
    """Return a script that makes a lab of one host and leaves; it fails where no lab can be."""
    return f"{_lab()}{shlex.join([*_IN_NAMESPACES, _host(1, 10**9)])}"


def main() -> int:
    """Set the lab up, run the command, and return its code; the kernel clears up behind us."""
    lab, command = json.loads(sys.argv[1]), sys.argv[2:]
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    subprocess.run(["sh", "-ec", _lab()], check=True)
    Path(SSH).write_text(_SSH)
    Path(SSH).chmod(0o755)
    hosts = [_start_host(host, lab) for host in range(1, lab["hosts"] + 1)]
    for host, process in enumerate(hosts, start=1):
        if process.stdout.readline() != b"up\n":  # type: ignore[union-attr]
            print(f"hpctrain: netlab: host h{host} could not be set up", file=sys.stderr)
            return 1
    code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    if code < 0:
        print(f"hpctrain: netlab: mpiexec ended with {signal.Signals(-code).name}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _lab() -> str:
    return _LAB.format(address=address(254))


def _host(host: int, bits: int) -> str:
    host_end, bridge_end = shape(bits, INTERFACE), shape(bits, f"v{host}")
    return _HOST.format(
        host=host, address=address(host), shape_host_end=host_end, shape_bridge_end=bridge_end
    )


def _start_host(host: int, lab: Mapping[str, int]) -> subprocess.Popen[bytes]:
    line = [*_IN_NAMESPACES, f"{_host(host, lab['bits'])}exec sleep infinity"]
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    cores = cores_of(host, lab, sorted(os.sched_getaffinity(0)))
    Path(SHM, address(host)).write_text(f"{process.pid} {','.join(map(str, cores))}\n")
    return process


def _exit_with_parent() -> None:
    """End when our stdin does. As process 1 we take everybody along."""
    os.read(0, 1)  # nothing is ever written
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
