"""The report and its faces: no false alarm, the facts, what cannot be checked, the command, and what a run leaves."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.errors import InputError, SpecError
from mha_inspect.layers.catalog import LAYERS
from mha_inspect.testing import assert_attention_is_right

from ...corpus.planted import MADE, B, D, E, H, N, Padded, Right, fused, halves
from ...hf_sizes import flags_of


def test_rotations_in_bfloat16_before_a_fused_kernel_are_not_accused() -> None:
    class Rotated(Right):
        def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = super().heads(x)
            return halves(q).to(x.dtype), halves(k).to(x.dtype), v

    torch.manual_seed(0)
    report = mha_inspect.check(Rotated(**fused()).bfloat16(), torch.randn(B, N, E).bfloat16(), only=["rotary"])
    assert (report.findings, [passed.check for passed in report.held]) == ((), ["rotary"])


@pytest.mark.parametrize("leaks", [True, False])
def test_an_attribute_alone_is_no_proof_that_attention_is_causal(leaks: bool) -> None:
    class Summarized(Right):
        """Queries see the tokens before them, and after these a key that is made of the first token alone."""

        def __init__(self) -> None:
            super().__init__()
            self.is_causal = True

        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (torch.cat([t, t[:, :, -1:] if leaks else t[:, :, :1]], 2) for t in (k, v))
            seen = torch.ones(N, N + 1, dtype=torch.bool).tril()
            seen[1:, -1] = True
            scores = (q @ k.mT / math.sqrt(D)).masked_fill(~seen, -torch.inf)
            return scores.softmax(-1) @ v

    torch.manual_seed(0)
    findings = mha_inspect.check(Summarized(), torch.randn(B, N, E)).findings
    assert [(found.check, found.sure) for found in findings] == ([("causal", False)] if leaks else [])


@pytest.mark.parametrize("given", ["lengths", "triangle"])
def test_a_triangle_over_the_batch_is_a_fault_unless_the_inputs_say_the_lengths(given: str) -> None:
    class Lengths(Padded):
        def mask(self, scores: Tensor) -> Tensor:
            return scores.masked_fill(~self.padding[:B, None, None], -1e9)

    torch.manual_seed(0)
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    findings = mha_inspect.check(Lengths(), torch.randn(B, N, E), mask[: B if given == "lengths" else N]).findings
    assert [finding.check for finding in findings if finding.check != "padding"] == ["causal"] * (given == "triangle")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_leaks_through_a_query_without_keys_is_told_as_that(side: Any) -> None:
    class Early(Padded):
        def mask(self, scores: Tensor) -> Tensor:
            return super().mask(scores).masked_fill(torch.ones(N, N, dtype=torch.bool).triu(), -1e9)

    torch.manual_seed(0)
    intent = Intent(padding="mask", padding_true="keep", padding_side=side)
    padding, causal = mha_inspect.check(Early(), torch.randn(B, N, E), intent=intent).findings
    assert (padding.check, causal.check, causal.sure) == ("padding", "causal", False)
    assert "a query with every key masked out" in padding.sentence


@pytest.mark.parametrize("hides_memory", [True, False])
def test_a_padding_mask_belongs_to_the_sequence_whose_keys_it_masks_out(hides_memory: bool) -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(E, H, 14, batch_first=True)
            self.decoder = nn.TransformerDecoderLayer(E, H, 14, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor | None = None, decoder_x: Tensor | None = None) -> Any:
            pads = None if mask is None else ~mask.bool()
            memory = self.encoder(x, src_key_padding_mask=pads)
            return self.decoder(decoder_x, memory, memory_key_padding_mask=pads if hides_memory else None)

    torch.manual_seed(0)
    given = {"decoder_x": torch.randn(B, N, E)}
    intent = Intent(padding="mask", padding_true="keep")
    report = mha_inspect.check(Translator().eval(), torch.randn(B, N, E), intent=intent, only=["padding"], **given)
    assert [finding.check for finding in report.findings] == ["padding"] * (not hides_memory)
    assert ("padding" in {passed.check for passed in report.held}) == hides_memory


@pytest.mark.parametrize("layer", LAYERS)
def test_our_layers_are_right(layer: str, invoke: Callable[..., Any]) -> None:
    sizes = ("--embed-dim", "12", "--num-heads", "2", "--seq-len", "5", "--json")
    code, out, _ = invoke("check", "--layer", layer, *sizes)
    assert code == 0
    assert json.loads(out)["findings"] == []
    code, out, _ = invoke("check", "--layer", layer, *sizes, "--causal", "--scale", "sqrt_head_dim")
    assert (code, json.loads(out)["findings"]) == (0, [])


class Mixes(Right):
    """Neighbours are mixed before, and heads after, attention with a bias for distance: all of it on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.talk = nn.Conv1d(E, E, 3), nn.Linear(H, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.conv(nn.functional.pad(x.mT, (2, 0))).mT)

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        distance = (torch.arange(n)[:, None] - torch.arange(n)).float()
        return (scores - 0.3 * distance).masked_fill(distance < 0, -1e9)

    def weigh(self, scores: Tensor) -> Tensor:
        return self.talk(scores.softmax(-1).movedim(1, -1)).movedim(-1, 1)


class MergesTokens(Right):
    """Every two tokens become one key."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.unflatten(2, (-1, 2)).mean(3) for t in (k, v))
        return (q @ k.mT / D**0.5).softmax(-1) @ v


class SharesMemory(Right):
    """Keys of the whole batch stand beside each row's own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat((t, t.mean((0, 2), keepdim=True).expand(B, H, 1, D)), 2) for t in (k, v))
        return (q @ k.mT / D**0.5).softmax(-1) @ v


class Patches(Right):
    """Takes an image."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, E, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.cut(x).flatten(2).mT)


class Hides(Right):
    """A mask hides these keys from every query."""

    def __init__(self, *keys: int) -> None:
        super().__init__()
        self.keys = torch.zeros(N, dtype=torch.bool)
        self.keys[list(keys)] = True

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.keys, -math.inf)


class HidesAndDiscards(Hides):
    """The result of the attention is not used."""

    def join(self, x: Tensor) -> Tensor:
        return super().join(x) * 0


class NewGate(Right):
    """A gate of the tokens multiplies the result; a new one is zero, as in diffusion transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(E, E)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(x) * super().forward(x)


def test_a_result_that_new_parameters_multiply_by_zero_is_not_called_unused() -> None:
    torch.manual_seed(0)
    report = mha_inspect.check(NewGate(), torch.randn(B, N, E))
    assert [finding.check for finding in report.findings] == []
    assert "zeros" in next(each.reason for each in report.left_out if each.check == "mixing")


class Codes(Right):
    """Each token is replaced by the nearest row of a table, as in a codec: no gradient passes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, E)

    def forward(self, x: Tensor) -> Tensor:
        coded: Tensor = self.table(torch.cdist(super().forward(x), self.table.weight).argmin(-1))
        return coded + x


class Doubled(torch.autograd.Function):
    """Runs a module without autograd, and computes its gradients in a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return x + Right.forward(module, x)  # type: ignore[arg-type, no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (given + Right.forward(ctx.module, given)).backward(*gradients)
        assert given.grad is not None
        return given.grad, None


class Reversible(Right):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x + 0 * self.o.bias, self)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Codes, Reversible])
def test_a_projection_without_gradient_on_purpose_is_not_accused(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert mha_inspect.check(kind(), torch.randn(B, N, E), only=["parameters"]).findings == ()


def first_head(change: Callable[[Tensor], Tensor]) -> Right:
    return Right(join=lambda m, x: Right.join(m, torch.cat([change(x[:, :1]), x[:, 1:]], 1)))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (first_head(torch.detach), "the autograd graph is cut"),
        (first_head(torch.zeros_like), "do not affect the output"),
        (MADE["CausalAlongHeads"](True), "do not affect the output"),  # the first head sees one key
    ],
)
def test_features_without_an_effect_are_not_called_detached(module: nn.Module, says: str) -> None:
    torch.manual_seed(0)
    findings = mha_inspect.check(module, torch.randn(B, N, E), only=["parameters"]).findings
    assert findings
    assert {(says in finding.sentence, finding.sure) for finding in findings} == {(True, "cut" in says)}


@pytest.mark.parametrize("keys", [(N // 2, N - 1), tuple(range(1, N)), tuple(range(N - 1))])
def test_a_token_that_a_mask_hides_is_no_proof_that_tokens_do_not_mix(keys: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(B, N, E)
    report = mha_inspect.check(Hides(*keys), x)
    assert report.findings == ()
    assert "mixing" in {passed.check for passed in report.held}
    (finding,) = mha_inspect.check(HidesAndDiscards(*keys), x, only=["mixing"]).findings
    hidden = re.findall(r"token (\d+)|or (\d+)", finding.evidence)
    assert finding.sure
    assert {int(one or other) for one, other in hidden}.isdisjoint(keys)


@pytest.mark.parametrize(
    ("kind", "shape", "causal", "may_be"),
    [
        (Mixes, (B, N, E), True, []),
        (MergesTokens, (B, N, E), None, []),
        (SharesMemory, (B, N, E), None, ["batch"]),
        (Patches, (2, 3, 8, 8), None, []),
    ],
)
def test_what_is_meant_is_no_fault(
    kind: type[nn.Module], shape: tuple[int, ...], causal: bool | None, may_be: list[str]
) -> None:
    torch.manual_seed(0)
    report = mha_inspect.check(kind(), torch.randn(shape), intent=Intent(causal=causal))
    assert report.ok
    assert [finding.check for finding in report.findings] == may_be


class RowsOfAlignments(Right):
    """Items of one alignment have one weight matrix: the batch is divided in two, and scores are summed over items."""

    def __init__(self, *, leaks: bool = False) -> None:
        super().__init__()
        self.leaks = leaks

    def forward(self, x: Tensor, rows: int = 3) -> Tensor:
        q, k, v = (t.unflatten(0, (-1, rows)) for t in self.heads(x))
        q = q - q.mean((0, 1), keepdim=True) if self.leaks else q
        weights = (torch.einsum("arhqd,arhkd->ahqk", q, k) / (rows * D) ** 0.5).softmax(-1)
        return self.o(self.join((weights[:, None] @ v).flatten(0, 1)))


@pytest.mark.parametrize("given", [{}, {"rows": 3}, {"rows": 6}, {"rows": 2}])
def test_items_of_the_batch_share_scores_in_the_groups_that_a_view_makes(given: dict[str, int]) -> None:
    torch.manual_seed(0)
    x, rows = torch.randn(6, N, E), given.get("rows", 3)
    (finding,) = mha_inspect.check(RowsOfAlignments(), x, only=["batch"], **given).findings
    groups = "1 group" if rows == 6 else f"{6 // rows} groups"
    assert f"correct if dimension 0 has {groups} of {rows} items, as a view divides it (" in finding.sentence
    assert not finding.sure
    leak = mha_inspect.check(RowsOfAlignments(leaks=True), x, only=["batch"], **given)
    assert [finding.sure for finding in leak.findings] == [rows < 6]


HUGGING_FACE = ("bert", "gpt2", "llama", "t5", "opt", "deberta-v2", "xlnet", "openai-gpt")


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_model_of_hugging_face_is_not_accused(name: str, invoke: Callable[..., Any]) -> None:
    pytest.importorskip("transformers")
    code, out, _ = invoke("check", f"hf:{name}", *flags_of(name), "--seq-len", "6", "--json")
    assert [finding for finding in json.loads(out)["findings"] if finding["sure"]] == []
    assert code == 0


def fact(report: Any, name: str) -> str:
    return " | ".join(fact.sentence for fact in report.facts if fact.name == name)


def test_the_facts_say_scale_sight_and_masks() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(B, N, E), torch.ones(B, N, dtype=torch.bool)
    report = mha_inspect.check(MADE["PaddingTurnedRound"](False), x, mask=mask)
    assert fact(report, "scale") == f"{D**-0.5:.4g} = 1/√head_dim (head_dim {D})"
    assert fact(report, "who sees whom") == "every query sees every key"
    assert fact(report, "mask") == "mask: True keeps a key, False ignores it"
    turned = mha_inspect.check(MADE["PaddingTurnedRound"](True), x, mask=~mask)
    assert fact(turned, "mask") == "mask: False keeps a key, True ignores it"
    declared = mha_inspect.check(MADE["PaddingTurnedRound"](False), x, intent=Intent(padding="mask"))
    assert fact(declared, "mask") == "mask: True keeps a key, False ignores it"
    window = mha_inspect.check(MADE["WindowOneWide"](False), x)
    assert fact(window, "who sees whom") == "causal, a window of 4"
    assert next(f for f in window.facts if f.picture).picture[:5] == (
        "■·········",
        "■■········",
        "■■■·······",
        "■■■■······",
        "·■■■■·····",
    )
    assert "not scaled" in fact(mha_inspect.check(MADE["NoScale"](True), x), "scale")


@pytest.mark.parametrize(("weigh", "sure"), [(torch.softmax, True), (lambda s, d: s.softmax(d).nan_to_num(), False)])
def test_weights_of_nan_that_are_replaced_may_be_meant(weigh: Callable[[Tensor, int], Tensor], sure: bool) -> None:
    torch.manual_seed(0)
    fill = {"mask": lambda m, s: s.masked_fill(torch.eye(N)[:, :1].bool(), -math.inf)}
    (finding,) = mha_inspect.check(Right(**fill, weigh=lambda m, s: weigh(s, -1)), torch.randn(B, N, E)).findings
    assert (finding.check, finding.sure) == ("finite", sure)
    assert finding.sentence == "A query with every key masked out gives NaN, first in weights."


def test_an_output_without_a_finite_number_shows_no_effect_of_tokens() -> None:
    report = mha_inspect.check(Right(), torch.full((B, N, E), math.nan))
    assert report.findings == ()
    assert {"batch", "mixing"} <= {skipped.check for skipped in report.left_out}


def test_the_module_is_left_as_it_was() -> None:
    torch.manual_seed(0)
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
    assert repr(report) == repr(mha_inspect.check(module, x))


def test_bad_input_says_what_there_is() -> None:
    x = torch.randn(B, N, E)
    with pytest.raises(InputError, match=r"no attention to check: .* computes 2 products \(addmm"):
        mha_inspect.check(nn.Sequential(nn.Linear(E, E), nn.Linear(E, E)), x)
    with pytest.raises(InputError, match=r"Padded\.forward has no argument msk\. Its arguments: x, mask"):
        mha_inspect.check(MADE["PaddingOnQueries"](True), x, intent=Intent(padding="msk"))
    with pytest.raises(SpecError, match="Unknown check headz"):
        mha_inspect.check(Right(), x, only=["headz"])
    with pytest.raises(TypeError, match=r"expects a torch\.nn\.Module"):
        mha_inspect.check(len, x)


def test_on_meta_what_needs_numbers_is_left_out() -> None:
    report = mha_inspect.check(
        Right().to("meta"), torch.randn(B, N, E, device="meta"), intent=Intent(scale="sqrt_head_dim")
    )
    reasons = {out.check: out.reason for out in report.left_out}
    assert "gradients cannot be computed" in reasons["parameters"]
    assert "every projection is used once" in [one.sentence for one in report.held]
    assert "meta" in reasons["heads"]
    assert {held.check for held in report.held} == {"scale", "parameters"}
    assert report.runs == 1
    assert not mha_inspect.check(MADE["KeyServesTwice"](True).to("meta"), torch.randn(B, N, E, device="meta")).ok


class Refuses(Right):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x != 0.5).any()):
            raise ValueError("not this one")
        return super().forward(x)


def test_a_forward_that_raises_under_another_input_is_told() -> None:
    x = torch.full((B, N, E), 0.5)
    report = mha_inspect.check(Refuses(), x)
    assert report.ok
    reasons = {out.check: out.reason for out in report.left_out}
    assert reasons["batch"] == "the forward raises when an input is changed: ValueError: not this one"


def test_the_assertion_tells_the_fix() -> None:
    torch.manual_seed(0)
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


def test_the_command_finds_and_lets_pass(tmp_path: Any, invoke: Callable[..., Any]) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    target = f"{tmp_path / 'model.py'}:Model"
    sizes = ("--embed-dim", "12", "--num-heads", "2", "--seq-len", "6")
    code, out, _ = invoke("check", target, *sizes, "--causal", "--mask", "mask=keep")
    assert (code, out.startswith("nothing wrong in ")) == (0, True)
    code, out, _ = invoke("check", target, *sizes, "--set", "late=2", "--causal")
    assert code == 1
    assert "model.py:15" in out
    assert "one future token: the causal mask starts one diagonal too late" in out
    code, out, _ = invoke("check", target, *sizes, "--mask", "mask=ignore", "--only", "padding", "--json")
    assert code == 1
    assert [finding["check"] for finding in json.loads(out)["findings"]] == ["padding"]
    trusted = f"{tmp_path / 'model.py'}:Trusted"
    assert invoke("check", target, *sizes, "--reference", trusted)[0] == 0
    code, out, _ = invoke("check", target, *sizes, "--set", "late=2", "--reference", trusted, "--only", "reference")
    assert (code, "the first difference is in masked_scores of attention 1" in out) == (1, True)
    alone = f"{tmp_path / 'model.py'}:Alone"
    code, out, _ = invoke("check", alone, *sizes, "--causal")
    assert (code, "batch (the batch has one item" in out) == (0, True)
    code, _, err = invoke("check", alone, *sizes, "--batch", "2")
    assert (code, "Alone failed on x float32 [2, 6, 12]" in err) == (1, True)
    code, _, err = invoke("check", target, *sizes, "--mask", "maks=keep")
    assert (code, "Model.forward has no argument maks. Its arguments: x, mask" in err) == (2, True)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--window 0", "window 0 is too small"),
        ("--batch-axis 7", "batch_axis 7 is unknown. Use 0 or 1."),
        ("--only heads --skip heads", "exclude every check"),
        ("--only head", "Unknown check head:"),
        ("--mask mask=yes", "NAME=keep or NAME=ignore"),
    ],
)
def test_what_cannot_be_meant_is_refused(line: str, told: str, invoke: Callable[..., Any]) -> None:
    code, out, err = invoke("check", *line.split())
    assert (code, out, told in err) == (2, "", True), err


@pytest.mark.parametrize("said", [{"padding_side": "middle"}, {"padding_true": "kept"}, {"scale": "1/8"}])
def test_words_that_are_not_known_cannot_be_meant(said: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(said))} .* is unknown"):
        Intent(**said)


def test_the_checks_are_listed(invoke: Callable[..., Any]) -> None:
    code, out, _ = invoke("check", "--list")
    assert code == 0
    assert out.startswith("inputs ")
    assert "\nreference   the output equals the reference's\n" in out
    assert out.endswith("\nmha-inspect check --explain NAME explains a check with an example that fails.\n")


def test_a_stack_of_twelve_runs_few_times() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True, norm_first=True)
    stack = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    report = mha_inspect.check(stack, torch.randn(2, N, E))
    assert report.ok
    assert report.runs <= 10


class OverTheBatch(nn.Module):
    """Sequence-first attention that is fed batch first: its rows attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


@pytest.mark.parametrize(("module", "axis"), [(OverTheBatch(), 0), (Right(), 1)])
def test_rows_that_attend_to_each_other_are_told_once(module: nn.Module, axis: int) -> None:
    """A row alone has one key, which gives its query no gradient and another output: neither is a fault of its own."""
    report = mha_inspect.check(module, torch.randn(B, N, E), intent=Intent(batch_axis=axis))
    assert [finding.check for finding in report.findings] == ["batch"]
    assert {held.check for held in report.held} >= {"parameters", "training"}


def test_a_future_key_is_said_to_be_after_its_query() -> None:
    (finding,) = mha_inspect.check(Right(), torch.randn(B, N, E), intent=Intent(window=2)).findings
    assert finding.evidence == "Query 0 gives weight to key 2, 2 after it."


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
    ("line", "sure"),
    [
        ("", True),
        ("--batch-first", True),
        ("--input-shape x=2x7x12", True),
        ("--input FILE", False),
        ("--input FILE --batch-first", True),
        ("--seq-first", None),
        ("--input FILE --seq-first", None),
        ("--batch-axis 1", None),
    ],
)
def test_a_layout_that_the_command_line_chose_is_known(
    line: str, sure: bool | None, tmp_path: Any, invoke: Callable[..., Any]
) -> None:
    (tmp_path / "over.py").write_text(OVER, encoding="utf-8")
    torch.save({"x": torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0))}, tmp_path / "x.pt")
    words = line.replace("FILE", str(tmp_path / "x.pt")).split()
    code, out, err = invoke("check", f"{tmp_path / 'over.py'}:Over", *words, "--json")
    assert code == (1 if sure else 0), err
    findings = json.loads(out)["findings"]
    assert [(finding["check"], finding["sure"]) for finding in findings] == ([] if sure is None else [("batch", sure)])
    assert all(("add --seq-first" in finding["fix"]) == (not words or "--input-shape" in words) for finding in findings)


class Scored(nn.Module):
    """Causal attention with scores of any size, and a mask that is added: 0 keeps a key."""

    def __init__(self, scale: float = 0.3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, E, bias=False, dtype=dtype) for _ in range(3))
        self.scale = scale

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (make(x) for make in (self.q, self.k, self.v))
        scores = q @ k.mT * self.scale + torch.full((x.shape[1],) * 2, -math.inf, dtype=x.dtype).triu(1)
        return (scores if mask is None else scores + mask[:, None]).softmax(-1) @ v


@pytest.mark.parametrize(("scale", "dtype"), [(1e4, torch.float32), (1e3, torch.bfloat16), (60, torch.float16)])
def test_a_weight_that_is_too_small_for_its_dtype_is_no_mask(scale: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, x = Scored(scale, dtype), torch.randn(B, 2 * N, E, dtype=dtype)
    assert (module(x).isfinite()).all()
    findings = mha_inspect.check(module, x, intent=Intent(causal=True)).findings
    assert [finding for finding in findings if finding.sure] == []


@pytest.mark.parametrize("hidden", [0, 1])
def test_a_mask_of_batch_and_keys_may_be_added_to_the_scores(hidden: int) -> None:
    torch.manual_seed(0)
    mask = torch.zeros(B, N).index_fill(1, torch.arange(N - hidden, N), -1e9)
    report = mha_inspect.check(Scored(), torch.randn(B, N, E), mask, intent=Intent(padding="mask"))
    assert report.findings == ()
    assert {"padding"} <= {passed.check for passed in report.held}
