"""Import the object that a target names, and nothing else. Importing runs its code.

Names in a config or a weight file are never imported.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import InputError
from ..files.tensors import opened
from ..text import MESSAGE, did_you_mean, first_few, message_of, shown

FORMS = "package.module:Name, path/to/file.py:Name or hf:TYPE"

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHONS = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_LONGEST_SOURCE = 2**22
_LOADED: dict[Path, str] = {}
"""Files that were imported by path, to their names in sys.modules."""


def split_target(text: str) -> tuple[str, str]:
    """Return the module or file of a target, and the name in it.

    Raises `InputError` if the text does not have the form of a target.
    """
    where, colon, name = text.rpartition(":") if ":" in text else (text, "", "")
    if where.endswith((".py", ".py:")) or (colon and (os.sep in where or "/" in where)):
        if name and where.endswith(".py"):
            return where, name
        if name:
            file = where.rstrip(":").removesuffix(".py")
            raise InputError(f"{shown(where)} is not a Python file. Write {shown(file)}.py:{name}.")
        raise InputError(f"{shown(text)} is missing the name of a class. Write {shown(where.rstrip(':'))}:Name.")
    if not colon or not name or not all(part.isidentifier() for part in (*where.split("."), *name.split("."))):
        raise InputError(f"{shown(text)} is not a target: write {FORMS}.")
    return where, name


def is_file_alone(text: str) -> bool:
    """Return whether a target is a Python file without the name of a class: `model.py`."""
    return text.endswith(".py") and ":" not in text


def names_in_file(path: Path) -> list[str]:
    """Return the classes that a file defines, without running it."""
    try:
        with opened(path, ".py") as (file, _):
            tree = ast.parse(file.read(_LONGEST_SOURCE))
    except (InputError, SyntaxError, ValueError, RecursionError, MemoryError):  # the errors of a parser on deep nesting
        return []
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def imported(where: str) -> ModuleType:
    """Return a module by its name or the path of its file. Raises `InputError` if it cannot be imported."""
    try:
        return _load_file(where) if where.endswith(".py") else _load_module(where)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # the file's own code may raise anything
        raise InputError(f"{shown(where)} cannot be imported: {in_one_line(error)}") from None


def load_object(text: str) -> tuple[Any, ModuleType]:
    """Return the object that a target names, and its module.

    Raises `InputError` if the module cannot be imported, or has no such name.
    """
    where, name = split_target(text)
    module = imported(where)
    value: Any = module
    owner = where
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise InputError(f"{shown(owner)} has no {shown(part)}. {_modules_in(value, part)}") from None
        owner += f".{part}"
    return value, module


def _modules_in(owner: Any, name: str) -> str:
    from torch import nn

    classes = [n for n, value in vars(owner).items() if isinstance(value, type) and issubclass(value, nn.Module)]
    modules = [*classes, *(n for n, value in vars(owner).items() if isinstance(value, nn.Module))]
    if not modules:
        return "It has no torch.nn.Module."
    return f"Modules in it: {first_few(modules, 8)}.{did_you_mean(name, modules)}"


def _load_module(name: str) -> ModuleType:
    """Import a module by its name.

    The current folder comes last on the path, and only if the module is in it: its other files never replace
    installed modules.
    """
    importlib.invalidate_caches()
    first = name.partition(".")[0]
    with suppress(OSError):  # the folder was removed
        here = os.getcwd()
        if here not in sys.path and PathFinder.find_spec(first, [here]) is not None:
            sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        as_file = Path(*name.split(".")).with_suffix(".py")
        known = ["torch", "transformers", *(file.stem for file in Path().glob("*.py"))]
        hint = "" if first in known else did_you_mean(first, known)
        if os.path.exists(as_file):
            hint = f" For the file, write {shown(as_file)}:Name."
        elif first == "nn":  # as everybody imports it
            hint = f" Did you mean torch.{name}?"
        raise InputError(
            f"there is no module {shown(error.name)} here or among the installed ones. Run it from the folder "
            f"of {shown(first)}, install its package, or give the file: path/to/file.py:Name.{hint}"
        ) from None


def _load_file(where: str) -> ModuleType:
    """Import a file by its path, with its folder on the import path as in `python file.py`.

    A file in a package is imported as a part of it, so that its relative imports work.
    """
    if not os.path.isfile(where):
        folder, name = os.path.dirname(where) or ".", os.path.basename(where)
        what = "is a folder" if os.path.isdir(where) else "is not a file" if os.path.exists(where) else "is not there"
        if os.path.isdir(folder) and not os.access(folder, os.X_OK):
            what = "cannot be read: permission denied for its folder"
        beside = sorted(path.name for path in Path(folder).glob("*.py") if path.name != name)
        near = "" if os.path.exists(where) else did_you_mean(name, beside)
        raise InputError(f"{shown(where)} {what}.{near or ' Give the path of a Python file: path/to/file.py:Name.'}")
    path = Path(os.path.realpath(where))
    if path in _LOADED and _LOADED[path] in sys.modules:
        return sys.modules[_LOADED[path]]
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").exists() and root.name.isidentifier():
        root, parts = root.parent, [root.name, *parts]
    importlib.invalidate_caches()
    is_new = str(root) not in sys.path
    if is_new:
        sys.path.insert(0, str(root))
    try:
        if len(parts) > 1 and path.stem.isidentifier():
            module = importlib.import_module(".".join(parts))
            if module.__file__ is not None and Path(module.__file__).resolve() == path:
                _LOADED[path] = module.__name__
                return module
        return _execute(path)
    finally:
        if is_new:  # first on the path during the import, last from then on
            sys.path.remove(str(root))
            sys.path.append(str(root))


def _execute(path: Path) -> ModuleType:
    name = path.stem
    if name in sys.modules or not name.isidentifier() or name in sys.stdlib_module_names:
        name = f"_target_{len(_LOADED)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    _LOADED[path] = name
    return module


@contextmanager
def stdout_for_the_answer() -> Iterator[None]:
    """Send the target's output to stderr, from Python and from libraries in C.

    Raises `InputError` if the target's code exits, because the program would end without an answer and with exit
    code 0.
    """
    saved = None
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        saved = os.dup(1)
        os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise InputError(f"the target cannot be inspected: {in_one_line(error)}.") from None
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)


def in_one_line(error: BaseException) -> str:
    """Return the main line of an error, and the line of the user's code that it came from."""
    lines = [*filter(None, map(str.strip, message_of(error).splitlines())), ""]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    frames = _frames(error)
    # The last line of the user's code, or else of a library.
    frame = next(reversed([frame for frame in frames if "-packages" not in frame.filename] or frames), None)
    place = (frame.filename, frame.lineno) if frame else ("", None)
    if isinstance(error, SyntaxError):
        text, place = error.msg, (error.filename or place[0], error.lineno or place[1])
    if isinstance(error, SystemExit):
        text = "it ends the program" + (f", with {error.code!r}" if error.code is not None else "")
    if not text and frames:
        text = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    filename = os.path.relpath(place[0]) if Path(place[0]).is_relative_to(Path.cwd()) else place[0]
    at = f"{filename.rpartition(f'site-packages{os.sep}')[2]}:{place[1]}"
    return shown(f"{line} ({at})" if place[0] and at not in line else line, MESSAGE)


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error outside mha-inspect, torch and Python's library."""
    torch = sys.modules.get("torch")
    skipped = (_OURS, os.path.dirname(torch.__file__ or "") + os.sep) if torch is not None else (_OURS,)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(skipped)]
    # A virtual environment may be inside the folder of the standard library.
    return [f for f in frames if not f.filename.startswith((_PYTHONS, "<frozen")) or "site-packages" in f.filename]
