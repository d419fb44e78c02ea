"""What a target's forward is called with: by its signature, by what it does with it, and by what somebody says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mha_inspect.call.call import Call
from mha_inspect.call.inputs import Asked, make_call
from mha_inspect.errors import InputError, SpecError
from mha_inspect.layers.spec import InputSpec
from mha_inspect.making.arguments import InputShape, parse_shapes
from mha_inspect.making.target import Target, TargetSpec, load_target
from mha_inspect.making.vocabulary import Flags

STYLES = str(Path(__file__).parent / "styles.py")
SIZES = {"embed_dim": 14, "num_heads": 2, "dropout": 0.0, "bias": True, "batch_first": True, "seq_len": 5}


def target(name: str, settings: dict[str, str] | None = None, **typed: Any) -> Target:
    flags = Flags({**SIZES, **typed}, frozenset(typed), frozenset(typed))
    text = name if ":" in name else f"{STYLES}:{name}"
    return load_target(text, settings or {}, TargetSpec(flags=flags))


def call(loaded: Target, shapes: tuple[str, ...] = (), given: dict[str, Any] | None = None, **inputs: Any) -> Call:
    typed = {**(given or {}), **{name: inputs[name] for name in ("key_len", "causal") if name in inputs}}
    flags = Flags({**SIZES, **typed}, frozenset(typed), frozenset(typed))
    spec = InputSpec(**{"batch": 3, "seq_len": 5, **inputs})
    return make_call(loaded, Asked(spec, flags, parse_shapes(shapes), seed=0))


def shapes_of(loaded: Call) -> dict[str, Any]:
    return {name: tuple(v.shape) if isinstance(v, torch.Tensor) else v for name, v in loaded.kwargs.items()}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("Configured", {}, {"x": (3, 5, 14)}),
        ("Tutorial", {}, {"values": (3, 5, 14), "keys": (3, 5, 14), "query": (3, 5, 14), "mask": None}),
        ("GPT", {}, {"idx": (3, 5)}),
        ("Cross", {"context_dim": "14"}, {"x": (3, 5, 14)}),
        ("Matrices", {}, {"data": (3, 5, 13)}),
        ("Tokens", {}, {"x": (3, 5)}),
        ("Picture", {}, {"x": (3, 5, 32, 32)}),
        ("Spectrogram", {}, {"x": (3, 20, 5)}),
        ("Stepping", {"start_pos": "2"}, {"x": (3, 5, 8), "start_pos": 2}),
        ("torch.nn:Linear", {"in_features": "11", "out_features": "3"}, {"input": (3, 5, 11)}),
        ("torch.nn:TransformerEncoderLayer", {"batch_first": "true"}, {"src": (3, 5, 14)}),
        ("torch.nn:TransformerEncoderLayer", {}, {"src": (5, 3, 14)}),
        (
            "torch.nn:MultiheadAttention",
            {"kdim": "11", "vdim": "17", "batch_first": "yes"},
            {"query": (3, 5, 14), "key": (3, 5, 11), "value": (3, 5, 17)},
        ),
    ],
)
def test_inputs_follow_the_forward(name, settings, expected):
    loaded = target(name, settings)
    arguments = call(loaded)
    assert shapes_of(arguments) == expected
    loaded.module(*arguments.args, **arguments.kwargs)


def test_lengths_of_query_and_key():
    assert shapes_of(call(target("Tutorial"), key_len=7)) == {
        "values": (3, 7, 14),
        "keys": (3, 7, 14),
        "query": (3, 5, 14),
        "mask": None,
    }
    assert shapes_of(call(target("Cross"), key_len=7)) == {"x": (3, 5, 14), "context": (3, 7, 11)}
    layer = target("torch.nn:TransformerDecoderLayer")
    assert shapes_of(call(layer, key_len=7)) == {"tgt": (5, 3, 14), "memory": (7, 3, 14)}
    model = target(
        "torch.nn:Transformer", {"num_encoder_layers": "1", "num_decoder_layers": "1", "d_model": "14"}, num_heads=2
    )
    assert shapes_of(call(model, key_len=7)) == {"src": (7, 3, 14), "tgt": (5, 3, 14)}
    with pytest.raises(SpecError, match="takes one sequence"):
        call(target("Configured"), key_len=7)


def test_numbers_come_from_the_seed_and_ids_from_the_vocabulary():
    first, again = (call(target("GPT"), batch=11, seq_len=13).kwargs["idx"] for _ in range(2))
    assert torch.equal(first, again)
    assert first.dtype == torch.int64
    assert (int(first.min()), int(first.max())) == (0, 28)  # 143 draws of 29 tokens: all but certain to hold both ends
    widths = [call(target("Matrices")).kwargs["data"] for _ in range(2)]
    assert torch.equal(*widths)


def test_probing_leaves_the_module_and_the_generators_as_they_were():
    loaded = target("torch.nn:BatchNorm1d", {"num_features": "5"})
    loaded.module.train()
    before = {name: tensor.clone() for name, tensor in loaded.module.state_dict().items()}
    state = torch.get_rng_state()
    call(loaded)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_an_argument_that_is_needed_is_named_with_its_flag():
    with pytest.raises(InputError, match=r"Needy.forward needs angles.*--input-shape angles=.*--input FILE"):
        call(target("Needy"))
    with pytest.raises(InputError, match=r"Stepping.forward needs start_pos.*--set start_pos=VALUE"):
        call(target("Stepping"))
    given = call(target("Needy"), ("angles=5x8",))
    assert shapes_of(given) == {"x": (3, 5, 8), "angles": (5, 8)}
    assert (given.drawn, given.guessed) == (("x", "angles"), {"x": "3x5x8:float32"})


def test_shapes_that_were_said():
    loaded = call(target("Configured"), ("x=2x3x14:float64",))
    assert (shapes_of(loaded)["x"], loaded.kwargs["x"].dtype) == ((2, 3, 14), torch.float64)
    assert shapes_of(call(target("Configured"), ("2x3x14",)))["x"] == (2, 3, 14)
    ids = call(target("GPT"), ("idx=7x2",)).kwargs["idx"]
    assert (ids.dtype, tuple(ids.shape), int(ids.max()) < 29) == (torch.int64, (7, 2), True)
    barred = call(target("Tutorial"), ("mask=3x1x5x5:bool",)).kwargs["mask"]
    assert barred.dtype == torch.bool
    # Whatever True means, no row is masked altogether.
    assert bool(barred.any(-1).all()) and not bool(barred.all(-1).any())  # noqa: PT018


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x=", "NAME=SIZExSIZE:DTYPE"),
        ("x=2y3", "NAME=SIZExSIZE:DTYPE"),
        ("x=2x0", "every size must be 1 or more"),
        ("x=" + "9" * 40, "every size must be 1 or more"),
        ("x=2x3:float23", "float32"),
        ("\x1b[2J", "NAME=SIZExSIZE:DTYPE"),
    ],
)
def test_shapes_that_are_none(text, said):
    with pytest.raises(SpecError) as refused:
        parse_shapes([text])
    assert said in str(refused.value)
    assert str(refused.value).isprintable()


def test_shapes_as_they_are_read():
    assert parse_shapes(["x=2x10x512:float32", "mask=3:bool", "7x5"]) == {
        "x": InputShape((2, 10, 512), "float32"),
        "mask": InputShape((3,), "bool"),
        "": InputShape((7, 5), None),
    }
    with pytest.raises(SpecError, match="twice"):
        parse_shapes(["x=2", "x=3"])


def test_a_shape_for_no_argument_of_the_forward():
    with pytest.raises(SpecError, match=r"names quary, .*values, keys, query, mask\. Did you mean query\?"):
        call(target("Tutorial"), ("quary=2x3x14",))
    with pytest.raises(SpecError) as refused:
        call(target("Configured"), ("\u202ex=2x3",))
    assert str(refused.value).isprintable()


def test_tensors_from_a_file(tmp_path):
    file = tmp_path / "inputs.pt"
    query, keys = torch.randn(2, 7, 14), torch.randn(2, 3, 14)
    torch.save({"query": query, "keys": keys}, file)
    loaded = call(target("Tutorial"), input=file)
    assert torch.equal(loaded.kwargs["query"], query)
    assert torch.equal(loaded.kwargs["keys"], keys)
    assert loaded.kwargs["values"] is loaded.kwargs["keys"]
    torch.save(query.double(), file)
    assert torch.equal(call(target("Configured"), input=file).kwargs["x"], query)
    torch.save({"query": query, "kees": keys}, file)
    with pytest.raises(SpecError, match=r"kees.*Did you mean keys"):
        call(target("Tutorial"), input=file)


def test_a_mask_file_is_given_as_it_is(tmp_path):
    file = tmp_path / "mask.pt"
    torch.save(torch.ones(5, 5).tril(), file)
    assert torch.equal(call(target("Tutorial"), attn_mask=file).kwargs["mask"], torch.ones(5, 5).tril())
    with pytest.raises(SpecError, match="takes no mask"):
        call(target("Configured"), attn_mask=file)


def test_switches_of_torchs_layer_reach_no_other():
    layer = target("torch.nn:MultiheadAttention")
    loaded = call(layer, given={"need_weights": False, "average_weights": False})
    assert loaded.kwargs["need_weights"] is loaded.kwargs["average_attn_weights"] is False
    with pytest.raises(SpecError, match="--need-weights does not apply"):
        call(target("Configured"), given={"need_weights": False})


def test_a_forward_of_nothing_but_stars():
    class Stars(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 2)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.linear(*args)

    loaded = call(Target(Stars(), "stars", {}))
    assert tuple(loaded.args[0].shape) == (3, 5, 7)


def test_padding_goes_by_the_lengths_that_a_file_has(tmp_path):
    file = tmp_path / "query.pt"
    torch.save(torch.randn(2, 9, 14), file)
    loaded = call(target("torch.nn:MultiheadAttention", {"batch_first": "true"}), input=file, padding=(1,))
    assert loaded.kwargs["key_padding_mask"].tolist() == [[False] * 8 + [True]] * 2


def test_masks_of_torchs_own_modules_mean_what_torch_says():
    layer = target("torch.nn:MultiheadAttention", {"batch_first": "true"})
    made = call(layer, causal=True, padding=(2,))
    mask, padding = made.kwargs["attn_mask"], made.kwargs["key_padding_mask"]
    assert torch.equal(mask, torch.ones(5, 5).triu(1).bool())
    assert padding.tolist() == [[False] * 3 + [True] * 2] * 3
    _, weights = layer.module(*made.args, **made.kwargs)
    assert float(weights.detach()[:, mask].abs().max()) == 0.0
    assert float(weights.detach()[..., 3:].abs().max()) == 0.0
