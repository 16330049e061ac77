"""The hardware of this machine: GPUs, NICs, NUMA nodes and their topology (sysfs, NVML, /proc).

Functions take the `root` below which they look, so that tests give them made-up machines.
"""
