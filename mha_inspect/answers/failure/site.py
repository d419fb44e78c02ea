"""Where a forward failed: the user's line, the expression in it, and what the tensors are called there."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from ...record.arguments import tensors_in
from ...record.source import place_of

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
MODULE_CALL = nn.Module._call_impl.__code__
ATTENTION_FORWARDS = {nn.MultiheadAttention.forward.__code__, nn.Transformer.forward.__code__}
_PASSES_ON = ("einops/", "mha_inspect/record", "mha_inspect/answers/failure")
_OPERATORS: dict[type[ast.operator], str] = {
    ast.MatMult: "matmul",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
}
_LONGEST = 48
"""Characters of an expression that serve as a name; a longer one is cut."""


@dataclass(frozen=True)
class LayerCall:
    """A call of one of torch's own layers, by the names of its arguments."""

    module: nn.Module
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Site:
    """The line that failed. It holds tensors: it must not outlive the error that it was read from."""

    entered: bool
    """Whether the forward was entered: else the call itself did not fit its signature."""
    source: str
    line: str
    variables: tuple[tuple[str, torch.Tensor], ...]
    """The tensors among the variables of the user's frame, with their names."""
    module: object
    """The innermost module whose forward was running; None without one."""
    attention: LayerCall | None
    """The call of torch's own multi-head attention, or transformer, that the error came out of, the innermost one."""
    by_user: bool
    """Whether the user's own code was the last to run."""
    tree: ast.expr | ast.stmt | None
    """The expression that failed, where it can be told; else None."""

    def name_of(self, tensor: torch.Tensor) -> str:
        """The variable that this very tensor is; one that the failing expression names goes first. Empty if none is."""
        names = [name for name, known in self.variables if known is tensor]
        if self.tree is not None and len(names) > 1:
            used = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
            names = [name for name in names if name in used] or names
        return names[0] if names else ""

    def named_here(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """The variables that the failing line names, in the order in which it does."""
        known = dict(self.variables)
        for tree in (self.tree, _statement(self.line)):
            used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)] if tree is not None else []
            if found := tuple((name, known[name]) for name in dict.fromkeys(used) if name in known):
                return found
        return ()

    def texts(self, call: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """How the expression writes the arguments of this call: those by place, and those by name.

        The receiver of a method is its first argument, as torch hands it over. Both are empty where the expression
        is not this call.
        """
        positional, named = _arguments(self.tree, call)
        return tuple(map(_text, positional)), {name: _text(node) for name, node in named.items()}


def site_of(error: BaseException, call: str = "", *, in_block: bool = False) -> Site:
    """Read the traceback of an error that came out of a forward, or of the body of a `with` block.

    `call` is the function of torch that raised, where Python does not say which expression did.
    """
    entries = entries_inside(error, in_block=in_block)
    bodies = [(frame, tb) for frame, tb in entries if shows_line(frame)]
    own = [(frame, tb) for frame, tb in bodies if is_own(frame)]
    shown = own[-1] if own else bodies[-1] if bodies else None
    frame, tb = shown if shown is not None else (None, None)
    modules = [frame.f_locals["self"] for frame, _ in entries if frame.f_code is MODULE_CALL]
    return Site(
        entered=bool(bodies),
        source="" if frame is None or tb is None else f"{_file(frame)[0]}:{tb.tb_lineno}",
        line="" if frame is None or tb is None else linecache.getline(frame.f_code.co_filename, tb.tb_lineno).strip(),
        variables=() if frame is None or not own else tuple(_variables(frame)),
        module=modules[-1] if modules else None,
        attention=_attention(entries),
        by_user=bool(own) and bodies[-1][0] is own[-1][0],
        tree=None if frame is None or tb is None else expression_of(frame, tb, call),
    )


def _statement(line: str) -> ast.AST | None:
    """A line as it can be read by itself; None for a part of a statement."""
    try:
        return ast.parse(line)
    except SyntaxError:
        return None


def entries_inside(error: BaseException, *, in_block: bool) -> list[tuple[FrameType, TracebackType]]:
    """The frames of a traceback from the first call of a module on; all of them where that was a block."""
    entries = list(entries_of(error.__traceback__))
    first = next((place for place, (frame, _) in enumerate(entries) if frame.f_code is MODULE_CALL), len(entries))
    return entries if in_block else entries[first:]


def shows_line(frame: FrameType) -> bool:
    """Whether a frame's lines do more than pass calls on."""
    return frame.f_code is not MODULE_CALL and bool(_file(frame)[0])


def is_own(frame: FrameType) -> bool:
    """Whether a frame is of the user's code, and of no library."""
    return shows_line(frame) and not _file(frame)[1]


def entries_of(tb: TracebackType | None) -> Iterator[tuple[FrameType, TracebackType]]:
    """The frames of a traceback, outermost first."""
    while tb is not None:
        yield tb.tb_frame, tb
        tb = tb.tb_next


def _file(frame: FrameType) -> tuple[str, bool]:
    """The file of a frame as sources show it, empty for code that passes calls on; and whether it is a library's."""
    place = place_of(frame.f_code)
    path, library = place.file, place.library
    stdlib = frame.f_code.co_filename.startswith(_STDLIB) and "-packages" not in frame.f_code.co_filename
    return ("", True) if stdlib or path.startswith(_PASSES_ON) else (path, library)


def _variables(frame: FrameType) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in frame.f_locals.items():
        if isinstance(value, torch.Tensor):
            yield name, value


def _attention(entries: list[tuple[FrameType, TracebackType]]) -> LayerCall | None:
    for before, (frame, _) in zip(reversed(entries[:-1]), reversed(entries[1:]), strict=True):
        if frame.f_code in ATTENTION_FORWARDS and before[0].f_code is MODULE_CALL:
            module, called = frame.f_locals["self"], before[0].f_locals
            try:
                bound = inspect.signature(module.forward).bind(*called["args"], **called["kwargs"])
            except TypeError:
                return None
            arguments = {name: value for name, value in bound.arguments.items() if any(tensors_in(value))}
            return LayerCall(module, arguments)
    return None


def expression_of(frame: FrameType, tb: TracebackType, call: str = "") -> ast.expr | ast.stmt | None:
    """The expression of a frame that was being evaluated; where Python does not say, the only one that fits."""
    tree = _parsed(frame.f_code.co_filename)
    if tree is None:
        return None
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.expr, ast.AugAssign, ast.Assert))
        and node.lineno <= tb.tb_lineno <= (node.end_lineno or node.lineno)
    ]
    place = _position(frame, tb)
    if place is not None:
        exact = [n for n in nodes if (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset) == place]
        # A call that is spread over lines is placed at the line of its method's name.
        close = [n for n in nodes if isinstance(n, ast.Call) and (n.end_lineno, n.end_col_offset) == place[1::2]]
        return next(iter([*exact, *close]), None)
    fitting = [node for node in nodes if any(_arguments(node, call))]
    return fitting[0] if len(fitting) == 1 else None


def _position(frame: FrameType, tb: TracebackType) -> tuple[int, int, int, int] | None:
    """Lines and columns of the running expression: Python 3.11 knows them."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None or tb.tb_lasti < 0:
        return None
    found = next(islice(positions(), tb.tb_lasti // 2, None), None)
    return None if found is None or None in found else found


@lru_cache(maxsize=8)
def _parsed(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


def _arguments(tree: ast.AST | None, call: str) -> tuple[list[ast.expr], dict[str, ast.expr]]:
    """The arguments of an expression, if it is this call."""
    base = call.rpartition(".")[2].strip("_")
    if isinstance(tree, ast.BinOp):
        return ([tree.left, tree.right], {}) if _OPERATORS.get(type(tree.op)) == base else ([], {})
    if isinstance(tree, ast.AugAssign):
        return ([tree.target, tree.value], {}) if _OPERATORS.get(type(tree.op)) == base else ([], {})
    if isinstance(tree, ast.Subscript):
        return ([tree.value], {}) if base == "getitem" else ([], {})
    if not isinstance(tree, ast.Call):
        return [], {}
    function = tree.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name.strip("_") != base or any(isinstance(arg, ast.Starred) for arg in tree.args):
        return [], {}
    named = {keyword.arg: keyword.value for keyword in tree.keywords if keyword.arg}
    if call.startswith("Tensor.") and isinstance(function, ast.Attribute):
        return [function.value, *tree.args], named
    return list(tree.args), named


def only_argument(tree: ast.AST | None) -> str:
    """How the call of a module writes its argument, if it has one alone: `self.q_proj(x + pos)`; else empty."""
    if isinstance(tree, ast.Call) and len(tree.args) == 1 and not tree.keywords:
        return _text(tree.args[0])
    return ""


def _text(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
