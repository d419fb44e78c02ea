"""Record a forward pass: the only user of torch's dispatch modes.

A `TorchDispatchMode` sees every operation of any module, with gradients on or off, on every device. Nothing is hooked,
wrapped or replaced, so what is recorded runs as it runs without the recorder, to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import RecordingError
from .arguments import argument_names, tensors_in
from .mode_stack import put_on, take_off
from .ops import RESULT, Kind, Named, Recording
from .replay import Replay
from .schema import About, about, known_as
from .site import ModuleCall, Site
from .sketch import Sketch
from .source import ATTENTION_FORWARD
from .storage import Look, look_at, weak_refs

_MODULE_CALL = nn.Module._call_impl.__code__
_Tensor = torch.Tensor
_PLAIN = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout})
LINK = About(RESULT, "result", pointwise=False, composite=False, makes_views=False, written=())
_RUNNING: ContextVar[tuple[object, ...]] = ContextVar("recorders that were entered", default=())
"""torch's modes belong to a thread. That a task or callback beside this one is not recorded is up to us."""
_NUMBERS, _MARKS = count(), count(2)


def record(module: Callable[..., Any], *args: Any, keep: bool = False, **kwargs: Any) -> tuple[Recording, Any]:
    """Run `module(*args, **kwargs)` once and record it.

    Returns the recording and what the module returned. With `keep` every tensor is kept, in `Recording.values`, as it
    was when it was made (a later in-place operation does not reach it); without it none is held a moment longer than in
    a plain run.
    """
    recorder = Recorder(module if isinstance(module, nn.Module) else None, keep=keep)
    recorder.take_inputs(argument_names(module, args, kwargs))
    with recorder:
        returned = module(*args, **kwargs)
    return recorder.finish(returned), returned


class Recorder(TorchDispatchMode):
    """The dispatch mode that writes down each operation. Use `record`, or enter it around any code."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile without this mode, as some of torch's own functions do (flex_attention)."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps __torch_dispatch__ at class creation, and the first operation imports torch._dynamo and
        # sympy: 800 modules and a second.
        return False

    def __init__(self, root: nn.Module | None = None, *, keep: bool = False) -> None:
        super().__init__()
        self._keep = keep
        self._entries: list[Any] = []
        """Entries of operations; names with what is known under them; what tells entries when it is called."""
        self._replay = Replay()
        self._weak = weak_refs()
        self._look = self._look_and_keep if keep else look_at
        self._known: dict[int, About] = {}
        self._inputs: list[Named] = []
        self._parameters: list[Named] = []
        self._buffers: list[Named] = []
        self._paths: dict[int, tuple[ref[nn.Module], str]] = {}
        self._refusals: dict[int, str] = {}
        self._kept: dict[int, dict[Any, list[torch.Tensor]]] = {}
        self._last_site: Site = []
        self._mark = 1
        self._key = f".recorder {next(_NUMBERS)}"
        """The name of what is noted in the frame of each call of a module: it lives as long as the call."""
        self._token = object()
        self._thread: int | None = None
        """The thread that entered it; None while it is not on."""
        self._closed = False
        self.boundary: FrameType | None = None
        """The frame that the block stands in: whatever called that one did not ask for the operations."""
        self._asking: FrameType | None = None
        """The frame that asked for what is running, where that is not the one that torch came from: a composite
        operation that is taken apart, a kernel that is opened."""
        self._kernel: int | None = None
        """Place of the fused kernel that what runs now belongs to."""
        self._inside = False
        """Whether a kernel's own code runs, below autograd, where composite operations arrive whole."""
        if root is not None:
            self._learn(root)

    def __enter__(self) -> Recorder:
        """Start to record what this thread and context run. Raises `RecordingError` where it is on already."""
        if self._thread is not None:
            raise RecordingError("this recording is under way already. Make another one for a block inside of it.")
        self.boundary = sys._getframe(1)
        self._thread, self._closed = get_ident(), False
        _RUNNING.set((*_RUNNING.get(), self._token))
        put_on(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        """Stop to record. Raises `RecordingError` in a thread that did not enter it; nothing more is recorded then."""
        self.boundary, self._closed = None, True
        if self._thread != get_ident():
            raise RecordingError(
                "this recording was not entered in the thread that leaves it: torch records by thread. "
                "Enter and leave it in one thread, around what runs there."
            )
        self._thread = None
        _RUNNING.set(tuple(token for token in _RUNNING.get() if token is not self._token))
        take_off(self)

    def _learn(self, root: nn.Module) -> None:
        """Note the paths of modules, and the names of parameters and buffers."""
        for path, module in root.named_modules():
            _require_eager(module, path)
            if self._path(module) is None:
                self._paths[id(module)] = ref(module), path
        look, weak = self._look, self._weak
        named = [(name, p) for name, p in root.named_parameters() if not nn.parameter.is_lazy(p)]
        self._entries.append((self._parameters, [(name, look(p, weak)) for name, p in named]))
        self._entries.append((self._buffers, [(name, look(buffer, weak)) for name, buffer in root.named_buffers()]))

    def take_inputs(self, arguments: Mapping[str, Any]) -> None:
        """Note the names of the tensors among the arguments."""
        looks = [(name, self._look(tensor, self._weak)) for name, tensor in tensors_in(arguments)]
        self._entries.append((self._inputs, looks))

    def finish(self, returned: Any = None) -> Recording:
        """Return the recording up to here, with the names of what was returned."""
        replay = self._catch_up()
        looks = [(name, self._look(tensor, self._weak)) for name, tensor in tensors_in(returned)]
        outputs = tuple(replay.named(looks))
        return Recording(
            ops=replay.ops(),
            inputs=tuple(self._inputs),
            parameters=tuple(self._parameters),
            buffers=tuple(self._buffers),
            scalars=replay.scalars,
            outputs=outputs,
            producers=replay.producers,
            fast_path_refusals=tuple(self._refusals.values()),
            constants=replay.constants(one.tensor.id for one in (*self._inputs, *self._parameters, *self._buffers)),
            values=replay.release(),
        )

    def _catch_up(self) -> Replay:
        """Work out what was written down since the last time."""
        replay, entries = self._replay, self._entries
        self._entries = []
        for entry in entries:
            if isinstance(entry[0], About):
                replay.add(entry)
            elif isinstance(entry[0], list):
                entry[0].extend(replay.named(entry[1]))
            else:
                for told in entry[0]():
                    replay.add(told)
        return replay

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and write it down."""
        if self._closed or (self._token not in _RUNNING.get() and get_ident() == self._thread):
            return func(*args, **kwargs) if kwargs else func(*args)  # another task's, or after the end
        known = self._known.get(id(func))
        if known is None:
            known = self._known[id(func)] = about(func)
        if known.fused or self._inside:
            answer = self._look_into(known, func, args, kwargs or {}, sys._getframe(1))
            if answer is not NotImplemented:
                return answer
        if known.composite and torch.is_inference_mode_enabled():
            # Without autograd's keys a composite operation arrives whole; with them torch has taken it apart before.
            return self._take_apart(func, args, kwargs or {}, sys._getframe(1))
        # What is done here is done at each operation: no more than what would be gone later. `Replay` does the rest.
        weak, look, plain = self._weak, self._look, self._plain
        given = [
            arg if type(arg) in _PLAIN else look(arg, weak) if isinstance(arg, _Tensor) else plain(arg) for arg in args
        ]
        if not kwargs:
            named = written = None
            if known.written:
                written = self._about_to_write(known, args, {})
            result = func(*args)
        else:
            named = {name: plain(arg) for name, arg in kwargs.items()}
            written = self._about_to_write(known, args, kwargs) if known.written else None
            result = func(*args, **kwargs)
        if isinstance(result, _Tensor):
            made = [look(result, weak)]
        else:
            made = [look(tensor, weak) for _, tensor in tensors_in(result)]
        left = None if written is None else [look(tensor, weak) for tensor in written]
        entries = self._entries
        place = len(entries)  # a module that is seen for the first time is told of after its first operation
        site = self._site(self._asking or sys._getframe(1))
        entries.insert(place, (known, given, named, made, left, site, self._mark, None, self._kernel))
        return result

    def _log(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        kind: Kind | None = None,
        written: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Write down an operation that has run already, under a name of its own.

        `func` is what to look up about it; None for `LINK`, which torch does not have. With `kind` given, what came out
        may lie in memory that was known before; `written` is what it wrote into.
        """
        known = LINK if func is None else known_as(func, name)
        given = [self._plain(arg) for arg in args]
        named = {key: self._plain(arg) for key, arg in kwargs.items()}
        made = [self._look(tensor, self._weak) for _, tensor in tensors_in(result)]
        left = None if written is None else [self._look(tensor, self._weak) for tensor in written]
        entries, place = self._entries, len(self._entries)
        site = self._site(self._asking or sys._getframe(1))
        entries.insert(place, (known, given, named, made, left, site, self._mark, kind, self._kernel))

    def _look_into(
        self, known: About, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Run what hides several steps in a way of its own; `NotImplemented` where it is recorded as any other."""
        return NotImplemented

    def _new_call(self) -> None:
        """Give what follows a call number of its own, though Python may stand where it stood; not in `_one_call`."""
        if self._mark > 0:
            self._mark = next(_MARKS)

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """Give all that runs in the body one call number, also where the same operations come over and over."""
        outer = self._mark
        self._mark = outer if outer < 0 else -next(_MARKS)
        try:
            yield
        finally:
            self._mark = outer if outer < 0 else next(_MARKS)

    def _take_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Run a composite operation as what it consists of, all of it asked for by the one who asked for the whole."""
        asking, self._asking = self._asking, self._asking or frame
        views = torch._C.DispatchKey.ADInplaceOrView
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(views)
        # Outside of a mode a view requires gradients where its base does, and that decides which kernels a product
        # takes. What comes out of an operation that makes views itself is made one on the way out.
        torch._C._dispatch_tls_set_dispatch_key_excluded(views, excluded and about(func).makes_views)
        put_on(self)
        try:
            # Not func.decompose: it prefers Python's kernels, which round otherwise than those of a plain run.
            return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        finally:
            take_off(self)
            torch._C._dispatch_tls_set_dispatch_key_excluded(views, excluded)
            self._asking = asking

    def _plain(self, value: Any) -> Any:
        """Return an argument as it is written down: what is in `_PLAIN`, a look, a list of those, or text."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._look(value, self._weak)
        if isinstance(value, Sketch):
            return value.look
        if isinstance(value, (list, tuple)):
            return [self._plain(item) for item in value]
        return value if isinstance(value, (int, float, complex, str)) else str(value)

    def _look_and_keep(self, tensor: torch.Tensor, weak: Any) -> Look:
        """Return what identifies a tensor now, and the tensor."""
        look = look_at(tensor, weak)
        if nn.parameter.is_lazy(tensor):
            return look
        views = self._kept.setdefault(id(look[0]), {})
        held = views.get(look[1:5])
        if held is None:
            held = views[look[1:5]] = [tensor.detach()]
        return (*look[:5], look[5] if len(look) > 5 else None, held)

    def _about_to_write(self, known: About, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that an operation writes into, after what is kept of their memory was copied."""
        places = [kwargs.get(name, args[place] if place < len(args) else None) for place, name in known.written]
        written = [tensor for _, tensor in tensors_in(places)]
        if self._keep:
            for tensor in written:
                for held in self._kept.pop(id(look_at(tensor, self._weak)[0]), {}).values():
                    held[0] = held[0].clone()
        return written

    def _site(self, frame: FrameType | None) -> Site:
        """Return where Python stands: the same list as last time where it stands there still."""
        boundary = self.boundary
        site: Site = []
        add = site.append
        attention = None
        while frame is not None and frame is not boundary:
            code = frame.f_code
            add(code)
            add(frame.f_lasti)
            if code is _MODULE_CALL:
                names = frame.f_locals
                call = names.get(self._key)
                if call is None:
                    call = self._begin(frame, names)
                add(call)
                if attention is not None and call.refused_at != attention.f_lasti:
                    call.refused_at = attention.f_lasti
                    self._ask_for_refusal(attention)
                attention = None
                break
            if code is ATTENTION_FORWARD:
                attention = frame
            frame = frame.f_back
        if attention is not None:  # called as a function, not as a module
            self._ask_for_refusal(attention)
        if site == self._last_site:
            return self._last_site
        self._last_site = site
        return site

    def _begin(self, frame: FrameType, names: dict[str, Any]) -> ModuleCall:
        """Return a note of the call of a module, and leave it in the call's frame.

        A frame has no identity that outlives it: its address is used again, and to hold it would hold its tensors.
        """
        module = names["self"]
        path = self._path(module)
        if path is None:
            self._learn(self._outermost(frame))
            path = self._path(module)
            if path is None:  # one that is part of no other
                path = ""
                self._paths[id(module)] = ref(module), path
        last = self._last_site
        above = self._site(frame.f_back)
        self._last_site = last
        call = names[self._key] = ModuleCall(path, above)
        return call

    def _ask_for_refusal(self, frame: FrameType) -> None:
        """Note why multi-head attention takes no fast path, in torch's own words."""
        names = frame.f_locals
        self._refusals[id(names["self"])] = names.get("why_not_fast_path", "")

    def _path(self, module: object) -> str | None:
        """Return the path of a module inside of the recorded one; None for one that is not known."""
        known = self._paths.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def _outermost(self, frame: FrameType | None) -> nn.Module:
        """Return the module whose call, of those that are running, began first."""
        found = None
        while frame is not None and frame is not self.boundary:
            found = frame if frame.f_code is _MODULE_CALL else found
            frame = frame.f_back
        assert found is not None
        module: nn.Module = found.f_locals["self"]
        return module


def _require_eager(module: nn.Module, path: str) -> None:
    """Refuse code that is no longer Python: what runs is not what the lines say, and no line asks for it.

    Raises `RecordingError`.
    """
    name = f"module {path}" if path else "the module"
    if isinstance(module, torch.jit.ScriptModule):
        raise RecordingError(
            f"{name} is scripted (torch.jit): its operations come from no line of Python. "
            "Record the module that it was made from."
        )
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        way_out = "its ._orig_mod" if hasattr(module, "_orig_mod") else "it before .compile()"
        raise RecordingError(
            f"{name} is compiled (torch.compile): what runs are kernels that were fused from its lines. "
            f"Record {way_out}."
        )
