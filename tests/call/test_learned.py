"""What is learned of a forward by running it: what its masks mean, which axis is the batch, what a dictionary holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mha_inspect.build.build import load_target
from mha_inspect.build.target import Target, TargetSpec
from mha_inspect.build.values import parse_shapes
from mha_inspect.build.vocabulary import Flags
from mha_inspect.call.call import Call, explained
from mha_inspect.call.inputs import Asked, make_call
from mha_inspect.call.load import subject_of
from mha_inspect.call.pairing import with_the_same
from mha_inspect.errors import InputError, SpecError
from mha_inspect.layers.spec import InputSpec
from mha_inspect.record.arguments import tensors_in

FILE = str(Path(__file__).parent / "masked.py")
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


def made(name: str, settings: dict[str, str] | None = None, shapes: tuple[str, ...] = (), **inputs: Any):
    target = load_target(name if ":" in name else f"{FILE}:{name}", settings or {}, TargetSpec())
    given = frozenset({"batch_first"} & set(inputs))
    flags = Flags({"batch_first": inputs.pop("batch_first", True)}, given, frozenset(inputs))
    asked = Asked(InputSpec(**{"batch": 2, "seq_len": 5, **inputs}), flags, parse_shapes(shapes))
    return target, make_call(target, asked)


def moved(target: Target, call: Call, token: int) -> torch.Tensor:
    """`batch query`: the outputs that move with one token of the first row, by a run that nothing else looks at."""
    module = target.module.eval()
    with torch.no_grad():
        before = module(**call.kwargs)
        x = call.kwargs["x"].clone()
        x[0, token] += 1.0
        after = module(**{**call.kwargs, "x": x})
    return ((before - after).abs() > 1e-5).any(-1)


@pytest.mark.parametrize("name", ["Keeps", "Bars", "Adds", "Subtracts", "Multiplies", "Visible", "Needed", "Both"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_causal_mask_is_made_as_the_forward_takes_it(name: str, batch: int) -> None:
    target, call = made(name, batch=batch, causal=True)
    for token in range(5):
        assert moved(target, call, token)[0].tolist() == [False] * token + [True] * (5 - token)


@pytest.mark.parametrize(
    "name", ["Keeps", "Bars", "Adds", "Multiplies", "Lengths", "Needed", "KeepsKeys", "BarsKeys", "Both"]
)
def test_padding_is_made_as_the_forward_takes_it(name: str) -> None:
    target, call = made(name, padding=(2, 1))
    assert moved(target, call, 2)[0].all()
    for token in (3, 4):
        seen = moved(target, call, token)[0]
        assert seen.nonzero().flatten().tolist() == [token]  # it moves what it asks itself, and no other


@pytest.mark.parametrize(("name", "arguments"), [("Both", 2), ("Needed", 1), ("Adds", 1)])
def test_both_go_into_two_arguments_or_into_one(name: str, arguments: int) -> None:
    target, call = made(name, causal=True, padding=(2, 1))
    assert len([value for key, value in call.kwargs.items() if key != "x" and value is not None]) == arguments
    assert moved(target, call, 1)[0].tolist() == [False, True, True, True, True]
    assert moved(target, call, 3)[0].tolist() == [False, False, False, True, False]
    assert len(call.said) == arguments


@pytest.mark.parametrize(("name", "said"), [("MayHold", "masks.look"), ("MayUnpack", "masks.0")])
def test_masks_that_an_argument_may_hold_are_made_one_by_one(name: str, said: str) -> None:
    target, call = made(name, causal=True, padding=(2, 1))
    assert moved(target, call, 1)[0].tolist() == [False, True, True, True, True]
    assert moved(target, call, 3)[0].tolist() == [False, False, False, True, False]
    assert any(said in sentence for sentence in call.said)
    assert "masks" not in made(name)[1].kwargs


@pytest.mark.parametrize(("name", "entry"), [("Batched", "attention_mask"), ("BatchedIfThere", "pad_mask")])
def test_padding_goes_into_a_dictionary_that_may_hold_it(name: str, entry: str) -> None:
    target, call = made(name, padding=(2, 1))
    batch = call.kwargs["batch"]
    before = target.module.eval()(batch)
    changed = target.module({**batch, "x": batch["x"] + torch.eye(5)[3][:, None]})
    moved = ((before - changed)[0].abs() > 1e-5).any(-1)
    assert moved.tolist() == [False, False, False, True, False]
    assert entry not in made(name)[1].kwargs["batch"]


@pytest.mark.parametrize("name", ["Keeps", "Bars", "Adds", "KeepsKeys"])
@pytest.mark.parametrize(
    ("flag", "inputs"), [("causal", {"causal": True, "seq_len": 1}), ("padding", {"padding": (0,)})], ids=str
)
def test_a_mask_that_would_bar_nothing_is_none(name: str, flag: str, inputs: dict[str, Any]) -> None:
    _, call = made(name, **inputs)
    assert {key for key, value in call.kwargs.items() if value is not None} == {"x"}
    assert call.said == (f"What --{flag} asks for bars no key here: no mask was given.",)


def test_lengths_are_those_of_the_sequences_without_their_padding() -> None:
    _, call = made("Lengths")
    assert call.kwargs["seq_lens"].tolist() == [5, 5]
    assert call.drawn == ("x",)
    _, call = made("Lengths", padding=(2, 1))
    assert call.kwargs["seq_lens"].tolist() == [3, 4]
    assert call.said[0].startswith(
        "--padding made seq_lens, int64 `batch`: it is how many keys of a row are no padding"
    )
    with pytest.raises(SpecError, match="does not show what its mask means, so --causal"):
        made("Lengths", causal=True)


def test_what_bars_by_minus_infinity_too_is_told_as_it_is_meant() -> None:
    _, call = made("Subtracts", causal=True)
    assert call.said == ("--causal made mask, int64 `query key`: 1 keeps a key, as is learned from the weights.",)
    assert torch.equal(call.kwargs["mask"], (~CAUSAL).long())


def test_what_was_learned_is_said_and_holds_at_other_sizes() -> None:
    _, call = made("Bars", causal=True)
    assert torch.equal(call.kwargs["attn_mask"], CAUSAL)
    assert call.said == ("--causal made attn_mask, bool `query key`: True bars a key, as is learned from the weights.",)
    target, call = made("Needed", batch=1, causal=True)
    assert call.without_ones is not None
    wider = call.without_ones(target.module)
    assert tuple(wider.kwargs["mask"].shape) == (2, 5, 5)
    assert torch.equal(wider.kwargs["mask"], ~CAUSAL.expand(2, 5, 5))


def test_what_is_causal_by_itself_gets_no_mask() -> None:
    _, call = made("Own", causal=True)
    assert call.kwargs.get("mask") is None
    assert call.said == ("The forward does by itself what --causal asks for: no mask was given.",)


@pytest.mark.parametrize(("flag", "asked"), [("--causal", {"causal": True}), ("--padding", {"padding": (1,)})])
def test_what_cannot_be_learned_is_not_made(flag: str, asked: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"Deaf.forward does not show what mask means, so {flag} .*--input FILE"):
        made("Deaf", **asked)


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("Needed", "mask", "got bool `batch 1 key` that bars nothing; True keeps a key"),
        ("NeedsTurned", "mask", "got bool `key query` that bars nothing; True keeps a key"),
        ("NeedsBytes", "mask", "got uint8 `batch key` that bars nothing; 1 bars a key"),
        ("NeedsColumns", "pad_mask", "got bool `key batch` that bars nothing; True keeps a key"),
        ("NeedsHeld", "masks.keys", "got bool `batch key` that bars nothing; True keeps a key"),
        ("NeedsNamed", "attention_mask", "got float32 `batch key` that bars nothing; it is added to the scores"),
        ("NeedsInside", "batch.inputs.mask", "got bool `batch key` that bars nothing; True keeps a key"),
        ("NeedsTwo", "src_mask", "got bool `batch 1 key` that bars nothing; True keeps a key"),
    ],
)
def test_a_mask_that_is_needed_bars_nothing(name: str, place: str, said: str) -> None:
    target, call = made(name)
    assert [f"The forward needs {place}: it {said}, as is learned from the weights."] == [
        words for words in call.said if f"needs {place}" in words
    ]
    x = dict(tensors_in(call.kwargs)).get("x", next(tensor for _, tensor in tensors_in(call.kwargs)))
    with torch.no_grad():
        plain = target.module.attended(x, lambda scores: scores) * (2 if name == "NeedsTwo" else 1)
        assert torch.equal(target.module(**call.kwargs), plain)


@pytest.mark.parametrize("name", ["NeedsTurned", "NeedsBytes", "NeedsColumns", "NeedsHeld", "NeedsNamed"])
def test_padding_goes_into_a_mask_that_is_needed(name: str) -> None:
    target, call = made(name, padding=(2, 2))
    seen = moved(target, call, 4)[0]
    assert seen.nonzero().flatten().tolist() == [4]
    assert not any("bars nothing" in words for words in call.said)


def test_torchs_transformer_masks_its_decoder() -> None:
    settings = {"d_model": "12", "nhead": "3", "num_encoder_layers": "1", "num_decoder_layers": "1"}
    _, call = made("torch.nn:Transformer", settings, causal=True, padding=(2,), key_len=7)
    masks = {name: value for name, value in call.kwargs.items() if "mask" in name and value is not None}
    assert set(masks) == {"tgt_mask", "src_key_padding_mask", "memory_key_padding_mask"}
    assert torch.equal(masks["tgt_mask"], CAUSAL)
    assert masks["memory_key_padding_mask"].tolist() == [[False] * 5 + [True] * 2] * 2


@pytest.mark.parametrize(
    ("name", "settings", "shape", "said"),
    [
        ("Turns", {}, (2, 5), "ids is `batch seq`: what stands along its second axis meets"),
        ("Forgets", {}, (2, 5), "is batch_first=True missing?"),
        ("Places", {}, (2, 5, 12), "second axis alone.* is batch_first=True missing?"),
        ("Places", {"axis": "0"}, (5, 2, 12), "x is `seq batch embed`: it matters where a token stands"),
        ("Pools", {"axis": "1"}, (2, 5, 12), "the output keeps its first axis"),
        ("Pools", {"axis": "0"}, (5, 2, 12), "x is `seq batch embed`: the output keeps its second axis"),
        ("Wraps", {}, (5, 2, 12), "what stands along its first axis meets"),
        ("Words", {}, (5, 2, 12), "x is `seq batch embed`: the forward unpacks x.shape as length, bsz. --batch-first"),
        ("Mixed", {}, (2, 5, 12), "unpacks x.shape as bsz, length. .* is batch_first=True missing?"),
        ("Silent", {}, (5, 2, 12), "x is `seq batch embed`: what stands along its first axis meets"),
    ],
)
def test_the_layout_is_what_the_forward_does(name: str, settings: dict[str, str], shape: tuple[int, ...], said: str):
    _, call = made(name, settings)
    assert tuple(next(iter(call.kwargs.values())).shape) == shape
    assert len(call.said) == 1
    assert re.search(said, call.said[0])


def test_that_the_batch_comes_first_is_not_worth_a_word() -> None:
    _, call = made("Silent", {"axis": "1"})
    assert tuple(call.kwargs["x"].shape) == (2, 5, 12)
    assert call.said == ()


def test_a_layout_that_is_given_is_taken() -> None:
    _, call = made("Turns", batch_first=False)
    assert tuple(call.kwargs["ids"].shape) == (5, 2)
    assert call.said == ()


def test_a_dictionary_holds_what_the_forward_asks_it_for() -> None:
    target, call = made("Dictionary")
    held = call.kwargs["batch"]
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == {
        "input_ids": (2, 5),
        "extra_embeds": (2, 5, 12),
    }
    assert int(held["input_ids"].max()) < 29
    assert call.said == ("batch holds input_ids, extra_embeds, as the forward uses it.",)
    target.module(held)
    _, call = made("Dictionary", shapes=("batch.input_ids=3x7:int64", "batch.extra_embeds=3x7x12"))
    assert {name: tuple(tensor.shape) for name, tensor in call.kwargs["batch"].items()} == {
        "input_ids": (3, 7),
        "extra_embeds": (3, 7, 12),
    }


def test_the_same_dictionary_goes_into_two_forwards() -> None:
    (one, call), (other, again) = made("Dictionary"), made("Dictionary")
    same = with_the_same(again, other.module, call, one.module)
    held, wanted = same.kwargs["batch"], call.kwargs["batch"]
    assert {name: tensor.data_ptr() for name, tensor in held.items()} == {n: t.data_ptr() for n, t in wanted.items()}


def test_a_dictionary_in_a_dictionary_gets_what_another_forward_gets() -> None:
    (one, call), (other, again) = made("Adds"), made("NeedsInside")
    inside = with_the_same(again, other.module, call, one.module).kwargs["batch"]["inputs"]
    assert inside["x"] is call.kwargs["x"]
    assert inside["mask"] is again.kwargs["batch"]["inputs"]["mask"]
    assert with_the_same(call, one.module, again, other.module).kwargs["x"] is again.kwargs["batch"]["inputs"]["x"]


def test_arguments_by_any_name_are_those_that_the_forward_asks_for() -> None:
    target, call = made("Named")
    assert {name: tuple(tensor.shape) for name, tensor in call.kwargs.items()} == {"x": (2, 5, 12)}
    target.module(**call.kwargs)


def test_what_runs_in_training_mode_alone_says_so() -> None:
    target, call = made("Trains")
    own = subject_of(target, call, 0)
    with pytest.raises(AssertionError) as raised:
        own.plain()
    assert str(explained(raised.value, own)).endswith("It runs in training mode: --train.")
    assert not target.module.training
    target.module.train()
    own.plain()


def test_a_lazy_module_gets_a_width_or_is_refused() -> None:
    target, call = made("Lazy")
    assert tuple(call.kwargs["x"].shape) == (2, 5, 12)
    assert call.said == ("Its lazy layers take any width, and were given 12: --input-shape gives another.",)
    # What was found out by running a copy leaves the module itself as it was.
    assert isinstance(target.module.first.weight, torch.nn.UninitializedParameter)
    with pytest.raises(InputError, match=r"LazyImage has lazy layers \(LazyConv1d\).*--input-shape x="):
        made("LazyImage")
    _, call = made("LazyImage", shapes=("x=2x5x12",))
    assert tuple(call.kwargs["x"].shape) == (2, 5, 12)


def test_nothing_is_run_again_that_was_known() -> None:
    target, call = made("Calls", batch=1)
    first = type(target.module).calls
    assert first == 3  # on copies: up to the first product, and two of 15 tokens to see which axis is the batch
    assert call.without_ones is not None
    call.without_ones(target.module)
    assert type(target.module).calls == first


def test_a_mask_for_each_head_fits_the_heads_of_torchs_attention(tmp_path: Path) -> None:
    mask = torch.randn(8, 5, 5)
    torch.save(mask, tmp_path / "mask.pt")
    settings = {"d_model": "16", "nhead": "4", "dim_feedforward": "20", "batch_first": "true"}
    target, call = made("torch.nn:TransformerEncoderLayer", settings, attn_mask=tmp_path / "mask.pt")
    assert torch.equal(call.kwargs["src_mask"], mask)
    layer, x = target.module.eval(), call.kwargs["src"]  # with gradients: its fast path takes no such mask
    assert torch.equal(layer(**call.kwargs), layer(x, src_mask=mask))
    assert not torch.equal(layer(**call.kwargs), layer(x))
