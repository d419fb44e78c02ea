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
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import InputError
from ..files.tensors import opened
from ..text import MESSAGE, did_you_mean, first_few, message_of, shown

FORMS = "package.module:Name, path/to/file.py:Name, hf:TYPE or hf:DIRECTORY"

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHONS = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_LONGEST_SOURCE = 2**22
_LOADED: dict[Path, str] = {}
"""Files that were imported by path, to their names in sys.modules."""
SECONDS: dict[str, float] = {}
"""How long the import of each module took, with what it imports itself."""


def split_target(text: str) -> tuple[str, str]:
    """Return the module or file of a target, and the name in it.

    Raises `InputError` if the text does not have the form of a target.
    """
    where, colon, name = text, "", ""
    if ":" in text:
        where, colon, name = text.rpartition(":")
    is_path = bool(colon) and (os.sep in where or "/" in where)
    if is_path or where.endswith((".py", ".py:")):
        _require_name_in_file(text, where, name)
    elif not colon or not name or not _is_dotted_name(where) or not _is_dotted_name(name):
        raise InputError(f"{shown(text)} is not a target: write {FORMS}.")
    return where, name


def _require_name_in_file(text: str, where: str, name: str) -> None:
    """Raise `InputError` if a target with a path lacks the name of a class, or is no Python file."""
    if not name:
        raise InputError(f"{shown(text)} is missing the name of a class. Write {shown(where.rstrip(':'))}:Name.")
    if not where.endswith(".py"):
        file = where.rstrip(":").removesuffix(".py")
        raise InputError(f"{shown(where)} is not a Python file. Write {shown(file)}.py:{name}.")


def _is_dotted_name(text: str) -> bool:
    """Return whether a text is names with points between them: `torch.nn.Linear`."""
    return all(part.isidentifier() for part in text.split("."))


def require_file(target: str) -> None:
    """Raise `InputError` if a target has no valid form, or names a file that is not there. Nothing is imported."""
    if target.startswith("hf:"):
        return
    if not is_file_alone(target):
        split_target(target)
    file = file_of(target)
    if file and not os.path.isfile(file):
        raise InputError(_no_file(file))


def is_file_alone(text: str) -> bool:
    """Return whether a target is a Python file without the name of a class: `model.py`."""
    return text.endswith(".py") and ":" not in text


def file_of(target: str) -> str:
    """Return the Python file that a target names; empty if it names a module or a model."""
    where = target if is_file_alone(target) else target.rpartition(":")[0]
    return where if where.endswith(".py") else ""


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
        with at_import(where):
            began = time.perf_counter()
            module = _load_file(where) if where.endswith(".py") else _load_module(where)
            SECONDS.setdefault(module.__name__, time.perf_counter() - began)
            return module
    except InputError:
        raise
    except (SystemExit, EOFError) as error:
        raise InputError(
            f"{shown(where)} runs as a program when it is imported: {in_one_line(error)}. "
            'Put what only the program does under `if __name__ == "__main__":`.'
        ) from None
    except Exception as error:  # the file's own code may raise anything
        raise InputError(f"{shown(where)} cannot be imported: {in_one_line(error)}") from None


@contextmanager
def at_import(where: str) -> Iterator[None]:
    """Run the block as the code of a file that is imported: with gradients, and without a terminal."""
    with _without_terminal(where), _gradients():
        yield


def _gradients() -> AbstractContextManager[Any]:
    """Return a block with gradients, as Python's own import has them: a file may train when it runs."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.enable_grad()


@contextmanager
def _without_terminal(where: str) -> Iterator[None]:
    """Run the block with a command line of one file and no terminal: code that asks for either ends at once."""
    arguments, stdin = sys.argv, sys.stdin
    try:
        with open(os.devnull, encoding="utf-8") as nothing:
            sys.argv, sys.stdin = [where], nothing
            yield
    finally:
        sys.argv, sys.stdin = arguments, stdin


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

    classes: list[str] = []
    instances: list[str] = []
    for member, value in vars(owner).items():
        if isinstance(value, nn.Module):
            instances.append(member)
        elif isinstance(value, type) and issubclass(value, nn.Module):
            classes.append(member)
    modules = classes + instances
    if not modules:
        return "The file has no torch.nn.Module."
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
        raise InputError(
            f"there is no module {shown(error.name)} here or among the installed ones. Run it from the folder "
            f"of {shown(first)}, install its package, or give the file: path/to/file.py:Name.{_way_to_module(name)}"
        ) from None


def _way_to_module(name: str) -> str:
    """Return a sentence on the module that a user may have meant by this name; empty if none is near."""
    as_file = Path(*name.split(".")).with_suffix(".py")
    if os.path.exists(as_file):
        return f" For the file, write {shown(as_file)}:Name."
    return did_you_mean(name.partition(".")[0], ["torch", "transformers", *(file.stem for file in Path().glob("*.py"))])


def _load_file(where: str) -> ModuleType:
    """Import a file by its path, with its folder on the import path as in `python file.py`.

    A file in a package is imported as a part of it, so that its relative imports work.
    """
    if not os.path.isfile(where):
        raise InputError(_no_file(where))
    path = Path(os.path.realpath(where))
    if path in _LOADED and _LOADED[path] in sys.modules:
        return sys.modules[_LOADED[path]]
    root = path.parent
    parts = [path.stem]
    while (root / "__init__.py").exists() and root.name.isidentifier():
        parts.insert(0, root.name)
        root = root.parent
    importlib.invalidate_caches()
    is_new = str(root) not in sys.path
    if is_new:
        sys.path.insert(0, str(root))
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # a file of a package may import its neighbours by their bare names
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


def _no_file(where: str) -> str:
    """Return the message for a path that is not a file."""
    folder, name = os.path.dirname(where) or ".", os.path.basename(where)
    what = "is not a file" if os.path.exists(where) else "does not exist"
    near = ""
    if not os.path.exists(where):
        files = sorted(path.name for path in Path(folder).glob("*.py") if path.name != name)
        near = did_you_mean(name, files)
    return f"{shown(where)} {what}.{near or ' Give the path of a Python file: path/to/file.py:Name.'}"


def _execute(path: Path) -> ModuleType:
    """Run a file that is in no package, and return its module."""
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
    """Return the main line of an error, and the line of the user's code that it came from.

    E.g. `ValueError: dim is 7 (model.py:12)`.
    """
    frames = _frames(error)
    text = _main_line(error)
    if not text and frames:
        # An assert without a message says by its code what is wrong.
        text = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = _place(error, frames)
    if not place or place in line:
        return shown(line, MESSAGE)
    return shown(f"{line} ({place})", MESSAGE)


def _main_line(error: BaseException) -> str:
    """Return the line of an error's message that says most: the first one, with the next if it ends in a colon."""
    if isinstance(error, SyntaxError):
        return error.msg
    if isinstance(error, SystemExit):
        return "it ends the program" if error.code is None else f"it ends the program, with {error.code!r}"
    stripped = [line.strip() for line in message_of(error).splitlines()]
    lines = [line for line in stripped if line]
    if not lines:
        return ""
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _place(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    """Return the line of the user's code that raised, or else of a library: `model.py:12`; empty if unknown."""
    file: str = ""
    number: int | None = None
    users = [frame for frame in frames if "-packages" not in frame.filename]
    if frames:
        frame = (users or frames)[-1]
        file, number = frame.filename, frame.lineno
    if isinstance(error, SyntaxError):
        file, number = error.filename or file, error.lineno or number
    if not file:
        return ""
    if Path(file).is_relative_to(Path.cwd()):
        file = os.path.relpath(file)
    return f"{file.rpartition(f'site-packages{os.sep}')[2]}:{number}"


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error outside mha-inspect, torch and Python's library."""
    torch = sys.modules.get("torch")
    skipped = [_OURS]
    if torch is not None:
        skipped.append(os.path.dirname(torch.__file__ or "") + os.sep)
    frames: list[traceback.FrameSummary] = []
    for frame in traceback.extract_tb(error.__traceback__):
        # A virtual environment may be inside the folder of the standard library.
        is_pythons = frame.filename.startswith((_PYTHONS, "<frozen")) and "site-packages" not in frame.filename
        if not is_pythons and not frame.filename.startswith(tuple(skipped)):
            frames.append(frame)
    return frames
