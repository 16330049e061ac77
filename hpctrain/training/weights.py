"""Weights by name: read from a run to initialize another, and exported for other frameworks.

A checkpoint holds whole planes of the arena; its manifest has the place of each tensor in them:

    about["weights"] = {"param": {"linear1.weight": {"shape": [64, 256], "offset": 0}, ...},
                        "buffer": {"norm1.mean": {"shape": [16], "offset": 0}, ...}}

    about["integers"] = {"norm1.steps": "int64"}            coded as gradients/integers.py describes
    about["ties"] = {"head.weight": "embedding.weight"}     further names

So a checkpoint is understood without the recipe, the data and the code of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from hpctrain import checkpoint
from hpctrain.checkpoint import Loaded, hashes
from hpctrain.core import atomic, xp
from hpctrain.core.errors import UsageError
from hpctrain.core.files import FileError, MissingError, open_regular
from hpctrain.core.opening import NAMED
from hpctrain.gradients.arena import Arena, Slot
from hpctrain.gradients.integers import decode, decoded_shape, encode
from hpctrain.transport.machine import version
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import World

Tensors = dict[str, np.ndarray]
SUFFIX = ".safetensors"
MAX_FAULTS = 10  # differences that an error lists
# What reading a file of another kind may raise, bfloat16 included, which NumPy does not have.
_READ_ERRORS = (
    safetensors.SafetensorError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
)


def layout(arena: Arena) -> dict[str, Any]:
    """Return the place of each tensor in the planes, as JSON data for a manifest."""
    return {"param": _slot_places(arena.model_slots), "buffer": _slot_places(arena.buffer_slots)}


def facts(arena: Arena) -> dict[str, Any]:
    """Return the entries of a manifest about the tensors of `arena`, as JSON data."""
    optional_entries = {"integers": dict(arena.integers), "ties": dict(arena.ties)}
    return {
        "weights": layout(arena),
        **{key: note for key, note in optional_entries.items() if note},
    }


def tensors_of(loaded: Loaded) -> Tensors:
    """Return the tensors of a checkpoint by name, parameters first: views, but for integers."""
    tensors = {
        name: _view_tensor(loaded.arrays[plane], place["offset"], place["shape"])
        for plane, places in loaded.about["weights"].items()
        for name, place in places.items()
    }
    for name, dtype in loaded.about.get("integers", {}).items():
        tensors[name] = decode(tensors[name], dtype)
    ties = loaded.about.get("ties", {}).items()
    return tensors | {other: tensors[first] for other, first in ties}


def checkpoint_of(run: Path, best: bool = False) -> Loaded:
    """Return the newest good checkpoint of a run, or the best; a checkpoint's folder is itself.

    Of its arrays only the planes that hold tensors are read. No MPI is needed. Raises UsageError if
    there is none, or if it does not have the names of its tensors.
    """
    if checkpoint.is_checkpoint(run):
        return run_ranks(1, lambda link: checkpoint.read(run, link, _request_planes))[0]
    loaded = run_ranks(1, lambda link: checkpoint.load(run, link, best, _request_planes))[0]
    if loaded is None:
        raise UsageError(f"{run} holds no checkpoint")
    return loaded


def warm_start(world: World, arena: Arena, path: Path) -> None:
    """Load the weights at `path`; every rank reads the file, and all must read the same."""

    def load() -> str:
        tensors = read(path)
        copy_into(arena, tensors, str(path))
        return tensors_sha256(tensors)

    world.must_agree(world.on_all_ranks(load), f"the SHA-256 of the weights at {path}")


def read(path: Path) -> Tensors:
    """Return the tensors at `path`: a run's folder, a checkpoint's folder, a .safetensors file.

    Raises UsageError for another kind of file, or a damaged one.
    """
    if path.is_dir():
        return tensors_of(checkpoint_of(path))
    try:
        open_regular(path, NAMED).close()  # to open a FIFO would block all ranks
        return safetensors.numpy.load_file(path)
    except MissingError:
        raise UsageError(
            f"{path}: expected the folder of a run or of a checkpoint, or a .safetensors file, "
            "seen nothing"
        ) from None
    except FileError:
        raise
    except _READ_ERRORS as error:
        raise UsageError(f"{path} cannot be read as a .safetensors file: {error}") from None


def copy_into(arena: Arena, tensors: Mapping[str, np.ndarray], source: str) -> None:
    """Copy `tensors` of any floating-point precision into the slots of the same names.

    Slots of integers take integers. Raises UsageError that lists missing slots, slots of another
    shape, tied tensors of different values, and tensors without a slot: of the whole model,
    whichever slots the arena holds.
    """
    tensor_of_slot = {arena.ties[name]: x for name, x in tensors.items() if name in arena.ties}
    tensor_of_slot |= {name: x for name, x in tensors.items() if name not in arena.ties}
    slots = {slot.name: slot for slot in (*arena.model_slots, *arena.buffer_slots)}
    faults = [
        f
        for s in slots.values()
        if (f := _tensor_fault(s, tensor_of_slot.get(s.name), arena.integers))
    ]
    faults += [
        f"'{name}': the model has none" for name in sorted(tensor_of_slot) if name not in slots
    ]
    faults += [
        f"'{name}': expected the values of '{first}', with which it is tied, seen others"
        for name, first in arena.ties.items()
        if name in tensors and not np.array_equal(tensors[name], tensor_of_slot[first])
    ]
    if faults:
        rest = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        faults_text = "".join(f"\n  {line}" for line in faults[:MAX_FAULTS] + rest)
        raise UsageError(f"the weights of {source} do not fit the model:{faults_text}")
    for name, view in (arena.views(arena.param) | arena.views(arena.buffer)).items():
        dtype = arena.integers.get(name)
        xp.copy(
            view,
            tensor_of_slot[name] if dtype is None else encode(tensor_of_slot[name].astype(dtype)),
        )


def tensors_sha256(tensors: Tensors) -> str:
    """Return the hash of the bytes of `tensors`."""
    arrays = (np.ascontiguousarray(tensors[name]) for name in sorted(tensors))
    return hashes.combine_hashes(hashlib.sha256(x.data).hexdigest() for x in arrays)


def export(run: Path, output: Path | None = None, best: bool = False, force: bool = False) -> Path:
    """Write the tensors of a run's newest or best checkpoint to one safetensors file; return it.

    Without `output` it lies in the run's folder and is named by its step. Whole or not at all;
    an existing file is replaced only with `force`. Raises UsageError, also for a name that
    promises another format.
    """
    if output is not None and output.suffix != SUFFIX:
        raise UsageError(
            f"{output}: an export is a safetensors file; name it {output.with_suffix(SUFFIX)}"
        )
    loaded = checkpoint_of(run, best)
    file = output or loaded.path.parent.parent / f"weights-{loaded.path.name}{SUFFIX}"
    if file.exists() and not force:
        raise UsageError(f"{file} exists; name another --output, or replace it with --force")
    tensors = {
        name: np.ascontiguousarray(x).reshape(x.shape) for name, x in tensors_of(loaded).items()
    }
    try:
        atomic.replace(file, safetensors.numpy.save(tensors, _metadata(loaded)))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    return file


def _metadata(loaded: Loaded) -> dict[str, str]:
    about = {"format": "np", "hpctrain": version("hpctrain"), "step": loaded.step}
    run = {key: loaded.about.get(key) for key in ("recipe", "recipe_sha256", "epoch", "seed")}
    metrics = loaded.about.get("metrics") or {}
    table = {key: value for key, value in {**about, **run, **metrics}.items() if value is not None}
    return {key: str(value) for key, value in table.items()}


def _request_planes(reader: checkpoint.Reader) -> None:
    if "weights" not in reader.about:
        raise UsageError(f"{reader.origin} does not name its tensors: hpctrain did not write it")
    reader.request_whole(plane for plane, places in reader.about["weights"].items() if places)


def _slot_places(slots: tuple[Slot, ...]) -> dict[str, Any]:
    return {slot.name: {"shape": list(slot.shape), "offset": slot.offset} for slot in slots}


def _view_tensor(plane: np.ndarray, offset: int, shape: list[int]) -> np.ndarray:
    return plane[offset : offset + prod(shape)].reshape(shape)


def _tensor_fault(slot: Slot, tensor: np.ndarray | None, integers: Mapping[str, str]) -> str:
    dtype = integers.get(slot.name)
    shape = slot.shape if dtype is None else decoded_shape(slot.shape, dtype)
    if tensor is None:
        return f"'{slot.name}': expected shape {shape}, seen none"
    if tensor.shape != shape:
        return f"'{slot.name}': expected shape {shape}, seen {tensor.shape}"
    if dtype is None and not np.issubdtype(tensor.dtype, np.floating):
        return f"'{slot.name}': expected floating point, seen {tensor.dtype}"
    return ""
