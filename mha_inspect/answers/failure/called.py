"""Which call of torch raised, and what it was given, read off the traceback of the run that failed.

The frames of a traceback still have their variables, and Python knows which expression of a frame was running. What
that expression gave to the call is worked out once more from the variables: names, attributes, and what torch makes of
them without changing anything. A layer of torch that is called in it is not called again: what it gave is among the
operations that were recorded. An expression that calls anything else (a function of the user's, a random generator) is
not worked out, for that could count, draw or write twice.
"""

from __future__ import annotations

import ast
import builtins
import dis
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    FrameType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name

from ...record.arguments import tensors_in
from ...record.ops import Op, TensorRef
from ...record.recorder import Recorder
from ...record.run import AttemptRecorder
from ...record.source import place_of
from .site import ATTENTION_FORWARDS, entries_inside, entries_of, expression_of, is_own, shows_line
from .witness import Call, name_of

_BINARY: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.MatMult: ("matmul", operator.matmul),
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.Div: ("div", operator.truediv),
    ast.FloorDiv: ("", operator.floordiv),
    ast.Mod: ("", operator.mod),
    ast.Pow: ("", operator.pow),
}
"""Operators, by the method of a tensor that they call where that is known."""
_COMPARED: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Eq: ("__eq__", operator.eq),
    ast.NotEq: ("__ne__", operator.ne),
    ast.Lt: ("__lt__", operator.lt),
    ast.LtE: ("__le__", operator.le),
    ast.Gt: ("__gt__", operator.gt),
    ast.GtE: ("__ge__", operator.ge),
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Invert: operator.invert}
_HARMLESS = {len, int, float, bool, str, min, max, abs, round, range, tuple, list, slice}
_IN_C = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
_CHANGES = (
    "dropout",
    "rand",
    "normal",
    "bernoulli",
    "multinomial",
    "uniform",
    "seed",
    "backward",
    "set_",
    "save",
    "load",
)
"""Parts of names of functions that draw numbers, or change something."""


class _CannotTellError(Exception):
    """An expression cannot be worked out without running what may count, draw or write."""


class _NoCallError(Exception):
    """What was running is no call of torch: Python's own code raised."""


@dataclass(frozen=True)
class Reading:
    """What a traceback tells of the call that raised. It holds tensors: it must not outlive the error."""

    call: Call | None
    """None where the error came from elsewhere."""
    told: bool
    """Whether that is known; where it is not, `call` is None as well."""
    made: tuple[tuple[torch.Tensor, TensorRef], ...] = field(default=())
    """The arguments that were made in the expression itself, and what the recording calls them."""


def read_call(
    error: BaseException, recorder: AttemptRecorder, ops: tuple[Op, ...], *, in_block: bool = False
) -> Reading:
    """The call that raised, read off the error that came out of a recorded run.

    Args:
        error: with its traceback.
        recorder: of the run.
        ops: the operations that were recorded up to the error.
        in_block: whether the run was the body of a `with` block, and not the forward of a module.
    """
    entries = entries_inside(error, in_block=in_block)
    own = [place for place, (frame, _) in enumerate(entries) if is_own(frame)]
    for frame, tb in entries[own[-1] if own else 0 :]:
        if frame.f_code in ATTENTION_FORWARDS:
            return Reading(None, told=True)  # its arguments are those of the module's call
        if not shows_line(frame):
            continue
        try:
            found = _Expression(frame, recorder, ops).call(expression_of(frame, tb))
        except _CannotTellError:
            return Reading(None, told=False)
        except _NoCallError:
            return Reading(None, told=True)
        if found is not None:
            return found
    return Reading(None, told=bool(entries) and _raises(*entries[-1]))


def dispatched(error: BaseException) -> str:
    """The innermost operation that was dispatched when an error was raised in a recorded run; empty without one."""
    code = Recorder.__torch_dispatch__.__code__
    names = [str(frame.f_locals["func"]) for frame, _ in entries_of(error.__traceback__) if frame.f_code is code]
    return names[-1] if names else ""


def _raises(frame: FrameType, tb: TracebackType) -> bool:
    """Whether a frame was at a `raise` or an `assert` of its own, and is not torch's, which was given something."""
    code = frame.f_code.co_code
    if place_of(frame.f_code).file.startswith("torch/"):
        return False
    return 0 <= tb.tb_lasti < len(code) and dis.opname[code[tb.tb_lasti]] == "RAISE_VARARGS"


class _Expression:
    """Works out an expression from the variables of a frame."""

    def __init__(self, frame: FrameType, recorder: AttemptRecorder, ops: tuple[Op, ...]) -> None:
        self._frame, self._recorder, self._ops = frame, recorder, ops
        self._given: list[tuple[torch.Tensor, TensorRef]] = []
        """What stands for the results of layers, and what the recording calls those."""

    def call(self, node: ast.AST | None) -> Reading | None:
        """The call of torch that a node is; None where it is a call of what has a frame of its own.

        Raises:
            _NoCallError: it is nothing that calls torch.
            _CannotTellError: what it was given cannot be worked out.
        """
        if node is None:
            return None
        noted = AttemptRecorder()
        with noted:
            try:
                call = self._call(node)
            except (_CannotTellError, _NoCallError):
                raise
            except Exception as error:  # whatever the code of others may raise
                raise _CannotTellError from error
        if call is None:
            return None
        return Reading(call, told=True, made=(*self._given, *_made(call, noted, self._ops)))

    def _call(self, node: ast.AST) -> Call | None:
        if isinstance(node, (ast.BinOp, ast.AugAssign)):
            left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
            values = (self._value(left), self._value(right))
            name = _BINARY.get(type(node.op), ("", None))[0]
            return _method(f"{name}_" if name and isinstance(node, ast.AugAssign) else name, values)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            values = (self._value(node.left), self._value(node.comparators[0]))
            return _method(_COMPARED.get(type(node.ops[0]), ("", None))[0], values)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            return _method("__getitem__", (self._value(node.value), self._value(node.slice)))
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = self._value(node.value)
            if not isinstance(owner, torch.Tensor) or not hasattr(torch.Tensor, node.attr):
                raise _NoCallError
        if isinstance(node, (ast.UnaryOp, ast.Attribute, ast.Subscript, ast.Compare)):
            raise _CannotTellError
        raise _NoCallError

    def _called(self, node: ast.Call) -> Call | None:
        function, receiver = self._function(node.func)
        name = resolve_name(function)
        if name is None:
            if getattr(function, "__module__", None) == "builtins" or function in _HARMLESS:
                raise _NoCallError
            if isinstance(function, _IN_C):
                raise _CannotTellError
            return None
        args, kwargs = self._arguments(node)
        return Call(function, name_of(function), (*receiver, *args), kwargs)

    def _function(self, node: ast.expr) -> tuple[Any, tuple[Any, ...]]:
        """What is called; a method of a tensor as the method of all tensors, and the tensor."""
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            if isinstance(owner, torch.Tensor) and hasattr(torch.Tensor, node.attr):
                return getattr(torch.Tensor, node.attr), (owner,)
            return self._attribute(owner, node.attr), ()
        return self._value(node), ()

    def _arguments(self, node: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                args += self._value(argument.value)
            else:
                args.append(self._value(argument))
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self._value(keyword.value)
            kwargs |= {keyword.arg: value} if keyword.arg is not None else value
        return tuple(args), kwargs

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            for scope in (self._frame.f_locals, self._frame.f_globals, vars(builtins)):
                if node.id in scope:
                    return scope[node.id]
            raise _NoCallError
        if isinstance(node, ast.Attribute):
            return self._attribute(self._value(node.value), node.attr)
        if isinstance(node, (ast.Tuple, ast.List)):
            items = self._arguments(ast.Call(func=node, args=node.elts, keywords=[]))[0]
            return items if isinstance(node, ast.Tuple) else list(items)
        if isinstance(node, ast.Dict) and None not in node.keys:
            keys = [self._value(key) for key in node.keys if key is not None]
            return dict(zip(keys, map(self._value, node.values), strict=True))
        if isinstance(node, ast.Slice):
            return slice(*(None if part is None else self._value(part) for part in (node.lower, node.upper, node.step)))
        if isinstance(node, ast.Subscript):
            return _of_plain(operator.getitem, self._value(node.value), self._value(node.slice))
        if isinstance(node, ast.BinOp):
            return _of_plain(_BINARY[type(node.op)][1], self._value(node.left), self._value(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
            compare = _COMPARED[type(node.ops[0])][1]
            return _of_plain(compare, self._value(node.left), self._value(node.comparators[0]))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _of_plain(_UNARY[type(node.op)], self._value(node.operand))
        if isinstance(node, ast.Call):
            return self._result(node)
        raise _CannotTellError

    def _result(self, node: ast.Call) -> Any:
        """What a call gives that changes nothing: a function of torch, or one of Python's own."""
        function, receiver = self._function(node.func)
        if isinstance(function, nn.Module) and type(function).__module__.startswith("torch.nn.modules."):
            return self._given_by(function)
        args, kwargs = self._arguments(node)
        name = (resolve_name(function) or "").rpartition(".")[2]
        plain = any(function is harmless for harmless in _HARMLESS) or getattr(function, "__module__", "") == "math"
        pure = name and not name.endswith("_") and not any(part in name for part in _CHANGES)
        if not (plain or pure) or "out" in kwargs or kwargs.get("inplace"):
            raise _CannotTellError
        return function(*receiver, *args, **kwargs)

    def _given_by(self, layer: nn.Module) -> torch.Tensor:
        """A tensor like the one that a layer of torch gave when it was called last; what is in it is not known."""
        path = self._recorder.path_of(layer)
        made = next((op.outputs[0] for op in reversed(self._ops) if op.module == path and op.outputs), None)
        first = next(layer.parameters(), None)
        if not path or made is None or first is None:
            raise _CannotTellError
        like = torch.empty_strided(made.shape, made.stride, dtype=getattr(torch, made.dtype), device=first.device)
        self._given.append((like, made))
        return like

    @staticmethod
    def _attribute(owner: Any, name: str) -> Any:
        if isinstance(owner, (torch.Tensor, ModuleType, nn.Module)) or owner is math:
            if isinstance(getattr(type(owner), name, None), property) and not isinstance(owner, torch.Tensor):
                raise _CannotTellError
            return getattr(owner, name)
        held = getattr(owner, "__dict__", {})
        if name in held or hasattr(type(owner), "__slots__"):
            return held[name] if name in held else getattr(owner, name)
        if callable(getattr(type(owner), name, None)):
            return getattr(owner, name)
        raise _CannotTellError


def _of_plain(function: Callable[..., Any], *values: Any) -> Any:
    """An operator, of tensors and of what Python itself has: any other class may do whatever it likes."""
    if not all(
        isinstance(v, (torch.Tensor, int, float, complex, str, tuple, list, dict, slice, type(None))) for v in values
    ):
        raise _CannotTellError
    return function(*values)


def _method(name: str, values: tuple[Any, ...]) -> Call:
    """A call of a tensor's method by an operator."""
    if not any(isinstance(value, torch.Tensor) for value in values):
        raise _NoCallError
    if not name or not isinstance(values[0], torch.Tensor):
        raise _CannotTellError
    function = getattr(torch.Tensor, name)
    return Call(function, name_of(function), values, {})


def _made(call: Call, noted: AttemptRecorder, ops: tuple[Op, ...]) -> Iterator[tuple[torch.Tensor, TensorRef]]:
    """The tensors among the arguments that were made on the way to the call, by what made them in the run.

    What was worked out here ran there as well, right before the call: the last operations that are alike are the same.
    """
    recording = noted.finish()
    own = [op for op in recording.ops if op.base_name != "empty_strided"]
    names = [op.name for op in own]
    start = len(ops) - len(names)
    while names and start >= 0 and [op.name for op in ops[start : start + len(names)]] != names:
        start -= 1
    if not names or start < 0:
        return
    alike = {op.index: ops[start + place] for place, op in enumerate(own)}
    for _, tensor in tensors_in((call.args, call.kwargs)):
        known = noted.identify(tensor)
        index = recording.producers.get(known.id, -1)
        if index not in alike:
            continue
        place = next((i for i, output in enumerate(recording.ops[index].outputs) if output.id == known.id), None)
        outputs = alike[index].outputs
        if place is not None and place < len(outputs) and outputs[place].shape == known.shape:
            yield tensor, outputs[place]
