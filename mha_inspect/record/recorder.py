"""Record a forward pass, by a dispatch mode of torch.

A `TorchDispatchMode` sees every operation of any module, with gradients on or off, on every device. Nothing is hooked,
wrapped or replaced, so what is recorded runs as it runs without the recorder, to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import count, groupby
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import RecordingError
from ..text import plural
from .arguments import tensors_in
from .catalog import ABOUT, About, about, adds_scores
from .ops import Kind, Named, Op, Recording, TensorRef
from .sight import Sight, sight_of
from .site import ATTENTION_FORWARD, RUNNING, ModuleCall, Site, place_of_site, put_on, take_off
from .tensors import DENSE, PLAIN, Look, Tensors, uncollected

_MODULE_CALL = nn.Module._call_impl.__code__
_VIEWS_IN_PLACE = frozenset({"transpose_", "t_", "squeeze_", "unsqueeze_", "detach_"})
"""They give their tensor another shape, and write nothing."""
_NUMBERS = count()
_NONE: dict[str, Any] = {}


Entry = tuple[
    About,
    list[Any],
    dict[str, Any],
    Sequence[Look],
    "Sequence[Look] | None",
    Site,
    int,
    "int | None",
    "Kind | None",
    "Sight | None",
    Any,
]
"""An operation as it is written down while it runs, no more than what would be gone later: what is known of it, its
arguments as `Tensors.note` has them, what came out, what it wrote into that was there (or None), where Python
stood, its call and kernel, its kind (None where the memory tells it), who sees whom in weights that it made, and what a
fused kernel is opened by."""


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

    def __init__(self, root: nn.Module | None = None, *, keep: bool = False) -> None:
        super().__init__()
        self._tensors = Tensors(keep)
        self._look, self._keeps = self._tensors.look, keep
        self._entries: list[Any] = []
        """What was written down since the recording was last asked for: entries, and names with what has them."""
        self._ops: list[Op] = []
        self._place: tuple[Site | None, tuple[str, str]] = None, ("", "")
        """The last site of an operation, and what it is in words."""
        self._inputs: list[Named] = []
        self._parameters: list[Named] = []
        self._buffers: list[Named] = []
        self._sights: dict[int, Sight] = {}
        self._paths: dict[int, tuple[ref[nn.Module], str]] = {}
        self._compiled: list[str] = []
        self._refusals: dict[int, str] = {}
        self._key = f".recorder {next(_NUMBERS)}"
        """The name of the mark in the frame of each call of a module."""
        self._module_calls: dict[int, tuple[ref[_Mark], ModuleCall]] = {}
        """Calls of modules by the addresses of their frames, each with its mark: it holds while that lives."""
        self._site: Site = []
        """Where Python stood at the last operation."""
        self._call = -1
        """Number of the call that the last operation came out of."""
        self._new_call = True
        """Whether the next operation comes out of another call, though Python may stand where it stood."""
        self._whole: set[int] = set()
        """Numbers of calls that are one each, also where the same operations come over and over."""
        self._frame: FrameType | None = None
        """The frame that it was entered in: whatever called that one asked for no operation. None at the end."""
        self._block: object | None = None
        """What tells this block from others in `RUNNING`; None while it is not on."""
        self._thread: int | None = None
        """The thread that entered it last."""
        self._asked: tuple[object, ...] | None = None
        """The blocks in which all that runs was found to belong to this one."""
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
        self._frame, self._block, self._thread = frame, object(), get_ident()
        RUNNING.set((*RUNNING.get(), self._block))
        put_on(self)

    def __exit__(self, *exc: Any) -> None:
        """Stop to record. Raises `RecordingError` in a thread that did not enter it; nothing more is recorded then."""
        block, self._frame, self._asked = self._block, None, None
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
        parameters: dict[int, tuple[str, Tensor]] = {}
        buffers: dict[int, tuple[str, Tensor]] = {}
        for path, module in _modules_of(root, "", {}).values():
            if self._path(module) is None:
                self._paths[id(module)] = ref(module), path
                if _is_compiled(module):
                    self._compiled.append(path)
            start = f"{path}." if path else ""
            for names, tensors in ((parameters, module._parameters), (buffers, module._buffers)):
                for name, tensor in tensors.items():
                    if tensor is not None and id(tensor) not in names and not nn.parameter.is_lazy(tensor):
                        names[id(tensor)] = start + name, tensor
        self._name(self._parameters, parameters.values())
        self._name(self._buffers, buffers.values(), are_constants=True)

    def _name(self, names: list[Named], tensors: Iterable[tuple[str, Tensor]], *, are_constants: bool = False) -> None:
        look = self._tensors.look
        self._entries.append((names, [(name, look(tensor, are_constants)) for name, tensor in tensors]))

    def take_inputs(self, arguments: Mapping[str, Any]) -> None:
        """Note the names of the tensors among the arguments."""
        self._name(self._inputs, tensors_in(arguments))

    def finish(self, returned: Any = None) -> Recording:
        """Return the recording up to here, with the names of what was returned."""
        outputs: list[Named] = []
        self._name(outputs, tensors_in(returned))
        with uncollected():
            self._catch_up()
            self._tell_turns_apart()
        tensors = self._tensors
        return Recording(
            ops=tuple(self._ops),
            inputs=tuple(self._inputs),
            parameters=tuple(self._parameters),
            buffers=tuple(self._buffers),
            scalars=tensors.scalars,
            outputs=tuple(outputs),
            producers=tensors.producers,
            fast_path_refusals=tuple(self._refusals.values()),
            notes=_of_compiled(self._compiled),
            constants=tensors.constants(),
            values=tensors.values,
            sights=self._sights,
        )

    def _catch_up(self) -> None:
        """Make operations of what was written down."""
        entries, self._entries = self._entries, []
        for entry in entries:
            if len(entry) == 2:
                names, looks = entry
                names += [Named(name, self._tensors.read(look)) for name, look in looks]
            elif entry[-1] is None:
                self._add(entry)
            else:
                self._open(entry)

    def _open(self, entry: Entry) -> None:
        """Add the steps of a kernel in its place."""
        self._add(entry)

    def _add(self, entry: Entry) -> Op:
        """Add one operation."""
        known, args, kwargs, made, written, site, call, kernel, kind, sight, _ = entry
        tensors, index = self._tensors, len(self._ops)
        inputs: list[TensorRef] = []
        plain, write, in_place, told = tensors.plain, tensors.write, written is not None, kind is not None
        plain_args = tuple([plain(value, inputs) for value in args])
        plain_kwargs = {name: plain(value, inputs) for name, value in kwargs.items()} if kwargs else {}
        outputs = [write(look, index, inputs, in_place, told) for look in made]
        if written is not None:
            left = [write(look, index, inputs, True, told) for look in written]
            outputs = outputs or left
        if kind is None:
            given = {tensor.storage for tensor in inputs}
            kind = "copy" if known.copies else "compute"
            if outputs and all(output.storage in given for output in outputs):
                kind = "write" if in_place and known.base_name not in _VIEWS_IN_PLACE else "view"
        if site is not self._place[0]:
            self._place = site, place_of_site(site)
        if sight is not None:
            self._sights[outputs[0].id] = sight
        read = tuple(inputs)
        op = Op(
            index,
            known.name,
            plain_args,
            plain_kwargs,
            plain_args if read == plain_args else read,  # one tuple where it may be: there are many
            tuple(outputs),
            kind,
            known.pointwise,
            *self._place[1],
            call,
            kernel,
        )
        self._ops.append(op)
        return op

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and write it down."""
        running = RUNNING.get()
        kwargs = kwargs or {}
        if running is not self._asked and not self._belongs(running):
            return func(*args, **kwargs)
        known = ABOUT.get(id(func)) or about(func)
        if self._inside or (known.needs_care and not (known.adds and not adds_scores(args, kwargs))):
            return self._run_with_care(known, func, args, kwargs or {}, sys._getframe(1))
        look = self._look
        noted = []
        for value in args:
            kind = type(value)
            noted.append(look(value) if kind in DENSE else value if kind in PLAIN else self._tensors.note(value))
        named = {name: self._tensors.note(value) for name, value in kwargs.items()} if kwargs else _NONE
        result = known.run(*args, **kwargs) if kwargs else known.run(*args)
        self._stand(self._asking or sys._getframe(1))
        made = (look(result, False),) if type(result) is Tensor else self._looks(result)
        self._entries.append((known, noted, named, made, None, self._site, self._call, self._kernel, None, None, None))
        if self._keeps:
            self._catch_up()
        return result

    def _run_with_care(
        self, known: About, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Run an operation that may hide several, write into what it is given, or make weights."""
        if known.fused or self._inside:
            answer = self._look_into(known, func, args, kwargs, frame)
            if answer is not NotImplemented:
                return answer
        if known.composite and torch.is_inference_mode_enabled():
            # Without autograd's keys a composite operation arrives whole; with them torch has taken it apart before.
            return self._take_apart(func, args, kwargs, frame)
        note = self._tensors.note
        noted, named = [note(value) for value in args], {name: note(value) for name, value in kwargs.items()}
        written = self._about_to_write(known, args, kwargs) if known.written else None
        result = func(*args, **kwargs)
        self._stand(self._asking or frame)
        sight = self._sight_of(known, args, result) if known.weighs else None
        self._write_down(known, noted, named, result, written, sight=sight)
        return result

    def _looks(self, result: Any) -> Sequence[Look]:
        return [self._look(tensor, False) for _, tensor in tensors_in(result)]

    def _belongs(self, running: tuple[object, ...]) -> bool:
        """Return whether what runs belongs to the code that this is entered around: not after its end, and no task's
        that takes turns with it."""
        if self._frame is None:
            return False
        if self._block in running:
            self._asked = running
            return True
        return get_ident() != self._thread  # one that works for this one

    def _write_down(
        self,
        known: About,
        args: list[Any],
        kwargs: dict[str, Any],
        result: Any,
        written: Sequence[Tensor] | None = None,
        *,
        kind: Kind | None = None,
        sight: Sight | None = None,
        opening: Any = None,
    ) -> None:
        """Write down an operation that has run where Python stands, under the name that `known` has.

        With `kind` given, what came out may lie in memory that was known before; `written` is what it wrote into.
        """
        left = None if written is None else [self._look(tensor, False) for tensor in written]
        made, site = self._looks(result), (self._site, self._call, self._kernel)
        self._entries.append((known, args, kwargs, made, left, *site, kind, sight, opening))
        if self._tensors.keep:
            self._catch_up()

    def _sight_of(self, known: About, args: Sequence[Any], result: Any) -> Sight | None:
        """Return who sees whom in weights, where there are numbers to tell."""
        if isinstance(result, Tensor):
            with self._beside(), suppress(Exception):  # whatever tensors of other kinds may raise
                return sight_of(args[0], result, args[1] if known.base_name.endswith("softmax") else None)
        return None

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run what nobody asked for, unseen by autograd and by the modes around this one."""
        modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
        with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction(), modes:
            yield

    def _look_into(
        self, known: About, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Run what hides several steps in a way of its own; `NotImplemented` where it is recorded as any other."""
        return NotImplemented

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

    def _about_to_write(self, known: About, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors that an operation writes into, after what is kept of their memory was copied."""
        places = [kwargs.get(name, args[place] if place < len(args) else None) for place, name in known.written]
        written = [tensor for _, tensor in tensors_in(places)]
        if self._tensors.keep:
            for tensor in written:
                self._tensors.copy_kept(tensor)
        return written

    # -- where Python stands ------------------------------------------------------------------------------------------

    def _stand(self, frame: FrameType | None) -> None:
        """Note where Python stands, and which call that is: the same as long as it stands there still."""
        site, attention = self._site_of(frame)
        if site != self._site:
            self._site, self._new_call = site, True
            if attention is not None:
                names = attention.f_locals
                self._refusals[id(names["self"])] = names.get("why_not_fast_path", "")
        self._call += self._new_call
        self._new_call = False

    def _site_of(self, frame: FrameType | None) -> tuple[Site, FrameType | None]:
        """Return where a frame stands, and the frame of multi-head attention's forward, if that is beneath it."""
        site: Site = []
        attention = None
        while frame is not None and frame is not self._frame:
            code = frame.f_code
            site += code, frame.f_lasti
            if code is _MODULE_CALL:
                noted = self._module_calls.get(id(frame))
                # The mark lives as long as the call: while it does, no other frame has its address.
                site.append(noted[1] if noted is not None and noted[0]() is not None else self._begin(frame))
                break
            if code is ATTENTION_FORWARD:
                attention = frame
            frame = frame.f_back
        return site, attention

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
        mark = names[self._key] = _Mark()
        call = ModuleCall(path, self._site_of(frame.f_back)[0])
        self._module_calls[id(frame)] = ref(mark), call
        return call

    def identify(self, tensor: Tensor) -> TensorRef:
        """Return what the recording calls this tensor."""
        self._catch_up()
        return self._tensors.read(self._tensors.look(tensor))

    def path_of(self, module: object) -> str:
        """Return the path of a module inside the recorded one; empty for that one itself, and for any other."""
        return self._path(module) or ""

    def _path(self, module: object) -> str | None:
        """Return the path of a module inside of the recorded one; None for one that is not known."""
        known = self._paths.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def _outermost(self, frame: FrameType | None) -> nn.Module:
        """Return the module whose call, of those that are running, began first."""
        outermost = frame
        while frame is not None and frame is not self._frame:
            outermost = frame if frame.f_code is _MODULE_CALL else outermost
            frame = frame.f_back
        assert outermost is not None
        module: nn.Module = outermost.f_locals["self"]
        return module

    def _tell_turns_apart(self) -> None:
        """Give each turn of `for w in ws: x = w @ x` a call number of its own.

        A call is told by where Python stands, and there it stands in every turn. What gives the turns away is that the
        same operations come over and over. The first turn keeps the number.
        """
        for call, group in groupby(self._ops, key=lambda op: op.call):
            ops = list(group)
            if call not in self._whole and len(ops) > 1:
                size = _period([op.name for op in ops])
                for place in range(size, len(ops)):
                    self._call += place % size == 0
                    ops[place].call = self._call
                self._whole.update(op.call for op in ops)
        self._new_call = True


def _period(names: Sequence[str]) -> int:
    """Return the length of what is repeated from the first to the last name; all of it where nothing is."""
    whole = len(names)
    lengths = (size for size in range(1, whole // 2 + 1) if whole % size == 0)
    return next((size for size in lengths if names[size:] == names[:-size]), whole)


def _modules_of(
    module: nn.Module, path: str, modules: dict[int, tuple[str, nn.Module]]
) -> dict[int, tuple[str, nn.Module]]:
    """Add a module and those in it, with their paths, by their ids: `named_modules` in a fifth of its time."""
    modules[id(module)] = path, module
    for name, child in module._modules.items():
        if child is not None and id(child) not in modules:
            _modules_of(child, f"{path}.{name}" if path else name, modules)
    return modules


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
