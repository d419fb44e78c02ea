"""Write a patched file in the place of the old one, which is kept beside it."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from ..errors import ExitCode, MhaInspectError
from ..render.export import Destination
from ..text import shown


class PatchRefusedError(MhaInspectError):
    """The file may not be written: it is a link, of another user, elsewhere, or has changed."""

    exit_code = ExitCode.REFUSED


def require_writable(path: Path) -> None:
    """Raise `PatchRefusedError` if a file may not be patched."""
    name = shown(str(path))
    if path.is_symlink():
        raise PatchRefusedError(f"{name} is a link. Give the file itself, {shown(os.path.realpath(path))}.")
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(Path.cwd())):
        raise PatchRefusedError(f"{name} is not under the current folder. Run it from the folder of the file.")
    if hasattr(os, "geteuid") and path.stat().st_uid != os.geteuid():
        raise PatchRefusedError(f"{name} belongs to another user. Apply the printed patch as that user.")
    if not os.access(path, os.W_OK):
        raise PatchRefusedError(f"{name} is read-only. Change its mode, or apply the printed patch.")


def write_patched(path: Path, before: bytes, after: bytes) -> Path:
    """Write the new content of a file, and return the path of the old one beside it: `model.py.orig`.

    The file is replaced whole or not at all. Raises `PatchRefusedError` if it is no longer what was patched, and
    `ExportError` if it cannot be written.
    """
    require_writable(path)
    if path.read_bytes() != before:
        raise PatchRefusedError(f"{shown(str(path))} changed while the patch was made. Run fix again.")
    kept = _free_name(path)
    Destination(kept, kept, "plain").write(before)
    Destination(path, path, "plain").write(after)
    return kept


def _free_name(path: Path) -> Path:
    """Return a path for the old file that no other file has: `model.py.orig`, else `model.py.orig2`."""
    for number in count(1):
        kept = path.with_name(f"{path.name}.orig{'' if number == 1 else number}")
        if not os.path.lexists(kept):
            return kept
    raise AssertionError("count never ends")
