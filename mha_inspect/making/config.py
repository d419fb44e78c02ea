"""Find the config of a constructor that does not say what it takes: a class, an object or a dictionary of its file."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any

_WORDS = ("config", "cfg", "args", "hparams", "params", "settings", "opt", "conf")
"""Parts of the names that people give a config."""
_OF_DICTIONARIES = ("get", "items", "keys", "values", "pop", "setdefault")
"""Methods of a dictionary, which say nothing of what is in a config."""


@dataclass(frozen=True)
class Config:
    """What a file has for an argument without an annotation."""

    name: str
    """Its name in the file: `GPTConfig`."""
    value: Any
    """The class, if it is a dataclass, whose fields can be set; else an object or a dictionary."""


@dataclass(frozen=True)
class _Reads:
    """What a constructor reads of an argument: `config.n_embd` is an attribute, `cfg["emb_dim"]` a key."""

    attributes: frozenset[str]
    keys: frozenset[str]

    def fits(self, value: Any) -> bool:
        """Return whether a value has all of these."""
        if isinstance(value, Mapping):
            return bool(self.keys) and not self.attributes and self.keys <= value.keys()
        if not self.attributes or self.keys:
            return False
        required = [field.name for field in fields(value)] if isinstance(value, type) else []
        return all(name in required or hasattr(value, name) for name in self.attributes)


def config_for(function: Callable[..., Any], argument: str, namespace: Mapping[str, Any]) -> Config | None:
    """Return the only class, object or dictionary of a file with all that a constructor reads of an argument.

    None if the argument is not called as a config, or several fit. Example: for

        class Attention(nn.Module):
            def __init__(self, config):
                self.proj = nn.Linear(config.n_embd, config.n_embd)

    it is the class of the file that has `n_embd`.
    """
    if not _is_called_config(argument):
        return None
    reads = _reads_of(function, argument)
    fitting: list[Config] = []
    for name, value in namespace.items():
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        made = _made(name, value)
        if made is not None and reads.fits(made):
            fitting.append(Config(name, value if is_dataclass(value) else made))
    return fitting[0] if len(fitting) == 1 else None


def _made(name: str, value: Any) -> Any:
    """Return an object of a class that is a config, and another value as it is; None for any other class.

    A config is a dataclass, or called one: no other class of the user is called without being asked for.
    """
    if not isinstance(value, type):
        return value
    if not is_dataclass(value) and not _is_called_config(name):
        return None
    try:
        return value()
    except Exception:  # it needs arguments, or its code raises
        return value if is_dataclass(value) else None


def _is_called_config(name: str) -> bool:
    """Return whether a name is one that people give a config."""
    return any(word in name.casefold() for word in _WORDS)


def _reads_of(function: Callable[..., Any], argument: str) -> _Reads:
    """Return what a constructor reads of an argument by its source; nothing if there is no source."""
    code: Any = vars(function).get("__init__") if isinstance(function, type) else function
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return _Reads(frozenset(), frozenset())
    attributes: set[str] = set()
    keys: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Attribute, ast.Subscript)) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id != argument:
            continue
        if isinstance(node, ast.Attribute) and node.attr not in _OF_DICTIONARIES:
            attributes.add(node.attr)
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, str)
        ):
            keys.add(node.slice.value)
    return _Reads(frozenset(attributes), frozenset(keys))
