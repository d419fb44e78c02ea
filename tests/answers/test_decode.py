"""A prompt and single steps with a cache: rows by hand, Hugging Face's own caches, and torch's own long forward."""

from __future__ import annotations

from itertools import pairwise
from operator import attrgetter

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.answers.decode import decoded
from mha_inspect.errors import ForwardError, InputError
from mha_inspect.layers.spec import Show
from mha_inspect.running.subject import Subject

from .check import test_published as published

IDS = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def hf():
    """`transformers`, where it is installed."""
    return pytest.importorskip("transformers")


def decode(module, *args, steps=3, cache=None, positions=None, **kwargs):
    subject = Subject(module.eval(), args, kwargs, seed=0, grad=False)
    return decoded(subject, Show(), steps, cache, positions)[0]


def rows(trace):
    return [(row.queries, row.past, row.new) for row in trace.steps]


class Attention(nn.Module):
    """As nanoGPT has it, with a `past` that is returned second."""

    def __init__(self, embed=32, heads=4, fault="") -> None:
        super().__init__()
        self.heads, self.fault = heads, fault
        self.qkv, self.proj = nn.Linear(embed, 3 * embed), nn.Linear(embed, embed)

    def forward(self, x, past=None):
        b, t, e = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if past is not None:
            if self.fault == "raises" and past[0].shape[2] > 5:
                raise RuntimeError("the cache is full")
            k, v = (torch.cat([old, new], 2) for old, new in zip(past, (k, v), strict=True))
        keys = k.shape[2]
        mask = torch.ones(t, keys, dtype=torch.bool).tril(keys - t + (self.fault == "late"))
        if self.fault == "forgets":
            k, v, mask = k[:, :, -t:], v[:, :, -t:], mask[:, -t:]
        weights = (q @ k.mT / (e // self.heads) ** 0.5).masked_fill(~mask, -torch.inf).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, e)), (k, v)


class WithBias(nn.Module):
    """Every step sees two keys more than its own, and no earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, add_bias_kv=True, add_zero_attn=True, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


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


class TwoLayers(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.first, self.last = Attention(), Attention(fault=fault)

    def forward(self, x, past=None):
        x, first = self.first(x, past and past[0])
        x, last = self.last(x, past and past[1])
        return x, (first, last)


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


class Restarting(Attention):
    """Positions restart at 0 in each call that is not given them, as in some hybrid models."""

    def forward(self, x, past=None, position_ids=None):
        places = torch.arange(x.shape[1])[None] if position_ids is None else position_ids
        return super().forward(x + places.to(x)[..., None].sin(), past)


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


class Slots(Attention):
    """Writes by index into a table of slots, and reads those up to the last position."""

    def forward(self, x, cache_position=None):
        places = torch.arange(x.shape[1]) if cache_position is None else cache_position
        if not hasattr(self, "slots"):
            self.slots = torch.zeros(len(x), 16, 2, x.shape[2])
        q, *new = self.qkv(x).chunk(3, -1)
        self.slots.index_put_((torch.arange(len(x))[:, None], places), torch.stack(new, 2))
        k, v = self.slots[:, : int(places[-1]) + 1].unbind(2)
        late = torch.arange(k.shape[1]) > places[:, None]
        return (q @ k.mT / x.shape[2] ** 0.5).masked_fill(late, -torch.inf).softmax(-1) @ v


def test_positions_that_the_call_leaves_out_are_given_where_no_step_sees_the_cache_without_them():
    torch.manual_seed(0)
    module, x = Slots().eval(), torch.randn(2, 7, 32)
    trace = decode(module, x)
    assert (trace.decode.verdict, rows(trace)[1:]) == ("same", [(1, 4, 1), (1, 5, 1), (1, 6, 1)])
    assert trace.notes[0] == "cache_position was given and advanced: without it, no cache is found."


class TwoWays(nn.Module):
    """Two layers of which each token sees all tokens; the second keeps what the first made of the earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))

    def forward(self, x, mems=None):
        kept = []
        for place, layer in enumerate(self.layers):
            kept.append(x if mems is None else torch.cat([mems[place], x], 1))
            x = layer(x, kept[-1], kept[-1])[0]
        return x, kept


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


class Static(nn.Module):
    """A model that makes and returns, or keeps, a static cache of 16 slots."""

    def __init__(self, hf, *, keeps: bool) -> None:
        super().__init__()
        self.model, self.keeps, self.make = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), keeps, hf.StaticCache
        self.cache = self.make(self.model.config, max_cache_len=16) if keeps else None

    def forward(self, ids, past_key_values=None):
        cache = self.cache if self.keeps else past_key_values or self.make(self.model.config, max_cache_len=16)
        out = self.model(ids, past_key_values=cache)
        return out.logits if self.keeps else (out.logits, out.past_key_values)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_static_cache_has_empty_slots_and_counts_the_tokens_so_far(hf, keeps):
    torch.manual_seed(0)
    trace = decode(Static(hf, keeps=keeps), IDS)
    assert rows(trace) == [(4, 0, 4), (1, 4, 1), (1, 5, 1), (1, 6, 1)]
    # 2 layers of keys and values: 2 batch items, 2 heads, 16 slots, 8 features
    assert [row.cache_bytes for row in trace.steps[1:]] == [2 * 2 * 2 * 2 * 16 * 8 * 4] * 3
    assert trace.decode.verdict == "same"


@pytest.mark.parametrize(
    ("make", "table", "keys"), [(published.llama, "cache_k", 6), (published.gpt_fast, "k_cache", 16)]
)
def test_published_code_that_writes_its_cache_in_place(make, table, keys):
    torch.manual_seed(0)
    module, args = make()
    trace = decode(module, *args)
    assert rows(trace) == [(3, 0, 3), (1, 3, 1), (1, 4, 1), (1, 5, 1)]
    assert trace.steps[-1].scores == (2, 4, 1, keys)
    cache = trace.attentions[0].cache
    assert (cache.past, cache.new, cache.empty) == (5, 1, keys - 6)
    assert trace.decode.verdict == "same"
    assert not attrgetter(table)(module).any()  # nothing of the run is left in it


def test_a_cache_of_any_name_and_positions_that_are_named():
    class Odd(Attention):
        def forward(self, x, weights_mask=None, note=None, earlier=None, step=0):
            if note is not None:
                raise TypeError("note is text")
            return super().forward(x + torch.arange(step, step + x.shape[1])[:, None].sin(), earlier)

    torch.manual_seed(0)
    x = torch.randn(2, 7, 32)
    assert decode(Odd(), x, positions="step").decode.verdict == "same"
    assert decode(Odd(), x, positions="step", cache="earlier").decode.verdict == "same"
    unnamed = decode(Odd(), x)
    assert (unnamed.decode.verdict, "--positions NAME" in unnamed.notes[0]) == ("differs", True)


def test_logits_of_the_last_position_alone_and_none_before_the_cache():
    class Last(Attention):
        def forward(self, x, past=None):
            out, cache = super().forward(x, past)
            return out[:, [-1]], None, cache

    trace = decode(Last(), torch.randn(2, 7, 32))
    assert trace.decode.verdict in ("same", "inconclusive")
    assert trace.decode.max_abs_difference < 1e-5


@pytest.mark.parametrize(
    ("module", "asked", "message"),
    [
        (Attention(), {"steps": 7}, r"decode 7 leaves no prompt: the input has 7 tokens\. Use --decode 1 to 6"),
        (Attention(), {"steps": 0}, r"decode 0 has no step"),
        (Attention(), {"cache": "pasd"}, r"no argument pasd\. Its arguments: x, past\. Did you mean past\?"),
        (Attention(), {"positions": "pos"}, r"no argument pos\. Its arguments: x, past"),
        (Attention(fault="forgets"), {}, r"no cache was found: with past, a step sees no earlier token"),
        (
            nn.TransformerEncoderLayer(32, 4, batch_first=True),
            {},
            r"no cache was found: the forward neither takes nor keeps a cache\. Trace it without --decode\.",
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
    assert repr(trace).index("4 calls") < repr(trace).rindex("8 attentions")
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
