"""Frameworks beside hpctrain: PyTorch's build, and the backends of torch.distributed that it has.

PyTorch is not imported, which takes seconds: its version and the entry points say enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

from hpctrain.tools.doctor.check import Check


def torch_version() -> str | None:
    """Return the version of PyTorch in this environment, None without it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def backend_names() -> list[str]:
    """Return the names that PyTorch loads at its import."""
    return [entry.name for entry in metadata.entry_points(group="torch.backends")]


def check_torch(
    version: str, loaded_names: Sequence[str], environ: Mapping[str, str], has_gpu: bool
) -> Check:
    """Return the check of PyTorch `version`: whether scripts can name the backend hpctrain."""
    build = "for CPUs" if version.endswith("+cpu") else "with CUDA"
    others = "gloo" if version.endswith("+cpu") or not has_gpu else "gloo, nccl"
    for variable, disabling in (("HPCTRAIN_TORCH", "0"), ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")):
        if environ.get(variable) == disabling:
            text = f"{version}, {build}; {variable}={disabling}: backends {others} alone"
            return Check("PyTorch", "note", text, f"unset {variable}, or import hpctrain.torch")
    if "hpctrain" not in loaded_names:
        text = f"{version}, {build}; no entry point of hpctrain: backends {others} alone"
        return Check("PyTorch", "note", text, "install hpctrain again, or import hpctrain.torch")
    return Check("PyTorch", "ok", f"{version}, {build}; backends hpctrain, {others}")
