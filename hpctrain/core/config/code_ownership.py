"""Ownership of the code that a recipe names: code of other users, or changed code, is not run.

A run's recipe.toml records in [code] the folder and the SHA-256 of each module's file. Reading a
run back executes its code: `must_be_own` therefore accepts only code that belongs to this user,
that no other user can change, and that is unchanged since the run was trained.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from hpctrain.core.config.usercode import Code, sources
from hpctrain.core.errors import UsageError


def must_be_own(run: Path, recipe: Path, code: Code) -> None:
    """Raise UsageError unless the code of the run is this user's and equals the recorded hashes.

    Other users may write neither to `run` and its `recipe` nor to the folders and files of modules;
    installed packages are trusted.
    """
    own_paths: dict[Path, None] = {run: None, recipe: None}
    faults = []
    for name in code.sha256:
        file = sources(name, code.folder)[name]  # it was hashed
        folder = Path(os.path.abspath(code.folder))
        if folder in file.parents:  # else it is installed
            candidates = (file, *file.parents)
            own_paths |= dict.fromkeys(path for path in candidates if path.is_relative_to(folder))
        if (sha256 := code.recorded.get(name)) != code.sha256[name]:
            expected_text = f"expected SHA-256 {sha256}" if sha256 else "no SHA-256 is recorded"
            faults.append(f"module {name} ({file}): {expected_text}, seen {code.sha256[name]}")
    faults = [*filter(None, map(_foreign_access, own_paths)), *faults]
    if faults:
        raise UsageError(
            f"{run} names code of its own ({', '.join(code.sha256)}), which is not run:"
            + "".join(f"\n  {fault}" for fault in faults)
            + "\nRead it, then add --trust (in Python: trust=True) to run it anyway"
        )


def _foreign_access(path: Path) -> str:
    """Return the way in which another user could have changed `path`; '' if no other user could."""
    status = os.stat(path)
    if status.st_uid != os.geteuid():
        return f"{path}: expected your own, seen a file of {_user_name(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH:
        return f"{path}: every user may write to it; chmod o-w"
    if status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid):
        return f"{path}: its group {_group_name(status.st_gid)} may write to it; chmod g-w"
    return ""


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _is_private(group: int) -> bool:
    """Return whether a group is this user's private group, which has the user's name."""
    try:
        members = grp.getgrgid(group).gr_mem
    except KeyError:
        return False
    name = _user_name(os.geteuid())
    return _group_name(group) == name and set(members) <= {name}
