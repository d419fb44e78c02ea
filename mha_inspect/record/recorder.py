"""Record a forward pass, by a dispatch mode of torch.

A `TorchDispatchMode` sees every operation of any module, with gradients on or off, on every device. Nothing is hooked,
wrapped or replaced, so what is recorded runs as it runs without the recorder, to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import RecordingError
from ..text import plural
from .arguments import tensors_in
from .ops import RESULT, Kind, Named, Recording, TensorRef
from .replay import Replay, uncollected
from .schema import About, about
from .sight import WEIGHS, sight_of
from .site import ATTENTION_FORWARD, RUNNING, Block, ModuleCall, Site, put_on, take_off
from .storage import Hold, Kept, Looker, Outside, hold_whole

_MODULE_CALL = nn.Module._call_impl.__code__
LINK = About(RESULT, "result", pointwise=False, composite=False, makes_views=False, written=())
_NUMBERS, _MARKS = count(), count(2)
_LARGEST = 1 << 24
"""Elements up to which what came from outside is held on to."""


class _Mark:
    """Lives as long as the call of a module."""

    __slots__ = ("__weakref__",)


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

    def __init__(self, root: nn.Module | None = None, *, keep: bool | Hold = False) -> None:
        super().__init__()
        self._entries: list[Any] = []
        """Entries of operations; names with what is known under them; what tells entries when it is called."""
        self._replay = Replay()
        self._outside: list[Outside] = []
        """What came from outside, but parameters and named inputs; a module that makes a mask may hold it anyhow."""
        self._kept = Kept(hold_whole if keep is True else keep) if keep else None
        self._write_down = Looker(self._kept).write_down
        self._known: dict[int, About] = {}
        self._inputs: list[Named] = []
        self._parameters: list[Named] = []
        self._buffers: list[Named] = []
        self._paths: dict[int, tuple[ref[nn.Module], str]] = {}
        self._compiled: list[str] = []
        self._refusals: dict[int, str] = {}
        self._last_site: Site = []
        self._mark = 1
        self._key = f".recorder {next(_NUMBERS)}"
        """The name of the mark in the frame of each call of a module."""
        self._calls: dict[int, tuple[ref[_Mark], ModuleCall]] = {}
        """Calls of modules by the addresses of their frames, each with its mark: it holds while that lives."""
        self._block: Block | None = None
        """None while it is not on."""
        self._thread: int | None = None
        """The thread that entered it last."""
        self._asked: tuple[Block, ...] | None = None
        """The blocks in which all that runs was found to be asked for by the code that it is entered around."""
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
        self.start(sys._getframe(1))
        return self

    def start(self, frame: FrameType) -> None:
        """Start to record what this thread and context run, in a block that stands in a frame.

        Raises `RecordingError` where it is on already.
        """
        if self._block is not None:
            raise RecordingError("this recording is under way already. Make another one for a block inside of it.")
        running = RUNNING.get()
        self._block, self._thread = Block(frame, running), get_ident()
        RUNNING.set((*running, self._block))
        put_on(self)

    def __exit__(self, *exc: Any) -> None:
        """Stop to record. Raises `RecordingError` in a thread that did not enter it; nothing more is recorded then."""
        block, self._asked = self._block, None
        if block is not None:
            block.frame = None
        if block is None or self._thread != get_ident():
            raise RecordingError(
                "this recording was not entered in the thread that leaves it: torch records by thread. "
                "Enter and leave it in one thread, around what runs there."
            )
        self._block = None
        RUNNING.set(tuple(other for other in RUNNING.get() if other is not block))
        take_off(self)

    def _learn(self, root: nn.Module) -> None:
        """Note the paths of modules, and the names of parameters and buffers."""
        parameters: dict[int, tuple[str, torch.Tensor]] = {}
        buffers: dict[int, tuple[str, torch.Tensor]] = {}
        for path, module in root.named_modules():
            if self._path(module) is None:
                self._paths[id(module)] = ref(module), path
                if _is_compiled(module):
                    self._compiled.append(path)
            start = f"{path}." if path else ""
            for found, own in ((parameters, module._parameters), (buffers, module._buffers)):
                for name, tensor in own.items():
                    if tensor is not None and id(tensor) not in found and not nn.parameter.is_lazy(tensor):
                        found[id(tensor)] = start + name, tensor
        self._entries.append((self._parameters, self._named(parameters.values())))
        self._entries.append((self._buffers, self._named(buffers.values(), self._outside)))

    def _named(self, named: Iterable[tuple[str, torch.Tensor]], outside: list[Outside] | None = None) -> list[Any]:
        """Return a look for each tensor, with its name."""
        pairs = [*named]
        looks = self._write_down([tensor for _, tensor in pairs], outside)
        return [(name, look) for (name, _), look in zip(pairs, looks, strict=True)]

    def take_inputs(self, arguments: Mapping[str, Any]) -> None:
        """Note the names of the tensors among the arguments."""
        self._entries.append((self._inputs, self._named(tensors_in(arguments))))

    def finish(self, returned: Any = None) -> Recording:
        """Return the recording up to here, with the names of what was returned."""
        replay = self._catch_up()
        outputs = tuple(replay.named(self._named(tensors_in(returned))))
        return Recording(
            ops=replay.ops(),
            inputs=tuple(self._inputs),
            parameters=tuple(self._parameters),
            buffers=tuple(self._buffers),
            scalars=replay.scalars,
            outputs=outputs,
            producers=replay.producers,
            fast_path_refusals=tuple(self._refusals.values()),
            notes=_of_compiled(self._compiled),
            constants=self._constants(replay),
            values=replay.release(),
            sights=replay.sights,
        )

    def _constants(self, replay: Replay) -> dict[int, torch.Tensor]:
        """Return what came from outside, was not written since and is still there, by the numbers of the tensors."""
        found = {}
        for look, weak, version in self._outside:
            tensor = weak()
            if tensor is not None and tensor._version == version and tensor.numel() <= _LARGEST:
                found[replay.read(look).id] = tensor.detach()
        return found

    def _catch_up(self) -> Replay:
        """Work out what was written down since the last time."""
        replay, entries = self._replay, self._entries
        self._entries = []
        with uncollected():
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
        running = RUNNING.get()
        if running is not self._asked and not self._is_asked(running, sys._getframe(1)):
            return func(*args, **kwargs) if kwargs else func(*args)
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
        write_down, outside = self._write_down, self._outside
        values = (*args, *kwargs.values()) if kwargs else args
        if known.written:
            given = write_down(values, outside)
            written = self._about_to_write(known, args, kwargs or {})
            result = func(*args, **kwargs) if kwargs else func(*args)
            (made,), left = write_down((result,), None, result), write_down(written)
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
            given, left = write_down((*values, result), outside, result), None
            made = given.pop()
        if known.base_name in WEIGHS:
            made = self._with_sight(known, made, args, result)
        entries = self._entries
        place = len(entries)  # a module that is seen for the first time is told of after its first operation
        site = self._site(self._asking or sys._getframe(1))
        names = tuple(kwargs) if kwargs else ()
        entries.insert(place, (known, given, names, made, left, site, self._mark, None, self._kernel))
        return result

    def _is_asked(self, running: tuple[Block, ...], frame: FrameType) -> bool:
        """Return whether what a frame asks for belongs to the code that this is entered around."""
        block = self._block
        if block is None or block.frame is None or (block not in running and get_ident() == self._thread):
            return False  # after the end; another task
        if block.is_generator and len(running) > 1:
            return block.asks(frame, running)  # or another generator's
        if block in running:  # and no thread that works for this one
            self._asked = running
        return True

    def _log(
        self,
        known: About,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        kind: Kind | None = None,
        written: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Write down an operation that has run already, under the name that `known` has.

        With `kind` given, what came out may lie in memory that was known before; `written` is what it wrote into.
        """
        *given, made = self._write_down((*args, *kwargs.values(), result), self._outside, result)
        left = None if written is None else self._write_down(written)
        if known.base_name in WEIGHS:
            made = self._with_sight(known, made, args, result)
        entries, place = self._entries, len(self._entries)
        site = self._site(self._asking or sys._getframe(1))
        entries.insert(place, (known, given, tuple(kwargs), made, left, site, self._mark, kind, self._kernel))

    def _with_sight(self, known: About, made: Any, args: Sequence[Any], result: Any) -> Any:
        """Return the look at weights with what is noted of who sees whom in them."""
        if not isinstance(made, tuple):
            return made
        dim = args[1] if known.base_name.endswith("softmax") else None
        with self._beside(), suppress(Exception):  # whatever tensors of other kinds may raise
            sight = sight_of(args[0], result, dim)
            return (*made, *(None,) * (7 - len(made)), sight)
        return made

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run what nobody asked for, unseen by autograd and by the modes around this one."""
        modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
        with torch.no_grad(), torch._C.DisableTorchFunction(), modes:
            yield

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

    def _about_to_write(self, known: About, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that an operation writes into, after what is kept of their memory was copied."""
        places = [kwargs.get(name, args[place] if place < len(args) else None) for place, name in known.written]
        written = [tensor for _, tensor in tensors_in(places)]
        if self._kept is not None:
            for look in self._write_down(written):
                self._kept.copy(look)
        return written

    def _site(self, frame: FrameType | None) -> Site:
        """Return where Python stands: the same list as last time where it stands there still."""
        block, calls = self._block, self._calls
        boundary = None if block is None else block.frame
        site: Site = []
        attention = None
        while frame is not None and frame is not boundary:
            code = frame.f_code
            site += code, frame.f_lasti
            if code is _MODULE_CALL:
                noted = calls.get(id(frame))
                # The note lives as long as the call: while it does, no other frame has its address.
                call = noted[1] if noted is not None and noted[0]() is not None else self._begin(frame)
                site.append(call)
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

    def _begin(self, frame: FrameType) -> ModuleCall:
        """Note the call of a module, and leave a mark among the names in its frame, which goes with them.

        A frame has no identity that outlives it: its address is used again, and to hold it would hold its tensors. And
        each look at its names copies all of them.
        """
        names = frame.f_locals
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
        mark = names[self._key] = _Mark()
        call = ModuleCall(path, above)
        self._calls[id(frame)] = ref(mark), call
        return call

    def _ask_for_refusal(self, frame: FrameType) -> None:
        """Note why multi-head attention takes no fast path, in torch's own words."""
        names = frame.f_locals
        self._refusals[id(names["self"])] = names.get("why_not_fast_path", "")

    def identify(self, tensor: torch.Tensor) -> TensorRef:
        """Return what the recording calls this tensor."""
        return self._catch_up().read(self._write_down((tensor,))[0])

    def path_of(self, module: object) -> str:
        """Return the path of a module inside the recorded one; empty for that one itself, and for any other."""
        return self._path(module) or ""

    def _path(self, module: object) -> str | None:
        """Return the path of a module inside of the recorded one; None for one that is not known."""
        known = self._paths.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def _outermost(self, frame: FrameType | None) -> nn.Module:
        """Return the module whose call, of those that are running, began first."""
        found, block = None, self._block
        while frame is not None and (block is None or frame is not block.frame):
            found = frame if frame.f_code is _MODULE_CALL else found
            frame = frame.f_back
        assert found is not None
        module: nn.Module = found.f_locals["self"]
        return module


def _is_compiled(module: nn.Module) -> bool:
    """Return whether what runs of a module are kernels that were fused from its lines (torch.compile)."""
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


def _of_compiled(paths: Sequence[str]) -> tuple[str, ...]:
    """Say what is not seen of modules that are compiled."""
    if not paths:
        return ()
    first = f"Module {paths[0]}" if paths[0] else "The module"
    others = f" and {plural(len(paths) - 1, 'other')} are" if len(paths) > 1 else " is"
    return (
        f"{first}{others} compiled (torch.compile): what a kernel does that was fused from many lines is not seen. "
        "Call what was compiled, its ._orig_mod, or run it before .compile(), to see all of it.",
    )
