"""Take a mode of torch's off, also one that others were entered above."""

from __future__ import annotations

from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

_FLAGS = tuple(f"old_{name}dispatch_mode_flags" for name in ("", "non_infra_", "without_ignore_compile_internals_"))


def take_off(mode: TorchDispatchMode) -> None:
    """Take a mode off the stack of this thread; nothing where it is not on it.

    Tasks and generators that take turns leave their blocks in any order, and torch would take off whatever is on top.
    """
    stack = dispatch._get_current_dispatch_mode_stack()
    places = [place for place, other in enumerate(stack) if other is mode]
    if not places:
        return
    above = stack[places[-1] + 1 :]
    for _ in above:
        dispatch._pop_mode()
    if not above:
        TorchDispatchMode.__exit__(mode, None, None, None)
        return
    dispatch._pop_mode()
    for name in _FLAGS:  # each mode puts back what was there before it: the next one up takes that over
        own, others = getattr(mode, name, None), getattr(above[0], name, None)
        if own and others:
            others[-1] = own.pop()
    for other in above:
        dispatch._push_mode(other)
