"""Results of the scripts for GPUs, and the three outcomes of a claim."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OUTCOMES = {True: "held", False: "short", None: "not measured"}
Claims = Mapping[str, bool | None]  #: None: what it takes is missing here
Rows = Sequence[Mapping[str, Any]]


def save_result(path: Path, about: Mapping[str, Any], claims: Claims, rows: Rows) -> None:
    """Write a result; what was written there before is of no use any more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {**about, "claims": dict(claims), "rows": list(rows)}
    path.write_text(json.dumps(document, indent=1) + "\n")


def print_claims(claims: Claims) -> bool:
    """Print each claim and how it ended; return whether none is short."""
    for claim, outcome in claims.items():
        print(f"{OUTCOMES[outcome]}: {claim}", flush=True)
    return False not in claims.values()
