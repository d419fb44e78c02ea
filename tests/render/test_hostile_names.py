"""Names out of modules, tensors and files act on no terminal and on no page."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mha_inspect.render.formats import FORMATS, to_text
from mha_inspect.reports.common import LayerInfo, Values
from mha_inspect.reports.trace import OpLine, OpRef
from mha_inspect.text import printable

from .samples import report, trace

HOSTILE = {
    "colour": "\x1b[31mred\x1b[0m",
    "8-bit": "\x9b31mred",
    "link": "\x1b]8;;file:///etc/passwd\x1b\\x\x1b]8;;\x1b\\",
    "return": "good\rbad",
    "newline": "first\nsecond",
    "null": "x\x00y",
    "bidi override": "abc\u202edcba",
    "line separator": "a\u2028b\u2029c",
    "surrogate": "a\ud800b",
    "markup": "[red]x[/red]",
    "emoji code": ":smile:",
    "html": "<script>alert(1)</script>&amp;",
}


def trace_of(name: str):
    """A trace with this name in every place that a name can come into."""
    operand_line = OpLine(0, name, name, name, (), (), name, "view", name)
    given = trace()
    (attention,) = given.attentions
    stage = replace(attention.stages[3], formula=name, axes=name, op=OpRef(1, name, name), values=Values(name, None))
    attention = replace(attention, module=name, stages=(stage,), notes=(name,))
    return replace(
        given,
        layer=LayerInfo(name, {name: name}),
        path=replace(given.path, plain=name, reason=name, opened=(name,)),
        attentions=(attention, attention),
        returns=(replace(given.returns[0], name=name, axes=name),),
        notes=(name,),
        ops=(operand_line,),
        proof=replace(given.proof, note=name),
    )


def acts_on_a_terminal(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def parameters_of(name: str):
    """The same of parameters."""
    given = report("params")
    rows = tuple(replace(row, name=name, role=name, axes=name, heads=None) for row in given.parameters)
    return replace(given, parameters=rows)


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_nothing_that_acts_on_a_terminal_comes_through(name):
    for made in (trace_of(name), parameters_of(name)):
        for format in FORMATS:
            text = to_text(made, format, width=100)
            assert [c for c in text if acts_on_a_terminal(c) and c != "\n"] == []
            text.encode("utf-8")
        # Colour adds only its own escapes.
        escapes = to_text(made, "table", width=100, color=True).split("\x1b")[1:]
        assert escapes
        assert all(part[0] == "[" and part[1 : part.index("m")].replace(";", "").isdigit() for part in escapes)
    assert json.loads(to_text(trace_of(name), "json"))["attentions"][0]["module"] == name
    assert printable(name) in to_text(trace_of(name), "plain")
    page = to_text(trace_of(name), "html")
    assert "<script" not in page
    body = ElementTree.fromstring(page[page.index("<body>") : page.index("</body>") + 7])
    assert printable(name) in "".join(body.itertext())


def test_a_name_of_any_length_takes_little_room_and_keeps_both_ends():
    name = "first." + "e" + "\u0301" * 20_000 + ".last"
    given = report("params")
    page = to_text(replace(given, parameters=(replace(given.parameters[0], name=name),)), "plain")
    row = next(line for line in page.split("\n") if line.startswith("first."))
    assert len(row) < 2000
    assert ".last  " in row


def test_what_is_escaped_can_be_read():
    assert printable("a\x1b[31m\u202e\U000e0041") == "a\\x1b[31m\\u202e\\U000e0041"
    assert printable("naïve √256 · kᵀ 漢字") == "naïve √256 · kᵀ 漢字"


@given(st.text())
def test_cleaning_leaves_only_what_can_be_printed_and_is_done_once(text):
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
