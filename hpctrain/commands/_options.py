"""Options that several commands have."""

from __future__ import annotations

import click

set_option = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    help="Change a key of the recipe; conflicting keys are removed.",
)
