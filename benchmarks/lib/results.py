"""Files of results: JSON as text, compressed by gzip where the text is long."""

from __future__ import annotations

import zlib
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
MAX_PLAIN_BYTES = 200_000
GZIP = zlib.MAX_WBITS | 16  # zlib's own header has no name and no time: equal text, equal bytes


def find_file(path: Path) -> Path:
    """Return the file of the result `path`: with .gz after its name if it is compressed."""
    compressed = path.with_name(f"{path.name}.gz")
    return compressed if compressed.exists() else path


def read_text(path: Path) -> str:
    """Return the text of the result `path`, compressed or not."""
    file = find_file(path)
    data = file.read_bytes()
    return (zlib.decompress(data, GZIP) if file.suffix == ".gz" else data).decode()


def write_text(path: Path, text: str) -> Path:
    """Write the result `path`, whole or not at all; return its file, compressed if it is long."""
    data, file = text.encode(), path
    if len(data) > MAX_PLAIN_BYTES:
        compressor = zlib.compressobj(9, wbits=GZIP)
        data = compressor.compress(data) + compressor.flush()
        file = path.with_name(f"{path.name}.gz")
    part = path.with_suffix(".part")
    part.write_bytes(data)
    find_file(path).unlink(missing_ok=True)
    part.replace(file)
    return file
