"""Record a forward pass with a torch dispatch mode.

A `TorchDispatchMode` sees every operation of any module, with gradients on or off, on every device. The module is not
hooked, wrapped or replaced, so the recorded run computes the same bits as a run without the recorder.

A module of two operations, y = softmax(x · W):

    >>> class TwoSteps(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.W = nn.Parameter(torch.ones(4, 3))
    ...     def forward(self, x):
    ...         return torch.softmax(x @ self.W, dim=-1)
    >>> module, x = TwoSteps(), torch.ones(2, 4)
    >>> with torch.no_grad(), Recorder(module) as recorder:
    ...     recorder.take_inputs({"x": x})
    ...     y = module(x)
    >>> recording = recorder.finish(y)
    >>> for op in recording.ops:
    ...     print(op.name, [tensor.id for tensor in op.inputs], "->", op.output.id, op.output.shape)
    aten.mm.default [1, 0] -> 2 (2, 3)
    aten._softmax.default [2] -> 3 (2, 3)
    >>> [(named.name, named.tensor.id) for named in (*recording.parameters, *recording.inputs, *recording.outputs)]
    [('W', 0), ('x', 1), ('', 3)]
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from threading import get_ident
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import RecordingError
from ..text import plural
from .arguments import tensors_in
from .callers import Callers
from .catalog import ABOUT, About, about, adds_scores
from .ops import Kind, Named, Op, Recording, TensorRef
from .ranks import gathered, runs_on_shapes, wait, wraps
from .sight import Sight, sight_of
from .site import RUNNING, Site, numbers_of_site, place_of_site, put_on, take_off
from .tensors import DENSE, PLAIN, Look, Tensors, uncollected

_VIEWS_IN_PLACE = frozenset({"transpose_", "t_", "squeeze_", "unsqueeze_", "detach_"})
"""In-place operations that change the shape and write no element."""

Entry = tuple[Any, ...]
"""The notes on an operation that cannot be made later: its properties; arguments from `Tensors.note`; results; existing
tensors that it wrote into, or None; its site, call and kernel; its kind, None if that follows from the memory; which
query sees which key in weights that it made, or None; and how to open its fused kernel, or None."""


class Recorder(TorchDispatchMode):
    """The dispatch mode that records each operation of the code in its `with` block."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile compiles without this mode; torch's flex_attention compiles internally."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps __torch_dispatch__ at class creation, and the first operation imports torch._dynamo and
        # sympy, 800 modules that take a second.
        return False

    def __init__(
        self, root: nn.Module | None = None, *, keep: bool = False, room: int | None = None, tables: bool = False
    ) -> None:
        super().__init__()
        self._tensors = Tensors(keep, room, tables=tables)
        self._look, self._keeps = self._tensors.look, keep
        self._entries: list[Any] = []
        """Notes not yet turned into operations: entries, and lists of names with their tensors."""
        self._ops: list[Op] = []
        self._place: tuple[Site | None, tuple[str, str]] = None, ("", "")
        """The last site of an operation, with its line and module path."""
        self._inputs: list[Named] = []
        self._parameters: list[Named] = []
        self._buffers: list[Named] = []
        self._sights: dict[int, Sight] = {}
        self._callers = Callers(self._learn)
        self._lazy: dict[int, tuple[str, Tensor]] = {}
        """Parameters without a shape before the run, which gives them one."""
        self._compiled: list[str] = []
        self._with_compiled_function: list[str] = []
        self.opens_compiled = False
        """Whether the block runs the original code of compiled modules."""
        self._block: object | None = None
        """The identity of this block in `RUNNING`; None outside the block."""
        self._thread: int | None = None
        """The thread that entered the block last."""
        self._accepted: tuple[object, ...] | None = None
        """Cached: the active blocks for which every operation belongs to this recorder; None if not known."""
        self._asking: FrameType | None = None
        """The frame that called the composite operation or kernel whose parts are running; None outside of these."""
        self._kernel: int | None = None
        """Index of the fused kernel that the running operations belong to; None outside a kernel."""
        self._is_rank = False
        """Whether a tensor that is spread over ranks has been seen."""
        self._inside = False
        """Whether a kernel's own code runs: below autograd, where composite operations are not decomposed."""
        if root is not None:
            self._learn(root)

    def __enter__(self) -> Recorder:
        self.start(sys._getframe(1))
        return self

    def start(self, frame: FrameType) -> None:
        """Start to record the operations of this thread and context, in a block that `frame` entered.

        Raises `RecordingError` if this recorder is already recording.
        """
        if self._block is not None:
            raise RecordingError("this recording has already started. Use another recording for a nested block.")
        self._callers.begin, self._block, self._thread = frame, object(), get_ident()
        RUNNING.set((*RUNNING.get(), self._block))
        put_on(self)

    def __exit__(self, *exc: Any) -> None:
        """Stop recording. Raises `RecordingError`, and stops too, in a thread that did not enter the block."""
        block, self._callers.begin, self._accepted = self._block, None, None
        if block is None or self._thread != get_ident():
            raise RecordingError(
                "this recording was entered in another thread, but torch records by thread. "
                "Enter and leave the block in the thread that runs the module."
            )
        self._block = None
        RUNNING.set(tuple(running for running in RUNNING.get() if running is not block))
        take_off(self)

    def _learn(self, root: nn.Module) -> None:
        """Note the paths of all modules below `root`, and the names of their parameters and buffers."""
        parameters: dict[int, tuple[str, Tensor]] = {}
        buffers: dict[int, tuple[str, Tensor]] = {}
        for path, module in root.named_modules():
            if self._callers.path_of(module) is None:
                self._callers.add(module, path)
                if _is_compiled(module):
                    self._compiled.append(path)
                elif _uses_compiled_function(module):
                    self._with_compiled_function.append(path)
            start = f"{path}." if path else ""
            for names, tensors in ((parameters, module._parameters), (buffers, module._buffers)):
                for name, tensor in tensors.items():
                    if tensor is None or id(tensor) in names:
                        continue
                    if nn.parameter.is_lazy(tensor):
                        self._lazy[id(tensor)] = start + name, tensor
                    else:
                        names[id(tensor)] = start + name, tensor
        self._name(self._parameters, parameters.values())
        self._name(self._buffers, buffers.values())

    def _name(self, names: list[Named], tensors: Iterable[tuple[str, Tensor]]) -> None:
        looks = []
        for name, tensor in tensors:
            self._tensors.leave_uncounted(tensor)
            # A parameter that is not trained may be a table of positions.
            looks.append((name, self._tensors.look(tensor, not tensor.requires_grad)))
        self._entries.append((names, looks))

    def take_inputs(self, arguments: Mapping[str, Any]) -> None:
        """Note the names of the tensors in the arguments."""
        self._name(self._inputs, tensors_in(arguments))

    def finish(self, returned: Any = None) -> Recording:
        """Return the recording so far, with `returned` as its named outputs."""
        outputs: list[Named] = []
        self._name(outputs, tensors_in(returned))
        self._name(self._parameters, [named for named in self._lazy.values() if not nn.parameter.is_lazy(named[1])])
        whole: list[tuple[str, Look]] = []
        for module, name, tensor in gathered(module for module, _ in self._callers.modules()):
            path = self._callers.path_of(module)
            whole.append((f"{path}.{name}" if path else name, self._look(tensor, False)))
        with uncollected():
            self._catch_up()
            self._callers.number_turns(self._ops)
        tensors = self._tensors
        if whole:
            self._read_whole({name: tensors.read(look) for name, look in whole})
        hides_compiled = bool(self._compiled or self._with_compiled_function) and not self.opens_compiled
        return Recording(
            ops=tuple(self._ops),
            inputs=tuple(self._inputs),
            parameters=tuple(self._parameters),
            buffers=tuple(self._buffers),
            scalars=tensors.scalars,
            outputs=tuple(outputs),
            producers=tensors.producers,
            fast_path_refusals=tuple(self._callers.refusals.values()),
            notes=(
                *_of_compiled(self._compiled, "compiled", opened=self.opens_compiled),
                *_of_compiled(self._with_compiled_function, "using a compiled function", opened=self.opens_compiled),
            ),
            hides_compiled=hides_compiled,
            constants=tensors.constants(),
            values=tensors.values,
            sights=self._sights,
        )

    def _read_whole(self, whole: Mapping[str, TensorRef]) -> None:
        """Name the parameters that FSDP gathered, which the operations read, instead of the ranks' parts."""
        views: dict[tuple[object, ...], TensorRef] = {}
        for op in self._ops:
            for tensor in op.inputs:
                # The first one: the backward pass makes the same views again.
                views.setdefault(_memory_of(tensor), tensor)
        for place, named in enumerate(self._parameters):
            if named.name not in whole:
                continue
            gathered = whole[named.name]
            tensor = views.get(_memory_of(gathered), gathered)
            self._parameters[place] = Named(named.name, tensor)
            # Its memory is the run's own.
            self._tensors.producers.pop(tensor.id, None)

    def _catch_up(self) -> None:
        """Turn the notes into operations."""
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
        """Add a fused kernel as one operation; a subclass adds its steps."""
        self._add(entry)

    def _add(self, entry: Entry) -> Op:
        """Add one operation, and return it."""
        operator, args, kwargs, results, written, site, call, kernel, kind, sight, _ = entry
        tensors, index = self._tensors, len(self._ops)
        inputs: list[TensorRef] = []
        plain, write = tensors.plain, tensors.write
        in_place, kind_given = written is not None, kind is not None
        plain_args = tuple([plain(value, inputs) for value in args])
        plain_kwargs = {name: plain(value, inputs) for name, value in kwargs.items()} if kwargs else {}
        outputs = [write(look, index, inputs, in_place, kind_given) for look in results]
        if written is not None:
            written_refs = [write(look, index, inputs, True, kind_given) for look in written]
            outputs = outputs or written_refs
        if kind is None:
            kind = _kind_by_memory(operator, inputs, outputs, in_place=in_place)
        if site is not self._place[0]:
            self._place = site, place_of_site(site)
        if sight is not None:
            self._sights[outputs[0].id] = sight
        read = tuple(inputs)
        op = Op(
            index,
            operator.name,
            plain_args,
            plain_kwargs,
            plain_args if read == plain_args else read,  # share the tuple if possible: there are many
            tuple(outputs),
            kind,
            operator.pointwise,
            *self._place[1],
            call,
            kernel,
            numbers_of_site(site),
        )
        self._ops.append(op)
        return op

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and note it."""
        running = RUNNING.get()
        kwargs = kwargs or {}
        if types or self._is_rank:
            if wraps(types):
                self._is_rank = True
                return NotImplemented  # the operations on the rank's own tensors come next
            if self._is_rank and runs_on_shapes(sys._getframe(1)):
                return func(*args, **kwargs)
        if running is not self._accepted and not self._belongs(running):
            return func(*args, **kwargs)
        operator = ABOUT.get(id(func)) or about(func)
        needs_care = operator.needs_care
        if operator.adds:
            # A product plus a tensor is fused only where the tensor may be a mask.
            needs_care = adds_scores(args, kwargs)
        if needs_care or self._inside:
            return self._run_with_care(operator, func, args, kwargs, sys._getframe(1))
        return self._run_plain(operator, args, kwargs, sys._getframe(1))

    def _run_plain(self, operator: About, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Run an operation that writes into no argument and opens no kernel, as nearly all do: it has to be quick."""
        look = self._look
        noted = []
        for value in args:
            kind = type(value)
            if kind in DENSE:
                noted.append(look(value))
            elif kind in PLAIN:
                noted.append(value)
            else:
                noted.append(self._tensors.note(value))
        named = {name: self._tensors.note(value) for name, value in kwargs.items()} if kwargs else kwargs
        result = operator.run(*args, **kwargs) if kwargs else operator.run(*args)
        callers = self._callers
        callers.note(self._asking or frame)
        looks = (look(result, False),) if type(result) is Tensor else self._looks(result)
        self._entries.append(
            (operator, noted, named, looks, None, callers.site, callers.call, self._kernel, None, None, None)
        )
        if self._keeps:
            if operator.name.startswith("_c10d_functional."):
                wait(result)  # a kept tensor is read after the run, or never waited for
            self._catch_up()
        return result

    def _run_with_care(
        self, operator: About, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Run an operation that may be fused or composite, write into its arguments, or make weights."""
        if operator.fused or self._inside:
            answer = self._look_into(operator, func, args, kwargs, frame)
            if answer is not NotImplemented:
                return answer
        if operator.composite and torch.is_inference_mode_enabled():
            # Inference mode lacks autograd's dispatch keys, in which torch otherwise decomposes composite operations.
            return self._decompose(func, args, kwargs, frame)
        note = self._tensors.note
        noted = [note(value) for value in args]
        named = {name: note(value) for name, value in kwargs.items()}
        written = self._about_to_write(operator, args, kwargs) if operator.written else None
        result = func(*args, **kwargs)
        self._callers.note(self._asking or frame)
        sight = self._sight_of(operator, args, result) if operator.weighs else None
        self._note(operator, noted, named, result, written, sight=sight)
        return result

    def _looks(self, result: Any) -> Sequence[Look]:
        return [self._look(tensor, False) for _, tensor in tensors_in(result)]

    def _belongs(self, running: tuple[object, ...]) -> bool:
        """Return whether the running code belongs to the recorded block, rather than to a concurrent task or to code
        after the block's end."""
        if self._callers.begin is None:
            return False
        if self._block in running:
            self._accepted = running
            return True
        return get_ident() != self._thread  # a worker thread of the block

    def _note(
        self,
        operator: About,
        args: list[Any],
        kwargs: dict[str, Any],
        result: Any,
        written: Sequence[Tensor] | None = None,
        *,
        kind: Kind | None = None,
        sight: Sight | None = None,
        opening: Any = None,
    ) -> None:
        """Note an operation that ran at the current site, under the name of `operator`.

        With `kind`, the results may be in memory that already existed; `written` is the tensors that it wrote into.
        """
        written_looks = None if written is None else [self._look(tensor, False) for tensor in written]
        callers = self._callers
        results = self._looks(result)
        self._entries.append(
            (
                operator,
                args,
                kwargs,
                results,
                written_looks,
                callers.site,
                callers.call,
                self._kernel,
                kind,
                sight,
                opening,
            )
        )
        if self._tensors.keep:
            self._catch_up()

    def _sight_of(self, operator: About, args: Sequence[Any], result: Any) -> Sight | None:
        """Return which query sees which key in weights; None if the weights have no numbers."""
        if not isinstance(result, Tensor):
            return None
        dim = args[1] if operator.base_name.endswith("softmax") else None
        with self._unrecorded(), suppress(Exception):  # other kinds of tensors may raise anything
            return sight_of(args[0], result, dim)
        return None

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Run the recorder's own computations, hidden from autograd and from all dispatch modes."""
        modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
        with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction(), modes:
            yield

    def _look_into(
        self, operator: About, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Run and open a fused kernel; return `NotImplemented` if the operation is to be recorded as any other."""
        return NotImplemented

    def _decompose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Run a composite operation as its parts, and record them all at the caller of the whole operation."""
        asking, self._asking = self._asking, self._asking or frame
        views = torch._C.DispatchKey.ADInplaceOrView
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(views)
        # Outside a mode a view requires gradients if its base does, and that decides which kernels a product takes. An
        # operation that makes views itself turns its result into a view when it returns.
        torch._C._dispatch_tls_set_dispatch_key_excluded(views, excluded and about(func).makes_views)
        put_on(self)
        try:
            # Not func.decompose: it prefers Python kernels, which round differently from those of a plain run.
            return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        finally:
            take_off(self)
            torch._C._dispatch_tls_set_dispatch_key_excluded(views, excluded)
            self._asking = asking

    def _about_to_write(self, operator: About, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors that an operation will write into, after copying the kept tensors in their memory."""
        arguments = []
        for place, name in operator.written:
            given = args[place] if place < len(args) else None
            arguments.append(kwargs.get(name, given))
        written = [tensor for _, tensor in tensors_in(arguments)]
        if self._tensors.keep:
            for tensor in written:
                self._tensors.copy_kept(tensor)
        return written

    def identify(self, tensor: Tensor) -> TensorRef:
        """Return the reference of this tensor in the recording."""
        self._catch_up()
        return self._tensors.read(self._tensors.look(tensor))

    def path_of(self, module: object) -> str:
        """Return the path of a module inside the recorded module; empty for that module itself or an unknown one."""
        return self._callers.path_of(module) or ""

    def called(self) -> list[nn.Module]:
        """Return the outermost modules that were called, and still exist."""
        return [module for module, path in self._callers.modules() if not path]


def _memory_of(tensor: TensorRef) -> tuple[object, ...]:
    """Return what two views of the same elements have in common."""
    return tensor.storage, tensor.offset, tensor.shape, tensor.stride


def _kind_by_memory(
    operator: About, inputs: Iterable[TensorRef], outputs: Sequence[TensorRef], *, in_place: bool
) -> Kind:
    """Return the kind of an operation: whether its results are in new memory, or in that of its inputs."""
    storages = {tensor.storage for tensor in inputs}
    shares_memory = bool(outputs) and all(output.storage in storages for output in outputs)
    if not shares_memory:
        return "copy" if operator.copies else "compute"
    writes = in_place and operator.base_name not in _VIEWS_IN_PLACE
    return "write" if writes else "view"


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has compiled a module, which then runs kernels fused from its lines."""
    if "_orig_mod" in module._modules:
        return True
    return vars(module).get("_compiled_call_impl") is not None


def _uses_compiled_function(module: nn.Module) -> bool:
    """Return whether a module has a function from torch.compile, or its forward names one.

    E.g. `flex_attention = torch.compile(flex_attention)` at the top of a file, as torch's pages recommend.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        return False
    for value in _values_near(module):
        if isinstance(value, FunctionType) and "_torchdynamo_orig_callable" in vars(value):
            return True
    return False


def _values_near(module: nn.Module) -> Iterator[Any]:
    """Yield the attributes of a module and of its classes, and the variables that its forward names."""
    yield from vars(module).values()
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        yield from vars(kind).values()
    forward = getattr(type(module), "forward", None)
    if isinstance(forward, FunctionType):  # not a script of torch.jit, which is no Python
        forward = inspect.unwrap(forward)
    if isinstance(forward, FunctionType):
        for name in forward.__code__.co_names:
            yield forward.__globals__.get(name)
        for cell in forward.__closure__ or ():
            if _is_filled(cell):
                yield cell.cell_contents


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the variable has no value yet
        return False
    return True


def _of_compiled(paths: Sequence[str], how: str, *, opened: bool) -> tuple[str, ...]:
    """Return a sentence on the modules that are `compiled` or `using a compiled function`; empty if there are none.

    If they were `opened`, their original code was run; otherwise their operations are not all recorded.
    """
    if not paths:
        return ()
    modules = f"Module {paths[0]}" if paths[0] else "The module"
    if len(paths) == 1:
        modules += " is"
    else:
        modules += f" and {plural(len(paths) - 1, 'other')} are"
    if opened:
        return (f"{modules} {how} (torch.compile). This run used the original Python code.",)
    way = "Run the module before .compile(), or run its ._orig_mod." if how == "compiled" else "Use trace for its code."
    return (f"{modules} {how} (torch.compile), and operations inside compiled kernels cannot be shown. {way}",)
