"""The picture of a page, from input to output: what it says is what the report says, and a real browser shows it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.spec import AttentionSpec
from mha_inspect.pictures.grid import codes
from mha_inspect.render.formats import page_of
from mha_inspect.render.html import to_cell

from .read_back import panels

LINE = ("--embed-dim", "24", "--seq-len", "6", "--batch", "2")
WIDTHS = (420, 1280)


def flow_in(file: Path) -> list[dict]:
    data = json.loads(re.search(r'id="mha-viewer-data">(.*?)</script>', file.read_text(encoding="utf-8"))[1])
    return [attention["flow"] for attention in data["attentions"]]


def rows_of_heads(stage: dict) -> dict[int, list[tuple[int, int]]]:
    """The bounds of the bands of each head."""
    found: dict[int, list[tuple[int, int]]] = {}
    stop = 0
    for head, size in stage["bands"]["runs"]:
        start, stop = stop, stop + size
        found.setdefault(head, []).append((start, stop))
    return found


# -- what the picture is made of --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_bands_are_the_rows_that_params_finds_for_each_head(invoke, tmp_path, name):
    """Two ways to one answer: the axes of a stage, and the elements of the weight that each head uses."""
    layer = ("--layer", name, *LINE, "--num-heads", "4")
    invoke("trace", *layer, "-o", str(tmp_path / "a.html"))
    stages = {stage["name"]: stage for stage in flow_in(tmp_path / "a.html")[0]["stages"]}
    report = json.loads(invoke("params", *layer, "--per-head", "--json").out)
    compared = 0
    for parameter in report["parameters"]:
        for stage, part, side in (("q_proj", "W_q", "rows"), ("v_proj", "W_v", "rows"), ("concat", "W_o", "columns")):
            pieces = [piece for piece in parameter.get("heads") or () if piece["part"] == part]
            heads = {piece["head"] for piece in pieces}
            if heads != {0, 1, 2, 3} or not stages[stage]["bands"]:
                continue
            # A matrix may stand below another one in its parameter.
            first = min(piece[side][0] for piece in pieces)
            theirs = {piece["head"]: [tuple(bound - first for bound in piece[side])] for piece in pieces}
            assert rows_of_heads(stages[stage]) == theirs
            compared += 1
    # Layers whose heads have their own matrices, or that have no W_o, have fewer.
    assert compared == {"bert": 2, "narrow": 1, "per-head": 1}.get(name, 3)


def test_a_key_head_is_of_the_heads_that_share_it(invoke, tmp_path):
    layer = ("--layer", "grouped-query", "--num-heads", "4", "--num-kv-heads", "2", *LINE)
    invoke("trace", *layer, "-o", str(tmp_path / "a.html"))
    (flow,) = flow_in(tmp_path / "a.html")
    stages = {stage["name"]: stage for stage in flow["stages"]}
    assert stages["q_proj"]["bands"] == {"of": "heads", "runs": [[head, 6] for head in range(4)]}
    assert stages["k_proj"]["bands"] == {"of": "kv_heads", "runs": [[0, 6], [1, 6]]}
    rows = rows_of_heads(stages["k_proj"])
    report = json.loads(invoke("params", *layer, "--per-head", "--json").out)
    pieces = [piece for parameter in report["parameters"] for piece in parameter.get("heads") or ()]
    theirs = {(piece["head"], tuple(piece["rows"])) for piece in pieces if piece["part"] == "W_k"}
    ours = {(head, rows[key][0]) for key, heads in enumerate(flow["shared"]) for head in heads}
    by_key_head = {(key, bounds[0]) for key, bounds in rows.items()}
    assert theirs in (ours, by_key_head)
    assert sorted(head for heads in flow["shared"] for head in heads) == [0, 1, 2, 3]


def test_a_key_head_has_the_colours_of_its_heads(page, invoke, tmp_path):
    sizes = ("--num-heads", "4", "--num-kv-heads", "2", *LINE)
    invoke("trace", "--layer", "grouped-query", *sizes, "-o", str(tmp_path / "a.html"))
    page.open(tmp_path / "a.html", width=1280)
    hover(page, "[data-stage=k_proj] .band:nth-child(2)")
    assert "key head 1, which heads 2, 3 share: features 6–11" in page.find(".card").text
    page.find("[data-stage=k_proj] .band:nth-child(2)").click()
    assert page.text(".read") == "weights, head 2"
    colours = page.run(
        "return ['[data-stage=k_proj] .band:nth-child(2)', '.heads button:nth-child(4)'].map((one) =>"
        " getComputedStyle(document.querySelector(one)))"
        ".map((one) => one.backgroundImage + one.borderLeftColor).map((one) => one.match(/oklch[(][^)]*[)]/g))"
    )
    assert colours[1][0] in colours[0]


def test_it_says_what_it_wrote_unless_quiet(invoke, tmp_path):
    file = tmp_path / "a.html"
    assert (
        invoke("params", "--embed-dim", "8", "--num-heads", "2", "-o", str(file)).err == f"mha-inspect: wrote {file}\n"
    )
    assert invoke("params", "--embed-dim", "8", "--num-heads", "2", "-q", "-o", str(file)).err == ""


# -- in a terminal ----------------------------------------------------------------------------------------------------


def test_compare_heads_draws_small_on_a_terminal_in_colour_alone(invoke, monkeypatch):
    line = ("compare-heads", "--embed-dim", "12", "--seq-len", "6", "--heads", "1,3")
    assert "query ↓" not in invoke(*line).out
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "3")
    out = invoke(*line).out
    table = codes(False, "true")
    for count in (1, 3):
        drawn = out[out.index(f"weights of {count} head") :]
        low, high = map(float, re.search(r"  ([\d.e-]+) .*? ([\d.e-]+)\n", re.sub(r"\x1b.*?m", "", drawn)).groups())
        read = torch.tensor([*panels(drawn, table, 6, 6)][:count])
        layer = weights_of_torch(count)
        step = (high - low) / len(table)
        assert (low + (read + 0.5) * step - layer).abs().max() <= 1.01 * step
    for variable, value in (("COLUMNS", "40"), ("FORCE_COLOR", "0")):
        monkeypatch.setenv(variable, value)
        assert "query ↓" not in invoke(*line).out
        monkeypatch.setenv(variable, {"COLUMNS": "100", "FORCE_COLOR": "3"}[variable])


def weights_of_torch(num_heads: int) -> torch.Tensor:
    """The weights of torch's layer of the flags: `heads query key` of the first batch item."""
    from mha_inspect.call.load import load_layer
    from mha_inspect.layers.spec import InputSpec, RunSpec

    layer = load_layer(AttentionSpec(embed_dim=12, num_heads=num_heads), InputSpec(seq_len=6), RunSpec())
    settings = {**layer.kwargs, "need_weights": True, "average_attn_weights": False}
    with torch.no_grad():
        weights: torch.Tensor = layer.module(*layer.args, **settings)[1][0]
    return weights


# -- in a browser -----------------------------------------------------------------------------------------------------

BOXES = """
return [...document.querySelectorAll(arguments[0])].map((element) => {
  const box = element.getBoundingClientRect();
  return [box.left, box.top, box.right, box.bottom];
});
"""


def boxes(page, selector: str) -> list[list[float]]:
    found = page.run(BOXES, selector)
    assert found, selector
    return found


def hover(page, selector: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(page.driver).move_to_element(page.find(selector)).perform()


def tap(page, selector: str) -> None:
    """Touch the middle of an element."""
    page.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
    left, top, right, bottom = boxes(page, selector)[0]
    point = {"x": (left + right) / 2, "y": (top + bottom) / 2}
    command = page.driver.execute_cdp_cmd
    command("Emulation.setTouchEmulationEnabled", {"enabled": True})
    command("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [point]})
    command("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    command("Emulation.setTouchEmulationEnabled", {"enabled": False})


def said_of(page, name: str) -> str:
    """What is said once it is about a stage: an event of a finger comes after the command for it."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(page.driver, 5).until(lambda _: page.find(".card").text.startswith(name))
    text: str = page.find(".card").text
    return text


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Path:
    """A page of two attentions with four heads."""
    file = tmp_path_factory.mktemp("pages") / "trace.html"
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    mha_inspect.trace(model, torch.randn(2, 6, 24), keep=True).save(file)
    return file


@pytest.fixture
def compared(invoke, tmp_path) -> Path:
    file = tmp_path / "heads.html"
    assert invoke("compare-heads", *LINE, "--heads", "1,2,4,8", "-o", str(file)).code == 0
    return file


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_all_of_it_is_inside_the_page(page, traced, width, dark):
    page.open(traced, width=width, dark=dark)
    assert page.run("return document.documentElement.scrollWidth") <= width
    shown = ".stage, .step, .heads button, .thumb, .picture, .card, summary"
    for left, top, right, bottom in boxes(page, shown + ", .band"):
        assert 0 <= left < right <= width
        assert top < bottom
    for element in page.driver.find_elements("css selector", ".stage, .step, .heads button, .card"):
        assert element.is_displayed()
        assert element.text.strip()
    # The heat maps are seen without scrolling; on a telephone, the parts are one below the other.
    assert max(bottom for *_, bottom in boxes(page, ".thumb")) < 900
    columns = boxes(page, ".flow > .column")
    order = [(top, bottom) if width == 420 else (left, right) for left, top, right, bottom in columns]
    assert all(before[1] <= after[0] for before, after in pairwise(order))
    assert page.complaints == []
    assert page.run("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_a_stage_is_told_by_pointing_at_it(page, traced, width):
    page.open(traced, width=width)
    trace = flow_in(traced)[0]
    for stage in trace["stages"]:
        selector = f".flow [data-stage={stage['name']}]"
        if width == 420:
            tap(page, selector)
        else:
            hover(page, selector)
        said = said_of(page, f"{stage['name']} ")
        assert "".join(text for text, _ in stage["axes"]) in said
        assert "".join(text for text, _ in stage["shape"]) in said
        assert stage["formula"] in said
        ((_, top, _, bottom),) = boxes(page, ".card")
        assert 0 <= top < bottom <= 900
    if width == 1280:
        hover(page, "[data-stage=k_proj] .band:nth-child(3)")
        assert "head 2: features 12–17" in page.find(".card").text


def test_a_head_is_chosen_by_click_by_band_and_by_key(page, traced):
    page.open(traced, width=1280)

    def chosen() -> tuple[str, list[str], str]:
        bands = page.run("return [...document.querySelectorAll('.band.of-chosen')].map((one) => one.dataset.heads)")
        return page.find(".heads [aria-pressed=true]").text, sorted(set(bands)), page.text(".read")

    assert chosen() == ("head 0", ["0"], "weights, head 0")
    before = page.run("return document.querySelector('.picture').toDataURL()")
    page.find(".heads button:nth-child(3)").click()
    assert chosen() == ("head 2", ["2"], "weights, head 2")
    assert page.run("return document.querySelector('.picture').toDataURL()") != before
    page.find("[data-stage=v_proj] .band:nth-child(2)").click()
    assert "head 1: features 6–11" in page.find(".card").text
    assert chosen() == ("head 1", ["1"], "weights, head 1")
    page.find(".heads [aria-pressed=true]").click()
    page.press("ARROW_RIGHT", "ARROW_RIGHT")
    assert chosen()[0] == "head 3"
    page.press("ARROW_DOWN")
    assert page.run("return document.querySelector('[name=attention]').value") == "1"
    ring = page.run("const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]")
    assert ring == ["solid", "3px"]
    assert page.complaints == []


def test_every_head_of_every_attention_is_a_click_away(page, traced):
    from selenium.webdriver.support.ui import WebDriverWait

    page.open(traced, width=1280)
    page.find(".all summary").click()
    WebDriverWait(page.driver, 5).until(lambda _: page.driver.find_elements("css selector", ".row .thumb"))
    assert [len(boxes(page, f".row:nth-of-type({row}) .thumb")) for row in (1, 2)] == [4, 4]
    page.find(".row:nth-of-type(2) button:nth-of-type(3)").click()
    assert page.text(".read") == "weights, head 2"
    assert page.run("return document.querySelector('[name=attention]').value") == "1"
    assert page.find(".row [aria-pressed=true]").get_attribute("aria-label").endswith("self_attn, head 2")


def test_a_problem_and_its_fix_stand_above_the_picture(page, invoke, tmp_path):
    module = tmp_path / "wrong.py"
    module.write_text(
        "from torch import nn\n\n\nclass Wrong(nn.Module):\n"
        "    def __init__(self, embed_dim=24, num_heads=4):\n"
        "        super().__init__()\n"
        "        self.num_heads = num_heads\n"
        "        self.q, self.k, self.v, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))\n\n"
        "    def forward(self, x):\n"
        "        q, k, v = (w(x).view(len(x), self.num_heads, x.shape[1], -1) for w in (self.q, self.k, self.v))\n"
        "        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)\n"
        "        return self.o((weights @ v).transpose(1, 2).flatten(2))\n"
    )
    invoke("trace", f"{module}:Wrong", "--seq-len", "6", "-o", str(tmp_path / "a.html"))
    page.open(tmp_path / "a.html", width=1280)
    picture = boxes(page, ".mha-viewer")[0][1]
    for line in page.driver.find_elements("css selector", "body > p")[:2]:
        assert line.rect["y"] + line.rect["height"] <= picture
    assert "split without transpose" in page.find("body > p").text
    assert page.find("body > p:nth-of-type(2)").text.startswith("fix: ")
    # The rows of a head are not known, so none is coloured.
    assert page.run("return document.querySelectorAll('[data-stage=q_proj] .band').length") == 0
    assert len(boxes(page, ".heads .thumb")) == 4


def test_a_stage_with_numbers_is_drawn_by_click(page, traced):
    page.open(traced, width=1280)
    page.find(".step[data-stage=scores]").click()
    assert page.text(".read") == "scores, head 0"
    assert page.find(".step[aria-pressed=true]").text.startswith("scores")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_slider_changes_the_number_of_heads(page, compared, width):
    flows = flow_in(compared)
    page.open(compared, width=width)
    page.run("document.querySelector('[name=count]').focus()")
    page.press("HOME")
    for place, count in enumerate((1, 2, 4, 8)):
        if place:
            page.press("ARROW_RIGHT")
        assert page.text(".count") == str(count)
        assert page.text(".features") == f"× head_dim {24 // count}"
        assert len(boxes(page, ".heads button .thumb")) == count
        for stage in ("q_proj", "k_proj", "v_proj", "concat", "output"):
            assert len(boxes(page, f"[data-stage={stage}] .band")) == count
        for stage in flows[place]["stages"]:
            shape = "".join(text for text, _ in stage["shape"])
            assert shape in page.find(f"[data-stage={stage['name']}]").text or stage["name"] in ("key", "value")
        assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.complaints == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_tables_are_folded_and_none_is_cut(page, compared, width):
    page.open(compared, width=width)
    assert page.run("return [...document.querySelectorAll('body > details')].every((one) => !one.open)")
    assert page.find("body > details table").is_displayed() is False
    page.run("document.querySelectorAll('body > details').forEach((one) => { one.open = true; })")
    assert page.run("return document.documentElement.scrollWidth") <= width
    for table in page.driver.find_elements("css selector", ".scroll"):
        page.run("arguments[0].scrollLeft = 100000", table)
        last = page.run("return [...arguments[0].querySelectorAll('th')].at(-1).getBoundingClientRect().right", table)
        assert last <= width


def test_in_a_notebook_the_picture_is_first_and_all_is_one_screen(page, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(1, 12, 64)
    layer = nn.MultiheadAttention(64, 8, batch_first=True).eval()
    cell = mha_inspect.trace(layer, x, x, x, keep=True)._repr_html_()
    file = tmp_path / "notebook.html"
    file.write_text(f'<!DOCTYPE html><html><head><meta charset="UTF-8"></head><body>{cell}</body></html>', "utf-8")
    page.open(file, width=1100)
    ((_, top, _, bottom),) = boxes(page, "iframe")
    assert boxes(page, "h1")[0][1] >= bottom
    assert top < 100
    assert page.run("return document.documentElement.scrollHeight") <= 900
    page.driver.switch_to.frame(page.find("iframe"))
    try:
        height = page.run("return window.innerHeight")
        assert all(low <= height for *_, low in boxes(page, ".stage, .thumb, .picture, .card, .most"))
    finally:
        page.driver.switch_to.default_content()


def test_a_page_without_attention_has_no_picture():
    trace = mha_inspect.trace(nn.Linear(2, 2), torch.randn(1, 2))
    assert trace._repr_html_() == to_cell(page_of(trace))
