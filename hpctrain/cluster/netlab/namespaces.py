"""The first process inside a netlab: it sets up the hosts, then runs mpiexec.

    python -m hpctrain.cluster.netlab.namespaces '{"hosts": 4, ...}' mpiexec ...

Each host is a shell that enters namespaces of its own, sets up its end of a veth pair, and prints
"up". It attaches the other end to the bridge, which lies in the namespace of process 1. The lab and
each host mount a /dev/shm of their own: no MPI finds the shared memory of another host, and files
that ranks leave there vanish with the lab.
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

from hpctrain.core.printing import say

NETWORK = "10.99.0.0/24"
INTERFACE = (
    "lab"  # the bridge, and each host's end of its link: one name suits all of MPI's options
)
SHM_PATH = "/dev/shm"
SSH_PATH = f"{SHM_PATH}/ssh"

_LAB_SCRIPT = f"""
mount -t tmpfs tmpfs {SHM_PATH}
ip link set lo up
ip link add name {INTERFACE} type bridge
ip addr add {NETWORK.replace("0/24", "254/24")} dev {INTERFACE}
ip link set {INTERFACE} up
"""

# UCX looks for network devices in /sys, which shows the devices of the namespace that mounted it.
# The far end of the link goes to the network namespace of process 1. Congestion control is Linux's
# default, cubic, even if this machine uses another: `bbr` sends at the rate of the last second, so
# when a rank changes its partner, the old and the new connection each keep to half of the link.
_HOST_TEMPLATE = f"""
hostname h{{host}}
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs {SHM_PATH}
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

# Open MPI does not quote the blanks of its own path, MPICH does.
_QUOTED_PREFIX = sys.prefix.replace(" ", r"\\ ")
_QUOTE_BLANKS = rf"s|\([=:;]\){sys.prefix}|\1{_QUOTED_PREFIX}|g"

# mpiexec calls it as `ssh [OPTIONS] ADDRESS COMMAND...`. Entering a mount namespace loses the
# current folder, so the script changes back to it. taskset binds processes to the host's cores.
_SSH_SCRIPT = f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
read -r pid cores < {SHM_PATH}/$1; shift
exec taskset -c $cores nsenter --target $pid --net --uts --ipc --mount \\
  sh -c 'cd "$0" && eval "$1"' "$PWD" "$(printf %s "$*" | sed '{_QUOTE_BLANKS}')"
"""


def host_address(host: int) -> str:
    """Return the IP address of host 1, 2, ...; mpiexec runs on host 254."""
    return NETWORK.replace("0/24", str(host))


def host_cores(host: int, lab: Mapping[str, int], cores: Sequence[int]) -> Sequence[int]:
    """Return the cores of host 1, 2, ...: an equal part, or all if a part has fewer than ranks."""
    cores_per_host = len(cores) // lab["hosts"]
    return (
        cores[(host - 1) * cores_per_host : host * cores_per_host]
        if cores_per_host >= lab["ranks_per_host"]
        else cores
    )


def shaping_command(bits_per_s: int, device: str) -> str:
    """Return the tc command that limits `device` to sending `bits_per_s`.

    A burst lasts 2 ms: shorter than any message of interest, longer than a tick of the clock.
    """
    burst_bytes = min(max(bits_per_s // 8 // 500, 1 << 16), 1 << 18)
    return (
        f"tc qdisc add dev {device} root tbf rate {bits_per_s}bit burst {burst_bytes} latency 50ms"
    )


def build_probe_script() -> str:
    """Return a script that sets up a lab with a single host and exits; it fails where labs fail."""
    return f"{_LAB_SCRIPT}{shlex.join([*_IN_NAMESPACES, _host_script(1, 10**9)])}"


def main() -> int:
    """Set up the lab, run the command and return its exit code; the kernel removes the lab."""
    lab, command = json.loads(sys.argv[1]), sys.argv[2:]
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    subprocess.run(["sh", "-ec", _LAB_SCRIPT], check=True)
    Path(SSH_PATH).write_text(_SSH_SCRIPT)
    Path(SSH_PATH).chmod(0o755)
    hosts = [_start_host(host, lab) for host in range(1, lab["hosts"] + 1)]
    for host, process in enumerate(hosts, start=1):
        if process.stdout.readline() != b"up\n":  # type: ignore[union-attr]
            say(f"hpctrain: netlab: host h{host} could not be set up", err=True)
            return 1
    exit_code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    if exit_code < 0:
        say(
            f"hpctrain: netlab: mpiexec ended with {signal.Signals(-exit_code).name}",
            err=True,
        )
    return exit_code if exit_code >= 0 else 128 - exit_code


def _host_script(host: int, bits_per_s: int) -> str:
    host_end_shaping, bridge_end_shaping = (
        shaping_command(bits_per_s, INTERFACE),
        shaping_command(bits_per_s, f"v{host}"),
    )
    return _HOST_TEMPLATE.format(
        host=host,
        address=host_address(host),
        shape_host_end=host_end_shaping,
        shape_bridge_end=bridge_end_shaping,
    )


def _start_host(host: int, lab: Mapping[str, int]) -> subprocess.Popen[bytes]:
    command = [*_IN_NAMESPACES, f"{_host_script(host, lab['bits_per_s'])}exec sleep infinity"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    cores = host_cores(host, lab, sorted(os.sched_getaffinity(0)))
    Path(SHM_PATH, host_address(host)).write_text(f"{process.pid} {','.join(map(str, cores))}\n")
    return process


def _exit_with_parent() -> None:
    """Exit when our stdin is closed; the end of process 1 kills all processes of the lab."""
    os.read(0, 1)  # the parent never writes: the read returns at end-of-file
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
