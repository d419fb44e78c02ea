"""The call of torch that an expression of a frame makes, worked out from the frame's variables.

Names, attributes, and what torch makes of them without changing anything are worked out. A layer, or a function of the
user's, is not called again: what it gave is among the operations that were recorded. What even that does not tell stays
unknown.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name

from ...record.arguments import tensors_in
from ...record.ops import Op, TensorRef
from ...record.recorder import Recorder
from ...record.site import place_of
from .site import evaluated, is_own, parsed, text_of

_OPERATORS: dict[type[ast.AST], tuple[str, Callable[..., Any]]] = {
    ast.MatMult: ("matmul", operator.matmul),
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.Div: ("div", operator.truediv),
    ast.FloorDiv: ("", operator.floordiv),
    ast.Mod: ("", operator.mod),
    ast.Pow: ("", operator.pow),
    ast.Eq: ("__eq__", operator.eq),
    ast.NotEq: ("__ne__", operator.ne),
    ast.Lt: ("__lt__", operator.lt),
    ast.LtE: ("__le__", operator.le),
    ast.Gt: ("__gt__", operator.gt),
    ast.GtE: ("__ge__", operator.ge),
    ast.Subscript: ("__getitem__", operator.getitem),
    ast.USub: ("", operator.neg),
    ast.Invert: ("", operator.invert),
}
"""Operators, with the method of a tensor that they call where that is known."""
_HARMLESS = {len, int, float, bool, str, min, max, abs, round, range, tuple, list, slice}
_PLAIN = (torch.Tensor, int, float, complex, str, tuple, list, dict, slice, type(None))
_DRAWS = ("dropout", "rand", "normal", "bernoulli", "multinomial", "uniform")
_CHANGES = ("seed", "backward", "set_", "save", "load")
"""Parts of names of functions that draw numbers, and of those that change something."""


class CannotTellError(Exception):
    """An expression cannot be worked out without running what may count, draw or write."""


class NoCallError(Exception):
    """What was running is no call of torch: Python's own code raised."""


class _Unknown:
    """Stands for an argument that cannot be told."""


@dataclass(frozen=True)
class Call:
    """One call of a function of torch."""

    name: str
    """`torch.matmul`, `Tensor.view`, `F.linear`; `aten.view.default` where only the operation is known."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    texts: dict[int | str, str] = field(default_factory=dict)
    """How the expression writes its arguments, by place or name."""

    @property
    def base(self) -> str:
        """The name without namespace, overload and underscores: `matmul`."""
        return (self.name.split(".")[1] if self.name.startswith("aten.") else self.name.rpartition(".")[2]).strip("_")

    @property
    def whole(self) -> bool:
        """Whether every argument is known."""
        return not any(isinstance(value, _Unknown) for value in (*self.args, *self.kwargs.values()))

    @property
    def settings(self) -> tuple[Any, ...]:
        """The arguments by place that are no tensors, as far as they are known."""
        return tuple(value for value in self.args if not isinstance(value, (torch.Tensor, _Unknown)))


@dataclass(frozen=True)
class Reading:
    """What a traceback tells of the call that raised. It holds tensors: it must not outlive the error."""

    call: Call | None
    """None where the error came from elsewhere, or nothing is known of the call."""
    told: bool
    """Whether it is known which call raised, if any did, with all that it was given."""
    made: tuple[tuple[torch.Tensor, TensorRef], ...] = ()
    """The arguments that were made in the expression itself, and what the recording calls them."""
    layer: nn.Module | None = None
    """torch's own multi-head attention, or transformer, where the call is one of it."""


class Expression:
    """Works out an expression from the variables of a frame."""

    def __init__(self, frame: FrameType, line: str, recorder: Recorder, ops: tuple[Op, ...]) -> None:
        self._frame, self._line, self._recorder, self._ops = frame, line, recorder, ops
        self._root: ast.AST | None = None
        self._given: list[tuple[torch.Tensor, TensorRef]] = []
        """What stands for the results of layers and functions, and what the recording calls those."""

    def call(self, node: ast.AST | None) -> Reading | None:
        """Return the call of torch that a node is; None where it is a call of what has a frame of its own.

        Raises:
            NoCallError: it is nothing that calls torch.
            CannotTellError: what is called cannot be worked out.
        """
        if node is None:
            return None
        self._root, noted = node, Recorder()
        with noted:
            try:
                call = self._call(node)
            except (CannotTellError, NoCallError):
                raise
            except Exception as error:  # whatever the code of others may raise
                raise CannotTellError from error
        if call is None:
            return None
        if not is_own(self._frame):
            call = replace(call, texts={})
        return Reading(call, told=call.whole, made=(*self._given, *_made(call, noted, self._ops)))

    def _call(self, node: ast.AST) -> Call | None:
        if isinstance(node, ast.Call):
            return self._called(node)
        if (found := _operation(node)) is not None and not isinstance(node, ast.UnaryOp):
            (name, _), operands = found
            texts: dict[int | str, str] = dict(
                enumerate(map(text_of, operands if name != "__getitem__" else operands[:1]))
            )
            values = tuple(map(self._known, operands))
            tensors = [isinstance(value, torch.Tensor) for value in values]
            unknown = [isinstance(value, _Unknown) for value in values]
            if not any(tensors) and not any(unknown):
                raise NoCallError
            if not name or not any(tensors) or not (tensors[0] or unknown[0]):
                raise CannotTellError
            name += "_" * isinstance(node, ast.AugAssign)
            return Call(name_of(getattr(torch.Tensor, name)), values, texts=texts)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = self._value(node.value)
            if not isinstance(owner, torch.Tensor) or not hasattr(torch.Tensor, node.attr):
                raise NoCallError
        if isinstance(node, (ast.UnaryOp, ast.Attribute, ast.Subscript, ast.Compare)):
            raise CannotTellError
        raise NoCallError

    def _called(self, node: ast.Call) -> Call | None:
        function, receiver = self._function(node.func)
        if getattr(function, "__module__", None) == "builtins":
            raise NoCallError
        if resolve_name(function) is None:
            if inspect.isroutine(function) and not (inspect.isfunction(function) or inspect.ismethod(function)):
                raise CannotTellError  # what is written in C has no frame
            return None
        args, kwargs = self._arguments(node, self._known)
        written = [node.func.value] if receiver and isinstance(node.func, ast.Attribute) else []
        written += [] if any(isinstance(arg, ast.Starred) for arg in node.args) else node.args
        texts: dict[int | str, str] = {place: text_of(tree) for place, tree in enumerate(written)}
        texts |= {keyword.arg: text_of(keyword.value) for keyword in node.keywords if keyword.arg}
        return Call(name_of(function), (*receiver, *args), kwargs, texts)

    def _function(self, node: ast.expr) -> tuple[Any, tuple[Any, ...]]:
        """Return what is called; a method of a tensor as the method of all tensors, and the tensor."""
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            if isinstance(owner, torch.Tensor) and hasattr(torch.Tensor, node.attr):
                return getattr(torch.Tensor, node.attr), (owner,)
            return _attribute(owner, node.attr), ()
        return self._value(node), ()

    def _arguments(self, node: ast.Call, value: Callable[[ast.expr], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        for argument in node.args:
            args += self._value(argument.value) if isinstance(argument, ast.Starred) else [value(argument)]
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            kwargs |= self._value(keyword.value) if keyword.arg is None else {keyword.arg: value(keyword.value)}
        return tuple(args), kwargs

    def _known(self, node: ast.expr) -> Any:
        """Return the value of an argument; an `_Unknown` where it cannot be told."""
        try:
            return self._value(node)
        except CannotTellError:
            return _Unknown()

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            for scope in (self._frame.f_locals, self._frame.f_globals, vars(builtins)):
                if node.id in scope:
                    return scope[node.id]
            raise NoCallError
        if isinstance(node, ast.Attribute):
            return _attribute(self._value(node.value), node.attr)
        if isinstance(node, (ast.Tuple, ast.List)):
            items = self._arguments(ast.Call(func=node, args=node.elts, keywords=[]), self._value)[0]
            return items if isinstance(node, ast.Tuple) else list(items)
        if isinstance(node, ast.Dict) and None not in node.keys:
            keys = [self._value(key) for key in node.keys if key is not None]
            return dict(zip(keys, map(self._value, node.values), strict=True))
        if isinstance(node, ast.Slice):
            return slice(*(None if part is None else self._value(part) for part in (node.lower, node.upper, node.step)))
        if isinstance(node, ast.Call):
            return self._result(node)
        if (found := _operation(node)) is None:
            raise CannotTellError
        values = list(map(self._value, found[1]))
        if not all(isinstance(value, _PLAIN) for value in values):
            raise CannotTellError  # any other class may do whatever it likes
        return found[0][1](*values)

    def _result(self, node: ast.Call) -> Any:
        """Return what a call gave: worked out where that changes nothing, else what the recording has of it."""
        function, receiver = self._function(node.func)
        if isinstance(function, nn.Module) and type(function).__module__.startswith("torch.nn.modules."):
            return self._given_by(function, node)
        name = (resolve_name(function) or "").rpartition(".")[2]
        if not name and not _is_plain(function):
            return self._returned_by(function, node)
        if name.endswith("_") and not name.startswith("_") and receiver:
            return receiver[0]  # it has been written already, and gives itself
        args, kwargs = self._arguments(node, self._value)
        if any(part in name for part in _CHANGES) or {"out", "generator"} & kwargs.keys() or kwargs.get("inplace"):
            raise CannotTellError
        elsewhere = any(tensor.device.type != "cpu" for _, tensor in tensors_in((receiver, args, kwargs)))
        if elsewhere and any(part in name for part in _DRAWS):
            raise CannotTellError
        with torch.random.fork_rng(devices=()):  # what draws numbers uses up nobody's
            return function(*receiver, *args, **kwargs)

    def _given_by(self, layer: nn.Module, node: ast.Call) -> Any:
        """Return a tensor like the one that a layer of torch gave; what is in it is not known."""
        path = self._recorder.path_of(layer)
        ops = [op for op in self._ops if op.module == path and op.outputs]
        later = sum(self._named(other.func) is layer for other in self._after(node))
        if isinstance(layer, nn.Dropout) and not (layer.training and layer.p):
            return self._value(node.args[0])
        calls = list(dict.fromkeys(op.call for op in ops))
        if not path or len(calls) <= later:
            raise CannotTellError
        return self._like(next(op for op in reversed(ops) if op.call == calls[-1 - later]).outputs[0])

    def _returned_by(self, function: Any, node: ast.Call) -> torch.Tensor:
        """Return a tensor like the one that a function of the user's, or a module of theirs, returned.

        That is the last operation's, where it stands in a `return` of this function and nothing else came after it.
        """
        forward = type(function).forward if isinstance(function, nn.Module) else function
        code = getattr(inspect.unwrap(forward) if callable(forward) else None, "__code__", None)
        if code is None or any(self._is_own_call(other) for other in self._after(node)):
            raise CannotTellError
        file = place_of(code).file
        last = next((op for op in reversed(self._ops) if op.source != self._line), None)
        for tree in ast.walk(parsed(code.co_filename) or ast.Module([], [])):
            if not isinstance(tree, ast.FunctionDef) or tree.name != code.co_name or last is None:
                continue
            first = min([tree.lineno, *(decorator.lineno for decorator in tree.decorator_list)])
            if first != code.co_firstlineno:
                continue
            for line in (n for n in ast.walk(tree) if isinstance(n, ast.Return) and _gives(n.value, last)):
                if last.source in {f"{file}:{at}" for at in range(line.lineno, (line.end_lineno or line.lineno) + 1)}:
                    return self._like(last.outputs[0])
        raise CannotTellError

    def _after(self, node: ast.Call) -> list[ast.Call]:
        """Return the calls that the expression made after this one."""
        calls = [call for call in evaluated(self._root) if isinstance(call, ast.Call)] if self._root else []
        return [call for call in calls[calls.index(node) + 1 :] if call is not self._root] if node in calls else []

    def _named(self, node: ast.AST) -> Any:
        """Return what a name, or an attribute of one, stands for; None for the result of a call."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        return self._function(node)[0] if isinstance(root, ast.Name) and isinstance(node, ast.expr) else None

    def _is_own_call(self, node: ast.Call) -> bool:
        """Whether a call is of anything but torch or Python."""
        function = self._named(node.func)
        return function is not None and resolve_name(function) is None and not _is_plain(function)

    def _like(self, made: TensorRef) -> torch.Tensor:
        tensors = [tensor for _, tensor in tensors_in(self._frame.f_locals)]
        device = tensors[0].device if tensors else None
        like = torch.empty_strided(made.shape, made.stride, dtype=getattr(torch, made.dtype), device=device)
        self._given.append((like, made))
        return like


def _is_plain(function: Any) -> bool:
    """Whether a function is one of Python's own that changes nothing."""
    return any(function is harmless for harmless in _HARMLESS) or getattr(function, "__module__", "") == "math"


def _gives(node: ast.AST | None, op: Op) -> bool:
    """Whether what is returned is what an operation gave."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr.strip("_") in (op.base_name.strip("_"), "reshape", "flatten", "unflatten", "contiguous")
    return isinstance(node, (ast.BinOp, ast.Subscript))


def _attribute(owner: Any, name: str) -> Any:
    if isinstance(owner, (torch.Tensor, ModuleType, nn.Module)):
        if isinstance(getattr(type(owner), name, None), property) and not isinstance(owner, torch.Tensor):
            raise CannotTellError
        return getattr(owner, name)
    held = getattr(owner, "__dict__", {})
    if name in held:
        return held[name]
    if hasattr(type(owner), "__slots__") or callable(getattr(type(owner), name, None)):
        return getattr(owner, name)
    raise CannotTellError


def _operation(node: ast.AST) -> tuple[tuple[str, Callable[..., Any]], list[ast.expr]] | None:
    """Return what an operator calls, and its operands; None for any other expression."""
    kind: ast.AST = node
    operands: list[ast.expr] = []
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        kind, operands = node.op, [node.left, node.right] if isinstance(node, ast.BinOp) else [node.target, node.value]
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        kind, operands = node.ops[0], [node.left, *node.comparators]
    elif isinstance(node, ast.UnaryOp):
        kind, operands = node.op, [node.operand]
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        operands = [node.value, node.slice]
    return (_OPERATORS[type(kind)], operands) if type(kind) in _OPERATORS and operands else None


def name_of(function: Any) -> str:
    """Return what people call a function of torch: `torch.matmul`, `Tensor.view`, `F.linear`."""
    name = resolve_name(function) or getattr(function, "__qualname__", None) or str(function)
    for long, short in (("torch.nn.functional.", "F."), ("torch.Tensor.", "Tensor."), ("torch.functional.", "torch.")):
        if name.startswith(long):
            return short + name[len(long) :]
    return str(name)


def _made(call: Call, noted: Recorder, ops: tuple[Op, ...]) -> Iterator[tuple[torch.Tensor, TensorRef]]:
    """Yield the tensors among the arguments that were made on the way to the call, by what made them in the run.

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
