"""Where a forward failed: the user's line, the expression in it, and what the tensors are called there."""

from __future__ import annotations

import ast
import dis
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

from ...record.site import place_of

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
MODULE_CALL = nn.Module._call_impl.__code__
ATTENTION_FORWARDS = {nn.MultiheadAttention.forward.__code__, nn.Transformer.forward.__code__}
_PASSES_ON = ("einops/", "mha_inspect/record", "mha_inspect/answers/failure")
_DEFERRED = (ast.stmt, ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
"""What is not evaluated where it stands in an expression."""

Entry = tuple[FrameType, TracebackType]


@dataclass(frozen=True)
class Site:
    """The line that failed. It holds tensors: it must not outlive the error that it was read from."""

    source: str
    line: str
    variables: tuple[tuple[str, torch.Tensor], ...]
    """The tensors among the variables of the user's frame, with their names."""
    module: object
    """The innermost module whose forward was running; None without one."""
    by_user: bool
    """Whether the user's own code was the last to run."""
    tree: ast.expr | ast.stmt | None
    """The expression that failed, where it can be told; else None."""

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the variable that this very tensor is, one that the failing expression names first; else empty."""
        names = [name for name, known in self.variables if known is tensor]
        used = set(_names_in(self.tree))
        return next((name for name in names if name in used), names[0] if names else "")

    def named_here(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Return the variables that the failing line names, in the order in which it does."""
        known = dict(self.variables)
        for tree in (self.tree, _statement(self.line)):
            if found := tuple((name, known[name]) for name in dict.fromkeys(_names_in(tree)) if name in known):
                return found
        return ()

    def only_argument(self) -> str:
        """Return how the call of a module writes its argument, if it has one alone (`self.q_proj(x + pos)`)."""
        tree = self.tree
        return text_of(tree.args[0]) if isinstance(tree, ast.Call) and len(tree.args) == 1 and not tree.keywords else ""


def site_of(error: BaseException, *, in_block: bool = False) -> Site | None:
    """Read the traceback of an error that came out of a forward, or of the body of a `with` block.

    Returns None where the forward was not entered: the call itself did not fit its signature.
    """
    entries = entries_inside(error, in_block=in_block)
    bodies = [entry for entry in entries if _shows_line(entry[0])]
    if not bodies:
        return None
    own = [entry for entry in bodies if is_own(entry[0])]
    frame, tb = (own or bodies)[-1]
    modules = [inside.f_locals["self"] for inside, _ in entries if inside.f_code is MODULE_CALL]
    return Site(
        source=f"{_file(frame)[0]}:{tb.tb_lineno}",
        line=linecache.getline(frame.f_code.co_filename, tb.tb_lineno).strip(),
        variables=tuple((name, value) for name, value in frame.f_locals.items() if isinstance(value, torch.Tensor))
        if own
        else (),
        module=modules[-1] if modules else None,
        by_user=bool(own) and bodies[-1] is own[-1],
        tree=expression_of(frame, tb),
    )


def entries_of(error: BaseException) -> Iterator[Entry]:
    """Yield the frames of an error's traceback, outermost first."""
    tb = error.__traceback__
    while tb is not None:
        yield tb.tb_frame, tb
        tb = tb.tb_next


def entries_inside(error: BaseException, *, in_block: bool) -> list[Entry]:
    """Return the frames of a traceback from the first call of a module on; all of them where that was a block."""
    entries = list(entries_of(error))
    first = next((place for place, (frame, _) in enumerate(entries) if frame.f_code is MODULE_CALL), len(entries))
    return entries if in_block else entries[first:]


def entries_of_calls(error: BaseException, *, in_block: bool) -> list[Entry]:
    """Return the user's last frame and those of libraries below it: one of them called what raised."""
    entries = entries_inside(error, in_block=in_block)
    own = [place for place, (frame, _) in enumerate(entries) if is_own(frame)]
    return [entry for entry in entries[own[-1] if own else 0 :] if _shows_line(entry[0])]


def is_own(frame: FrameType) -> bool:
    """Whether a frame is of the user's code, and of no library."""
    return _shows_line(frame) and not _file(frame)[1]


def _shows_line(frame: FrameType) -> bool:
    """Whether a frame's lines do more than pass calls on."""
    return frame.f_code is not MODULE_CALL and bool(_file(frame)[0])


def _file(frame: FrameType) -> tuple[str, bool]:
    """Return the file of a frame as sources show it, empty for code that passes calls on; and whether a library's."""
    place = place_of(frame.f_code)
    stdlib = frame.f_code.co_filename.startswith(_STDLIB) and "-packages" not in frame.f_code.co_filename
    return ("", True) if stdlib or place.file.startswith(_PASSES_ON) else (place.file, place.library)


def expression_of(frame: FrameType, tb: TracebackType) -> ast.expr | ast.stmt | None:
    """Return the expression of a frame that was being evaluated; None where that cannot be told."""
    tree = parsed(frame.f_code.co_filename)
    if tree is None:
        return None
    place = _position(frame, tb)
    if place is None:
        return _counted(tree, frame, tb)
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.expr, ast.AugAssign, ast.Assert))]
    exact = [n for n in nodes if (n.lineno, n.end_lineno, n.col_offset, n.end_col_offset) == place]
    # A call that is spread over lines is placed at the line of its method's name.
    close = [n for n in nodes if isinstance(n, ast.Call) and (n.end_lineno, n.end_col_offset) == place[1::2]]
    return next(iter([*exact, *close]), None)


def _position(frame: FrameType, tb: TracebackType) -> tuple[int, int, int, int] | None:
    """Return lines and columns of the running expression; None on Python 3.10, which does not know them."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None or tb.tb_lasti < 0:
        return None
    found = next(islice(positions(), tb.tb_lasti // 2, None), None)
    return None if found is None or None in found else found


def _counted(tree: ast.Module, frame: FrameType, tb: TracebackType) -> ast.expr | ast.stmt | None:
    """Return the running expression by counting: the third call in a statement's code is the third it evaluates.

    None where the code has more or fewer of them than the statement shows.
    """
    line, code = tb.tb_lineno, frame.f_code
    around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or n.lineno)]
    if not around or code.co_name.startswith("<"):
        return None
    statement = max(around, key=lambda node: node.lineno)
    body = getattr(statement, "body", None)
    last = max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno or line
    inside = [(a, b) for a, b, at in code.co_lines() if at is not None and statement.lineno <= at <= last]
    kinds = {
        found.offset: _kind_of_instruction(found.opname)
        for found in dis.get_instructions(code)
        if any(a <= found.offset < b for a, b in inside)
    }
    running = max((offset for offset in kinds if offset <= tb.tb_lasti), default=-1)
    wanted = kinds.get(running)
    if wanted == "unpack":
        return statement
    nodes = [node for node in evaluated(statement) if _kind_of_node(node) == wanted]
    places = [offset for offset, kind in kinds.items() if kind == wanted]
    return nodes[places.index(running)] if wanted and len(nodes) == len(places) else None


def _kind_of_instruction(name: str) -> str:
    if name.startswith("CALL") and not name.startswith("CALL_INTRINSIC"):
        return "call"
    if name == "BINARY_SUBSCR" or name.startswith("UNPACK"):
        return "index" if name == "BINARY_SUBSCR" else "unpack"
    return "operator" if name.startswith(("BINARY_", "INPLACE_")) else "compare" if name == "COMPARE_OP" else ""


def _kind_of_node(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return "index" if isinstance(node.ctx, ast.Load) else ""
    if isinstance(node, ast.BinOp):
        folded = isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)
        return "" if folded else "operator"
    kinds = {ast.Call: "call", ast.AugAssign: "operator", ast.Compare: "compare", ast.ListComp: "call"}
    return kinds.get(type(node), "")


def evaluated(node: ast.AST) -> Iterator[Any]:
    """Yield a node and what is evaluated for it, in that order: operands before their operation."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ListComp):
            yield child
        elif not isinstance(child, _DEFERRED):
            yield from evaluated(child)
    yield node


@lru_cache(maxsize=8)
def parsed(path: str) -> ast.Module | None:
    """Return the tree of a file; None where there is none, or it is no Python."""
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


def _statement(line: str) -> ast.AST | None:
    """Return a line as it can be read by itself; None for a part of a statement."""
    try:
        return ast.parse(line)
    except SyntaxError:
        return None


def _names_in(tree: ast.AST | None) -> list[str]:
    return [] if tree is None else [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]


def text_of(node: ast.expr) -> str:
    """Return an expression as it is written, cut where it is too long for a name."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 48 else text[:45] + "..."
