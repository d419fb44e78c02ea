"""Write a report and its pictures to stdout and to the file of --export."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from ..errors import ExitCode, ExportError, MhaInspectError, SpecError
from ..files.memory import require_loadable
from ..render.export import Destination
from ..render.screen import columns, in_color, is_terminal, lines
from ..text import shown
from .options import Options, require_numbers
from .ranks import answers

if TYPE_CHECKING:
    from ..pictures.grid import Picture
    from ..render.formats import Format
    from ..reports.common import Report

# Windows reports a closed pipe as EINVAL.
GONE = (errno.EPIPE, errno.EINVAL) if os.name == "nt" else (errno.EPIPE,)
FULL = (errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC))


class ClosedPipeError(MhaInspectError):
    """The reader of stdout closed the pipe: no message is printed."""

    exit_code = ExitCode.CLOSED_PIPE


@dataclass(frozen=True)
class Drawn:
    """Pictures that go with a report."""

    pictures: tuple[Picture, ...]
    printed: bool = True
    """Whether they follow the report on stdout; otherwise only the file of --export has them."""
    viewed: dict[str, Any] | None = None
    """The content of a page's viewer; None if the page has only the pictures."""

    def text(self, stream: IO[str] | None = None) -> str:
        """Return the pictures as text for a stream, or for a file if it is None."""
        from ..pictures.grid import depth_shown
        from ..pictures.terminal import draw

        width = None if stream is None else columns(stream)
        depth = depth_shown() if stream is not None and in_color(stream) else "none"
        return "".join("\n" + draw(picture, width=width, depth=depth) for picture in self.pictures)


def require_drawable(options: Options) -> None:
    """Raise `MhaInspectError` if there are no numbers to draw, or the format has no pictures."""
    if options.json and options.ending not in (".png", ".html"):
        raise SpecError("--picture draws, but --json has no pictures. Drop one of the two, or add --export FILE.png.")
    require_numbers(options.device, "draw")


def prepare(options: Options, *, draws: bool | None = None, computes: bool = True) -> Destination | None:
    """Return the destination of --export, checked before anything is computed; None without --export.

    `draws` is None for a command that has no picture; `computes` says that torch is needed. Raises `MhaInspectError`
    if the file cannot be written, is a picture although none is drawn, or torch cannot be loaded.
    """
    if computes:
        require_loadable()
    if options.export is None or not answers():
        return None
    export = Destination.of(options.export)
    if export.format == "png":
        if not draws:
            way = "Use" if draws is None else "Add --picture, or use"
            raise ExportError(f"{shown(export.asked)} is a picture, but none is drawn. {way} .html, .txt or .json.")
        from ..pictures.plot import require_matplotlib

        require_matplotlib(f"--export {shown(export.asked)}")
    return export


def give(report: Report, options: Options, export: Destination | None, drawn: Drawn | None = None) -> None:
    """Print a report on stdout in the chosen format, and write it to the file of --export.

    Raises as `write`. If only the file cannot be written, stdout still has the report.
    """
    from ..render.formats import to_text

    failure: ExportError | None = None
    if export is not None:
        try:
            export.write(_exported(report, export.format, drawn))
        except ExportError as error:
            failure = error
    out = sys.stdout
    format = _printed(options, out)
    text = to_text(report, format, width=columns(out), color=in_color(out), height=lines(out))
    if not options.json and drawn is not None and drawn.printed:
        text += drawn.text(out)
    write(text)
    if failure is not None:
        raise failure


def _printed(options: Options, out: IO[str] | None) -> Format:
    """Return the format for stdout."""
    if options.json:
        return "json"
    return "table" if is_terminal(out) and not options.plain else "plain"


def _exported(report: Report, format: Any, drawn: Drawn | None) -> str | bytes:
    """Return the content of a file: the report, the pictures, or both."""
    from ..render.formats import to_text

    if drawn is None or format == "json":
        return to_text(report, format)
    if format == "png":
        from ..pictures.plot import to_png

        return to_png(drawn.pictures)
    text = to_text(report, format)
    if drawn.viewed is not None:
        from ..pictures.viewer import with_viewer

        return with_viewer(text, drawn.viewed)
    if not drawn.printed:
        return text
    from ..render.html import with_pre

    return text + drawn.text() if format == "plain" else with_pre(text, drawn.text())


def write(text: str) -> None:
    """Write a whole text to stdout. Characters that its encoding lacks become escapes.

    Raises `ClosedPipeError` if the reader closed the pipe, `ExportError` if stdout is closed or its disk is full.
    """
    out = sys.stdout
    if out is None:
        raise ExportError("stdout is closed, so nothing can be printed. Use --export FILE.txt, or leave stdout open.")
    encoding = out.encoding or "utf-8"
    try:
        out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        out.flush()
    except OSError as error:
        raise unwritable(error) or error from None


def unwritable(error: OSError) -> MhaInspectError | None:
    """Return the error for a closed pipe or a full disk at stdout; None for any other error."""
    if error.errno not in GONE + FULL:
        return None
    try:  # point stdout to the null device, so that Python does not try again at exit and complain
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass
    if error.errno in GONE:
        return ClosedPipeError()
    return ExportError(f"stdout could not be written: {error.strerror}. Free some space, or redirect stdout elsewhere.")
