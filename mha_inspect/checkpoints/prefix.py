"""Find the prefix by which the names in a checkpoint differ from those in a module.

A model may be saved alone, or as a part of a larger one:

    model.layers.0.q_proj.weight    in the file
          layers.0.q_proj.weight    in the module

>>> prefix = common_prefix({"model.layers.0.q_proj.weight"}, {"layers.0.q_proj.weight"})
>>> prefix.in_module("model.layers.0.q_proj.weight"), prefix.in_file("layers.0")
('layers.0.q_proj.weight', 'model.layers.0')
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_LONGEST = 5
"""The largest number of pieces in a prefix."""


@dataclass(frozen=True)
class Prefix:
    """The beginning of all names of one side, which the names of the other side lack."""

    text: str = ""
    """`model.`; empty if both sides have the same names."""
    is_of_module: bool = False
    """Whether the names of the module begin so, and not those of the file."""

    def in_module(self, name: str) -> str:
        """Return the name in the module of a tensor of the file."""
        if self.is_of_module:
            return self.text + name
        return name.removeprefix(self.text)

    def in_file(self, path: str) -> str:
        """Return the path in the file of a module; empty for the module whose tensors the file has without a prefix."""
        if self.is_of_module:
            # Names are of tensors inside: the path `model` is the prefix `model.` without its point.
            return f"{path}.".removeprefix(self.text).removesuffix(".")
        return f"{self.text}{path}".removesuffix(".")

    def __str__(self) -> str:
        """Return the prefix as reports have it: `model.` of the file, `-model.` of the module."""
        return f"-{self.text}" if self.is_of_module else self.text


def common_prefix(in_file: Collection[str], in_module: Collection[str]) -> Prefix:
    """Return the prefix with which most names are on both sides; the shortest if several are equal."""
    in_both = {*in_file} & {*in_module}
    agreeing = Counter({Prefix(): len(in_both)})
    for text in _prefixes(in_file, in_module):
        agreeing[Prefix(text)] += 1
    for text in _prefixes(in_module, in_file):
        agreeing[Prefix(text, is_of_module=True)] += 1

    def rank(prefix: Prefix) -> tuple[int, int, str]:
        text = str(prefix)
        return -agreeing[prefix], len(text), text

    return min(agreeing, key=rank)


def _prefixes(longer: Collection[str], shorter: Collection[str]) -> Iterator[str]:
    """Yield for each longer name the prefixes without which it is one of the shorter names."""
    for name in longer:
        pieces = name.split(".")
        for count in range(1, min(len(pieces), _LONGEST + 1)):
            if ".".join(pieces[count:]) in shorter:
                yield f"{'.'.join(pieces[:count])}."
