"""Formulas mean what they say, FLOPs are torch's count, and memory is shared where torch shares it."""

from __future__ import annotations

import math
import re

import pytest
import torch
from einops import repeat
from hypothesis import assume, given, settings
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mha_inspect
from mha_inspect.naming.canonical import canonical
from mha_inspect.naming.score_formulas import scale_text
from mha_inspect.naming.stage_facts import StageFacts

from ..drawn import LOOPS, Case, Setting, settings_of, sizes_of
from ..layers.declared import read_weights
from ..torch_math import torch_math

SOURCES = {"q_heads": "q_proj", "k_heads": "k_proj", "v_heads": "v_proj", "concat": "context"}


def facts_of(case: Case) -> StageFacts:
    spec = case.forward.spec
    group = spec.num_heads // (spec.num_kv_heads or spec.num_heads)
    return StageFacts(case.seen.graph, case.seen.attentions[0][0], case.axes.stages[0], group=group)


def in_canonical_axes(case: Case, stage: str) -> Tensor:
    content = canonical(case.value(stage), stage, case.axes.stages[0][stage], sizes_of(case.forward))
    assert content is not None
    return content


def evaluated(case: Case, stage: str, formula: str) -> Tensor | None:
    """What a formula gives, laid out as the stage is or in canonical axes; None where it is only words."""
    if formula in ("the query", "the key"):
        return case.value(formula.removeprefix("the "))
    if projected := re.fullmatch(r"(a part of )?(\w+) · W_([qkvo])ᵀ( \+ b_([qkvo]))?", formula):
        return projection(case, stage, *projected.group(1, 2, 3, 5))
    if product := re.fullmatch(r"q_heads · k_headsᵀ(?: / √(\d+)| · ([\d.e-]+))?", formula):
        square, factor = product.groups()
        scale = 1 / math.sqrt(int(square)) if square else float(factor or 1)
        return in_canonical_axes(case, "q_heads") @ in_canonical_axes(case, "k_heads").mT * scale
    if formula in ("softmax(scores)", "softmax(masked_scores)"):
        return case.value(formula[8:-1]).softmax(case.seen.attentions[0][0].softmax_dim)
    if formula == "weights · v_heads":
        return in_canonical_axes(case, "weights") @ in_canonical_axes(case, "v_heads")
    if formula == SOURCES.get(stage):
        return case.value(formula)
    if " -> " in formula:
        formula, *grown = formula.split(", ")
        return with_what_it_has_more(case, stage, formula, grown)
    return None


def projection(case: Case, stage: str, part: str | None, source: str, letter: str, bias: str | None) -> Tensor:
    """`source · W_letterᵀ + b_letter` with the parameters of the layer; of the first head alone where it loops."""
    weights = read_weights(case.forward.module).tensors()
    is_part = case.setting.layer == "narrow" and stage != "output" and "w_q" in weights and len(weights["w_q"]) > 1
    assert (part is not None) == is_part
    heads = slice(1) if case.setting.layer in LOOPS else slice(None)
    shift = weights.get(f"b_{letter}")
    if letter == "o":
        matrix = weights["w_o"].flatten(1)
    else:
        matrix = weights[f"w_{letter}"][heads].flatten(0, 1)
        shift = None if shift is None else shift[heads].flatten()
    assert bias == (None if shift is None else letter)
    return (in_canonical_axes(case, source) @ matrix.T + (0 if shift is None else shift)).detach()


def with_what_it_has_more(case: Case, stage: str, pattern: str, grown: list[str]) -> Tensor:
    """The rearranged source, its heads repeated and the layer's own keys appended as the formula says."""
    spec, known = case.forward.spec, sizes_of(case.forward)
    if times := [re.fullmatch(r"each head repeated (\d+) times", words) for words in grown if "times" in words]:
        assert times[0] is not None
        assert int(times[0][1]) == known["group"] > 1
        pattern = re.sub("-> batch (kv_heads|1) ", r"-> batch (\1 group) ", pattern)
        grown = []
    sizes = {name: size for name, size in known.items() if re.search(rf"\b{name}\b", pattern)}
    result = repeat(case.value(SOURCES[stage]), pattern, **sizes)
    if not grown:
        return result
    more = spec.add_bias_kv + spec.add_zero_attn
    assert grown == [f"plus {more} appended {'value' if stage == 'v_heads' else 'key'}{'s' * (more > 1)}"]
    content = case.value(stage)
    assert torch.equal(content.narrow(-2, 0, result.shape[-2]), result)
    assert content.shape[-2] == result.shape[-2] + more
    return content


@settings(max_examples=25, deadline=None, derandomize=True)
@given(settings_of())
def test_each_formula_gives_the_stage(setting: Setting) -> None:
    case = Case(setting)
    assume(case.sizes["heads"] > 1 or case.sizes["query"] > 1)  # sizes of one leave no trace of what was moved
    facts = facts_of(case)
    for stage, pattern in case.axes.stages[0].items():
        formula = facts.formula(stage)
        expected = evaluated(case, stage, formula)
        if expected is None:
            assert formula in WORDS.get(stage, ()) or re.fullmatch(PHRASES.get(stage, ""), formula), (stage, formula)
            continue
        content = case.value(stage)
        if expected.shape != content.shape or " · " in formula:
            in_axes = canonical(content, stage, pattern, sizes_of(case.forward))
            assert in_axes is not None
            content = in_axes
        torch.testing.assert_close(
            content, expected, rtol=1e-6, atol=1e-9, msg=lambda text, s=stage, f=formula: f"{s} = {f}: {text}"
        )


WORDS = {
    "query": ("given",),
    "key": ("given",),
    "value": ("given",),
    "masked_scores": ("scores + mask", "mask(scores)"),
    "context": ("dropout(weights) · v_heads",),
}
PHRASES = {
    "q_heads": r"q_proj in heads, then [\w, ]+",
    "k_heads": r"k_proj in heads, then [\w, ]+",
    "v_heads": r"v_proj in heads, then [\w, ]+",
    "masked_scores": r"mask \+ q_heads · k_headsᵀ.*",
    "concat": r"contexts of \d heads side by side",
}


BEFORE = {
    **{f"{letter}_proj": (name,) for letter, name in (("q", "query"), ("k", "key"), ("v", "value"))},
    **{f"{letter}_heads": (f"{letter}_proj",) for letter in "qkv"},
    "scores": ("q_heads", "k_heads"),
    "masked_scores": ("scores", "q_heads", "k_heads"),
    "weights": ("masked_scores", "scores"),
    "context": ("weights", "v_heads"),
    "concat": ("context",),
    "output": ("concat", "context"),
}


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(settings_of())
def test_memory_is_what_pointers_say(setting: Setting) -> None:
    case = Case(setting)
    facts = facts_of(case)
    for stage in case.axes.stages[0]:
        if stage in ("query", "key", "value"):
            assert_is_input_where_it_is_given(case, stage, facts.memory(stage))
        elif case.setting.layer in LOOPS and stage == "concat":
            assert facts.memory(stage) == "copy" or case.sizes["heads"] == 1
        else:
            sources = [case.value(name) for name in BEFORE[stage] if name in case.axes.stages[0]]
            assert_is_shared_as_told(case.value(stage), sources, facts.memory(stage))
            assert_is_moved_as_told(case, stage, sources[0], facts.memory(stage))


def assert_is_input_where_it_is_given(case: Case, stage: str, memory_said: str) -> None:
    producer = case.seen.recording.producer(case.seen.attentions[0][0].stages[stage])
    assert (memory_said == "input") == (producer is None)
    if memory_said == "input":
        assert memory(case.value(stage)) in {memory(tensor) for tensor in case.forward.tensors}


def assert_is_shared_as_told(content: Tensor, sources: list[Tensor], memory_said: str) -> None:
    sharing = [source for source in sources if memory(source) == memory(content)]
    assert bool(sharing) == (memory_said in ("input", "view"))
    if memory_said == "input":  # nothing is done: the stage before it, as it is
        assert content.shape in {source.shape for source in sharing}


def assert_is_moved_as_told(case: Case, stage: str, source: Tensor, memory_said: str) -> None:
    """A copy has the numbers of its source, and what is new has others."""
    content = case.value(stage)
    is_moved = bool(torch.isin(content, torch.cat([source.flatten(), torch.zeros(1)])).all())
    if memory_said == "copy" and not (case.forward.spec.add_bias_kv and stage in ("k_heads", "v_heads")):
        assert is_moved
    if memory_said == "new" and stage != "masked_scores":  # a mask of nothing changes no number
        assert not is_moved or content.numel() < 5 or case.sizes["key"] == 1


@settings(max_examples=8, deadline=None, derandomize=True)
@given(settings_of(layers=("torch", "split-heads", "fold-heads", "bert", "grouped-query", "wide")))
def test_the_flops_of_all_stages_are_torchs_count(setting: Setting) -> None:
    case = Case(setting)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), torch_math(), counter:
        case.forward.module(*case.forward.args, **case.forward.kwargs)
    facts = facts_of(case)
    assert sum(facts.flops(stage) for stage in case.axes.stages[0]) == counter.get_total_flops()
    sizes = case.sizes_in("scores")
    product = 2 * sizes["batch"] * sizes["heads"] * sizes["query"] * sizes["key"] * sizes["head_dim"]
    assert facts.flops("context") == product
    assert facts.flops("scores" if "scores" in case.axes.stages[0] else "masked_scores") == product
    assert facts.flops("weights") == facts.flops("q_heads") == 0
    width = sizes["heads"] * sizes["head_dim"]
    assert facts.flops("q_proj") == 2 * sizes["batch"] * sizes["query"] * sizes["embed"] * width


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (1.0, ""),
        (1 / 8, " / √64"),
        (1 / math.sqrt(50), " / √50"),
        (1 / math.sqrt(2) * (1 + 1e-6), " / √2"),
        (0.3, " · 0.3"),
        (2.0, " · 2"),
        (-0.125, " · -0.125"),
        (None, " · scale"),
        (0.0, " · 0"),
    ],
)
def test_how_a_scale_is_written(scale: float | None, text: str) -> None:
    assert scale_text(scale) == text


@pytest.mark.parametrize(
    ("places", "offset"),
    [
        ([[3, 4, 5, 6, 7]] * 2, 3),
        ([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]], None),  # padding on the left: positions of its own for each batch item
        ([[0, 1, 2, 0, 1]] * 2, None),
        ([[5], [7]], None),
    ],
)
def test_positions_that_differ_between_batch_items_or_restart_have_no_offset(places, offset):
    torch.manual_seed(0)
    pairs = torch.tensor(places)[..., None] * 10.0 ** -torch.arange(4)
    cos, sin = (table.repeat(1, 1, 2)[:, None] for table in (pairs.cos(), pairs.sin()))

    def turned(heads):
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat((-second, first), -1) * sin

    def forward(module, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in module(x).chunk(3, -1))
        return ((turned(q) @ turned(k).mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)

    with mha_inspect.recording() as seen:
        forward(torch.nn.Linear(16, 48), torch.randn(2, pairs.shape[1], 16))
    position = seen.trace.attentions[0].position
    assert (position.kind, position.layout, position.dims) == ("rotary", "half", 8)
    assert (position.query_offset, position.key_offset) == (offset, offset)


def test_a_table_of_positions_in_a_parameter_that_is_not_trained_is_a_rotation_in_a_recording_too():
    """As RoFormer keeps it in an embedding."""
    torch.manual_seed(0)
    module, angles = nn.Linear(16, 48), torch.arange(9)[:, None] * 10.0 ** -torch.arange(4)
    module.table = nn.Parameter(torch.cat((angles.sin(), angles.cos()), -1), requires_grad=False)

    def turned(heads):
        rows = nn.functional.embedding(torch.arange(2, 2 + heads.shape[2]), module.table)
        sin, cos = (part.repeat_interleave(2, -1) for part in rows.chunk(2, -1))
        return heads * cos + torch.stack((-heads[..., 1::2], heads[..., ::2]), -1).flatten(-2) * sin

    with mha_inspect.recording() as seen:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in module(torch.randn(2, 5, 16)).chunk(3, -1))
        (turned(q) @ turned(k).mT / 8**0.5).softmax(-1) @ v
    position = seen.trace.attentions[0].position
    assert (position.kind, position.layout, position.dims) == ("rotary", "interleaved", 8)
    assert (position.query_offset, position.key_offset) == (2, 2)
