"""What holds for a format whatever the report."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from html import escape
from xml.etree import ElementTree

import pytest

from mha_inspect.render.formats import page_of, to_text
from mha_inspect.render.page import Column, Page, Table, section, table
from mha_inspect.render.terminal import to_table

from .samples import COMPARE, REPORTS
from .trace_samples import ATTENTION, FULL_TRACE, STAGES, TRACE, VALUES

ESCAPE = "\x1b"
WIDTHS = (1, 20, 60, 100)


@cache
def rendered(name, format, **settings):
    """A report in a format, made once for all that is asked of it."""
    return to_text(REPORTS[name], format, **settings)


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_of_a_table_is_wider_than_asked_for(name, width):
    lines = rendered(name, "table", width=width).split("\n")
    # Superscripts and Greek are one column each; there are no wide characters in the samples.
    assert [line for line in lines if len(line) > width] == []


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("name", REPORTS)
def test_no_name_is_cut_at_the_widths_of_terminals(name, width):
    page = rendered(name, "table", width=width)
    assert "…" not in page
    for word in re.findall(r"[a-z]+_[a-z_]+|encoder[a-z0-9.]+", rendered(name, "plain")):
        # Operations and settings may lose their column; what has one keeps its words whole.
        if word in STAGE_NAMES or word.startswith("encoder"):
            assert word in page, word


STAGE_NAMES = {stage.name for stage in STAGES} | {"in_proj_weight", "out_proj.weight", "head_dim"}


@pytest.mark.parametrize("width", [30, 60])
def test_no_number_of_a_tensor_is_lost_where_it_does_not_fit(width):
    page = to_text(FULL_TRACE, "table", width=width)
    found = re.findall(r"-?\d\.\d{4}|-?inf|nan", VALUES.text)
    # Once at a stage, once at each of the two tensors that are returned.
    assert len(found) == 4 * 6
    assert [page.count(number) >= 3 for number in found] == [True] * len(found)


def test_a_shape_is_one_word_and_no_other_character_stands_for_its_spaces():
    columns = [Column("inputs", str, wrap=6), Column("note", lambda row: "")]
    page = Page("", "", "", (section("", table(["%4 [1536], %2 [12, 512]", "漢字漢字 abcdefgh"], columns)),))
    assert [line.split("  ")[0] for line in to_table(page, width=18, color=False).split("\n")[4:]] == [
        *("%4 [1536],", "%2 [12, 512]", "漢字漢字", "abcdefgh", "")
    ]


@pytest.mark.parametrize("name", ["e" + "\u0301" * 20_000, "漢" * 20_000, "a" * 20_000, "e\u0301" * 20_000])
def test_long_names_take_linear_time(name):
    start = time.process_time()
    page = to_text(replace(TRACE, notes=(name,), layer=replace(TRACE.layer, name=name)), "table", width=20)
    assert "…" in page
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", REPORTS)
def test_colour_changes_nothing_but_the_colour(name):
    coloured = rendered(name, "table", width=100, color=True)
    assert ESCAPE in coloured
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in bare.split("\n")] == rendered(name, "table", width=100).split("\n")


def test_a_dimension_has_the_colour_of_its_axis():
    coloured = to_text(TRACE, "table", width=140, color=True)
    row = next(line for line in coloured.split("\n") if "scores" in line)
    assert "\x1b[36m12\x1b[0m" in row
    assert "\x1b[36mquery\x1b[0m" in row
    assert "\x1b[94m12\x1b[0m" in row
    assert "\x1b[94mkey\x1b[0m" in row


@pytest.mark.parametrize("name", REPORTS)
def test_no_colour_is_one_that_a_common_palette_makes_pale(name):
    found = re.findall("\x1b\\[([0-9;]*)m", rendered(name, "table", color=True))
    codes = {code for escape in found for code in escape.split(";")}
    # Bold, dim; red, green, magenta, cyan, bright blue. Blue (34) and bright black (90)
    # are dark on black.
    # Yellow is for what may be wrong alone, where a reader expects it.
    assert codes <= {"0", "1", "2", "31", "32", "33", "35", "36", "94"}


def body_of(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text[text.index("<body>") : text.index("</body>") + 7])


def words_in(element: ElementTree.Element, tag: str) -> list[str]:
    return ["".join(inner.itertext()) for inner in element.iter(tag)]


@pytest.mark.parametrize("name", REPORTS)
def test_html_tables_have_every_cell_in_full(name):
    page = page_of(REPORTS[name])
    tables = [block for section in page.sections for block in section.blocks if isinstance(block, Table)]
    shown_tables = list(body_of(rendered(name, "html")).iter("table"))
    assert len(shown_tables) == len(tables)
    for shown, block in zip(shown_tables, tables, strict=True):
        assert words_in(shown, "th") == [column.title for column in block.columns]
        rows = [words_in(row, "td") for row in shown.iter("tr")][1:]
        assert rows == [[cell.full for cell in row] for row in block.rows]


@pytest.mark.parametrize("name", REPORTS)
def test_html_has_a_title_and_two_themes_and_each_table_scrolls_by_itself(name):
    text = rendered(name, "html")
    assert f"<title>mha-inspect: {page_of(REPORTS[name]).title}</title>" in text
    assert "@media (prefers-color-scheme: dark)" in text
    scrolling = [around for around in body_of(text).iter("div") if around.get("class") == "scroll"]
    assert [around[0].tag for around in scrolling if around[0].tag == "table"] == ["table"] * text.count("<table")


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_fetches_nothing(name):
    assert not re.search(r"https?:|//\w|url\(|@import|@font-face|<script|\bsrc=|\bhref=", rendered(name, "html"))


def test_the_scale_is_told_beside_the_usual_one():
    def page(scale: float) -> str:
        return to_text(replace(TRACE, attentions=(replace(ATTENTION, scale=scale),)), "plain")

    assert "scale 0.0625 = 1/√256" in page(0.0625)
    # As torch's math path applies it: the square of a rounded fourth root.
    assert "= 1/√256" in page(0.062500001)
    assert "scale 0.07 = 1.12 × 1/√256\n" in page(0.07)
    assert "scale 1 (not scaled)" in page(1.0)


def test_what_was_not_opened_and_what_is_a_shape_alone_are_said():
    path = replace(TRACE.path, not_opened=("aten._a: not enough memory", "aten._b: it takes nested tensors"))
    stages = tuple(replace(stage, shape_only=stage.name in ("scores", "weights")) for stage in STAGES)
    report = replace(TRACE, path=path, attentions=(replace(ATTENTION, stages=stages),))
    for format in ("plain", "table"):
        lines = to_text(report, format, width=140).split("\n")
        said = [line.split("  ")[-1].strip() for line in lines if line.startswith("not opened")]
        assert said == ["aten._a: not enough memory", "aten._b: it takes nested tensors"]
        assert [line.split()[0] for line in lines if re.match(r"\w+\*?°", line)] == ["scores*°", "weights*°"]
        assert any("° too large to compute" in line for line in lines)
        assert "°" not in to_text(TRACE, format)


def test_head_counts_whose_reason_is_the_same_share_a_line():
    same = [replace(count, reason="Every stage is identical.") for count in COMPARE.counts[:3]]
    page = to_text(replace(COMPARE, baseline=2, counts=tuple(same)), "plain")
    assert "1, 4 heads  Every stage is identical." in page
    alone = to_text(replace(COMPARE, baseline=2, counts=tuple(same[:2])), "plain")
    assert re.search(r"^1 head +Every stage is identical", alone, re.MULTILINE)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="'yaml' is not one of table, plain, json, html"):
        to_text(TRACE, "yaml")


@pytest.mark.parametrize(("format", "rich"), [("html", False), ("table", True)])
def test_only_terminal_formats_import_rich_and_none_imports_torch(format, rich):
    code = (
        "import sys\n"
        "from mha_inspect.render.formats import to_text\n"
        "from mha_inspect.reports.common import Environment, LayerInfo\n"
        "from mha_inspect.reports.params import ParamsReport, ParametersTotal\n"
        "made_with = Environment('2', 'cpu', 'float32', 0)\n"
        "report = ParamsReport(made_with, LayerInfo('x', {}), (), ParametersTotal(0, 0, '', None))\n"
        f"to_text(report, {format!r})\n"
        "print('rich' in sys.modules, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(rich), "False"]


JUDGED = [name for name, report in REPORTS.items() if report.verdict is not None]


@pytest.mark.parametrize("name", JUDGED)
def test_the_verdict_is_the_first_line_in_every_format(name):
    verdict = REPORTS[name].verdict
    assert verdict
    assert rendered(name, "plain").split("\n")[0] == verdict
    words = rendered(name, "table", width=100).split()
    assert words[: len(verdict.split())] == verdict.split()
    before, _, after = rendered(name, "html").partition("<h1>")
    assert escape(verdict) in before
    assert after
    assert REPORTS[name].to_dict()["verdict"] == verdict


@pytest.mark.parametrize("name", JUDGED)
def test_a_page_that_is_longer_than_the_screen_ends_with_the_verdict(name):
    verdict, report = REPORTS[name].verdict, REPORTS[name]
    short = to_text(report, "table", width=100, height=3).split()
    assert short[-len(verdict.split()) :] == verdict.split()
    whole = to_text(report, "table", width=100, height=None).split()
    assert len(short) > len(verdict.split())
    assert " ".join(short).count(" ".join(verdict.split())) > " ".join(whole).count(" ".join(verdict.split())) - 1
