"""Define the errors that mha-inspect raises on purpose, and the exit codes of the command line.

Every message gives the request with its numbers, the rule, and a way out, in one or two lines.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import TYPE_CHECKING

from .text import message_of

if TYPE_CHECKING:
    from .reports.trace import Trace


class ExitCode(IntEnum):
    """The exit codes of the process."""

    OK = 0  # the answer is on stdout
    CONDITION = 1  # a checked condition is true: outputs differ, a fault was found, the forward raised
    USAGE = 2  # the flags or the input cannot be used
    REFUSED = 3  # refused because it would do harm: not enough memory, or a file that is not safe to open
    BUG = 70  # a bug in mha-inspect; the traceback is printed
    INTERRUPTED = 130  # Ctrl-C
    CLOSED_PIPE = 141  # output pipe closed


class MhaInspectError(Exception):
    """Base class of the errors raised on purpose. The message is shown to the user as it is."""

    exit_code: ExitCode = ExitCode.USAGE


class SpecError(MhaInspectError):
    """The sizes or settings of a layer contradict each other."""


class NoMaskError(SpecError):
    """The forward of a target takes no mask."""


class InputError(MhaInspectError):
    """A query, key, value, mask or input file does not fit the layer."""


class WeightsError(MhaInspectError):
    """The weights of one layer cannot be copied into another."""


class DeviceError(MhaInspectError):
    """The device is unknown, missing, or cannot run the request."""


class ExportError(MhaInspectError):
    """The report could not be written to the given file."""


class RecordingError(MhaInspectError):
    """The forward pass cannot be recorded."""


class ForwardError(MhaInspectError):
    """The forward of a traced module raised. `trace` is the recording up to the error; `__cause__` is the error."""

    def __init__(self, message: str, trace: Trace) -> None:
        super().__init__(message)
        self.trace = trace


class DoesNotFitError(MhaInspectError):
    """The forward pass needs more memory than is free."""

    exit_code = ExitCode.REFUSED


class UnsafeFileError(MhaInspectError):
    """Reading the file would run code from it, or unpack data of unlimited size."""

    exit_code = ExitCode.REFUSED


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed memory allocation, in Python or torch, on the CPU or another device."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # torch has no error class for the CPU.
    text = message_of(error)
    phrases = [
        *("not enough memory", "can't allocate memory", "Storage size calculation overflowed"),
        *("failed to map segment", "cannot allocate memory", "Cannot allocate memory"),  # while loading a library
    ]
    return isinstance(error, (RuntimeError, ImportError, OSError)) and any(phrase in text for phrase in phrases)
