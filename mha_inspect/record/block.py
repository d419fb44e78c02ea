"""The code that a recorder is entered around: what other threads, tasks and generators run does not belong to it."""

from __future__ import annotations

from contextvars import ContextVar
from inspect import CO_GENERATOR
from types import FrameType

from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

RUNNING: ContextVar[tuple[Block, ...]] = ContextVar("blocks that were entered", default=())
"""torch's modes belong to a thread. That a task or callback beside this one is not recorded is up to us."""


def put_on(mode: TorchDispatchMode) -> None:
    """Put a mode of torch's on top of the stack of this thread, and touch nothing else.

    A mode's own `__enter__` notes in variables of a module, which all threads share, whether any mode is on. Two
    threads that enter and leave beside each other leave those wrong, and the recorder needs none of what asks for them.
    """
    dispatch._push_mode(mode)


def take_off(mode: TorchDispatchMode) -> None:
    """Take a mode off, also from under others; nothing where it is not on.

    Tasks and generators that take turns leave their blocks in any order, and torch would take off whatever is on top.
    """
    stack = dispatch._get_current_dispatch_mode_stack()
    places = [place for place, other in enumerate(stack) if other is mode]
    above = stack[places[-1] + 1 :] if places else []
    for _ in above:
        dispatch._pop_mode()
    if places:
        dispatch._pop_mode()
    for other in above:
        dispatch._push_mode(other)


class Block:
    """The code that a recorder was entered around."""

    __slots__ = ("frame", "is_generator", "within")

    def __init__(self, frame: FrameType, running: tuple[Block, ...]) -> None:
        self.frame: FrameType | None = frame
        """The frame that it stands in: whatever called that one did not ask for the operations. None at the end."""
        self.is_generator = bool(frame.f_code.co_flags & CO_GENERATOR)
        self.within = _around(frame, running)
        """The blocks that it was entered in."""

    def asks(self, frame: FrameType | None, running: tuple[Block, ...]) -> bool:
        """Return whether what a frame asks for belongs to this block.

        A generator that has stood still in its block is recorded with whoever goes on, as somebody's context manager
        is; but not where that is a block of its own that this one was not entered in, as another generator's.
        """
        around = _around(frame, running)
        return self in around or all(block in self.within for block in around)


def _around(frame: FrameType | None, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return the blocks whose frames are beneath a frame, or are it."""
    frames = set()
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    return tuple(block for block in blocks if block.frame in frames)
