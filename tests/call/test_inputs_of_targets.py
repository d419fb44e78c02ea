"""What a forward is called with: by its signature, by what it does with it, and by what somebody says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mha_inspect.__main__ import run
from mha_inspect.call.call import Call
from mha_inspect.call.inputs import Asked, make_call
from mha_inspect.call.part import call_with, with_the_same
from mha_inspect.errors import InputError, NoMaskError, SpecError
from mha_inspect.layers.spec import InputSpec
from mha_inspect.making.settings import InputShape, parse_shapes
from mha_inspect.making.target import Target, TargetSpec, load_target
from mha_inspect.making.vocabulary import Flags

STYLES = str(Path(__file__).parent / "styles.py")
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


def loaded(name: str, settings: dict[str, str] | None = None, *shapes: str, **inputs: Any) -> tuple[Target, Call]:
    """Return a target and what it is called with: a batch of 2 and a length of 5."""
    typed = {name: inputs.pop(name) for name in ("batch_first", "need_weights", "embed_dim") if name in inputs}
    sizes = Flags({"embed_dim": 14, "num_heads": 2, **typed}, frozenset(typed), frozenset(typed))
    target = load_target(name if ":" in name else f"{STYLES}:{name}", settings or {}, TargetSpec(flags=sizes))
    known = frozenset({*typed, *inputs})
    flags = Flags({"batch_first": True, **typed}, frozenset(typed), known)
    return target, make_call(
        target, Asked(InputSpec(**{"batch": 2, "seq_len": 5, **inputs}), flags, parse_shapes(shapes))
    )


def shapes_of(call: Call) -> dict[str, Any]:
    return {name: tuple(v.shape) if isinstance(v, torch.Tensor) else v for name, v in call.kwargs.items()}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("Tutorial", {}, {"values": (2, 5, 14), "keys": (2, 5, 14), "query": (2, 5, 14), "mask": None}),
        ("GPT", {}, {"idx": (2, 5)}),
        ("Cross", {"query_dim": "14", "context_dim": "14"}, {"x": (2, 5, 14)}),
        ("Matrices", {}, {"data": (2, 5, 13)}),
        ("Before", {}, {"x": (2, 5)}),
        ("Before", {"kind": "image"}, {"x": (2, 5, 32, 32)}),
        ("Before", {"kind": "sound"}, {"x": (2, 20, 5)}),
        ("torch.nn:TransformerEncoderLayer", {}, {"src": (5, 2, 14)}),
        (
            "torch.nn:MultiheadAttention",
            {"kdim": "11", "vdim": "17", "batch_first": "yes"},
            {"query": (2, 5, 14), "key": (2, 5, 11), "value": (2, 5, 17)},
        ),
    ],
)
def test_inputs_are_what_the_forward_takes(name: str, settings: dict[str, str], expected: dict[str, Any]) -> None:
    target, call = loaded(name, settings)
    assert {name: shape for name, shape in shapes_of(call).items() if name in expected} == expected
    target.module(*call.args, **call.kwargs)


def test_numbers_are_drawn_from_the_seed_and_ids_from_the_vocabulary() -> None:
    first, again = (loaded("GPT", batch=11, seq_len=13)[1].kwargs["idx"] for _ in range(2))
    assert torch.equal(first, again)
    assert first.dtype == torch.int64
    assert (int(first.min()), int(first.max())) == (0, 28)  # 143 draws of 29 tokens: all but certain to hold both ends


def test_probing_leaves_the_module_and_the_generators_as_they_were() -> None:
    torch.manual_seed(0)
    module, state = nn.BatchNorm1d(5).train(), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    make_call(Target(module, "norm", {}), Asked(InputSpec(batch=3, seq_len=5)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_forward_is_run_once_to_know_its_inputs_and_once_to_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    kind = type(loaded("Counting", batch=1)[0].module).__mro__[1]
    calls = kind.calls
    assert run(["trace", f"{STYLES}:Counting", "--embed-dim", "12", "--num-heads", "3"]) == 0
    assert "weights " in capsys.readouterr().out
    assert kind.calls == calls + 2


# -- which axis is the batch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("Keeps", (2, 5, 12), None),
        ("Words", (5, 2, 12), "x is `seq batch embed`: the forward unpacks x.shape as length, bsz. Use --batch-first"),
        ("Wraps", (5, 2, 12), "x is `seq batch embed`: the MultiheadAttention inside takes .*--batch-first"),
        ("WrapsTurned", (2, 5, 12), None),
        ("WrapsPooled", (2, 5, 12), "x is `batch seq embed`: the forward does not say, .* --seq-first"),
    ],
)
def test_the_layout_is_what_the_forward_says(name: str, shape: tuple[int, ...], said: str | None) -> None:
    _, call = loaded(name)
    assert shapes_of(call)["x"] == shape
    assert len(call.said) == (said is not None)
    assert said is None or re.match(said, call.said[0])


@pytest.mark.parametrize(("name", "first"), [("Wraps", False), ("Words", True)])
def test_a_layout_that_is_given_is_taken(name: str, first: bool) -> None:
    _, call = loaded(name, batch_first=first)
    assert shapes_of(call)["x"] == ((2, 5, 12) if first else (5, 2, 12))
    assert call.said == ()


@pytest.mark.parametrize(("name", "first"), [("Wraps", False), ("Words", False), ("Keeps", True)])
def test_arguments_that_were_given_are_laid_out_as_the_layer_inside_takes_them(name: str, first: bool) -> None:
    module = loaded(name)[0].module
    assert call_with(module, (torch.randn(5, 2, 12),), {}, "").batch_first is first


# -- what nobody can guess ---------------------------------------------------------------------------------------------


def test_a_width_that_was_drawn_is_replaced_by_one_with_which_the_forward_runs() -> None:
    assert shapes_of(loaded("NoWeights")[1]) == {"q": (2, 5, 12), "k": (2, 5, 12)}
    assert shapes_of(loaded("NoWeights", {"num_hidden": "24"})[1])["q"] == (2, 5, 24)
    assert shapes_of(loaded("NoWeights", None, "q=2x5x21", "k=2x5x21")[1])["q"] == (2, 5, 21)


def test_a_width_that_was_drawn_is_not_the_mistake_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", f"{STYLES}:OfNoWidth"]) == 1
    output = capsys.readouterr().out
    assert "was chosen by mha-inspect: nothing in the module shows it." in output
    assert "Use a head count" not in output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Needy", "Needy.forward needs angles, .*--input-shape angles"),
        ("Dictionary", "Dictionary.forward takes several tensors in batch"),
        ("Annotated", "Annotated.forward takes several tensors in pair"),
        ("Named", r"Named.forward takes several tensors in \*\*kwargs"),
    ],
)
def test_what_nobody_can_guess_is_refused_with_the_page_that_says_how_to_give_it(name: str, said: str) -> None:
    with pytest.raises(InputError, match=f"{said}.* `mha-inspect help inputs`"):
        loaded(name)


def test_a_lazy_module_gets_a_width_or_is_refused() -> None:
    target, call = loaded("Lazy")
    assert call.said == (
        f"The lazy layers take any width and were given {call.kwargs['x'].shape[-1]}. Use --input-shape for another.",
    )
    # What was found out by running a copy leaves the module itself as it was.
    assert isinstance(target.module.q.weight, nn.UninitializedParameter)
    with pytest.raises(InputError, match=r"LazyImage has lazy layers \(LazyConv1d\).*--input-shape input="):
        loaded("LazyImage")
    assert shapes_of(loaded("LazyImage", None, "input=2x5x12")[1])["input"] == (2, 5, 12)


# -- what somebody says ------------------------------------------------------------------------------------------------


def test_shapes_that_were_said() -> None:
    _, call = loaded("Configured", None, "x=2x3x14:float64")
    assert (shapes_of(call)["x"], call.kwargs["x"].dtype) == ((2, 3, 14), torch.float64)
    ids = loaded("GPT", None, "idx=7x2")[1].kwargs["idx"]
    assert (ids.dtype, tuple(ids.shape), int(ids.max()) < 29) == (torch.int64, (7, 2), True)
    barred = loaded("Tutorial", None, "mask=3x1x5x5:bool")[1].kwargs["mask"]
    # Whatever True means, no row is masked altogether.
    assert bool(barred.any(-1).all())
    assert not bool(barred.all(-1).any())
    given = loaded("Needy", None, "angles=5x12")[1]
    assert (given.drawn, given.guessed) == (("x", "angles"), {"x": "2x5x12:float32"})


def test_shapes_as_they_are_read() -> None:
    assert parse_shapes(["x=2x10x512:float32", "mask=3:bool", "7x5"]) == {
        "x": InputShape((2, 10, 512), "float32"),
        "mask": InputShape((3,), "bool"),
        "": InputShape((7, 5), None),
    }
    wrong = {"x=2y3": "NAME=SIZExSIZE:DTYPE", "x=2x0": "every size must be 1 or more", "x=2x3:float23": "float32"}
    for text, said in {**wrong, "\x1b[2J": "NAME=SIZExSIZE:DTYPE"}.items():
        with pytest.raises(SpecError, match=said) as refused:
            parse_shapes([text])
        assert str(refused.value).isprintable()
    with pytest.raises(SpecError, match=r"names quary, .*values, keys, query, mask\. Did you mean query\?"):
        loaded("Tutorial", None, "quary=2x3x14")


def test_tensors_and_masks_from_files(tmp_path: Path) -> None:
    file, mask = tmp_path / "inputs.pt", tmp_path / "mask.pt"
    query, keys = torch.randn(2, 7, 14), torch.randn(2, 3, 14)
    torch.save({"query": query, "keys": keys}, file)
    torch.save(torch.ones(7, 3).tril(), mask)
    _, call = loaded("Tutorial", input=file, attn_mask=mask)
    assert torch.equal(call.kwargs["query"], query)
    assert call.kwargs["values"] is call.kwargs["keys"]
    assert torch.equal(call.kwargs["mask"], torch.ones(7, 3).tril())
    torch.save({"query": query, "kees": keys}, file)
    with pytest.raises(SpecError, match=r"kees.*Did you mean keys"):
        loaded("Tutorial", input=file)
    torch.save(query, file)
    _, call = loaded("torch.nn:MultiheadAttention", {"batch_first": "true"}, input=file, padding=(1,))
    assert call.kwargs["key_padding_mask"].tolist() == [[False] * 6 + [True]] * 2


def test_a_function_returns_what_the_forward_is_called_with() -> None:
    target, call = loaded("scaled")
    assert target.name == "Needy"
    assert torch.equal(call.kwargs["angles"], torch.ones(5, 12))
    assert call.notes == ("Called with x float32 [2, 5, 12], angles float32 [5, 12], returned with the module.",)
    target, call = loaded("in_dictionary")
    assert call.drawn == ("batch.x",)
    target.module(**call.kwargs)
    assert loaded("both")[1].kwargs["need_weights"] is False
    with pytest.raises(InputError, match=r"without_arguments\(\) returned a module and .*\(module, args, kwargs\)"):
        loaded("without_arguments")
    with pytest.raises(SpecError, match=r"scaled returns its own inputs, so --padding does not apply"):
        loaded("scaled", padding=(1,))


def test_two_that_return_their_arguments_get_the_same() -> None:
    for name in ("scaled", "in_dictionary"):
        settings = {"width": "13"} if name == "scaled" else None
        (target, call), (second, second_call) = loaded(name), loaded(name, settings)
        same = with_the_same(second_call, second.module, call, target.module)
        ours, theirs = ((one.kwargs.get("batch") or one.kwargs)["x"] for one in (same, call))
        assert torch.equal(ours, theirs)


def test_returned_arguments_are_moved_with_the_module() -> None:
    target = load_target(f"{STYLES}:scaled", {}, TargetSpec(dtype="float64", device="meta"))
    call = make_call(target, Asked(InputSpec()))
    assert {(tensor.dtype, tensor.device.type) for tensor in call.kwargs.values()} == {(torch.float64, "meta")}


# -- masks, in the form that a forward takes, which is learned by running it -------------------------------------------


def moved(target: Target, call: Call, token: int) -> torch.Tensor:
    """`batch query`: the outputs that move with one token of the first row, by a run that nothing else looks at."""
    module = target.module.eval()
    with torch.no_grad():
        x = call.kwargs["x"].clone()
        x[0, token] += 1.0
        apart = module(**call.kwargs) - module(**{**call.kwargs, "x": x})
    return (apart.abs() > 1e-5).any(-1)


@pytest.mark.parametrize("name", ["Keeps", "Bars", "Adds", "Visible", "Both"])
def test_a_causal_mask_is_made_as_the_forward_takes_it(name: str) -> None:
    target, call = loaded(name, causal=True)
    for token in range(5):
        assert moved(target, call, token)[0].tolist() == [False] * token + [True] * (5 - token)


@pytest.mark.parametrize("name", ["Keeps", "Adds", "BarsKeys", "Both"])
def test_padding_is_made_as_the_forward_takes_it(name: str) -> None:
    target, call = loaded(name, padding=(2, 1))
    assert moved(target, call, 2)[0].all()
    for token in (3, 4):
        # It moves what it asks itself, and no other.
        assert moved(target, call, token)[0].nonzero().flatten().tolist() == [token]


@pytest.mark.parametrize(("name", "heads"), [("Both", 2), ("Adds", 2), ("ByHead", 3)])
def test_both_flags_make_one_mask(name: str, heads: int) -> None:
    target, call = loaded(name, {"embed_dim": "12", "num_heads": str(heads)}, causal=True, padding=(2, 1))
    assert len([value for key, value in call.kwargs.items() if key != "x" and value is not None]) == 1
    assert moved(target, call, 1)[0].tolist() == [False, True, True, True, True]
    assert moved(target, call, 3)[0].tolist() == [False, False, False, True, False]


def test_what_was_made_is_said_and_what_is_not_needed_is_not_made() -> None:
    _, call = loaded("Bars", causal=True)
    assert torch.equal(call.kwargs["attn_mask"], CAUSAL)
    assert call.said == ("--causal made attn_mask, bool `query key`: True masks out a key, as the weights show.",)
    _, call = loaded("Bars", causal=True, seq_len=1)
    assert call.said == ("--causal masks out no key here, so no mask was given.",)
    for name in ("Own", "Inside"):
        _, call = loaded(name, causal=True)
        assert call.kwargs.get("mask") is None
        assert call.said == ("The forward already does what --causal asks for, so no mask was given.",)


@pytest.mark.parametrize(("flag", "asked"), [("--causal", {"causal": True}), ("--padding", {"padding": (1,)})])
def test_what_cannot_be_learned_is_not_made(flag: str, asked: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=rf"{flag} cannot be applied to Deaf.forward: .*\(module, args\)"):
        loaded("Deaf", **asked)
    with pytest.raises(NoMaskError, match="takes no mask: its arguments are x"):
        loaded("OneLate", **asked)


def test_a_required_mask_is_made_where_the_forward_does_not_run_without_it() -> None:
    _, call = loaded("Needed")
    assert torch.equal(call.kwargs["mask"], ~CAUSAL.expand(2, -1, -1))
    assert call.said[0] == "mask is required, so a mask was made as with --causal."
    _, call = loaded("Needed", padding=(1,))
    assert call.kwargs["mask"].shape == (2, 5, 5)


def test_masks_of_torchs_own_modules_mean_what_torch_says() -> None:
    settings = {"d_model": "12", "nhead": "3", "num_encoder_layers": "1", "num_decoder_layers": "1"}
    _, call = loaded("torch.nn:Transformer", settings, causal=True, padding=(2,), key_len=7)
    masks = {name: value for name, value in call.kwargs.items() if "mask" in name and value is not None}
    assert set(masks) == {"tgt_mask", "src_key_padding_mask", "memory_key_padding_mask"}
    assert torch.equal(masks["tgt_mask"], CAUSAL)
    layer, call = loaded("torch.nn:MultiheadAttention", {"batch_first": "true"}, causal=True, padding=(2,))
    weights = layer.module(*call.args, **call.kwargs)[1].detach()
    assert float(weights[:, call.kwargs["attn_mask"]].abs().max()) == float(weights[..., 3:].abs().max()) == 0.0


def test_a_mask_for_each_head_fits_the_heads_of_torchs_attention(tmp_path: Path) -> None:
    mask = torch.randn(4, 5, 5)
    torch.save(mask, tmp_path / "mask.pt")
    settings = {"d_model": "16", "nhead": "2", "dim_feedforward": "20", "batch_first": "true"}
    target, call = loaded("torch.nn:TransformerEncoderLayer", settings, attn_mask=tmp_path / "mask.pt")
    assert torch.equal(call.kwargs["src_mask"], mask)
    layer, x = target.module.eval(), call.kwargs["src"]  # with gradients: its fast path takes no such mask
    assert torch.equal(layer(**call.kwargs), layer(x, src_mask=mask))
