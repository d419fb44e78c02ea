"""Code as it is published: what is right is not accused, and a planted mistake is found, with a cache or without."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.errors import InputError
from mha_inspect.reports.check import CheckReport

from . import published

TOKENS = torch.arange(12).reshape(2, 6)
X = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
PADDED = Intent(causal=True, padding="attention_mask", padding_true="keep", padding_side="left")


def checked(made: object, intent: Intent | None = None) -> CheckReport:
    module, args, kwargs = (*made, {})[:3] if isinstance(made, tuple) else (made, (X,), {})  # type: ignore[misc]
    assert isinstance(module, nn.Module)
    return mha_inspect.check(module.eval(), *args, intent=intent, **kwargs)


@pytest.mark.parametrize(
    ("name", "intent"),
    [
        ("llama", Intent(causal=True, scale="sqrt_head_dim")),
        ("gpt_fast", Intent(causal=True, scale="sqrt_head_dim")),
        ("left_padded", Intent(causal=True)),
        ("left_padded", PADDED),
        ("left_unmasked", PADDED),
        ("esm", Intent(scale="sqrt_head_dim")),
    ],
)
def test_published_code_is_not_accused(name: str, intent: Intent) -> None:
    report = checked(getattr(published, name)(), intent)
    assert report.findings == ()
    assert set(intent.declared()) & {skipped.check for skipped in report.left_out} == set()


@pytest.mark.parametrize("model", [published.LlamaModel, published.LlamaModelUnrotated, published.LlamaModelTiled])
def test_a_mistake_behind_a_cache_is_found(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    report = mha_inspect.check(model(), TOKENS, intent=Intent(causal=True))
    planted = {
        published.LlamaModel: [],
        published.LlamaModelUnrotated: ["rotary"],
        published.LlamaModelTiled: ["grouped"],
    }
    assert [finding.check for finding in report.findings] == planted.get(model, [])
    assert {"grouped", "rotary"} <= {result.check for result in (*report.held, *report.findings)}


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt_fast", "LlamaModel"])
def test_a_cache_that_the_module_keeps_is_continued_by_positions(name: str, declared: bool) -> None:
    torch.manual_seed(0)
    made = getattr(published, name)()
    positions = "input_pos" if name == "gpt_fast" else "start_pos"
    report = checked((made, (TOKENS,)) if name == "LlamaModel" else made, Intent(cache=positions if declared else None))
    assert report.findings == ()
    assert "cache" in {passed.check for passed in report.held}


@pytest.mark.parametrize(
    ("model", "args", "cause"),
    [
        (published.LlamaModelRestarted, (TOKENS,), "positions restart at 0"),
        (published.LlamaModelTopLeft, (TOKENS,), "aligned top left"),
        (published.GptFastRestarted, (TOKENS, torch.arange(6)), "positions restart at 0"),
    ],
)
@pytest.mark.parametrize("declared", [True, False])
def test_a_mistake_that_only_chunks_show_is_found(
    model: type[nn.Module], args: tuple[torch.Tensor, ...], cause: str, declared: bool
) -> None:
    torch.manual_seed(0)
    positions = "input_pos" if len(args) > 1 else "start_pos"
    report = checked((model(), args), Intent(cache=positions if declared else None))
    (finding,) = report.findings
    assert (finding.check, finding.sure) == ("cache", True)
    assert cause in finding.sentence
    # The first chunk and the one call agree: worked out by hand with the module itself.
    module = model().eval()
    whole, first = module(*args), module(TOKENS[:, :3], *(each[:3] for each in args[1:]))
    assert torch.allclose(whole[:, :3], first, atol=1e-5)
    assert int(re.findall(r"from position (\d+) on", finding.sentence)[0]) >= 3


def test_an_argument_that_nobody_can_cut_accuses_nobody() -> None:
    reasons = {skipped.check: skipped.reason for skipped in checked(published.llama_table()).left_out}
    assert "table has a size for each token" in reasons["cache"]
    with pytest.raises(InputError, match=r"cache was declared and could not run: table has a size .*--skip cache"):
        checked(published.llama_table(), Intent(cache="start_pos"))
    (finding,) = checked((Counted(), (X,)), Intent(cache="start_pos")).findings  # it keeps nothing
    assert (finding.check, finding.sure) == ("cache", True)


class Counted(published.Esm):
    def forward(self, x: torch.Tensor, start_pos: int = 0) -> torch.Tensor:
        return super().forward(x + start_pos)


def test_the_keys_of_a_static_cache_are_aligned_with_what_was_written() -> None:
    module, (tokens, positions) = published.gpt_fast()
    late = positions + 3  # the first three slots are empty, and masked for nobody: the past is visible
    facts = {fact.name: fact.sentence for fact in checked((module, (tokens, late))).facts}
    assert facts["who sees whom"] == "causal; 7 keys are masked out for every query"


def test_three_mistakes_are_three_findings() -> None:
    report = checked(published.Three())
    assert [(finding.check, finding.sure) for finding in report.findings] == [
        ("heads", True),
        ("causal", False),
        ("scale", False),
    ]
    # Nothing that relies on one token per position has passed.
    assert {result.check for result in report.held} & {
        "rotary",
        "mixing",
        "causal",
        "window",
        "padding",
        "cache",
    } == set()
    assert [finding.check for finding in checked(published.Three(), Intent(causal=True)).findings if finding.sure] == [
        "heads",
        "causal",
    ]


@pytest.mark.parametrize(("layer", "check"), [(published.NoScale, "scale"), (published.LateMask, "causal")])
def test_what_may_be_a_mistake_is_said_and_does_not_fail(layer: type[nn.Module], check: str) -> None:
    report = checked(layer())
    assert [(finding.check, finding.sure) for finding in report.findings] == [(check, False)]
    assert report.ok


def test_a_mask_is_given_in_the_form_that_the_forward_takes() -> None:
    report = checked(published.FourD(), Intent(padding="attention_mask", padding_true="keep"))
    assert "padding" in {passed.check for passed in report.held}


def test_a_declared_check_that_cannot_run_is_an_error() -> None:
    class NoMask(published.Esm):
        def forward(self, x: torch.Tensor, attention_mask: object = None) -> torch.Tensor:
            assert attention_mask is None, "no mask is taken"
            return super().forward(x)

    with pytest.raises(InputError, match=r"padding was declared and could not run.*no mask is taken"):
        checked(NoMask(), Intent(padding="attention_mask"))


class PaddedWindows(nn.Module):
    """Rotary attention in windows with the window before, of a sequence that is padded to whole windows."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.qkv, self.o = nn.Linear(24, 72, bias=False), nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        q, k, v = F.pad(heads, (0, 0, 0, -x.shape[1] % self.window)).unflatten(-2, (-1, self.window))
        k, v = (torch.cat((F.pad(side, (0, 0, 0, 0, 1, 0))[..., :-1, :, :], side), -2) for side in (k, v))
        angles = torch.arange(2 * self.window)[:, None] * 100.0 ** (-torch.arange(6) / 6).repeat(2)
        q, k = (
            side * turn.cos() + torch.cat((-side[..., 6:], side[..., :6]), -1) * turn.sin()
            for side, turn in ((q, angles[self.window :]), (k, angles))
        )
        i, j = torch.arange(self.window)[:, None] + self.window, torch.arange(2 * self.window)
        outside = (j > i).expand(q.shape[2], -1, -1).clone()
        outside[0, :, : self.window] = True  # the first window has none before it
        context = (q @ k.mT / 12**0.5).masked_fill(outside, -torch.inf).softmax(-1) @ v
        return self.o(context.flatten(2, 3)[:, :, : x.shape[1]].transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("length", "window"), [(8, 64), (8, 4), (7, 4), (13, 64)])
def test_rows_that_pad_a_sequence_to_whole_windows_are_not_rotated_tokens(length: int, window: int) -> None:
    torch.manual_seed(0)
    assert not [
        f for f in mha_inspect.check(PaddedWindows(window).eval(), torch.randn(2, length, 24)).findings if f.sure
    ]
