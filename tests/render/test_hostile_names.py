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

from .samples import FULL_PARAMS
from .trace_samples import ATTENTION, STAGES, TRACE

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
    stage = replace(STAGES[3], formula=name, axes=name, op=OpRef(1, name, name), values=Values(name, None))
    return replace(
        TRACE,
        layer=LayerInfo(name, {name: name}),
        path=replace(TRACE.path, plain=name, reason=name, opened=(name,)),
        attentions=(
            replace(ATTENTION, module=name, stages=(stage,), notes=(name,)),
            replace(ATTENTION, module=name, stages=(stage,), notes=(name,)),
        ),
        returns=(replace(TRACE.returns[0], name=name, axes=name),),
        notes=(name,),
        ops=(operand_line,),
        proof=replace(TRACE.proof, note=name),
    )


def acts_on_a_terminal(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_nothing_that_acts_on_a_terminal_comes_through(name, format):
    text = to_text(trace_of(name), format, width=100)
    assert [c for c in text if acts_on_a_terminal(c) and c != "\n"] == []
    text.encode("utf-8")


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_colour_adds_only_its_own_escapes(name):
    text = to_text(trace_of(name), "table", width=100, color=True)
    escapes = text.split("\x1b")[1:]
    assert escapes
    assert all(part[0] == "[" and part[1 : part.index("m")].replace(";", "").isdigit() for part in escapes)


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_json_gives_back_the_very_name_and_a_page_shows_it(name):
    trace = trace_of(name)
    assert json.loads(to_text(trace, "json"))["attentions"][0]["module"] == name
    assert printable(name) in to_text(trace, "plain")
    page = to_text(trace, "html")
    assert "<script" not in page
    body = ElementTree.fromstring(page[page.index("<body>") : page.index("</body>") + 7])
    assert printable(name) in "".join(body.itertext())


def test_a_name_of_any_length_takes_little_room_and_keeps_both_ends():
    name = "first." + "e" + "\u0301" * 20_000 + ".last"
    page = to_text(replace(FULL_PARAMS, parameters=(replace(FULL_PARAMS.parameters[0], name=name),)), "plain")
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


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_parameters_are_cleaned_too(name):
    report = replace(
        FULL_PARAMS,
        parameters=tuple(replace(p, name=name, role=name, axes=name, heads=None) for p in FULL_PARAMS.parameters),
        side_by_side=tuple(replace(c, shapes={name: (3,)}, first_head={}) for c in FULL_PARAMS.side_by_side),
    )
    for format in FORMATS:
        assert [c for c in to_text(report, format) if acts_on_a_terminal(c) and c != "\n"] == []
