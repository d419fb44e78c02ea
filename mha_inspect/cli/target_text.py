"""Complete what a user typed as a target: a file without `.py`, a class of one file here, or a name as in Python."""

from __future__ import annotations

from pathlib import Path

from ..errors import SpecError
from ..layers.catalog import LAYERS
from ..text import first_few, shown

_MOST_FILES = 200
"""The largest number of Python files here in which a class is looked for."""
_OF_TORCH = (
    "MultiheadAttention",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
)
"""Classes of torch.nn with attention, which may be named alone."""


def completed(text: str) -> str:
    """Return a target in full: `model` is `model.py` if that is a file, `Attention` is `model.py:Attention`.

    A class as Python names it gets its colon: `nn.MultiheadAttention` is `torch.nn:MultiheadAttention`. Any other text
    is returned as it is, also the name of a layer. Raises `SpecError` if several files here define the class.
    """
    if ":" in text or text in LAYERS or Path(text).is_file():
        return text
    if Path(f"{text}.py").is_file():
        return f"{text}.py"
    if not text.isidentifier():
        return _with_colon(text)
    from ..making.importing import names_in_file

    files = [path for path in sorted(Path().glob("*.py"))[:_MOST_FILES] if text in names_in_file(path)]
    if len(files) > 1:
        choices = first_few([f"{path}:{text}" for path in files], 6)
        raise SpecError(f"{shown(text)} is defined in {len(files)} files here. Choose from {choices}.")
    if files:
        return f"{files[0]}:{text}"
    return f"torch.nn:{text}" if text in _OF_TORCH else text


def namesake(text: str) -> str:
    """Return how to type a file or folder here that has the name of a layer: `bert.py`, `./torch`; empty without one.

    The layer is meant by its name alone.
    """
    if text not in LAYERS:
        return ""
    if Path(f"{text}.py").is_file():
        return f"{text}.py"
    return f"./{text}" if Path(text).is_dir() else ""


def _with_colon(text: str) -> str:
    """Return `package.module:Class` for `package.module.Class`; any other text as it is."""
    where, _, name = text.rpartition(".")
    if not where or not name[:1].isupper() or not all(part.isidentifier() for part in text.split(".")):
        return text
    package = "torch.nn" if where == "nn" else where  # as everybody imports it
    return f"{package}:{name}"


def command_for(text: str) -> str | None:
    """Return the command that a target alone means: `params` of a checkpoint, else `trace`; None if it is no target."""
    if text in LAYERS or ":" in text or text.endswith(".py"):
        return "trace"
    from ..files.checkpoint import is_checkpoint

    if is_checkpoint(text):
        return "params"
    return "trace" if Path(text).is_file() else None
