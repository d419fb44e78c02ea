"""The report and its faces: no false alarm, the facts, what cannot be checked, the command, and what a run leaves."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.errors import InputError, SpecError
from mha_inspect.layers.catalog import LAYERS
from mha_inspect.testing import assert_attention_is_right

from ..corpus.planted import MADE, B, E, H, N, Right
from ..hf_sizes import flags_of
from ..warm import Answer

Invoke = Callable[..., Answer]


@pytest.mark.parametrize("layer", LAYERS)
def test_our_layers_are_right(layer: str, invoke: Invoke) -> None:
    line = f"check --layer {layer} --embed-dim 12 --num-heads 2 --seq-len 5 --causal --scale sqrt_head_dim --json"
    code, out, _ = invoke(*line.split())
    assert (code, json.loads(out)["findings"]) == (0, [])


@pytest.mark.parametrize("name", ["gpt2", "openai-gpt"])
def test_a_model_of_hugging_face_is_not_accused(name: str, invoke: Invoke) -> None:
    pytest.importorskip("transformers")
    code, out, _ = invoke("check", f"hf:{name}", *flags_of(name), "--seq-len", "6", "--json")
    assert code == 0
    assert not any(finding["sure"] for finding in json.loads(out)["findings"])


@pytest.mark.parametrize(
    ("name", "wrong", "does"),
    [
        ("PaddingOnQueries", True, "False masks out a query, not a key"),
        ("PaddingOnQueries", False, "False masks out a key"),
        ("PaddingTurnedRound", True, "True masks out a key"),
    ],
)
def test_a_mask_that_nobody_gave_is_tried(name: str, wrong: bool, does: str) -> None:
    module, x = MADE[name](wrong).eval(), torch.randn(B, N, E)
    said = f"mask was not given. Tried: {does};"
    report = mha_inspect.check(module, x)
    assert next(fact.sentence for fact in report.facts if fact.name == "mask").startswith(said)
    with torch.no_grad():
        assert any(note.startswith(said) for note in mha_inspect.trace(module, x).notes)


def test_the_module_is_left_as_it_was() -> None:
    module = MADE["KeepsKeysBetweenCalls"](True).train()
    before, generator = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    x = torch.randn(B, N, E, generator=torch.Generator().manual_seed(1))
    first = x.clone()
    report = mha_inspect.check(module, x)
    assert module.training
    assert module.past is None
    assert torch.equal(x, first)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert str(report) == str(mha_inspect.check(module, x))


def test_bad_input_says_what_there_is() -> None:
    x = torch.randn(B, N, E)
    with pytest.raises(InputError, match=r"no attention to check: .* computes 2 products \(addmm"):
        mha_inspect.check(nn.Sequential(nn.Linear(E, E), nn.Linear(E, E)), x, only="heads")
    with pytest.raises(InputError, match=r"Padded\.forward has no argument msk\. Its arguments: x, mask"):
        mha_inspect.check(MADE["PaddingOnQueries"](True), x, intent=Intent(padding="msk"))
    with pytest.raises(SpecError, match="Unknown check headz"):
        mha_inspect.check(Right(), x, only=["headz"])
    with pytest.raises(TypeError, match=r"expects a torch\.nn\.Module"):
        mha_inspect.check(len, x)


def test_on_meta_what_needs_numbers_is_left_out() -> None:
    x = torch.randn(B, N, E, device="meta")
    report = mha_inspect.check(Right().to("meta"), x, intent=Intent(scale="sqrt_head_dim"))
    reasons = {skipped.check: skipped.reason for skipped in report.left_out}
    assert "gradients cannot be computed" in reasons["parameters"]
    assert "meta" in reasons["heads"]
    assert {passed.check for passed in report.passed} == {"reshape", "scale", "parameters"}
    assert "every projection is used once" in {passed.sentence for passed in report.passed}
    assert report.runs == 1
    assert not mha_inspect.check(MADE["KeyServesTwice"](True).to("meta"), x).ok


class Refuses(Right):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x != 0.5).any()):
            raise ValueError("not this one")
        return super().forward(x)


def test_a_forward_that_raises_under_another_input_is_told() -> None:
    x = torch.full((B, N, E), 0.5)
    report = mha_inspect.check(Refuses(), x)
    assert report.ok
    reasons = {skipped.check: skipped.reason for skipped in report.left_out}
    assert reasons["batch"] == "the forward raises when an input is changed: ValueError: not this one"


def test_the_assertion_tells_the_fix() -> None:
    assert_attention_is_right(Right(), torch.randn(B, N, E))
    said = r"^1 problem: The heads are merged (.*\n)*1\. heads: .*planted\.py:\d+\nevidence .*\nfix "
    with pytest.raises(AssertionError, match=said):
        assert_attention_is_right(MADE["MergedByReshape"](True), torch.randn(B, N, E))


MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, embed_dim=12, num_heads=2, late=1):
        super().__init__()
        self.late, self.heads = late, num_heads
        self.qkv, self.o = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None):
        b, n, e = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT * (e // self.heads) ** -0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(self.late).bool(), float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :].bool(), -1e9)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, e))

class Trusted(Model):
    def __init__(self, embed_dim=12, num_heads=2, late=1):
        super().__init__(embed_dim, num_heads)

class Alone(Model):
    def forward(self, x):
        x.shape[0] == 1 or self.more_than_one_item
        return super().forward(x)
"""


@pytest.fixture
def checked(tmp_path: Path, invoke: Invoke) -> Callable[..., tuple[int, str]]:
    """Return a function that checks a class of the model, and returns the code and what is printed."""
    path = tmp_path / "model.py"
    path.write_text(MODEL, encoding="utf-8")

    def run(name: str, *words: str) -> tuple[int, str]:
        sizes = ("--embed-dim", "12", "--num-heads", "2", "--seq-len", "6")
        code, out, err = invoke("check", f"{path}:{name}", *sizes, *words)
        return code, out + err

    return run


def test_the_command_finds_and_lets_pass(tmp_path: Path, checked: Callable[..., tuple[int, str]]) -> None:
    code, said = checked("Model", "--causal", "--mask", "mask=keep")
    assert code == 0
    assert said.startswith("nothing wrong in ")
    code, said = checked("Model", "--set", "late=2", "--causal")
    assert code == 1
    assert "model.py:15" in said
    assert "one future token: the causal mask starts one diagonal too late" in said
    code, said = checked("Model", "--mask", "mask=ignore", "--only", "padding", "--json")
    assert code == 1
    assert [finding["check"] for finding in json.loads(said)["findings"]] == ["padding"]
    code, said = checked(
        "Model", "--set", "late=2", "--reference", f"{tmp_path / 'model.py'}:Trusted", "--only", "reference"
    )
    assert code == 1
    assert "the first difference is in masked_scores of attention 1" in said


def test_the_command_says_what_the_forward_takes(checked: Callable[..., tuple[int, str]]) -> None:
    code, said = checked("Alone", "--causal")
    assert code == 0
    assert "batch (the batch has one item" in said
    code, said = checked("Alone", "--batch", "2")
    assert code == 1
    assert "Alone failed on x float32 [2, 6, 12]" in said
    code, said = checked("Model", "--mask", "maks=keep")
    assert code == 2
    assert "Model.forward has no argument maks. Its arguments: x, mask" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--window 0", "window 0 is too small"),
        ("--batch-axis 7", "batch_axis 7 is unknown. Use 0 or 1."),
        ("--only heads --skip heads", "exclude every check"),
        ("--only head", "Unknown check head:"),
        ("--mask mask=yes", "NAME=keep or NAME=ignore"),
    ],
)
def test_what_cannot_be_meant_is_refused(line: str, said: str, invoke: Invoke) -> None:
    code, out, err = invoke("check", *line.split())
    assert (code, out, said in err) == (2, "", True), err


@pytest.mark.parametrize("said", [{"padding_side": "middle"}, {"padding_true": "kept"}, {"scale": "1/8"}])
def test_words_that_are_not_known_cannot_be_meant(said: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(said))} .* is unknown"):
        Intent(**said)


def test_the_checks_are_listed(invoke: Invoke) -> None:
    code, out, _ = invoke("check", "--list")
    assert code == 0
    assert out.startswith("inputs ")
    assert "\nreference   the output equals the reference's\n" in out
    assert out.endswith("\nmha-inspect check --explain NAME explains a check with an example that fails.\n")


def test_a_stack_of_twelve_runs_few_times() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True, norm_first=True)
    stack = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    report = mha_inspect.check(stack, torch.randn(2, N, E))
    assert report.ok
    assert report.runs <= 30


def test_rows_that_attend_to_each_other_are_told_once() -> None:
    """A row alone has one key, which gives its query no gradient and another output: neither is a fault of its own."""
    report = mha_inspect.check(Right(), torch.randn(B, N, E), intent=Intent(batch_axis=1))
    assert [finding.check for finding in report.findings] == ["batch"]
    assert {"parameters", "training"} <= {passed.check for passed in report.passed}


OVER = """
from torch import nn

class Over(nn.Module):
    def __init__(self, embed_dim=12, num_heads=2):
        super().__init__()
        self.attention = nn.MultiheadAttention(embed_dim, num_heads)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]
"""


@pytest.mark.parametrize(
    ("line", "code", "sure", "advises"),
    [
        ("", 0, [], False),
        ("--batch-first", 1, [True], False),
        ("--input FILE", 0, [False], False),
        ("--seq-first", 0, [], False),
        ("--batch-axis 1", 0, [], False),
    ],
)
def test_a_layout_that_the_command_line_chose_is_known(
    line: str, code: int, sure: list[bool], advises: bool, tmp_path: Path, invoke: Invoke
) -> None:
    (tmp_path / "over.py").write_text(OVER, encoding="utf-8")
    torch.save({"x": torch.randn(2, 7, 12)}, tmp_path / "x.pt")
    words = line.replace("FILE", str(tmp_path / "x.pt")).split()
    answer = invoke("check", f"{tmp_path / 'over.py'}:Over", *words, "--json")
    assert answer.code == code, answer.err
    findings = json.loads(answer.out)["findings"]
    assert [(finding["check"], finding["sure"]) for finding in findings] == [("batch", is_sure) for is_sure in sure]
    assert any("add --seq-first" in finding["fix"] for finding in findings) == advises
