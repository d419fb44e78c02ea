"""The errors that mha-inspect raises on purpose, and the exit codes of the command line.

Every message says what was asked with its numbers, the rule, and a way out, in one or two lines.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import TYPE_CHECKING

from .text import message_of

if TYPE_CHECKING:
    from .reports.trace import Trace


class ExitCode(IntEnum):
    """What the process returns to the shell."""

    OK = 0  # the answer is on stdout
    CONDITION = 1  # a condition that was asked about holds: outputs differ, a fault was found, the forward raised
    USAGE = 2  # the flags or the input cannot be used as they are
    REFUSED = 3  # it could be tried, and would do harm: it does not fit in memory, or a file is not safe to open
    BUG = 70  # a fault of mha-inspect itself; the traceback is kept
    INTERRUPTED = 130  # Ctrl-C
    CLOSED_PIPE = 141  # the reader of stdout went away


class MhaInspectError(Exception):
    """Base of every error raised on purpose. The message is meant for the user, whole as it stands."""

    exit_code: ExitCode = ExitCode.USAGE


class SpecError(MhaInspectError):
    """The sizes or settings of a layer contradict each other."""


class InputError(MhaInspectError):
    """A query, key, value, mask or input file does not fit the layer."""


class WeightsError(MhaInspectError):
    """The weights of one layer cannot be carried over into another."""


class DeviceError(MhaInspectError):
    """The device is unknown, absent, or cannot run what was asked."""


class ExportError(MhaInspectError):
    """The report could not be written to the file that was named."""


class RecordingError(MhaInspectError):
    """The forward pass cannot be recorded as it is."""


class ForwardError(MhaInspectError):
    """The forward of a traced module raised. `trace` holds what was recorded up to there; `__cause__` is the error."""

    def __init__(self, message: str, trace: Trace) -> None:
        super().__init__(message)
        self.trace = trace


class DoesNotFitError(MhaInspectError):
    """The forward pass needs more memory than the machine has free."""

    exit_code = ExitCode.REFUSED


class UnsafeFileError(MhaInspectError):
    """A file could only be read by running code that is in it, or by unpacking what may be any size."""

    exit_code = ExitCode.REFUSED


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in Python or in torch, on the CPU or on a device."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # On the CPU torch has no class of its own for it.
    text = message_of(error)
    said = [
        *("not enough memory", "can't allocate memory", "Storage size calculation overflowed"),
        *("failed to map segment", "cannot allocate memory", "Cannot allocate memory"),  # of a library to be loaded
    ]
    return isinstance(error, (RuntimeError, ImportError, OSError)) and any(words in text for words in said)
