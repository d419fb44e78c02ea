"""A report that was saved, and damaged: it is refused in a line, or shown in every format."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import mha_inspect
from mha_inspect.errors import MhaInspectError
from mha_inspect.layers.spec import Show
from mha_inspect.render import to_text

from .contract import acts_on_a_terminal, in_time, require_message
from .files import ANYTHING


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in _places(item, (*path, key)))]


def test_damaged_reports(try_all, tmp_path):
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8)
    trace = mha_inspect.trace(layer, x, x, x, show=Show(ops=True, stats=True, values=True)).to_dict()
    places = _places(trace)[1:]
    changes = st.lists(st.tuples(st.sampled_from(places), st.none() | ANYTHING, st.booleans()), min_size=1, max_size=2)

    def check(case: list[tuple[tuple[Any, ...], Any, bool]]) -> None:
        damaged = copy.deepcopy(trace)
        for (*path, last), value, is_removed in case:
            inside: Any = damaged
            try:
                for key in path:
                    inside = inside[key]
                if is_removed:
                    del inside[last]
                else:
                    inside[last] = value
            except (KeyError, IndexError, TypeError):
                continue  # another change has removed it
        (tmp_path / "x.json").write_text(json.dumps(damaged, default=str))
        with in_time():
            try:
                found = mha_inspect.load(tmp_path / "x.json")
            except MhaInspectError as error:
                require_message(error)
                return
            for format in ("plain", "table", "json", "html"):
                text = to_text(found.report, format)
                assert format == "html" or acts_on_a_terminal(text) == []

    try_all(check, changes, 60)
