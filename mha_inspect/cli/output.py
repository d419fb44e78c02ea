"""Write a report and its pictures to stdout and to the file of --export."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from ..errors import ExitCode, ExportError, MhaInspectError, SpecError
from ..files.memory import require_loadable
from ..render.export import Destination
from ..render.screen import columns, in_color, is_terminal, lines
from ..text import printable, shortened, shown
from .options import Options, require_numbers
from .ranks import place, prints_answer

if TYPE_CHECKING:
    from ..pictures.grid import Picture
    from ..render.export import ExportFormat
    from ..render.formats import Format
    from ..reports.common import Report

# Windows reports a closed pipe as EINVAL.
_CLOSED_PIPE = (errno.EPIPE, errno.EINVAL) if os.name == "nt" else (errno.EPIPE,)
"""Numbers of the errors of a write to a pipe whose reader closed it."""
_FULL_DISK = (errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC))
"""Numbers of the errors of a write that fails: the disk is full, a file too large, a device broken, a quota used up.

Windows has no quota error.
"""


_ENOUGH_FOR_PICTURES = 60
"""The columns of a terminal from which on pictures are drawn that were not asked for."""
_LONGEST = 1500
"""The most characters of a message."""


class ClosedPipeError(MhaInspectError):
    """The reader of stdout closed the pipe: no message is printed."""

    exit_code = ExitCode.CLOSED_PIPE


@dataclass(frozen=True)
class Drawn:
    """Pictures that go with a report."""

    pictures: tuple[Picture, ...]
    printed: bool = True
    """Whether they follow the report on stdout, and in a file of text; otherwise only a PNG has them."""
    small: bool = False
    """Whether they are small, a row of panels each; then a file of text has none."""
    viewed: dict[str, Any] | None = None
    """The data of the picture of a page; None for other files."""

    def text(self, stream: IO[str] | None = None) -> str:
        """Return the pictures as text for a stream, or for a file if it is None: of any width, and without colour."""
        from ..pictures.grid import depth_shown
        from ..pictures.terminal import draw

        width = None if stream is None else columns(stream)
        depth = depth_shown() if stream is not None and in_color(stream) else "none"
        drawn: list[str] = []
        for picture in self.pictures:
            drawn.append(draw(picture, width=width, depth=depth, small=self.small))
        return "".join(f"\n{text}" for text in drawn)


def shows_pictures(options: Options) -> bool:
    """Return whether stdout is a terminal on which heat maps can be seen: it has colours, and is not narrow."""
    out = sys.stdout
    if options.json or not (is_terminal(out) and in_color(out)):
        return False
    width = columns(out)
    return width is not None and width >= _ENOUGH_FOR_PICTURES


def require_drawable(options: Options) -> None:
    """Raise `MhaInspectError` if there are no numbers to draw (on meta), or only JSON to draw in."""
    if options.json and options.ending not in (".png", ".html"):
        raise SpecError("--picture draws, but --json has no pictures. Drop one of the two, or add --export FILE.png.")
    require_numbers(options.device, "draw")


def checked_destination(options: Options, *, draws: bool | None = None, computes: bool = True) -> Destination | None:
    """Check what a command needs before it computes anything, and return the destination of --export.

    None without --export, and on a rank that prints no answer. Raises `MhaInspectError` if the file cannot be written,
    is a picture although none is drawn, or torch cannot be loaded.

    Args:
        options: the options of the command.
        draws: whether pictures are drawn; None for a command without --picture, whose error names another way out.
        computes: whether the command needs torch.
    """
    if computes:
        require_loadable()
    if options.export is None or not prints_answer():
        return None
    export = Destination.of(options.export)
    if export.format == "png":
        if not draws:
            way = "Use" if draws is None else "Add --picture, or use"
            raise ExportError(f"{shown(export.asked)} is a picture, but none is drawn. {way} .html, .txt or .json.")
        from ..pictures.plot import require_matplotlib

        require_matplotlib(f"--export {shown(export.asked)}")
    return export


def print_and_export(report: Report, options: Options, export: Destination | None, drawn: Drawn | None = None) -> None:
    """Print a report on stdout in the chosen format, and write it to the file of --export.

    Each of the two is done although the other fails: the file is written first, and its `ExportError` is raised after
    the report is printed. For stdout this raises as `write`.
    """
    from ..render.formats import to_text

    failure: ExportError | None = None
    if export is not None:
        try:
            export.write(_file_content(report, export.format, drawn))
            if not options.quiet:
                say(f"wrote {export.asked}")
        except ExportError as error:
            failure = error
    out = sys.stdout
    format = _format_for_stdout(options, out)
    text = to_text(report, format, width=columns(out), color=in_color(out), height=lines(out))
    if not options.json and drawn is not None and drawn.printed:
        text += drawn.text(out)
    write(text)
    if failure is not None:
        raise failure


def _format_for_stdout(options: Options, out: IO[str] | None) -> Format:
    """Return the format for stdout; `out` is None if the process has no stdout."""
    if options.json:
        return "json"
    return "table" if is_terminal(out) else "plain"


def _file_content(report: Report, format: ExportFormat, drawn: Drawn | None) -> str | bytes:
    """Return the content of the file of --export: the pictures for a PNG, the report for JSON, both for text or a page.

    The bytes are a PNG.
    """
    from ..render.formats import to_text

    if drawn is not None and format == "png":
        from ..pictures.plot import to_png

        return to_png(drawn.pictures)
    # A PNG without pictures was refused by `checked_destination`, and a forward that raised writes none.
    if drawn is not None and format == "html" and drawn.viewed is not None:
        from ..pictures.viewer import drawn_page

        return to_text(report, "html", drawn=drawn_page(drawn.viewed))
    text = to_text(report, cast("Format", format))
    if drawn is not None and drawn.printed and not drawn.small and format == "plain":
        text += drawn.text()
    return text


def say(message: str) -> None:
    """Print a message on stderr, with unprintable characters escaped and the middle of a very long one cut."""
    escaped = "\n".join(map(printable, message.split("\n")))
    if sys.stderr is not None:
        with suppress(OSError):
            here = place()
            who = "mha-inspect" if here is None else f"mha-inspect: {here}"
            print(f"{who}: {shortened(escaped, _LONGEST)}", file=sys.stderr)


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
        failure = stdout_failure(error)
        if failure is None:
            raise
        raise failure from None


def stdout_failure(error: OSError) -> MhaInspectError | None:
    """Return what to raise for a closed pipe or a full disk at stdout, and silence stdout; None for any other error."""
    if error.errno not in _CLOSED_PIPE + _FULL_DISK:
        return None
    _silence_stdout()
    if error.errno in _CLOSED_PIPE:
        return ClosedPipeError()
    return ExportError(f"stdout could not be written: {error.strerror}. Free some space, or redirect stdout elsewhere.")


def _silence_stdout() -> None:
    """Point stdout to the null device: Python writes what is left at exit, and would complain about it again."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):  # stdout is no file, e.g. in a notebook, or it is closed
        pass
