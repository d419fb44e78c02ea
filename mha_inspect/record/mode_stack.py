"""Put a mode of torch's on the stack of this thread and take it off again, in any order, and touch nothing else.

A mode's own `__enter__` notes in variables of a module, which all threads share, whether any mode is on. Two threads
that enter and leave beside each other leave those wrong, and the recorder needs none of what asks for them.
"""

from __future__ import annotations

from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode


def put_on(mode: TorchDispatchMode) -> None:
    """Put a mode on top."""
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
