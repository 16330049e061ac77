"""`hpctrain data`: shows the contents of data files; no MPI is started."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click
import tomli_w

from hpctrain.commands._lazy import WholeGroup
from hpctrain.core.names import counted
from hpctrain.core.printing import say
from hpctrain.core.strict_json import to_json

if TYPE_CHECKING:
    from hpctrain.data.formats.info import ArrayInfo, FileInfo

EPILOG = """\b
Examples:
  hpctrain data info train.h5
  hpctrain data info 'shards/train-*.parquet'
  hpctrain data info train.zarr cifar-000.tar --json
"""


@click.group(cls=WholeGroup, epilog=EPILOG)
def data() -> None:
    """Show the contents of data files."""


@data.command(epilog=EPILOG)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, an object per PATH.")
def info(paths: tuple[str, ...], as_json: bool) -> None:
    """Print the arrays in files: shapes, dtypes, chunks, classes and missing values.

    PATH is a file, a folder of Zarr or of Hugging Face's save_to_disk, or a pattern in quotes for
    the files of a set. The kind is guessed from the first bytes. The last lines are a table [data]
    for a recipe. The exit code is 2 if a file cannot be read.
    """
    from hpctrain.data.formats.info import examine  # late, so that `--help` stays fast

    infos = [examine(path) for path in paths]
    if as_json:
        say(to_json([asdict(item) for item in infos]))
        return
    say("\n".join(_text(item) for item in infos), end="")


def _text(item: FileInfo) -> str:
    head = f"{item.path}: {item.kind}, {counted(item.files, 'file')}, {item.size_bytes:,} bytes"
    shapes = [f"{array.dtype} {array.shape}" if array.shape else "" for array in item.arrays]
    key_width = max((len(array.key) for array in item.arrays), default=0)
    width = max(map(len, shapes), default=0)
    gap = "  " * bool(key_width)
    lines = [
        f"  {array.key:{key_width}}{gap}{shape:{width}}  {_notes(array)}".rstrip()
        for array, shape in zip(item.arrays, shapes, strict=True)
    ]
    splits = [f"  split {name}: {counted(rows, 'row')}" for name, rows in item.splits.items()]
    return "\n".join([head, *lines, *splits, "", "[data]", tomli_w.dumps(item.table)])


def _notes(array: ArrayInfo) -> str:
    """Return the storage, the labels and the missing values of an array, or its fault."""
    if array.fault:
        return f"cannot be used: {array.fault}"
    notes = [array.storage] * bool(array.storage)
    if array.chunk_rows:
        notes.append(f"chunks of {counted(array.chunk_rows, 'row')}")
    if array.classes is not None:
        notes.append(f"labels 0 .. {array.classes - 1}")
    if array.not_finite is not None:
        count = f"{counted(array.not_finite, 'value')} not finite" if array.not_finite else "finite"
        is_whole = array.rows_read == array.shape[0]
        notes.append(count + f" in the first {array.rows_read:,} rows" * (not is_whole))
    return ", ".join(notes)
