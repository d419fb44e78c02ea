"""Find where the operations of a recorded run are called: the lines, the module, and the number of the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, groupby
from types import FrameType
from typing import Any
from weakref import WeakMethod, ref

from torch import nn

from .ops import Op
from .site import ATTENTION_FORWARD, ModuleCall, Site

_MODULE_CALL = nn.Module._call_impl.__code__
_NUMBERS = count()


class _Mark:
    """An object that exists as long as the call of a module."""

    __slots__ = ("__weakref__",)


class Callers:
    """The code that calls the operations of a block, as the recorder sees it from each operation."""

    def __init__(self, learn: Callable[[nn.Module], None]) -> None:
        self._learn = WeakMethod(learn)  # no circle with the recorder, which would keep its tensors
        """Adds all modules below a module that was called and is not known."""
        self.begin: FrameType | None = None
        """The frame that entered the block, where sites end. None outside the block."""
        self.site: Site = []
        """The site of the last operation."""
        self.call = -1
        """Number of the Python call of the last operation."""
        self.is_new_call = True
        """Whether the next operation belongs to a new call, even at the same site."""
        self.whole: set[int] = set()
        """Numbers of calls not to be split into turns of a loop, even if their operations repeat."""
        self.refusals: dict[int, str] = {}
        """Why each module of `nn.MultiheadAttention` did not take the fast path, by its id; empty if it did."""
        self._paths: dict[int, tuple[ref[nn.Module], str]] = {}
        self._key = f".recorder {next(_NUMBERS)}"
        """The variable name of the mark in the frame of each module call."""
        self._numbers = count()
        """Numbers of the module calls to come."""
        self._module_calls: dict[int, tuple[ref[_Mark], ModuleCall]] = {}
        """Module calls by the ids of their frames, each valid as long as its mark exists."""

    def add(self, module: nn.Module, path: str) -> None:
        """Add a module with its path inside the recorded module."""
        self._paths[id(module)] = ref(module), path

    def modules(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the known modules that still exist, with their paths."""
        for reference, path in self._paths.values():
            module = reference()
            if module is not None:
                yield module, path

    def path_of(self, module: object) -> str | None:
        """Return the path of a module inside the recorded module; None if it is not known."""
        entry = self._paths.get(id(module))
        if entry is None:
            return None
        reference, path = entry
        return path if reference() is module else None

    def note(self, frame: FrameType | None) -> None:
        """Note the site of a frame and the number of its call, which is the same as long as the site is."""
        site, attention = self._site_of(frame)
        if site != self.site:
            self.site, self.is_new_call = site, True
            if attention is not None:
                names = attention.f_locals
                self.refusals[id(names["self"])] = names.get("why_not_fast_path", "")
        self.call += self.is_new_call
        self.is_new_call = False

    def _site_of(self, frame: FrameType | None) -> tuple[Site, FrameType | None]:
        """Return the site of a frame, and the frame of `MultiheadAttention.forward` below the module call, or None."""
        site: Site = []
        attention = None
        while frame is not None and frame is not self.begin:
            code = frame.f_code
            site += code, frame.f_lasti
            if code is ATTENTION_FORWARD:
                attention = frame
            if code is _MODULE_CALL or code.co_name == "forward":
                begun = self._module_calls.get(id(frame))
                # The mark exists as long as the call, and so long no other frame has its id.
                call = begun[1] if begun is not None and begun[0]() is not None else None
                if call is not None or self._calls_module(frame):
                    site.append(call or self._begin_call(frame))
                    break
            frame = frame.f_back
        return site, attention

    def _calls_module(self, frame: FrameType) -> bool:
        """Return whether this frame is the call of a module, or its `forward` if that is called directly."""
        code, above = frame.f_code, frame.f_back
        if code is _MODULE_CALL or code.co_name != "forward" or not code.co_argcount:
            return code is _MODULE_CALL
        while above is not None and above is not self.begin and above.f_code.co_name != "forward":
            if above.f_code is _MODULE_CALL:
                return False
            above = above.f_back
        return isinstance(_called(frame), nn.Module)

    def _begin_call(self, frame: FrameType) -> ModuleCall:
        """Note the call of a module, and put a mark into its frame's variables, which disappears with the frame.

        Ids of frames are reused, and a reference to a frame would keep its tensors alive. Reading a frame's variables
        copies all of them, so it is done once per call.
        """
        module = _called(frame)
        path = self.path_of(module)
        if path is None and (learn := self._learn()) is not None:
            learn(self._outermost(frame))
            path = self.path_of(module)
        if path is None:  # a module that is not part of any other
            path = ""
            self.add(module, path)
        mark = frame.f_locals[self._key] = _Mark()
        above = self._site_of(frame.f_back)[0]
        call = ModuleCall(path, above, next(self._numbers))
        self._module_calls[id(frame)] = ref(mark), call
        return call

    def _outermost(self, frame: FrameType | None) -> nn.Module:
        """Return the module of the outermost running call."""
        outermost = frame
        while frame is not None and frame is not self.begin:
            outermost = frame if self._calls_module(frame) else outermost
            frame = frame.f_back
        assert outermost is not None
        module: nn.Module = _called(outermost)
        return module

    def number_turns(self, every: Iterable[Op]) -> None:
        """Give each turn of `for w in ws: x = w @ x` its own call number.

        A call is identified by its site, which is the same in every turn of a loop, so a repeating sequence of
        operations is split into its repetitions. The first turn keeps the number.
        """
        for call, group in groupby(every, key=lambda op: op.call):
            ops = list(group)
            if call not in self.whole and len(ops) > 1:
                size = _period([op.name for op in ops])
                for place in range(size, len(ops)):
                    self.call += place % size == 0
                    ops[place].call = self.call
                self.whole.update(op.call for op in ops)
        self.is_new_call = True


def _called(frame: FrameType) -> Any:
    """Return the first argument of a frame, the module that is called; None if the frame has deleted it."""
    return frame.f_locals.get(frame.f_code.co_varnames[0])


def _period(names: Sequence[str]) -> int:
    """Return the length of the shortest sequence whose repetitions are the names; the full length if none repeats."""
    whole = len(names)
    for size in range(1, whole // 2 + 1):
        repeats = whole % size == 0 and names[size:] == names[:-size]
        if repeats:
            return size
    return whole
