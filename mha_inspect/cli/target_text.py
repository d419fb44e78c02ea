"""Complete what a user typed as a target: a file without `.py`, or a class that one file here defines."""

from __future__ import annotations

from pathlib import Path

from ..errors import SpecError
from ..layers.catalog import LAYERS
from ..text import first_few, shown

_MOST_FILES = 200
"""The largest number of Python files here in which a class is looked for."""


def completed(text: str) -> str:
    """Return a target in full: `model` is `model.py` if that is a file, `Attention` is `model.py:Attention`.

    Any other text is returned as it is, also the name of a layer. Raises `SpecError` if several files here define
    the class.
    """
    if ":" in text or text in LAYERS or Path(text).is_file():
        return text
    if Path(f"{text}.py").is_file():
        return f"{text}.py"
    if not text.isidentifier():
        return text
    from ..making.importing import names_in_file

    files = [path for path in sorted(Path().glob("*.py"))[:_MOST_FILES] if text in names_in_file(path)]
    if len(files) > 1:
        choices = first_few([f"{path}:{text}" for path in files], 6)
        raise SpecError(f"{shown(text)} is defined in {len(files)} files here. Choose from {choices}.")
    return f"{files[0]}:{text}" if files else text


def command_for(text: str) -> str | None:
    """Return the command that a target alone means: `params` of a checkpoint, else `trace`; None if it is no target."""
    if text in LAYERS or ":" in text or text.endswith(".py"):
        return "trace"
    from ..files.checkpoint import is_checkpoint

    if is_checkpoint(text):
        return "params"
    return "trace" if Path(text).is_file() else None
