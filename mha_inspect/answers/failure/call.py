"""Find where a forward failed, and the torch call that raised, with its tensor arguments.

A function mode sees the call while the module runs once more. The body of a `with` block is not run again: the frames
of the traceback show the dispatched operation instead.
"""

from __future__ import annotations

import ast
import copy
import dis
import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from ...record.arguments import tensors_in
from ...record.ops import Recording, TensorRef
from ...record.recorder import Recorder
from ...record.site import place_of
from ...text import message_of
from .compared import compared_numbers

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
"""The folder of this package."""
_PROGRAMS = os.path.dirname(sys.executable) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_MODULE_CALL = nn.Module._call_impl.__code__
_LAYER_FORWARDS = {
    nn.MultiheadAttention.forward.__code__: "nn.MultiheadAttention",
    nn.Transformer.forward.__code__: "nn.Transformer",
}
_PASSES_ON = ("einops/", "mha_inspect/record", "mha_inspect/answers/failure")
_TAKE_MASKS = ("masked_fill", "masked_fill_", "where")
_ROLES: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "layer_norm": ("input", "", "weight", "bias"),
    **dict.fromkeys(("embedding", "conv1d", "conv2d", "conv3d"), ("input", "weight")),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask"),
}
"""Argument names by position, for torch functions without a signature."""


@dataclass(frozen=True)
class Site:
    """The line that failed. It references tensors, so it must not outlive the error."""

    source: str
    line: str
    variables: Mapping[str, torch.Tensor]
    """The tensor variables of the user's frame."""
    module: object
    """The innermost module whose forward was running; None outside of a module."""
    by_user: bool
    """Whether the innermost frame is user code."""
    raises: bool
    """Whether user code raised with `raise` or `assert`."""
    missing: tuple[str, ...] = ()
    """Arguments of the user's function that are None, and that the failing expression uses as values."""
    compared: str = ""
    """Both sides of the comparison of an assert, with their numbers."""
    called: tuple[str, ...] = ()
    """The arguments of the module that the user's line calls; empty if the error is in the line itself."""
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The tensors that the line gives that module."""


@dataclass(frozen=True)
class Call:
    """One call of a torch function. It references tensors, so it must not outlive the error."""

    name: str = ""
    """`torch.matmul`, `Tensor.view`, `F.linear`; `aten.view.default` if only the operation is known."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    layer: nn.Module | None = None
    """The called nn.MultiheadAttention or nn.Transformer; None for other calls."""
    function: Callable[..., Any] | None = None
    """Runs the call again with such arguments; None if it must not run again."""

    @property
    def base(self) -> str:
        """The name without namespace, overload and underscores: `matmul`."""
        return (self.name.split(".")[1] if self.name.startswith("aten.") else self.name.rpartition(".")[2]).strip("_")

    @property
    def batch_first(self) -> bool:
        """Whether the layer takes the batch first."""
        return bool(getattr(self.layer, "batch_first", True))


def _entries(error: BaseException) -> list[tuple[FrameType, TracebackType]]:
    """Return the frames of an error's traceback, outermost first."""
    entries, tb = [], error.__traceback__
    while tb is not None:
        entries.append((tb.tb_frame, tb))
        tb = tb.tb_next
    return entries


def _entries_inside(error: BaseException, in_block: bool) -> list[tuple[FrameType, TracebackType]]:
    """Return the frames from the first module call on; for a block, return all frames."""
    entries = _entries(error)
    calls = [place for place, (frame, _) in enumerate(entries) if frame.f_code is _MODULE_CALL]
    return entries if in_block else entries[calls[0] :] if calls else []


def _file(frame: FrameType) -> tuple[str, bool]:
    """Return the file of a frame as sources show it (empty for forwarding code), and whether it is a library's."""
    path, place = frame.f_code.co_filename, place_of(frame.f_code)
    passes_on = place.file.startswith(_PASSES_ON) or frame.f_code is _MODULE_CALL
    if passes_on or (path.startswith(_STDLIB) and "-packages" not in path):
        return "", True
    return place.file, place.library


def site_of(error: BaseException, *, in_block: bool = False) -> Site | None:
    """Read the traceback of an error from a forward, or from the body of a `with` block.

    Returns None if the forward was not entered because the arguments did not fit its signature.
    """
    entries = _entries_inside(error, in_block)
    bodies = [entry for entry in entries if _file(entry[0])[0]]
    if not bodies:
        return None
    by_user = [entry for entry in bodies if not _file(entry[0])[1]]
    frame, tb = (by_user or bodies)[-1]
    caller = None if by_user else _calling_frame()
    if caller is not None:
        return _site_of_caller(caller, entries)
    modules = [inside.f_locals["self"] for inside, _ in entries if inside.f_code is _MODULE_CALL]
    is_last = bodies[-1] in by_user
    variables = frame.f_locals if by_user else {}
    # In a library, the error is about the first argument if that is None, and the error is about an argument there too.
    names_none = "NoneType" in message_of(error)
    called, given = _called_module(entries, frame)
    ours = is_last or _missing(*bodies[-1], names_none)
    missing = _missing(frame, tb, names_none, only_first=not is_last) if ours else ()
    return Site(
        source=f"{_file(frame)[0]}:{tb.tb_lineno}",
        line=linecache.getline(frame.f_code.co_filename, tb.tb_lineno).strip(),
        variables={name: value for name, value in variables.items() if isinstance(value, torch.Tensor)},
        module=modules[-1] if modules else None,
        by_user=is_last,
        raises=is_last and dis.opname[frame.f_code.co_code[max(tb.tb_lasti, 0)]] == "RAISE_VARARGS",
        missing=missing,
        compared=compared_numbers(frame, tb.tb_lineno) if is_last and isinstance(error, AssertionError) else "",
        called=called,
        given=given,
    )


def _calling_frame() -> FrameType | None:
    """Return the innermost frame of the user's files that is running, e.g. one that calls `trace`; None without one.

    Files of installed packages, of Python and of this package are not the user's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_of_user(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def _is_of_user(path: str) -> bool:
    """Return whether a file is a source of the user: no installed package, no program, no part of Python."""
    if not os.path.isfile(path) or path.startswith((_HERE, _STDLIB, _PROGRAMS)):
        return False
    return "-packages" + os.sep not in path


def _site_of_caller(frame: FrameType, entries: Sequence[tuple[FrameType, TracebackType]]) -> Site:
    """Return the site of an error that was raised in a library's own forward, called by a frame of the user."""
    modules = [inside.f_locals["self"] for inside, _ in entries if inside.f_code is _MODULE_CALL]
    called, given = _called_module(entries, None)
    return Site(
        source=f"{place_of(frame.f_code).file}:{frame.f_lineno}",
        line=linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip(),
        variables={name: value for name, value in frame.f_locals.items() if isinstance(value, torch.Tensor)},
        module=modules[-1] if modules else None,
        by_user=False,
        raises=False,
        called=called,
        given=given,
    )


def _called_module(
    entries: Sequence[tuple[FrameType, TracebackType]], frame: FrameType | None
) -> tuple[tuple[str, ...], dict[str, torch.Tensor]]:
    """Return the arguments of the module that a frame calls, and the tensors among them; empty if it calls none.

    Without a frame, the first module is meant.
    """
    place = next((place for place, entry in enumerate(entries) if entry[0] is frame), -1)
    call = next((inside for inside, _ in entries[place + 1 :] if inside.f_code is _MODULE_CALL), None)
    if call is None:
        return (), {}
    try:
        signature = inspect.signature(call.f_locals["self"].forward)
        bound = signature.bind(*call.f_locals["args"], **call.f_locals["kwargs"])
    except (TypeError, ValueError):  # the arguments do not fit, or the forward has no signature
        return (), {}
    tensors = {name: value for name, value in bound.arguments.items() if isinstance(value, torch.Tensor)}
    return tuple(signature.parameters), tensors


def _missing(frame: FrameType, tb: TracebackType, names_none: bool, *, only_first: bool = False) -> tuple[str, ...]:
    """Return the arguments of a function that are None and are operands of the expression that raised.

    Without `names_none` the message is not about None: only an argument that a mask is made of counts. With
    `only_first` only the first argument of a call counts.
    """
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    empty = [name for name in names if frame.f_locals.get(name, frame) is None]
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename))) if empty else ast.Module([], [])
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, or nested too deeply
        return ()
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.expr, ast.stmt)) and node.lineno == tb.tb_lineno]
    _, *span = next(islice(code.co_positions(), tb.tb_lasti // 2, None))
    nodes = [node for node in nodes if [node.end_lineno, node.col_offset, node.end_col_offset] == span]
    if only_first:
        nodes = [ast.Tuple(node.args[:1]) for node in nodes if isinstance(node, ast.Call)]
    used = {name for node in nodes for name, is_masks in _operands(node) if is_masks or names_none}
    return tuple(name for name in empty if name in used)


def _operands(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the variables that an expression uses, and whether a mask is made of it: `fill(mask == 0, value)`."""
    fills = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TAKE_MASKS
    for child in ast.iter_child_nodes(node):
        value = child.value if isinstance(child, ast.keyword) else child
        if isinstance(value, ast.Name):
            yield value.id, False
        elif fills and isinstance(value, ast.Compare):
            yield from ((name, True) for name, _ in _operands(value))


class CallWatch(TorchFunctionMode):
    """Remembers the last torch call that raised, and its error."""

    def __init__(self) -> None:
        super().__init__()
        self._raised: tuple[Exception, Call] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call, and remember it if it raises."""
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self._raised = error, Call(_name_of(func), tuple(args), kwargs or {}, function=func)
            raise

    def take(self, error: BaseException) -> Call | None:
        """Return the call that raised an error, and forget it; None if no torch call raised it."""
        raised, self._raised = self._raised, None
        return raised[1] if raised is not None and raised[0] is error else None


def _name_of(function: Any) -> str:
    """Return the usual name of a torch function: `torch.matmul`, `Tensor.view`, `F.linear`."""
    name = str(resolve_name(function) or getattr(function, "__qualname__", None) or function)
    called = getattr(function, "__name__", "")
    if name.startswith("torch.") and getattr(torch, called, None) is function:
        name = f"torch.{called}"  # an alias may be found first: torch.spmm is torch.mm
    for long, short in (("torch.nn.functional.", "F."), ("torch.Tensor.", "Tensor."), ("torch.functional.", "torch.")):
        name = short + name[len(long) :] if name.startswith(long) else name
    return name


def dispatched(error: BaseException) -> Call | None:
    """Return the innermost operation that was dispatched when a recorded run raised; None without one."""
    code = Recorder.__torch_dispatch__.__code__
    frames = [frame.f_locals for frame, _ in _entries(error) if frame.f_code is code]
    if not frames:
        return None
    func = frames[-1]["func"]
    return Call(str(func), tuple(frames[-1]["args"]), frames[-1]["kwargs"] or {}, function=func)


def method_of(error: BaseException) -> Call | None:
    """Return the method of a tensor, written in Python, in which an error was raised: `unflatten`; None if none was."""
    frame = _entries(error)[-1][0]
    code = frame.f_code
    method = getattr(torch.Tensor, code.co_name, None)
    is_method = getattr(method, "__code__", None) is code
    args = tuple(frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount])
    return Call(f"Tensor.{code.co_name}", args, function=method) if is_method else None


def call_of_layer(error: BaseException, *, in_block: bool) -> Call | None:
    """Return the innermost call of nn.MultiheadAttention or nn.Transformer in a traceback; None without one.

    The arguments include the weight of the layer if its device or dtype differs from theirs.
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
            again = again_of(layer, bound.arguments)
            return Call(_LAYER_FORWARDS[frame.f_code], kwargs=given, layer=layer, function=again)
    return None


def again_of(layer: nn.Module, arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return a function that runs a layer's forward again, with some arguments replaced.

    None if hooks or modules of the user would run again. If the layer's weight among the arguments was converted, a
    copy of the layer is.
    """
    inside = [*layer.modules()]
    is_torchs = all(type(each).__module__.startswith("torch.nn.") for each in inside)
    has_hooks = any(each._forward_hooks or each._forward_pre_hooks for each in inside if each is not layer)
    if not is_torchs or has_hooks:
        return None

    def again(**replaced: Any) -> Any:
        weight, own = replaced.pop("weight", None), next(layer.parameters())
        is_converted = weight is not None and (weight.dtype, weight.device) != (own.dtype, own.device)
        called = copy.deepcopy(layer).to(weight.device, weight.dtype) if is_converted else layer
        return called.forward(**{**arguments, **replaced})

    return again


def tensors_of(call: Call | None, site: Site) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensor arguments of a call, each with the name of its argument (empty if unknown).

    Without a call, yield the tensors that the failing line of user code names.
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
    """Return source code for a tensor: `k`, `k.transpose(-2, -1)`, `q_proj(...)`; empty if unknown.

    `names` maps tensor ids to names. `path` is the module of the line; the output of another module is written as a
    call of that module, unless it is still running: its output does not exist yet.
    """
    op = recording.producer(tensor)
    if tensor.id in names or op is None:
        return names.get(tensor.id, "")
    is_running = path.startswith(f"{op.module}.")
    inner = op.module.removeprefix(f"{path}." if path else "")
    if op.module not in ("", path) and not is_running and inner.count(".") < 2:
        return f"{inner}(...)"
    name = written(recording, op.inputs[0], names, path) if op.inputs else ""
    if name and op.base_name == "_to_copy":
        return f"{name}.to(...)"
    if not name or len(op.inputs) > 1 or not hasattr(torch.Tensor, op.base_name):
        return ""
    settings = (part for arg in op.args[1:] for part in (arg if isinstance(arg, tuple) else (arg,)))
    return f"{name}.{op.base_name}({', '.join(map(str, settings))})"
