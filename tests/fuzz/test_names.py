"""Names of any kind, through every format: nothing that a terminal acts on, JSON as it was, and in no time."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from mha_inspect.render.formats import FORMATS, to_text
from tests.render.test_hostile_names import HOSTILE, trace_of

from .contract import acts_on_a_terminal, in_time

PIECES = st.one_of(
    st.sampled_from(list(HOSTILE.values())),
    st.text(max_size=20),
    st.builds(
        lambda piece, number: piece * number,
        st.sampled_from(["e\u0301", "\u0301", "\u0488", "a", "漢", "\u200d", "\U0001f469", "\ufdfd", ".", "&", "\t"]),
        st.integers(0, 20_000),
    ),
)


def test_names(try_all):
    def check(case):
        name, width, color = case
        for format in FORMATS:
            with in_time():
                text = to_text(trace_of(name), format, width=width, color=color and format == "table")
            if not (color and format == "table"):
                assert acts_on_a_terminal(text) == []
            text.encode("utf-8")
        assert json.loads(to_text(trace_of(name), "json"))["attentions"][0]["module"] == name

    names = st.lists(PIECES, max_size=4).map("".join)
    try_all(check, st.tuples(names, st.sampled_from([None, 1, 20, 80, 200]), st.booleans()), 15)
