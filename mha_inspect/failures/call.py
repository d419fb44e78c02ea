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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, zip_longest
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from ..record.arguments import tensors_in
from ..record.ops import Recording, TensorRef
from ..record.recorder import Recorder
from ..record.site import Place, place_of
from ..running.asserted import asserted_numbers
from ..text import message_of

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
"""The folder of this package."""
_PROGRAMS = os.path.dirname(sys.executable) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_MODULE_CALL = nn.Module._call_impl.__code__
_LAYER_FORWARDS = {
    nn.MultiheadAttention.forward.__code__: "nn.MultiheadAttention",
    nn.Transformer.forward.__code__: "nn.Transformer",
}
_PASSES_ON = ("einops/", "mha_inspect/record", "mha_inspect/failures")
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
    asserted: str = ""
    """The numbers of an assert that failed."""
    called: tuple[str, ...] = ()
    """The arguments of the module that the user's line calls; empty if the error is in the line itself."""
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The tensors that the line gives that module."""
    operands: tuple[str, ...] = ()
    """The source of each operand of the expression that raised; empty if it is not in the line itself."""


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


@dataclass(frozen=True, eq=False)
class _Entry:
    """A frame of a traceback, and where it was."""

    frame: FrameType
    traceback: TracebackType

    @property
    def line(self) -> int:
        """The number of the line."""
        return self.traceback.tb_lineno

    @property
    def calls_module(self) -> bool:
        """Whether this is the call of a module, before its forward."""
        return self.frame.f_code is _MODULE_CALL


def _entries(error: BaseException) -> list[_Entry]:
    """Return the frames of an error's traceback, outermost first."""
    entries, tb = [], error.__traceback__
    while tb is not None:
        entries.append(_Entry(tb.tb_frame, tb))
        tb = tb.tb_next
    return entries


def _entries_inside(error: BaseException, in_block: bool) -> list[_Entry]:
    """Return the frames from the first module call on; for a block, return all frames."""
    entries = _entries(error)
    if in_block:
        return entries
    for place, entry in enumerate(entries):
        if entry.calls_module:
            return entries[place:]
    return []


def _body_of(frame: FrameType) -> Place | None:
    """Return the file of a frame as sources show it, and whether it is a library's; None for forwarding code."""
    path, place = frame.f_code.co_filename, place_of(frame.f_code)
    if place.file.startswith(_PASSES_ON) or frame.f_code is _MODULE_CALL or not place.file:
        return None
    is_of_python = path.startswith(_STDLIB) and "-packages" not in path
    return None if is_of_python else place


def site_of(error: BaseException, *, in_block: bool = False) -> Site | None:
    """Read the traceback of an error from a forward, or from the body of a `with` block.

    Returns None if the forward was not entered because the arguments did not fit its signature.
    """
    entries = _entries_inside(error, in_block)
    places = [(entry, _body_of(entry.frame)) for entry in entries]
    bodies = [(entry, place) for entry, place in places if place is not None]
    if not bodies:
        return None
    by_user = [(entry, place) for entry, place in bodies if not place.library]
    caller = None if by_user else _calling_frame()
    if caller is not None:
        return _site_of_caller(caller, entries)
    innermost, _ = bodies[-1]
    entry, place = by_user[-1] if by_user else bodies[-1]
    is_last = bool(by_user) and entry is innermost
    module = _called_module(entries, entry.frame)
    return Site(
        source=f"{place.file}:{entry.line}",
        line=linecache.getline(entry.frame.f_code.co_filename, entry.line).strip(),
        variables=_tensors_of(entry.frame.f_locals) if by_user else {},
        module=_innermost_module(entries),
        by_user=is_last,
        raises=is_last and _raises(entry),
        missing=_missing(entry, innermost, names_none="NoneType" in message_of(error), is_last=is_last),
        asserted=asserted_numbers(error) if is_last else "",
        called=module.arguments,
        given=module.tensors,
        operands=_sources_of_operands(entry) if is_last else (),
    )


def _tensors_of(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _innermost_module(entries: Sequence[_Entry]) -> object:
    """Return the innermost module that was called; None without one."""
    for entry in reversed(entries):
        if entry.calls_module:
            return entry.frame.f_locals["self"]
    return None


def _raises(entry: _Entry) -> bool:
    """Return whether a frame raised with `raise` or `assert`."""
    return dis.opname[entry.frame.f_code.co_code[max(entry.traceback.tb_lasti, 0)]] == "RAISE_VARARGS"


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


def _site_of_caller(frame: FrameType, entries: Sequence[_Entry]) -> Site:
    """Return the site of an error that was raised in a library's own forward, called by a frame of the user."""
    module = _called_module(entries, None)
    return Site(
        source=f"{place_of(frame.f_code).file}:{frame.f_lineno}",
        line=linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip(),
        variables=_tensors_of(frame.f_locals),
        module=_innermost_module(entries),
        by_user=False,
        raises=False,
        called=module.arguments,
        given=module.tensors,
    )


@dataclass(frozen=True)
class _CalledModule:
    """What a module is called with."""

    arguments: tuple[str, ...] = ()
    """The arguments that its forward takes."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The tensors that it is given, by argument."""


def _called_module(entries: Sequence[_Entry], frame: FrameType | None) -> _CalledModule:
    """Return what a frame calls a module with; nothing if it calls none. Without a frame, the first module is meant."""
    start = next((place for place, entry in enumerate(entries, 1) if entry.frame is frame), 0)
    call = next((entry.frame for entry in entries[start:] if entry.calls_module), None)
    if call is None:
        return _CalledModule()
    try:
        signature = inspect.signature(call.f_locals["self"].forward)
        bound = signature.bind(*call.f_locals["args"], **call.f_locals["kwargs"])
    except (TypeError, ValueError):  # the arguments do not fit, or the forward has no signature
        return _CalledModule()
    return _CalledModule(tuple(signature.parameters), _tensors_of(bound.arguments))


# -- arguments that are None ------------------------------------------------------------------------------------------


def _missing(entry: _Entry, innermost: _Entry, *, names_none: bool, is_last: bool) -> tuple[str, ...]:
    """Return the arguments of a function of the user that are None where the expression that raised uses them.

    Without `names_none` the message is not about None: only an argument that a mask is made of counts. In a library
    (not `is_last`), the error must be about an argument there too, and about the first one of the user's call.
    """
    if not _empty_arguments(entry.frame):
        return ()
    if is_last:
        return _used_empty(entry, _expressions_at(entry), names_none)
    if not _empty_arguments(innermost.frame) or not _used_empty(innermost, _expressions_at(innermost), names_none):
        return ()
    calls = [node for node in _expressions_at(entry) if isinstance(node, ast.Call)]
    return _used_empty(entry, [ast.Tuple(node.args[:1]) for node in calls], names_none)


def _empty_arguments(frame: FrameType) -> list[str]:
    """Return the arguments of a function that are None."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [name for name in names if name in frame.f_locals and frame.f_locals[name] is None]


def _used_empty(entry: _Entry, expressions: Iterable[ast.AST], names_none: bool) -> tuple[str, ...]:
    """Return the arguments of a function that are None and are operands of expressions."""
    used: set[str] = set()
    for node in expressions:
        used.update(_names_of_masks(node))
        if names_none:
            used.update(_operands(node))
    return tuple(name for name in _empty_arguments(entry.frame) if name in used)


def _expressions_at(entry: _Entry) -> list[ast.AST]:
    """Return the nodes of the code that raised, at its columns; none if the file is not Python."""
    code = entry.frame.f_code
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, or nested too deeply
        return []
    _, *span = next(islice(code.co_positions(), entry.traceback.tb_lasti // 2, None))
    nodes: list[ast.AST] = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.expr, ast.stmt)) or node.lineno != entry.line:
            continue
        if [node.end_lineno, node.col_offset, node.end_col_offset] == span:
            nodes.append(node)
    return nodes


def _sources_of_operands(entry: _Entry) -> tuple[str, ...]:
    """Return the source of each operand of the expression that raised: `a + 1` and `b` of `(a + 1) @ b`."""
    for node in _expressions_at(entry):
        if isinstance(node, ast.BinOp):
            return _source_of(node.left), _source_of(node.right)
        if isinstance(node, ast.Call) and not node.keywords:
            operands = [*_tensors_among(node.args)]
            is_method = isinstance(node.func, ast.Attribute) and not _is_of_torch(node.func.value)
            if isinstance(node.func, ast.Attribute) and is_method:
                operands.insert(0, node.func.value)
            return tuple(map(_source_of, operands))
    return ()


def _tensors_among(arguments: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """Yield the arguments that may be tensors: no numbers as written, and what is in a list, as for `torch.cat`."""
    for argument in arguments:
        number = argument.operand if isinstance(argument, ast.UnaryOp) else argument
        if isinstance(argument, (ast.List, ast.Tuple)):
            yield from _tensors_among(argument.elts)
        elif not isinstance(number, ast.Constant):
            yield argument


def _is_of_torch(node: ast.expr) -> bool:
    """Return whether the name before a function is that of a module of torch: `torch`, `torch.nn.functional`, `F`."""
    return ast.unparse(node) in ("torch", "F", "nn.functional", "functional", "torch.nn.functional")


def _source_of(node: ast.expr) -> str:
    """Return the source of an operand, in parentheses if it is an operation."""
    source = ast.unparse(node)
    return f"({source})" if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare)) else source


def _operands(node: ast.AST) -> Iterator[str]:
    """Yield the variables that are operands of an expression: `a` and `c` of `f(a, b.x, key=c)`."""
    for child in ast.iter_child_nodes(node):
        value = child.value if isinstance(child, ast.keyword) else child
        if isinstance(value, ast.Name):
            yield value.id


def _names_of_masks(node: ast.AST) -> Iterator[str]:
    """Yield the variables that a mask is made of: `mask` of `scores.masked_fill(mask == 0, value)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in _TAKE_MASKS:
        return
    for child in ast.iter_child_nodes(node):
        value = child.value if isinstance(child, ast.keyword) else child
        if isinstance(value, ast.Compare):
            yield from _operands(value)


# -- calls of torch ---------------------------------------------------------------------------------------------------


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
        if name.startswith(long):
            name = f"{short}{name.removeprefix(long)}"
    return name


def dispatched(error: BaseException) -> Call | None:
    """Return the innermost operation that was dispatched when a recorded run raised; None without one."""
    code = Recorder.__torch_dispatch__.__code__
    frames = [entry.frame for entry in _entries(error) if entry.frame.f_code is code]
    if not frames:
        return None
    values = frames[-1].f_locals
    return Call(str(values["func"]), tuple(values["args"]), values["kwargs"] or {}, function=values["func"])


def method_of(error: BaseException) -> Call | None:
    """Return the method of a tensor, written in Python, in which an error was raised: `unflatten`; None if none was."""
    frame = _entries(error)[-1].frame
    code = frame.f_code
    method = getattr(torch.Tensor, code.co_name, None)
    if getattr(method, "__code__", None) is not code:
        return None
    args = tuple(frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount])
    return Call(f"Tensor.{code.co_name}", args, function=method)


def call_of_layer(error: BaseException, *, in_block: bool) -> Call | None:
    """Return the innermost call of nn.MultiheadAttention or nn.Transformer in a traceback; None without one.

    The arguments include the weight of the layer if its device or dtype differs from theirs.
    """
    entries = _entries_inside(error, in_block)
    for before, entry in reversed(list(pairwise(entries))):
        if entry.frame.f_code in _LAYER_FORWARDS and before.calls_module:
            values = before.frame.f_locals
            name = _LAYER_FORWARDS[entry.frame.f_code]
            return _call_of(name, entry.frame.f_locals["self"], values["args"], values["kwargs"])
    return None


def _call_of(name: str, layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return a call of a layer, with its weight if a tensor has another device or dtype."""
    arguments = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
    tensors = _tensors_of(arguments)
    weight = next(layer.parameters())
    for value in list(tensors.values()):
        if value.device != weight.device or (value.is_floating_point() and value.dtype != weight.dtype):
            tensors["weight"] = weight
    return Call(name, kwargs=tensors, layer=layer, function=again_of(layer, arguments))


def again_of(layer: nn.Module, arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return a function that runs a layer's forward again, with some arguments replaced.

    None if hooks or modules of the user would run again. If the layer's weight among the arguments was converted, a
    copy of the layer is.
    """
    for module in layer.modules():
        if not type(module).__module__.startswith("torch.nn."):
            return None
        if module is not layer and (module._forward_hooks or module._forward_pre_hooks):
            return None

    def again(**replaced: Any) -> Any:
        weight, weight_of_layer = replaced.pop("weight", None), next(layer.parameters())
        called = layer
        if weight is not None and (weight.dtype, weight.device) != (weight_of_layer.dtype, weight_of_layer.device):
            called = copy.deepcopy(layer).to(weight.device, weight.dtype)
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
    roles = _ROLES.get(call.base, ())[: len(call.args)]
    by_place = zip_longest(roles, call.args, fillvalue="")
    for role, value in (*by_place, *call.kwargs.items()):
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
    if not op.inputs:
        return ""
    name = written(recording, op.inputs[0], names, path)
    if name and op.base_name == "_to_copy":
        return f"{name}.to(...)"
    if not name or len(op.inputs) > 1 or not hasattr(torch.Tensor, op.base_name):
        return ""
    settings: list[str] = []
    for arg in op.args[1:]:
        settings += map(str, arg) if isinstance(arg, tuple) else [str(arg)]
    return f"{name}.{op.base_name}({', '.join(settings)})"
