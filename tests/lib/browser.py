"""Pages in headless Chromium: their JavaScript errors and the colours that they paint."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
from matplotlib import colors

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --enable-logging=stderr"
)
# What the page itself may not have: a script, which tells how wide each picture came out.
LOOK = """<script>addEventListener("load", () => {
document.title = [...document.images].map(one => one.alt + "=" + one.naturalWidth).join(" ")
})</script>"""


def browse(folder, *arguments):
    """Return what the browser prints, and what its console says; each time a new profile."""
    profile = f"--user-data-dir={folder / 'profile'}-{len(list(folder.iterdir()))}"
    completed = subprocess.run(
        [BROWSER, *FLAGS.split(), profile, *map(str, arguments)],
        check=True, timeout=100, capture_output=True, text=True,
    )  # fmt: skip
    return completed.stdout, [line for line in completed.stderr.splitlines() if "CONSOLE" in line]


def painted(picture: np.ndarray, color: str) -> int:
    """Return how many pixels of `picture`, float (height, width, 3 or 4) in 0 .. 1, are `color`."""
    return int((np.abs(picture[..., :3] - colors.to_rgb(color)).max(axis=-1) < 0.02).sum())
