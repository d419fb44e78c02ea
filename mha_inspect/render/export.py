"""Write a report to a file: whole or not at all, and an existing file stays as it was until the new one is complete."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ExportError
from ..text import printable

_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
"""Numbers of the errors of a write for which there is no space."""

ExportFormat = Literal["plain", "json", "html", "png"]
FORMAT_OF_SUFFIX: dict[str, ExportFormat] = {".txt": "plain", ".json": "json", ".html": "html", ".png": "png"}


@dataclass(frozen=True)
class Destination:
    """A file to export to, checked to be writable as far as possible without writing."""

    asked: Path
    """As the user named it."""
    real: Path
    """With symbolic links followed, so that a link stays a link."""
    format: ExportFormat

    @classmethod
    def of(cls, asked: Path) -> Destination:
        """Check the path of an export.

        Raises `ExportError` for an unknown suffix, a folder that does not exist or cannot be written to, and a target
        that is itself a folder.
        """
        format = FORMAT_OF_SUFFIX.get(asked.suffix.lower())
        if format is None:
            ending = f"ends in {printable(asked.suffix, 20)}" if asked.suffix else "has no ending"
            suffixes = ", ".join(FORMAT_OF_SUFFIX)
            raise ExportError(f"{_name(asked)} {ending}: the ending gives the format. Use one of {suffixes}.")
        try:
            real = Path(os.path.realpath(asked))
            fault = _fault(asked, real)
        except OSError as error:  # a name that is too long, a working folder that is gone
            fault = f"cannot be written: {error.strerror or type(error).__name__}. Choose another path."
        if fault:
            raise ExportError(f"{_name(asked)} {fault}")
        return cls(asked, real, format)

    def write(self, content: str | bytes) -> None:
        """Write the content to a temporary file beside the target, then replace the target with it.

        Raises `ExportError` if that fails; an existing file is then unchanged.
        """
        data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        try:
            before = self.real.stat() if self.real.exists() else None
            if before is None or stat.S_ISREG(before.st_mode):
                self._replace(data, before)
                return
            # A device or a pipe is written to; put a file in its place and it is gone. A pipe that nobody reads is
            # refused by the system where it is not waited for.
            descriptor = os.open(self.real, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
            os.set_blocking(descriptor, True)
            with open(descriptor, "wb") as device:
                device.write(data)
        except OSError as error:
            kept = " The existing file was not changed." if self.real.is_file() else ""
            way = "Free some space, or choose another path." if error.errno in _FULL else "Choose another path."
            raise ExportError(
                f"{_name(self.asked)} could not be written: {error.strerror or error}.{kept} {way}"
            ) from None

    def _replace(self, data: bytes, before: os.stat_result | None) -> None:
        temporary = str(self.real.parent / f".mha-inspect-{os.urandom(8).hex()}.tmp")
        try:
            # Made by hand rather than by tempfile, whose files are private: a new file gets the user's umask.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            with open(os.open(temporary, flags, 0o666), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if before is not None:
                os.chmod(temporary, stat.S_IMODE(before.st_mode))
                if hasattr(os, "chown"):
                    with contextlib.suppress(OSError):
                        os.chown(temporary, before.st_uid, before.st_gid)
            os.replace(temporary, self.real)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _fault(asked: Path, real: Path) -> str:
    """Return why a file cannot be written, and what to do; empty if it can.

    Raises `OSError` for a name that the system does not take, e.g. one that is too long. `Path.exists` raises it on
    some versions of Python, and returns False on newer ones.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(real)
    folder = real.parent
    place = real if real.exists() else folder
    if real.is_symlink():
        return "is a link to itself. Choose another path."
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        return f"cannot be written: the folder {_name(folder)} {what}. Create it first, or choose another."
    if real.is_dir():
        return f"is a folder. Name a file in it, e.g. {_name(asked / ('report' + asked.suffix))}."
    if not os.access(place, os.W_OK):
        return f"cannot be written: no permission to write to {_name(place)}. Choose another path."
    return ""


def _name(path: Path) -> str:
    return printable(path, 200)


def save(path: Path, text: Callable[[str], str]) -> None:
    """Write a report to a file, whose text in a format is given. Raises `ExportError` where that cannot be done."""
    target = Destination.of(path)
    if target.format == "png":
        raise ExportError(f"{path} is a picture. Draw one with .plot() of a stage, and save its figure.")
    target.write(text(target.format))
