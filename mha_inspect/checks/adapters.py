"""Factors of LoRA that reach other projections than the one that they are named for.

    z = self.qkv(x)
    z = z + z.new_zeros(z.shape).index_copy(-1, rows, low @ self.bq.T)        # rows of q, as if they lay [q | k | v]

Where the rows of a packed weight lie group by group, the first of them are queries, a key and a value of each group.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ..naming.parameters import parts_in
from ..naming.projection import Part
from ..reports.check import Finding
from ..text import listed, spans
from .evidence import Evidence

_LETTERS = {"query": "q", "key": "k", "value": "v"}
_SHORT = re.compile(r"(?:lora)?[abw]?([qkv])")
"""A word of a name that says a side in one letter: `q`, `bq`, `loraq`."""


def factors_on_other_sides(evidence: Evidence) -> Iterator[Finding]:
    """Yield factors that are named for one side and are added to the rows of others, each once."""
    reported: set[str] = set()
    places = {id(attention): place for place, (attention, _) in enumerate(evidence.run.attentions)}
    for attention, _, _ in evidence.kinds:
        parts, _ = parts_in(evidence.run, places[id(attention)])
        for name, reached in _factors_by_name(parts).items():
            side = _side_in(name)
            if not side or name in reported:
                continue
            if all(part.letter == side for part in reached):
                continue
            reported.add(name)
            rows = listed(list(map(_rows, reached)))
            yield Finding(
                "parameters",
                f"{name} is named for {side}, and is added to {rows}.",
                "Its rows were followed to the heads. A packed weight may have rows by group instead of [q | k | v].",
                sure=False,
            )


def _factors_by_name(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """Return the parts of an attention that are added to projections, by the name of their parameter."""
    by_name: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        if part.kind == "added factor" and part.heads and not part.is_shared:
            by_name[part.parameter.name].append(part)
    return by_name


def _side_in(name: str) -> str:
    """Return the side that a name says: `q` for `attn.lora_q` and `bq`; empty if it says none, or several."""
    said = set()
    for word in re.split(r"[._]", name.casefold()):
        short = _SHORT.fullmatch(word)
        if word in _LETTERS:
            said.add(_LETTERS[word])
        elif short is not None:
            said.add(short[1])
    return said.pop() if len(said) == 1 else ""


def _rows(part: Part) -> str:
    """Return the heads of a side: `W_k of head 0`."""
    heads = sorted(part.heads)
    word = "head" if len(heads) == 1 else "heads"
    return f"W_{part.letter} of {word} {spans(heads)}"
