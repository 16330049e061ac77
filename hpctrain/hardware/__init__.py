"""What machine this is: GPUs, NICs, NUMA nodes and what lies near what, from sysfs, NVML, /proc.

Functions take the `root` below which they look, so that tests give them made-up machines.
"""
