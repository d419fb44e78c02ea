"""A prompt and single steps with a cache: rows by hand, Hugging Face's own caches, and torch's own long forward."""

from __future__ import annotations

from itertools import pairwise
from operator import attrgetter

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.errors import ForwardError, InputError
from mha_inspect.layers.spec import Show
from mha_inspect.questions.decode import decoded
from mha_inspect.reports.trace import Cache
from mha_inspect.running.subject import Subject

from . import wrong_caches as published
from .decoding import (
    SIZES,
    Attention,
    Concatenated,
    IndexCopied,
    Last,
    Odd,
    Paged,
    Restarting,
    Rotated,
    Slots,
    Static,
    TwoLayers,
    TwoWays,
    WithBias,
)
from .every_mistake import CASES, Case
from .inside import KV, D, H, T, X

IDS = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def hf():
    """`transformers`, where it is installed."""
    return pytest.importorskip("transformers")


def decode(module, *args, steps=3, **kwargs):
    subject = Subject(module.eval(), args, kwargs, seed=0, grad=False)
    return decoded(subject, Show(), steps)[0]


def rows(trace):
    return [(row.queries, row.past, row.new) for row in trace.steps]


def test_rows_of_a_concatenated_cache_by_hand():
    torch.manual_seed(0)
    x = torch.randn(2, 7, 32)
    trace = decode(Attention(), x)
    assert rows(trace) == [(4, 0, 4), (1, 4, 1), (1, 5, 1), (1, 6, 1)]
    assert [row.scores for row in trace.steps] == [(2, 4, 4, 4), (2, 4, 1, 5), (2, 4, 1, 6), (2, 4, 1, 7)]
    # keys and values: 2 tensors of 2 · 4 heads · keys · 8 features in 4 bytes
    assert [row.cache_bytes for row in trace.steps] == [2 * 2 * 4 * keys * 8 * 4 for keys in (4, 5, 6, 7)]
    # four projections of 32 by 32, then scores and context: 2 · batch · heads · queries · keys · head_dim each
    flops = [2 * 2 * n * 32 * 32 * 4 + 2 * 2 * 2 * 4 * n * keys * 8 for n, keys in ((4, 4), (1, 5), (1, 6), (1, 7))]
    assert [row.flops for row in trace.steps] == flops
    assert trace.decode.verdict == "same"
    assert trace.decode.tokens == 7
    stages = {stage.name: stage.shape for stage in trace.attentions[0].stages}
    assert stages["scores"] == (2, 4, 1, 7)


@pytest.mark.parametrize("fault", ["", "late"])
def test_every_call_is_compared_and_not_only_the_last(fault):
    torch.manual_seed(0)
    module, x = TwoLayers(fault).eval(), torch.randn(2, 7, 32)
    with torch.no_grad():
        whole, past, ends = module(x)[0], None, []
        for start, stop in pairwise((0, 4, 5, 6, 7)):
            output, past = module(x[:, start:stop], past)
            ends.append((whole[:, stop - 1] - output[:, -1]).abs().max())
    assert ends[-1] < 1e-6
    trace = decode(module, x, steps=3)
    assert trace.decode.verdict == ("differs" if fault else "same")
    assert trace.decode.max_abs_difference == pytest.approx(float(max(ends)), abs=1e-7)


def test_positions_that_the_call_leaves_out_are_given_where_they_make_the_difference():
    torch.manual_seed(0)
    module, x = Restarting().eval(), torch.randn(2, 7, 32)
    with torch.no_grad():
        whole, (_, past) = module(x)[0], module(x[:, :6])
        apart = (whole[:, 6:] - module(x[:, 6:], past)[0]).abs().max()
        given = module(x[:, 6:], past, torch.tensor([[6]]))[0]
    assert torch.allclose(given, whole[:, 6:], atol=1e-6)
    trace = decode(module, x, steps=1)
    assert (trace.decode.verdict, rows(trace)) == ("same", [(6, 0, 6), (1, 6, 1)])
    assert trace.notes[0] == f"position_ids was given and advanced: without it, a call differs by {apart:.3g}."
    assert decode(Attention(), x).notes == ()


def test_positions_that_the_call_leaves_out_are_given_where_no_step_sees_the_cache_without_them():
    torch.manual_seed(0)
    module, x = Slots().eval(), torch.randn(2, 7, 32)
    trace = decode(module, x)
    assert (trace.decode.verdict, rows(trace)[1:]) == ("same", [(1, 4, 1), (1, 5, 1), (1, 6, 1)])
    assert trace.notes[0] == "cache_position was given and advanced: without it, no cache is found."


def test_a_forward_whose_tokens_see_later_tokens_is_not_compared_with_its_steps():
    torch.manual_seed(0)
    trace = decode(TwoWays(), torch.randn(2, 7, 32))
    assert rows(trace) == [(4, 0, 4), (1, 4, 1), (1, 5, 1), (1, 6, 1)]
    assert trace.decode.verdict is None
    assert trace.decode.note.startswith("no attention is causal")


def test_lengths_and_bytes_are_those_of_hugging_faces_own_cache(hf):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).eval()
    trace, cache = decode(model, input_ids=IDS), hf.DynamicCache()
    for row, (start, stop) in zip(trace.steps, [(0, 4), (4, 5), (5, 6), (6, 7)], strict=True):
        assert (row.past, row.new) == (cache.get_seq_length(), stop - start)
        with torch.no_grad():
            model(input_ids=IDS[:, start:stop], past_key_values=cache, use_cache=True)
        assert row.cache_bytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert row.scores == (2, 4, stop - start, cache.get_seq_length())
    assert trace.decode.verdict == "same"


@pytest.mark.parametrize("keeps", [True, False])
def test_a_static_cache_has_empty_slots_and_counts_the_tokens_so_far(hf, keeps):
    torch.manual_seed(0)
    trace = decode(Static(hf, keeps=keeps), IDS)
    assert rows(trace) == [(4, 0, 4), (1, 4, 1), (1, 5, 1), (1, 6, 1)]
    # 2 layers of keys and values: 2 batch items, 2 heads, 16 slots, 8 features
    assert [row.cache_bytes for row in trace.steps[1:]] == [2 * 2 * 2 * 2 * 16 * 8 * 4] * 3
    assert trace.decode.verdict == "same"


@pytest.mark.parametrize(
    ("make", "args", "table", "keys"),
    [
        (published.LlamaModel, (published.TOKENS,), "layers.0.cache_k", 6),
        (published.GptFast, (published.TOKENS, torch.arange(6)), "k_cache", 16),
    ],
)
def test_published_code_that_writes_its_cache_in_place(make, args, table, keys):
    torch.manual_seed(0)
    module = make()
    trace = decode(module, *args)
    assert rows(trace) == [(3, 0, 3), (1, 3, 1), (1, 4, 1), (1, 5, 1)]
    assert trace.steps[-1].scores == (2, 4, 1, keys)
    cache = trace.attentions[0].cache
    assert (cache.past, cache.new, cache.empty) == (5, 1, keys - 6)
    assert trace.decode.verdict == "same"
    assert not attrgetter(table)(module).any()  # nothing of the run is left in it


def test_a_cache_of_any_name():
    torch.manual_seed(0)
    assert decode(Odd(), torch.randn(2, 7, 32)).decode.verdict == "same"


def test_logits_of_the_last_position_alone_and_none_before_the_cache():
    trace = decode(Last(), torch.randn(2, 7, 32))
    assert trace.decode.verdict in ("same", "inconclusive")
    assert trace.decode.max_abs_difference < 1e-5


@pytest.mark.parametrize(
    ("module", "asked", "message"),
    [
        (Attention(), {"steps": 7}, r"decode 7 leaves no prompt: the input has 7 tokens\. Use --decode 1 to 6"),
        (Attention(), {"steps": 0}, r"decode 0 has no step"),
        (Attention(fault="forgets"), {}, r"no cache was found: with past, a step sees no earlier token"),
        (
            nn.TransformerEncoderLayer(32, 4, batch_first=True),
            {},
            r"no cache was found: the forward neither takes nor keeps a cache\. Trace it without --decode, or see ",
        ),
        (nn.Linear(32, 32), {}, r"no attention was found"),
        (WithBias(), {}, r"no cache was found"),
    ],
)
def test_what_cannot_be_decoded_says_why(module, asked, message):
    with pytest.raises(InputError, match=message):
        decode(module, torch.randn(2, 7, 32), **asked)


def test_a_step_that_raises_is_named_and_the_calls_before_are_shown():
    with pytest.raises(ForwardError) as failed:
        decode(Attention(fault="raises"), torch.randn(2, 7, 32))
    trace = failed.value.trace
    assert trace.notes[0] == "Step 3 of 3 raised: 1 token after 6."
    assert rows(trace) == [(4, 0, 4), (1, 4, 1), (1, 5, 1)]
    assert "the cache is full" in trace.failure.message


def test_without_numbers_there_are_rows_and_no_proof():
    with torch.device("meta"):
        module = Attention()
        trace = decode(module, torch.randn(2, 7, 32))
    assert rows(trace)[-1] == (1, 6, 1)
    assert trace.decode.verdict is None
    assert "device meta" in trace.decode.note


def test_a_recorded_generate_loop_has_a_row_for_each_call(hf):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).eval()
    with torch.no_grad(), mha_inspect.recording() as seen:
        model.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    trace = seen.trace
    assert rows(trace) == [(7, 0, 7), (1, 7, 1), (1, 8, 1), (1, 9, 1)]
    assert [row.cache_bytes for row in trace.steps] == [2 * 2 * 2 * 2 * keys * 8 * 4 for keys in (7, 8, 9, 10)]
    assert str(trace).index("4 calls") < str(trace).rindex("8 attentions")
    assert trace.decode is None


def test_calls_that_are_no_loop_have_no_rows():
    module, x = Attention().eval(), torch.randn(2, 7, 32)
    with mha_inspect.recording() as seen:
        module(x)
        module(x)
    assert seen.trace.steps is None
    with mha_inspect.recording() as seen:
        module(x)
        module(x[:, :1])
    assert seen.trace.steps is None
    cross, memory = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 9, 32)
    with mha_inspect.recording() as seen:
        for _ in range(3):
            cross(x[:, :1], memory, memory)
    assert len(seen.trace.attentions) == 3
    assert seen.trace.steps is None


STEPWISE = [
    (case, wrong)
    for case in CASES
    for wrong in (True, False)
    if case.check == "cache" and case.intent.cache and set(case.inputs()) == {"x"}
    if case.name not in ("CacheIfAsked", "CacheLost", "StateNotDecayed") and not (wrong and case.wrong is None)
]


@pytest.mark.parametrize(("case", "wrong"), STEPWISE[::3], ids=lambda value: getattr(value, "name", value))
def test_the_verdict_is_that_of_calls_by_hand(case: Case, wrong: bool):
    """The oracle is the module itself: one call over all tokens, beside a prompt and single steps."""
    torch.manual_seed(3)
    module, x = case.make(wrong).eval(), case.inputs()["x"]
    with torch.no_grad():
        whole, past, ends = case.make(wrong).eval(), None, []
        whole.load_state_dict(module.state_dict())
        truth, steps = whole(x)[0], x.shape[1] - 3
        whole = case.make(wrong).eval()
        whole.load_state_dict(module.state_dict())
        for start, stop in pairwise((0, steps, steps + 1, steps + 2, steps + 3)):
            output, past = whole(x[:, start:stop], **({case.intent.cache: past} if start else {}))
            ends.append(float((truth[:, stop - 1] - output[:, -1]).abs().max()))
    proof = decode(module, x).decode
    assert proof.verdict == ("differs" if max(ends) > 1e-4 else "same")
    if proof.verdict == "differs":
        assert proof.max_abs_difference == pytest.approx(max(ends), rel=1e-3)


def recorded(module, offsets, *, length=6, cut=0):
    torch.manual_seed(1)
    cache, x = None, torch.randn(1, length, 24)
    with torch.no_grad(), mha_inspect.recording() as seen:
        for offset in offsets:
            y, cache = module.eval()(x, cache, offset)
            x = y[:, -1:]
            if cut:
                cache, cut = (cache[0][:, :, :-cut], cache[1][:, :, :-cut], cache[2] - cut), 0
    return seen.trace


@pytest.mark.parametrize(
    ("module", "given", "cut", "expected", "jumps"),
    [
        (Rotated(), [0, 12, 13], 0, [0, 12, 13], True),
        (Rotated(table="sliced"), [0, 12, 13], 0, [0, 12, 13], True),
        (Rotated(table="ids"), [0, 12, 13], 0, [0, 12, 13], True),
        (Rotated(anew=True, most=6), [None] * 4, 0, [0, 6, 6, 6], False),  # keys rotated anew count their rows
        (Rotated(), [None] * 3, 2, [0, 4, 5], False),  # tokens that are taken back
    ],
)
def test_the_positions_of_each_call_are_those_that_it_was_rotated_by(module, given, cut, expected, jumps):
    trace = recorded(module, given, cut=cut)
    assert [step.query_offset for step in trace.steps] == expected
    assert bool([note for note in trace.notes if "jump" in note]) == jumps


@pytest.mark.parametrize("fault", [0, 1])
def test_decode_tells_the_positions_of_its_calls(fault):
    torch.manual_seed(1)
    trace = decode(Rotated(fault=fault), torch.randn(1, 8, 24), steps=2)
    assert [step.query_offset for step in trace.steps] == [0, 6 + fault, 7 + 2 * fault]


@pytest.mark.parametrize(
    ("kind", "way", "slots"), [(Concatenated, "concatenated", 0), (IndexCopied, "in place", 12), (Paged, "paged", 0)]
)
@pytest.mark.parametrize("alone", [True, False])
def test_steps_of_a_loop_have_the_cache_of_the_steps_before(kind, way, slots, alone):
    torch.manual_seed(0)
    module, steps = kind().eval(), (X, X[:, :1] * 2, X[:, :1] * 3)
    with torch.no_grad():
        if alone:
            attentions = [mha_inspect.trace(module, step).attentions[0] for step in steps]
        else:
            with mha_inspect.recording() as seen:
                for step in steps:
                    module(step)
            attentions = [*seen.trace.attentions]
    assert [(a.num_heads, a.num_kv_heads, a.head_dim) for a in attentions] == [(H, KV, D)] * 3
    assert [attention.kind for attention in attentions] == [("self", "causal", "grouped"), *[("self", "grouped")] * 2]
    caches = [Cache(past, new, max(slots - past - new, 0), way) for past, new in ((0, T), (T, 1), (T + 1, 1))]
    assert [attention.cache for attention in attentions] == [caches[0] if slots else None, *caches[1:]]
    empty = " + empty (4)" if slots else ""
    formulas = {stage.name: stage.formula for stage in attentions[2].stages}
    assert formulas["k_heads"] == f"cache (7) + k_proj in heads (1){empty}, each head repeated 2 times"
