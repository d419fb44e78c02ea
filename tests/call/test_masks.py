"""The masks of --causal and --padding, made in the form that a forward takes, which is learned by running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mha_inspect.call.call import Call
from mha_inspect.call.inputs import Asked, make_call
from mha_inspect.errors import NoMaskError, SpecError
from mha_inspect.layers.spec import InputSpec
from mha_inspect.making.target import Target, TargetSpec, load_target
from mha_inspect.making.vocabulary import Flags

FILE = str(Path(__file__).parent / "masked.py")
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


def loaded(name: str, settings: dict[str, str] | None = None, **inputs: Any):
    target = load_target(name if ":" in name else f"{FILE}:{name}", settings or {}, TargetSpec())
    flags = Flags(typed=frozenset(inputs))
    return target, make_call(target, Asked(InputSpec(**{"batch": 2, "seq_len": 5, **inputs}), flags))


def moved(target: Target, call: Call, token: int) -> torch.Tensor:
    """`batch query`: the outputs that move with one token of the first row, by a run that nothing else looks at."""
    module = target.module.eval()
    with torch.no_grad():
        before = module(**call.kwargs)
        x = call.kwargs["x"].clone()
        x[0, token] += 1.0
        after = module(**{**call.kwargs, "x": x})
    return ((before - after).abs() > 1e-5).any(-1)


@pytest.mark.parametrize("name", ["Keeps", "Bars", "Adds", "Multiplies", "Visible", "Both"])
def test_a_causal_mask_is_made_as_the_forward_takes_it(name: str) -> None:
    target, call = loaded(name, causal=True)
    for token in range(5):
        assert moved(target, call, token)[0].tolist() == [False] * token + [True] * (5 - token)


def test_a_module_that_masks_by_itself_needs_no_argument_for_it() -> None:
    _, call = loaded("Inside", causal=True)
    assert list(call.kwargs) == ["x"]
    assert "already does" in call.said[0]
    for name, inputs in (("OneLate", {"causal": True}), ("Inside", {"padding": (2,)})):
        with pytest.raises(NoMaskError, match="takes no mask: its arguments are x"):
            loaded(name, **inputs)


@pytest.mark.parametrize("name", ["Keeps", "Bars", "Adds", "Multiplies", "BarsKeys", "Both"])
def test_padding_is_made_as_the_forward_takes_it(name: str) -> None:
    target, call = loaded(name, padding=(2, 1))
    assert moved(target, call, 2)[0].all()
    for token in (3, 4):
        seen = moved(target, call, token)[0]
        assert seen.nonzero().flatten().tolist() == [token]  # it moves what it asks itself, and no other


@pytest.mark.parametrize("name", ["Both", "Adds", "ByHead"])
def test_both_flags_make_one_mask(name: str) -> None:
    target, call = loaded(name, causal=True, padding=(2, 1))
    assert len([value for key, value in call.kwargs.items() if key != "x" and value is not None]) == 1
    assert moved(target, call, 1)[0].tolist() == [False, True, True, True, True]
    assert moved(target, call, 3)[0].tolist() == [False, False, False, True, False]
    assert call.said[0].startswith("--causal and --padding made ")


@pytest.mark.parametrize(
    ("name", "flag", "inputs"),
    [("Bars", "causal", {"causal": True, "seq_len": 1}), ("KeepsKeys", "padding", {"padding": (0,)})],
)
def test_a_mask_that_would_bar_nothing_is_none(name: str, flag: str, inputs: dict[str, Any]) -> None:
    _, call = loaded(name, **inputs)
    assert {key for key, value in call.kwargs.items() if value is not None} == {"x"}
    assert call.said == (f"--{flag} masks out no key here, so no mask was given.",)


def test_what_was_learned_is_said() -> None:
    _, call = loaded("Bars", causal=True)
    assert torch.equal(call.kwargs["attn_mask"], CAUSAL)
    assert call.said == ("--causal made attn_mask, bool `query key`: True masks out a key, as the weights show.",)


def test_what_is_causal_by_itself_gets_no_mask() -> None:
    _, call = loaded("Own", causal=True)
    assert call.kwargs.get("mask") is None
    assert call.said == ("The forward already does what --causal asks for, so no mask was given.",)


@pytest.mark.parametrize(("flag", "asked"), [("--causal", {"causal": True}), ("--padding", {"padding": (1,)})])
def test_what_cannot_be_learned_is_not_made(flag: str, asked: dict[str, Any]) -> None:
    for name in ("Deaf", "Needed"):
        with pytest.raises(SpecError, match=rf"{flag} cannot be applied to {name}.forward: .*\(module, args\)"):
            loaded(name, **asked)


def test_torchs_transformer_masks_its_decoder() -> None:
    settings = {"d_model": "12", "nhead": "3", "num_encoder_layers": "1", "num_decoder_layers": "1"}
    _, call = loaded("torch.nn:Transformer", settings, causal=True, padding=(2,), key_len=7)
    masks = {name: value for name, value in call.kwargs.items() if "mask" in name and value is not None}
    assert set(masks) == {"tgt_mask", "src_key_padding_mask", "memory_key_padding_mask"}
    assert torch.equal(masks["tgt_mask"], CAUSAL)
    assert masks["memory_key_padding_mask"].tolist() == [[False] * 5 + [True] * 2] * 2


def test_a_mask_for_each_head_fits_the_heads_of_torchs_attention(tmp_path: Path) -> None:
    mask = torch.randn(8, 5, 5)
    torch.save(mask, tmp_path / "mask.pt")
    settings = {"d_model": "16", "nhead": "4", "dim_feedforward": "20", "batch_first": "true"}
    target, call = loaded("torch.nn:TransformerEncoderLayer", settings, attn_mask=tmp_path / "mask.pt")
    assert torch.equal(call.kwargs["src_mask"], mask)
    layer, x = target.module.eval(), call.kwargs["src"]  # with gradients: its fast path takes no such mask
    assert torch.equal(layer(**call.kwargs), layer(x, src_mask=mask))
    assert not torch.equal(layer(**call.kwargs), layer(x))
