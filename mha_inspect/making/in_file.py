"""Find the modules that a Python file defines, the outermost first, for a target that names a file alone."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from torch import nn

from ..errors import InputError, MhaInspectError
from ..text import first_few, listed, shown
from .importing import imported
from .target import Target


@dataclass(frozen=True)
class ChosenTarget:
    """The target that was chosen in a file."""

    target: str
    """In full, e.g. `model.py:Block`."""
    note: str = ""
    """A sentence on the file's other modules; empty if there are none."""


def choose_in_file(file: str, build: Callable[[str], Target], attends: Callable[[Target], bool | None]) -> ChosenTarget:
    """Choose the outermost module of a file that can be built and attends, or else raises when it is called.

    `build` raises `MhaInspectError` for a target that cannot be built; `attends` returns None if the forward raises.
    Neither is called if there is no choice. Raises `InputError` if the file defines nothing that can be a target, and
    the error of the first target if none can be built.
    """
    levels = names_by_level(file)
    names = [name for level in levels for name in level]
    if not names:
        raise InputError(
            f"{shown(file)} defines neither a torch.nn.Module nor a function without arguments that could return one. "
            f"Name what to inspect: {shown(file)}:NAME."
        )
    if len(names) == 1:
        return ChosenTarget(f"{file}:{names[0]}")
    return _chosen(file, _outermost(file, levels, build, attends), names)


def _outermost(
    file: str, levels: list[list[str]], build: Callable[[str], Target], attends: Callable[[Target], bool | None]
) -> str:
    """Return the first name that can be built and attends, or else one that raises, or else any that can be built.

    Raises the error of the first name if none can be built.
    """
    raising: list[str] = []
    without: list[str] = []
    errors: list[MhaInspectError] = []
    for level in levels:
        for name in level:
            try:
                target = build(f"{file}:{name}")
            except MhaInspectError as error:
                errors.append(error)
                continue
            # The only outermost module is what the file is about.
            if len(level) == 1 and not without:
                return name
            has_attention = attends(target)
            if has_attention:
                return name
            if has_attention is None:
                raising.append(name)
            else:
                without.append(name)
        if raising:
            return raising[0]
    if without:
        return without[0]
    raise errors[0]


def _chosen(file: str, name: str, names: list[str]) -> ChosenTarget:
    rest = [candidate for candidate in names if candidate != name]
    there = first_few(rest, 6) if len(rest) > 2 else listed(rest)
    note = f"{name} of {file} is used. The file also has {there}: name one as {file}:{rest[0]}."
    return ChosenTarget(f"{file}:{name}", note)


def names_by_level(file: str) -> list[list[str]]:
    """Import a file, and return the names that can be targets: outermost first, each level in the file's order.

    The levels are modules that the file built, classes that no other class of the file uses, the other classes, and
    functions without required arguments. Empty levels are left out. For

        class Attention(nn.Module): ...
        class Block(nn.Module): ...  # builds an Attention

    they are `[["Block"], ["Attention"]]`. Raises `InputError` if the file cannot be imported.
    """
    module = imported(file)
    built: list[str] = []
    classes: list[str] = []
    functions: list[str] = []
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if isinstance(value, nn.Module):
            built.append(name)
        elif _is_class_of(module, value):
            classes.append(name)
        elif _is_free_function_of(module, value):
            functions.append(name)
    inner = _used_by_others(module, classes)
    outermost = [name for name in classes if name not in inner]
    if not outermost:  # they use each other
        outermost, inner = classes, set()
    used = [name for name in classes if name in inner]
    levels = (built, outermost, used, functions)
    return [level for level in levels if level]


def _is_class_of(module: ModuleType, value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__


def _is_free_function_of(module: ModuleType, value: object) -> bool:
    """Return whether a value is a function of this file that can be called without arguments."""
    if not inspect.isfunction(value) or value.__module__ != module.__name__:
        return False
    for parameter in inspect.signature(value).parameters.values():
        is_optional = parameter.default is not parameter.empty
        if not is_optional and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return False
    return True


def _used_by_others(module: ModuleType, classes: list[str]) -> set[str]:
    """Return the classes whose names the body of another class reads, as a subclass or one that builds it does."""
    used = set[str]()
    for name, node in _class_definitions(module).items():
        if name in classes:
            read = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            used |= read & set(classes) - {name}
    return used


def _class_definitions(module: ModuleType) -> Mapping[str, ast.ClassDef]:
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError, RecursionError):
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
