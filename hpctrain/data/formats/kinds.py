"""The kind of a data file, guessed from its first bytes, or from the metadata in a folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.files import open_regular
from hpctrain.core.opening import NAMED
from hpctrain.data.formats.libraries import faults_of

KINDS = ("npy", "npz", "idx", "hdf5", "zarr", "parquet", "webdataset", "safetensors", "huggingface")
_TAR = slice(257, 262)  #: of "ustar" in the first header


def guess_kind(path: Path) -> str:
    """Return the `kind` of a file or a folder; raise UsageError if it is unknown."""
    if path.is_dir():
        if any((path / name).exists() for name in ("zarr.json", ".zgroup")):
            return "zarr"
        if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            return "huggingface"
        raise UsageError(
            f"{path}: expected a file, or a folder of Zarr or of Hugging Face's save_to_disk, seen "
            "another folder; for several files give a pattern, as 'folder/*.parquet'"
        )
    with open_regular(path, NAMED) as file, faults_of(str(path), "a file that can be read"):
        start, size = file.read(512), file.seek(0, 2)
    magics = {b"\x89HDF\r\n\x1a\n": "hdf5", b"PAR1": "parquet", b"\x93NUMPY": "npy"}
    for magic, kind in magics.items():
        if start.startswith(magic):
            return kind
    if start.startswith(b"PK"):
        return "npz" if path.suffix == ".npz" else "zarr"
    if start[_TAR] == b"ustar":
        return "webdataset"
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size:
        return "safetensors"
    if start.startswith(b"\0\0"):
        return "idx"
    if start.startswith(b"\x1f\x8b") and ".tar" not in path.name and path.suffix != ".tgz":
        return "idx"
    raise UsageError(
        f"{path}: expected a file of one of the kinds {', '.join(KINDS)}, seen {size} bytes that "
        f"begin with {start[:8]!r}; of tables in text: pandas.read_csv(path).to_parquet(other), a "
        "compressed .tar must be decompressed"
    )


def find_other_kind(path: Path, kind: str) -> str:
    """Return the kind that the first bytes of a file show; empty for `kind`, or if unsure."""
    with suppress(HpctrainError, OSError):
        guess = guess_kind(path)
        return guess if guess not in (kind, "idx") else ""  # any gzip file looks like idx
    return ""
