"""Options that several commands have."""

from __future__ import annotations

import click

sets = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    help="Change the recipe; a key that this one excludes is removed.",
)
