"""Bring an answer to where it was asked for: stdout, and the file of --export."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, TextIO

from ..errors import ExitCode, ExportError, MhaInspectError
from ..files.memory import require_loadable
from ..render.export import IMAGES, Destination, ExportFormat
from ..render.screen import columns, in_color, is_terminal
from ..text import shown

if TYPE_CHECKING:
    from ..render import Format
    from ..reports.common import Report
    from .options import Options
    from .picture import Drawn


# Windows reports a reader that is gone as EINVAL.
GONE = (errno.EPIPE, errno.EINVAL) if os.name == "nt" else (errno.EPIPE,)
FULL = (errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC))


class ClosedPipeError(MhaInspectError):
    """The reader of stdout went away. Nobody is left to be told."""

    exit_code = ExitCode.CLOSED_PIPE


def prepare(options: Options, *, draws: bool = False, computes: bool = True) -> Destination | None:
    """Return where --export goes, looked at before anything is computed; None where nothing is exported.

    Args:
        options: what was asked for.
        draws: whether there is a picture.
        computes: whether torch is needed.

    Raises `ExportError` when it could not be written there, or is to be a picture and none is drawn, `InputError` when
    nothing is there to make one with, and `MhaInspectError` where torch could not be loaded.
    """
    if computes:
        require_loadable()
    if options.export is None:
        return None
    export = Destination.of(options.export)
    if export.format in IMAGES:
        if not draws:
            way = "Add --picture, or end it in" if options.has_picture else "End it in"
            raise ExportError(f"{shown(export.asked)} is a picture, and none is drawn. {way} .html, .txt or .json.")
        from ..pictures.plot import require_matplotlib

        require_matplotlib(f"--export {shown(export.asked)}")
    return export


def give(report: Report, options: Options, export: Destination | None, drawn: Drawn | None = None) -> None:
    """Print a report on stdout in the format that was asked for, and write it to the file of --export.

    Pictures go with it where they were asked for.

    Raises `ExportError` when either could not be written (stdout has the answer all the same when the file has
    not), and `ClosedPipeError` when the reader of stdout is gone.
    """
    from ..render import to_text

    failure: ExportError | None = None
    if export is not None:
        try:
            export.write(_exported(report, export.format, drawn))
        except ExportError as error:
            failure = error
    chosen: Format = options.format or ("table" if is_terminal(sys.stdout) else "plain")
    out = sys.stdout
    text = to_text(report, chosen, width=columns(out), color=in_color(out))
    if chosen != "json" and drawn is not None and drawn.printed:
        text += drawn.text(chosen, out)
    write(text, chosen)
    if failure is not None:
        raise failure


def write(text: str, format: str = "plain") -> None:
    """Write text to stdout, whole.

    Raises `ClosedPipeError` when the reader is gone, `ExportError` when stdout is a file that takes no more.
    """
    if sys.stdout is None:
        raise ExportError(
            "stdout is closed: there is nowhere to print to. Use --export FILE.txt, or leave stdout open."
        )
    try:
        sys.stdout.write(_encodable(text, format, sys.stdout))
        sys.stdout.flush()
    except OSError as error:
        raise unwritable(error) or error from None


def unwritable(error: OSError) -> MhaInspectError | None:
    """Return what an error means for stdout: nobody reads it, or there is no room; None for any other error."""
    if error.errno in GONE:
        forget_stdout()
        return ClosedPipeError()
    if error.errno in FULL:
        forget_stdout()
        return ExportError(f"stdout could not be written: {error.strerror}. Make room, or send it somewhere else.")
    return None


def forget_stdout() -> None:
    """Point stdout to nowhere, so that Python does not try once more at exit, and complain."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass


def _exported(report: Report, format: ExportFormat, drawn: Drawn | None) -> str | bytes:
    """Return what goes into a file: the report, the pictures, or both."""
    image = None if drawn is None else drawn.image(format)
    if image is not None:
        return image
    assert format != "png"  # `prepare` lets no image pass without a picture
    assert format != "svg"
    from ..render import to_text

    text = to_text(report, format)
    return text if drawn is None or format == "json" else drawn.added(text, format)


def _encodable(text: str, format: str, stream: TextIO) -> str:
    """Return the text with what the stream's encoding lacks written as escapes, which JSON reads back as it was."""
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding, getattr(stream, "errors", None) or "strict")
    except UnicodeEncodeError:
        if format == "json":
            import json

            return "".join(c if c.isascii() else json.dumps(c)[1:-1] for c in text)
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text
