"""What holds for a format whatever the report."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import cache
from html import escape
from xml.etree import ElementTree

import pytest

from mha_inspect.render.formats import page_of, to_text
from mha_inspect.render.page import Column, Page, Table, section, table
from mha_inspect.render.terminal import to_table

from .samples import REPORTS, report, trace

ESCAPE = "\x1b"
each_report = pytest.mark.parametrize("name", REPORTS)


@cache
def rendered(name, format, **settings):
    """A report in a format, made once for all that is asked of it."""
    return to_text(report(name), format, **settings)


@each_report
def test_a_table_is_no_wider_than_asked_for_and_loses_no_stage_at_the_widths_of_terminals(name):
    for width in (20, 60, 100):
        lines = rendered(name, "table", width=width).split("\n")
        # Superscripts and Greek are one column each; there are no wide characters in the samples.
        assert [line for line in lines if len(line) > width] == []
    stages = {stage.name for stage in trace().attentions[0].stages} | {"in_proj_weight", "out_proj.weight"}
    for word in stages & {*re.findall(r"[a-z]+[._][a-z_]+", rendered(name, "plain"))}:
        # Operations and settings may lose their column; what has one keeps its words whole.
        assert word in rendered(name, "table", width=60), word


@pytest.mark.parametrize("width", [30, 60])
def test_no_number_of_a_tensor_is_lost_where_it_does_not_fit(width):
    stages = trace("trace-full").attentions[0].stages
    text = next(stage.values.text for stage in stages if stage.name == "weights")
    page = rendered("trace-full", "table", width=width)
    assert all(number in page for number in re.findall(r"\d\.\d{4}", text))


def test_a_shape_is_one_word_and_no_other_character_stands_for_its_spaces():
    columns = [Column("inputs", str, wrap=6), Column("note", lambda row: "")]
    page = Page("", "", "", (section("", table(["%4 [1536], %2 [12, 512]", "漢字漢字 abcdefgh"], columns)),))
    assert [line.split("  ")[0] for line in to_table(page, width=18, color=False).split("\n")[4:]] == [
        *("%4 [1536],", "%2 [12, 512]", "漢字漢字", "abcdefgh", "")
    ]


@pytest.mark.parametrize("name", ["e" + "\u0301" * 20_000, "漢" * 20_000, "a" * 20_000])
def test_long_names_take_linear_time(name):
    start = time.process_time()
    page = to_text(replace(trace(), notes=(name,), layer=replace(trace().layer, name=name)), "table", width=20)
    assert "…" in page
    assert time.process_time() - start < 2


@each_report
def test_colour_changes_nothing_but_the_colour(name):
    coloured = rendered(name, "table", width=100, color=True)
    assert ESCAPE in coloured
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in bare.split("\n")] == rendered(name, "table", width=100).split("\n")
    # Bold, dim; red, green, magenta, cyan, bright blue. Blue (34) and bright black (90) are dark on black.
    # Yellow is for what may be wrong alone, where a reader expects it.
    codes = {code for found in re.findall("\x1b\\[([0-9;]*)m", coloured) for code in found.split(";")}
    assert codes <= {"0", "1", "2", "31", "32", "33", "35", "36", "94"}


def test_a_dimension_has_the_colour_of_its_axis():
    row = next(line for line in rendered("trace", "table", width=140, color=True).split("\n") if "context" in line)
    assert "\x1b[36m5\x1b[0m" in row
    assert "\x1b[36mquery\x1b[0m" in row


def body_of(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text[text.index("<body>") : text.index("</body>") + 7])


def words_in(element: ElementTree.Element, tag: str) -> list[str]:
    return ["".join(inner.itertext()) for inner in element.iter(tag)]


@each_report
def test_html_tables_have_every_cell_in_full_and_fetch_nothing(name):
    text, page = rendered(name, "html"), page_of(report(name))
    tables = [block for section in page.sections for block in section.blocks if isinstance(block, Table)]
    for shown, block in zip(body_of(text).iter("table"), tables, strict=True):
        assert words_in(shown, "th") == [column.title for column in block.columns]
        rows = [words_in(row, "td") for row in shown.iter("tr")][1:]
        assert rows == [[cell.full for cell in row] for row in block.rows]
    assert f"<title>mha-inspect: {page.title}</title>" in text
    assert "@media (prefers-color-scheme: dark)" in text
    scrolling = [around for around in body_of(text).iter("div") if around.get("class") == "scroll"]
    assert [around[0].tag for around in scrolling if around[0].tag == "table"] == ["table"] * text.count("<table")
    assert not re.search(r"https?:|//\w|url\(|@import|@font-face|<script|\bsrc=|\bhref=", text)


def test_what_was_not_opened_and_what_is_a_shape_alone_are_said():
    path = replace(trace().path, not_opened=("aten._a: not enough memory", "aten._b: it takes nested tensors"))
    (attention,) = trace().attentions
    stages = tuple(replace(stage, shape_only=stage.name in ("scores", "weights")) for stage in attention.stages)
    changed = replace(trace(), path=path, attentions=(replace(attention, stages=stages),))
    for format in ("plain", "table"):
        lines = to_text(changed, format, width=140).split("\n")
        said = [line.split("  ")[-1].strip() for line in lines if line.startswith("not opened")]
        assert said == ["aten._a: not enough memory", "aten._b: it takes nested tensors"]
        assert [line.split()[0] for line in lines if re.match(r"\w+\*?°", line)] == ["scores*°", "weights*°"]
        assert "°" not in to_text(trace(), format)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="'yaml' is not one of table, plain, json, html"):
        to_text(trace(), "yaml")


@each_report
def test_the_verdict_is_the_first_line_in_every_format_and_the_last_of_a_page_longer_than_the_screen(name):
    verdict = report(name).verdict
    if verdict is None:
        assert name.startswith(("params", "layers"))
        return
    assert rendered(name, "plain").split("\n")[0] == verdict
    whole = rendered(name, "table", width=100)
    assert whole.split()[: len(verdict.split())] == verdict.split()
    before, _, after = rendered(name, "html").partition("<h1>")
    assert escape(verdict) in before
    assert after
    assert report(name).to_dict()["verdict"] == verdict
    short = to_text(report(name), "table", width=100, height=3).split()
    fixes = [finding.fix for finding in getattr(report(name), "findings", ()) if finding.fix]
    closing = verdict.split() + (["fix", *fixes[0].split()] if fixes else [])
    assert short[-len(closing) :] == closing
    assert " ".join(short).count(" ".join(verdict.split())) > " ".join(whole.split()).count(verdict) - 1
