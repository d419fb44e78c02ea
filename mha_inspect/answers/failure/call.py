"""Where a forward failed, and the call of torch that raised, with the tensors that it was given.

A function mode sees the call while the module is run once more. The body of a `with` block is not run again: there the
frames of the traceback tell the operation that had been dispatched.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from ...record.arguments import tensors_in
from ...record.ops import Recording, TensorRef
from ...record.recorder import Recorder
from ...record.site import place_of

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_MODULE_CALL = nn.Module._call_impl.__code__
_LAYER_FORWARDS = {
    nn.MultiheadAttention.forward.__code__: "nn.MultiheadAttention",
    nn.Transformer.forward.__code__: "nn.Transformer",
}
_PASSES_ON = ("einops/", "mha_inspect/record", "mha_inspect/answers/failure")
_ROLES: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "layer_norm": ("input", "", "weight", "bias"),
    "embedding": ("input", "weight"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask"),
}
"""Names of the arguments by place, for functions of torch that have no signature to ask."""


@dataclass(frozen=True)
class Site:
    """The line that failed. It holds tensors: it must not outlive the error that it was read from."""

    source: str
    line: str
    variables: Mapping[str, torch.Tensor]
    """The tensors among the variables of the user's frame."""
    module: object
    """The innermost module whose forward was running; None without one."""
    by_user: bool
    """Whether the user's own code was the last to run."""
    raises: bool
    """Whether the user's own code raised by a `raise` or an `assert`."""


@dataclass(frozen=True)
class Call:
    """One call of a function of torch. It holds tensors: it must not outlive the error."""

    name: str = ""
    """`torch.matmul`, `Tensor.view`, `F.linear`; `aten.view.default` where only the operation is known."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    layer: nn.Module | None = None
    """torch's own multi-head attention, or transformer, where the call is one of it."""

    @property
    def base(self) -> str:
        """The name without namespace, overload and underscores: `matmul`."""
        return (self.name.split(".")[1] if self.name.startswith("aten.") else self.name.rpartition(".")[2]).strip("_")

    @property
    def batch_first(self) -> bool:
        """Whether it takes the batch first."""
        return bool(getattr(self.layer, "batch_first", True))


def _entries(error: BaseException) -> list[tuple[FrameType, TracebackType]]:
    """Return the frames of an error's traceback, outermost first."""
    entries, tb = [], error.__traceback__
    while tb is not None:
        entries.append((tb.tb_frame, tb))
        tb = tb.tb_next
    return entries


def _entries_inside(error: BaseException, in_block: bool) -> list[tuple[FrameType, TracebackType]]:
    """Return the frames from the first call of a module on; all of them where that was a block."""
    entries = _entries(error)
    calls = [place for place, (frame, _) in enumerate(entries) if frame.f_code is _MODULE_CALL]
    return entries if in_block else entries[calls[0] :] if calls else []


def _file(frame: FrameType) -> tuple[str, bool]:
    """Return the file of a frame as sources show it, empty for code that passes calls on; and whether a library's."""
    path, place = frame.f_code.co_filename, place_of(frame.f_code)
    passes_on = place.file.startswith(_PASSES_ON) or frame.f_code is _MODULE_CALL
    if passes_on or (path.startswith(_STDLIB) and "-packages" not in path):
        return "", True
    return place.file, place.library


def site_of(error: BaseException, *, in_block: bool = False) -> Site | None:
    """Read the traceback of an error that came out of a forward, or of the body of a `with` block.

    Returns None where the forward was not entered: the call itself did not fit its signature.
    """
    entries = _entries_inside(error, in_block)
    bodies = [entry for entry in entries if _file(entry[0])[0]]
    if not bodies:
        return None
    by_user = [entry for entry in bodies if not _file(entry[0])[1]]
    frame, tb = (by_user or bodies)[-1]
    modules = [inside.f_locals["self"] for inside, _ in entries if inside.f_code is _MODULE_CALL]
    is_last = bodies[-1] in by_user
    variables = frame.f_locals if by_user else {}
    return Site(
        source=f"{_file(frame)[0]}:{tb.tb_lineno}",
        line=linecache.getline(frame.f_code.co_filename, tb.tb_lineno).strip(),
        variables={name: value for name, value in variables.items() if isinstance(value, torch.Tensor)},
        module=modules[-1] if modules else None,
        by_user=is_last,
        raises=is_last and dis.opname[frame.f_code.co_code[max(tb.tb_lasti, 0)]] == "RAISE_VARARGS",
    )


class CallWatch(TorchFunctionMode):
    """Notes the call of torch that raised last, and its error."""

    def __init__(self) -> None:
        super().__init__()
        self._raised: tuple[Exception, Call] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the call; note it where it raises."""
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self._raised = error, Call(_name_of(func), tuple(args), kwargs or {})
            raise

    def take(self, error: BaseException) -> Call | None:
        """Return the call that raised an error, and forget it; None where no call of torch did."""
        raised, self._raised = self._raised, None
        return raised[1] if raised is not None and raised[0] is error else None


def _name_of(function: Any) -> str:
    """Return what people call a function of torch: `torch.matmul`, `Tensor.view`, `F.linear`."""
    name = str(resolve_name(function) or getattr(function, "__qualname__", None) or function)
    for long, short in (("torch.nn.functional.", "F."), ("torch.Tensor.", "Tensor."), ("torch.functional.", "torch.")):
        name = short + name[len(long) :] if name.startswith(long) else name
    return name


def dispatched(error: BaseException) -> Call | None:
    """Return the innermost operation that was dispatched when a recorded run raised; None where none was."""
    code = Recorder.__torch_dispatch__.__code__
    frames = [frame.f_locals for frame, _ in _entries(error) if frame.f_code is code]
    return Call(str(frames[-1]["func"]), tuple(frames[-1]["args"]), frames[-1]["kwargs"] or {}) if frames else None


def call_of_layer(error: BaseException, *, in_block: bool) -> Call | None:
    """Return the call of torch's own multi-head attention, or transformer, that an error came out of, the inmost one.

    Its weight is among the arguments, where that is on another device, or of another dtype. None without such a layer.
    """
    frames = [frame for frame, _ in _entries_inside(error, in_block)]
    for before, frame in zip(reversed(frames[:-1]), reversed(frames[1:]), strict=True):
        if frame.f_code in _LAYER_FORWARDS and before.f_code is _MODULE_CALL:
            layer, called = frame.f_locals["self"], before.f_locals
            bound = inspect.signature(layer.forward).bind(*called["args"], **called["kwargs"])
            given = {name: value for name, value in bound.arguments.items() if isinstance(value, torch.Tensor)}
            weight = next(layer.parameters())
            dtypes = {value.dtype for value in given.values() if value.is_floating_point()}
            if {value.device for value in given.values()} - {weight.device} or dtypes - {weight.dtype}:
                given["weight"] = weight
            return Call(_LAYER_FORWARDS[frame.f_code], kwargs=given, layer=layer)
    return None


def tensors_of(call: Call | None, site: Site) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors among the arguments of a call, each with the argument's name, if it has one.

    Without a call those are yielded that the failing line names, where it is the user's.
    """
    if call is None:
        words = dict.fromkeys(re.findall(r"\w+", site.line)) if site.by_user else ()
        yield from (("", site.variables[word]) for word in words if word in site.variables)
        return
    roles = _ROLES.get(call.base, ())
    named = [(roles[place] if place < len(roles) else "", value) for place, value in enumerate(call.args)]
    for role, value in (*named, *call.kwargs.items()):
        yield from ((role, tensor) for _, tensor in tensors_in(value))


def written(recording: Recording, tensor: TensorRef, names: Mapping[int, str], path: str) -> str:
    """Return how a line may write a tensor: `k`, `k.transpose(-2, -1)`, `q_proj(...)`; empty if that is not known.

    `names` are those of tensors by their ids. `path` is that of the module whose line it is: what another module gave
    is a call of that one.
    """
    op = recording.producer(tensor)
    if tensor.id in names or op is None:
        return names.get(tensor.id, "")
    inner = op.module.removeprefix(f"{path}." if path else "")
    if op.module not in ("", path) and inner.count(".") < 2:
        return f"{inner}(...)"
    name = written(recording, op.inputs[0], names, path) if op.inputs else ""
    if name and op.base_name == "_to_copy":
        return f"{name}.to(...)"
    if not name or len(op.inputs) > 1 or not hasattr(torch.Tensor, op.base_name):
        return ""
    settings = (part for arg in op.args[1:] for part in (arg if isinstance(arg, tuple) else (arg,)))
    return f"{name}.{op.base_name}({', '.join(map(str, settings))})"
