"""The viewer: what it stores is what was drawn of, and a real browser shows it."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mha_inspect.pictures.grid import Picture, PictureAxis, hex_table
from mha_inspect.pictures.viewer import (
    ROOM,
    Shown,
    SizeOfStage,
    Storage,
    drawn_page,
    encoded,
    fragment,
    frame,
    storages,
    viewer_data,
)
from mha_inspect.render.html import to_html
from mha_inspect.render.page import Page as WrittenPage

HOSTILE = '</script><img src=x onerror="window.hurt=1">\'\u2028\x1b[31m<!--'
FIRST = {"attention": 0, "stage": "weights", "head": 0}
TOKENS = ("the", "cat", "sat", "on", "the", HOSTILE)


def stages(rows: int, columns: int, *, heads: int = 3, seed: int = 0, labels: tuple[str, ...] = ()) -> list[Picture]:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(heads, rows, columns)).astype(np.float32)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    weights[:, np.triu(np.ones((rows, columns), bool), 1)] = -np.inf
    names = tuple(f"head {head}" for head in range(heads))
    sides = PictureAxis("query", labels), PictureAxis("key", labels)
    return [Picture("scores", names, scores, *sides, True), Picture("weights", names, weights, *sides)]


def numbers(stored: dict) -> np.ndarray:
    """The stored elements as numbers, by the rule that `encoded` tells."""
    codes = np.frombuffer(base64.b64decode(stored["data"]), {8: "u1", 16: "<u2"}[stored["bits"]])
    codes = codes.reshape(len(stored["heads"]), *stored["cells"]).astype(np.float64)
    most = 2 ** stored["bits"] - 3
    low, high = (np.array(stored[end])[:, None, None] for end in ("low", "high"))
    values = low + (codes - 1) / (most - 1) * (high - low)
    return np.select([codes == 0, codes == most + 1, codes == most + 2], [-np.inf, np.inf, np.nan], values)


@pytest.mark.parametrize("bits", [8, 16])
def test_stored_elements_are_those_of_the_tensor(bits):
    for picture in stages(17, 19):
        picture.values[0, 3, 0], picture.values[1, 2, 1] = np.nan, np.inf
        stored = encoded(picture, Storage(bits, None))
        read = numbers(stored)
        finite = np.isfinite(picture.values)
        assert np.array_equal(np.where(finite, 0, picture.values), np.where(finite, 0, read), equal_nan=True)
        step = (np.array(stored["high"]) - np.array(stored["low"])).max() / (2**bits - 4)
        assert np.abs(np.where(finite, picture.values, 0) - np.where(finite, read, 0)).max() <= step * 0.51
        assert f"Stored in {bits} bits" in " ".join(stored["notes"])
        assert ["masked", "masked"] in stored["signs"] or picture.signed
        assert ["nan", "NaN (1)"] in stored["signs"]


@given(rows=st.integers(1, 30), columns=st.integers(1, 30), cells=st.integers(1, 30), bits=st.sampled_from([8, 16]))
def test_what_is_reduced_is_the_largest_and_says_so(rows, columns, cells, bits):
    picture = stages(rows, columns, seed=rows * columns)[1]
    stored = encoded(picture, Storage(bits, cells))
    cells_read, (high, wide) = numbers(stored), stored["block"]
    assert cells_read.shape[1] <= cells
    assert cells_read.shape[2] <= cells
    for head, row, column in np.ndindex(cells_read.shape):
        part = picture.values[head, row * high : (row + 1) * high, column * wide : (column + 1) * wide]
        if np.isfinite(part.max()):
            assert abs(cells_read[head, row, column] - part.max()) <= 1 / (2**bits - 4)
        else:
            assert cells_read[head, row, column] == -np.inf
    assert ("Each cell is the largest of" in " ".join(stored["notes"])) is ((high, wide) != (1, 1))


def test_storage_keeps_what_fits():
    assert storages({"weights": SizeOfStage(100, 4)}) == {"weights": Storage(16, None)}
    assert storages({"weights": SizeOfStage(ROOM, 4)}) == {"weights": Storage(8, None)}
    size = SizeOfStage(48 * 32 * 512 * 512, 48 * 32)
    many = storages(dict.fromkeys(("scores", "masked_scores", "weights"), size))
    assert {how.bits for how in many.values()} == {8}
    assert sum(48 * 32 * how.cells**2 for how in many.values()) <= ROOM
    assert many["weights"].cells > many["scores"].cells > 32


def test_a_hostile_name_ends_nothing():
    pictures = stages(6, 6, labels=TOKENS)
    text = fragment(
        viewer_data([Shown(HOSTILE, pictures)], dict.fromkeys(("scores", "weights"), Storage(16, None)), FIRST)
    )
    assert text.count("</script>") == 2
    assert "<img" not in text
    assert "\x1b" not in text
    data = json.loads(re.search(r'id="mha-viewer-data">(.*?)</script>', text)[1])
    assert data["attentions"][0]["name"].startswith('</script><img src=x onerror="')


# -- in a browser -----------------------------------------------------------------------------------------------------


def written(file: Path, attentions: list[Shown], first: dict | None = None) -> Path:
    data = viewer_data(
        attentions,
        dict.fromkeys(("scores", "weights"), Storage(16, None)),
        {"attention": 0, "stage": "weights", "head": 0, **(first or {})},
    )
    file.write_text(to_html(WrittenPage("t", "", "", ()), drawn_page(data)), encoding="utf-8")
    return file


@pytest.fixture
def attentions() -> list[Shown]:
    return [Shown(f"attention {n} in {HOSTILE}", stages(6, 6, seed=n, labels=TOKENS)) for n in range(3)]


@pytest.fixture
def file(tmp_path, attentions) -> Path:
    return written(tmp_path / "viewer.html", attentions)


def hover(page, row: int, column: int, rows: int = 6, columns: int = 6) -> None:
    """Point at the middle of a cell."""
    from selenium.webdriver import ActionChains

    page.run("document.querySelector('.picture').scrollIntoView()")
    width, height = page.run("const p = document.querySelector('.picture'); return [p.clientWidth, p.clientHeight]")
    from_middle = round(((column + 0.5) / columns - 0.5) * width), round(((row + 0.5) / rows - 0.5) * height)
    ActionChains(page.driver).move_to_element_with_offset(page.find(".picture"), *from_middle).perform()


PIXEL = "return [...document.querySelector('.picture').getContext('2d').getImageData(...arguments, 1, 1).data]"


def test_choose_attention_stage_and_head(page, file, attentions):
    page.open(file)
    assert page.text(".read") == "weights, head 0"
    page.find(".heads button:nth-child(3)").click()
    assert page.text(".read") == "weights, head 2"
    assert page.find(".heads [aria-pressed=true]").text.endswith("head 2")
    page.find("[data-stage=scores]").click()
    assert page.text(".read") == "scores, head 2"
    size = np.abs(attentions[0].pictures[0].values).max()
    assert [float(page.text(end)) for end in (".low", ".high")] == [-float(f"{size:.4g}"), float(f"{size:.4g}")]
    shown = page.run("return [...document.querySelector('[name=attention]').options].map((o) => o.textContent)")
    assert [name[:11] for name in shown] == ["attention 0", "attention 1", "attention 2"]
    page.run("const s = document.querySelector('[name=attention]'); s.value = 1; s.dispatchEvent(new Event('change'))")
    size = np.abs(attentions[1].pictures[0].values).max()
    assert float(page.text(".high")) == float(f"{size:.4g}")
    assert page.complaints == []


def test_hovering_reads_numbers_and_labels(page, file, attentions):
    page.open(file)
    weights = attentions[0].pictures[1].values[0]
    for row, column in ((3, 1), (5, 0), (1, 4)):
        hover(page, row, column)
        said = page.text(".read")
        assert said.startswith(f"query {row} “{TOKENS[row][:5]}")
        assert f", key {column} “{TOKENS[column]}”: " in said
        number = said.rpartition(": ")[2]
        if column > row:
            assert number == "masked"
        else:
            assert abs(float(number) - weights[row, column]) <= 1e-4


def test_each_cell_has_the_colour_of_its_number(page, file, attentions):
    page.open(file)
    for stage, signed in (("weights", False), ("scores", True)):
        page.find(f"[data-stage={stage}]").click()
        table = [tuple(int(c[i : i + 2], 16) for i in (0, 2, 4)) for c in hex_table(signed)]
        picture = next(picture for picture in attentions[0].pictures if picture.title == stage)
        low, high = picture.scale
        for row, column in np.ndindex(6, 6):
            number = picture.values[0, row, column]
            *colour, shown = page.run(PIXEL, column, row)
            if np.isfinite(number):
                assert shown == 255
                assert abs((table.index(tuple(colour)) + 0.5) / 256 - (number - low) / (high - low)) <= 1.51 / 256
            else:
                assert shown == 0  # the hatched ground is seen


def test_the_keyboard_moves_between_heads_layers_and_cells(page, file):
    page.open(file)
    page.run("document.querySelector('.heads [tabindex=\"0\"]').focus()")
    page.press("ARROW_RIGHT")
    assert page.text(".read") == "weights, head 1"
    assert page.driver.switch_to.active_element.text.endswith("head 1")
    page.press("ARROW_LEFT", "ARROW_LEFT")
    assert page.text(".read") == "weights, head 2"
    page.press("ARROW_DOWN")
    assert page.run("return document.querySelector('[name=attention]').value") == "1"
    page.press("ARROW_UP", "ARROW_UP")
    assert page.run("return document.querySelector('[name=attention]').value") == "2"
    page.run("document.querySelector('.picture').focus()")
    page.press("ARROW_DOWN", "ARROW_RIGHT", "ARROW_DOWN")
    assert page.text(".read").startswith("query 1 “cat”, key 1 “cat”: 0.")


def test_everything_has_a_name(page, file):
    """Each control that can have the focus has a label, and what is drawn is said in words."""
    page.open(file)
    unnamed = page.run(
        "return [...document.querySelectorAll('select, input, button, canvas[tabindex]')].filter((e) =>"
        " !(e.getAttribute('aria-label') || (e.labels && e.labels.length) || e.textContent.trim())).length"
    )
    assert unnamed == 0
    label = page.find(".picture").get_attribute("aria-label")
    assert label == "weights, head 0: 6 places of query by 6 of key"
    assert "masked" in page.text(".signs")


def contrast(page, selector: str) -> float:
    ink, ground = page.run(
        "const one = document.querySelector(arguments[0]), root = document.querySelector('.mha-viewer');"
        "return [getComputedStyle(one).color, getComputedStyle(root).backgroundColor]",
        selector,
    )

    def light(colour: str) -> float:
        parts = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    bright, dim = sorted((light(ink), light(ground)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_follow_the_system_and_can_be_read(page, file, dark):
    page.open(file, dark=dark)
    ground = page.run("return getComputedStyle(document.querySelector('.mha-viewer')).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark
    for selector in (".read", ".notes", ".help", "label", "legend", "select", "button .name"):
        assert contrast(page, selector) >= 4.5, selector


def test_a_narrow_screen_needs_no_scrolling_sideways(page, file):
    width = 320
    page.open(file, width=width, height=700)
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.run("return document.querySelector('.plot').getBoundingClientRect().width") > 0.8 * width
    assert page.run("return document.querySelector('.picture').getBoundingClientRect().width") > 0.5 * width


def test_a_hostile_name_is_text(page, file):
    page.open(file)
    assert page.run("return [window.hurt, document.images.length, document.scripts.length]") == [None, 0, 2]
    assert 'in </script><img src=x onerror="window.hurt=1">' in page.text("[name=attention]")
    assert page.complaints == []


def test_nothing_is_fetched_and_nothing_else_may_run(page, file):
    page.open(file)
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    page.run("const s = document.createElement('script'); s.textContent = 'window.hurt = 1'; document.body.append(s)")
    assert page.run("return window.hurt") is None
    assert any("Content Security Policy" in entry["message"] for entry in page.complaints)


def test_in_a_notebook_it_runs_in_a_frame(page, tmp_path, attentions):
    data = viewer_data(attentions, dict.fromkeys(("scores", "weights"), Storage(16, None)), FIRST | {"head": 1})
    file = tmp_path / "notebook.html"
    file.write_text(
        f'<!DOCTYPE html><html><head><meta charset="UTF-8"></head><body>{frame(data)}</body></html>', "utf-8"
    )
    page.open(file)
    page.driver.switch_to.frame(page.find("iframe"))
    try:
        assert page.text(".read") == "weights, head 1"
    finally:
        page.driver.switch_to.default_content()
