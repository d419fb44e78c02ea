"""Record a forward pass: the only user of torch's dispatch modes.

A `TorchDispatchMode` sees every operation of any module, with gradients on or off, on every device. Nothing is hooked,
wrapped or replaced, so what is recorded runs as it runs without the recorder, to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import RecordingError
from .arguments import argument_names, tensors_in
from .catalog import about, does
from .ops import Kind, Named, Op, Recording, TensorRef
from .source import ATTENTION_FORWARD, line_of
from .storage import Storage, identity, owner_of
from .turns import tell_turns_apart

_MODULE_CALL = nn.Module._call_impl.__code__
_PLAIN = frozenset({type(None), bool, int, float, complex, str})


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


@contextmanager
def opened() -> Iterator[None]:
    """Let torch run attention step by step: neither the fused fast path nor a fused scaled-dot-product kernel.

    Both settings are put back on the way out, also when the body raises.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


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
        self._ops: list[Op] = []
        self._storages: dict[int, Storage] = {}
        self._producers: dict[int, int] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._kept_in: dict[int, list[int]] = {}
        self._inputs: list[Named] = []
        self._parameters: list[Named] = []
        self._buffers: list[Named] = []
        self._scalars: dict[int, float] = {}
        self._paths: dict[int, str] = {}
        self._refusals: dict[int, str] = {}
        self._next_tensor = 0
        self._next_storage = 0
        self._call: tuple[list[Any], int] = ([], -1)
        self.boundary: FrameType | None = None
        """The frame that the block stands in: whatever called that one did not ask for the operations."""
        self._asking: FrameType | None = None
        """The frame that asked for the composite operation that is being taken apart."""
        if root is not None:
            self._learn(root)

    def __enter__(self) -> Recorder:
        self.boundary = sys._getframe(1)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.boundary = None
        super().__exit__(*exc)

    def _learn(self, root: nn.Module) -> None:
        """Note the paths of modules, and the names of parameters and buffers."""
        for path, module in root.named_modules():
            _require_eager(module, path)
            self._paths.setdefault(id(module), path)
        for name, parameter in root.named_parameters():
            if not nn.parameter.is_lazy(parameter):
                self._parameters.append(Named(name, self._read(parameter)))
        self._buffers += [Named(name, self._read(buffer)) for name, buffer in root.named_buffers()]

    def take_inputs(self, arguments: Mapping[str, Any]) -> None:
        """Note the names of the tensors among the arguments."""
        self._inputs += [Named(name, self._read(tensor)) for name, tensor in tensors_in(arguments)]

    def finish(self, returned: Any = None) -> Recording:
        """The recording up to here, with the names of what was returned."""
        outputs = tuple(Named(name, self._read(tensor)) for name, tensor in tensors_in(returned))
        return Recording(
            ops=tuple(tell_turns_apart(self._ops)),
            inputs=tuple(self._inputs),
            parameters=tuple(self._parameters),
            buffers=tuple(self._buffers),
            scalars=self._scalars,
            outputs=outputs,
            producers=self._producers,
            fast_path_refusals=tuple(self._refusals.values()),
            values=self._values,
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and write it down."""
        kwargs = kwargs or {}
        known = about(func)
        if known.composite and torch.is_inference_mode_enabled():
            # Without autograd's keys a composite operation arrives whole; with them torch has taken it apart before.
            return self._take_apart(func, args, kwargs, sys._getframe(1))
        inputs: list[TensorRef] = []
        plain_args = tuple([self._plain(arg, inputs) for arg in args])
        plain_kwargs = {name: self._plain(arg, inputs) for name, arg in kwargs.items()}
        written = [kwargs.get(name, args[place] if place < len(args) else None) for place, name in known.written]
        if written and self._keep:
            self._preserve(written)
        result = func(*args, **kwargs)
        index = len(self._ops)
        storages = {tensor.storage: tensor for tensor in inputs}
        if isinstance(result, torch.Tensor):
            outputs = [self._write(result, index, storages, bool(written))]
        else:
            outputs = [self._write(tensor, index, storages, bool(written)) for _, tensor in tensors_in(result)]
        if written:
            left = [self._write(tensor, index, storages, True) for _, tensor in tensors_in(written)]
            outputs = outputs or left
        source, module, call = self._where(self._asking or sys._getframe(1))
        kind: Kind = "copy" if does(known.base_name, "copies") else "compute"
        if outputs and all(output.storage in storages for output in outputs):
            kind = "write" if written else "view"
        self._ops.append(
            Op(
                index=index,
                name=known.name,
                args=plain_args,
                kwargs=plain_kwargs,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                kind=kind,
                pointwise=known.pointwise,
                source=source,
                module=module,
                call=call,
            )
        )
        return result

    def _take_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Run a composite operation as what it consists of, all of it asked for by the one who asked for the whole."""
        asking, self._asking = self._asking, self._asking or frame
        views = torch._C.DispatchKey.ADInplaceOrView
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(views)
        # Outside of a mode a view requires gradients where its base does, and that decides which kernels a product
        # takes. What comes out of an operation that makes views itself is made one on the way out.
        torch._C._dispatch_tls_set_dispatch_key_excluded(views, excluded and about(func).makes_views)
        super().__enter__()
        try:
            # Not func.decompose: it prefers Python's kernels, which round otherwise than those of a plain run.
            return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        finally:
            super().__exit__(None, None, None)
            torch._C._dispatch_tls_set_dispatch_key_excluded(views, excluded)
            self._asking = asking

    def _plain(self, value: Any, inputs: list[TensorRef]) -> Any:
        """The argument as plain data; tensors in it are added to `inputs`."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            tensor = self._read(value)
            inputs.append(tensor)
            return tensor
        if isinstance(value, (list, tuple)):
            return tuple([self._plain(item, inputs) for item in value])
        return value if isinstance(value, (int, float, complex, str)) else str(value)

    def _read(self, tensor: torch.Tensor) -> TensorRef:
        """The identity of a tensor as it is now."""
        address, key = identity(tensor)
        storage = self._find(tensor, address)
        if storage is None:
            storage = self._add_storage(tensor, address, None)
        seen = storage.seen.get(key)
        if seen is not None and seen[1] == storage.version:
            return seen[0]
        # Written since through another view, or never seen: its content is what the last writer of this memory left.
        return self._new(tensor, key, storage, storage.made_by)

    def _write(self, tensor: torch.Tensor, index: int, inputs: Mapping[int, TensorRef], in_place: bool) -> TensorRef:
        """The identity of a tensor that operation `index` has just returned; `inputs` are its own, by storage."""
        address, key = identity(tensor)
        storage = self._find(tensor, address)
        if storage is None or not (storage.number in inputs or storage.made_by == index):
            storage = self._add_storage(tensor, address, index)
        elif in_place and storage.made_by != index:
            storage.version += 1
            storage.made_by = index
        else:
            seen = storage.seen.get(key)
            if seen is not None and seen[1] == storage.version:
                unchanged = seen[0] is inputs.get(storage.number)  # a view that changes nothing
                if unchanged or self._producers.get(seen[0].id) == index:  # or what it wrote, returned as well
                    return seen[0]
        return self._new(tensor, key, storage, index)

    def _find(self, tensor: torch.Tensor, address: int) -> Storage | None:
        """What is known of the memory of a tensor."""
        storage = self._storages.get(address)
        reused = storage is not None and isinstance(storage.owner, ref) and storage.owner() is not tensor
        return None if reused else storage

    def _add_storage(self, tensor: torch.Tensor, address: int, made_by: int | None) -> Storage:
        storage = self._storages[address] = Storage(self._next_storage, made_by, owner_of(tensor))
        self._next_storage += 1
        return storage

    def _new(self, tensor: torch.Tensor, key: tuple[Any, ...], storage: Storage, made_by: int | None) -> TensorRef:
        made = TensorRef(
            id=self._next_tensor,
            shape=key[1],
            stride=key[2],
            offset=key[0],
            dtype=str(tensor.dtype).removeprefix("torch."),
            itemsize=tensor.element_size(),
            storage=storage.number,
        )
        self._next_tensor += 1
        storage.seen[key] = (made, storage.version)
        if made_by is not None:
            self._producers[made.id] = made_by
        if not made.shape and tensor.device.type == "cpu" and tensor.dtype.is_floating_point:
            with suppress(RuntimeError):  # a tensor without memory: a zero of forward-mode gradients, a fake one
                self._scalars[made.id] = tensor.item()
        if self._keep:
            self._values[made.id] = tensor.detach()
            self._kept_in.setdefault(storage.number, []).append(made.id)
        return made

    def _preserve(self, written: Sequence[Any]) -> None:
        """Copy the kept tensors whose memory is about to be written."""
        for _, tensor in tensors_in(written):
            storage = self._storages.get(identity(tensor)[0])
            for kept in self._kept_in.pop(storage.number, []) if storage is not None else []:
                self._values[kept] = self._values[kept].clone()

    def _where(self, frame: FrameType | None) -> tuple[str, str, int]:
        """The line that asked for the operation, the module it runs in, and the number of the call it belongs to."""
        innermost, source, library, module = frame, "", "", None
        stack: list[Any] = []
        boundary = self.boundary
        while frame is not None and frame is not boundary:
            code = frame.f_code
            stack += (code, frame.f_lasti)
            if not source:
                line = line_of(frame)
                if not line.library:
                    source = line.text
                elif not library:
                    library = line.text
            if code is _MODULE_CALL and module is None:
                module = frame.f_locals["self"]
            elif code is ATTENTION_FORWARD:
                called = frame.f_locals
                self._refusals[id(called["self"])] = called.get("why_not_fast_path", "")
            frame = frame.f_back
        path = ""
        if module is not None:
            stack.append(id(module))
            if id(module) not in self._paths:
                self._learn(self._outermost(innermost))
            path = self._paths.setdefault(id(module), "")  # one that is part of no other
        if stack != self._call[0]:
            self._call = (stack, self._call[1] + 1)
        return source or library, path, self._call[1]

    def _outermost(self, frame: FrameType | None) -> nn.Module:
        """The module whose call, of those that are running, began first."""
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
