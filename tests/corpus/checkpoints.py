"""Two files of weights: which tensors are the same, rounded, in another order or changed, and in which heads."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

State = dict[str, Tensor]
EMBED, HEADS, KV_HEADS, WIDTH = 48, 6, 2, 8
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": EMBED}


@dataclass(frozen=True)
class Files:
    """Two files of weights."""

    name: str
    left: Callable[[], State]
    right: Callable[[], State]
    outcome: str = "differs"
    verdicts: Mapping[str, str] = field(default_factory=dict)
    """Verdicts of tensors, by a part of their name on the left or of that on the right; others have the same bits."""
    orders: Mapping[str, str] = field(default_factory=dict)
    """The order of the rows of tensors, by a part of their name on the left: an einops pattern, or words."""
    changed: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    """How much each head of a part changed: `("layers.1", "W_q")` to relative differences."""
    left_alone: tuple[str, ...] = ()
    right_alone: tuple[str, ...] = ()
    config: dict[str, Any] | None = field(default_factory=lambda: CONFIG)
    num_heads: int | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names on the left to those on the right."""


def drawn(seed: int, **shapes: tuple[int, ...]) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def llama(seed: int = 0, layers: int = 2) -> State:
    """Layers of 6 heads of 8 features, which share 2 keys and values."""
    shapes = {"q_proj": (48, 48), "k_proj": (16, 48), "v_proj": (16, 48), "o_proj": (48, 48)}
    named = {f"layers.{n}.self_attn.{name}.weight": shape for n in range(layers) for name, shape in shapes.items()}
    return drawn(seed, **named, **{"embed.weight": (50, 48), "layers.0.norm.weight": (48,)})


def packed() -> State:
    """GPT-2's way: q, k and v side by side in columns; 4 heads of 6 features."""
    shapes = {"c_attn.weight": (24, 72), "c_attn.bias": (72,), "c_proj.weight": (24, 24)}
    return drawn(0, **{f"h.0.attn.{name}": shape for name, shape in shapes.items()})


def with_mlp() -> State:
    return packed() | drawn(6, **{"h.0.mlp.c_fc.weight": (24, 30)})


def apart() -> State:
    """`packed`, with q, k and v in three Linears, as porting it to plain layers leaves it."""
    state, prefix = packed(), "h.0.attn."
    split = {f"{prefix}o_proj.weight": state[f"{prefix}c_proj.weight"].T}
    weights, biases = state[f"{prefix}c_attn.weight"].T.chunk(3), state[f"{prefix}c_attn.bias"].chunk(3)
    for letter, weight, bias in zip("qkv", weights, biases, strict=True):
        split |= {f"{prefix}{letter}_proj.weight": weight, f"{prefix}{letter}_proj.bias": bias}
    return split


def to_linear(state: State, *, square: bool = True) -> State:
    """Turn the matrices of Conv1D into those of Linear; without `square`, those that load either way are forgotten."""
    turned = {}
    for name, tensor in state.items():
        is_turned = tensor.dim() == 2 and (square or len({*tensor.shape}) == 2)
        turned[name] = tensor.T if is_turned else tensor
    return turned


def stacked() -> State:
    """As torch's own layer has it."""
    return drawn(0, **{"in_proj_weight": (72, 24), "in_proj_bias": (72,), "out_proj.weight": (24, 24)})


def unstacked(order: str = "qkv") -> State:
    """The same with a tensor for each letter; `order` is that of the blocks that they are taken from."""
    state = {"out_proj.weight": stacked()["out_proj.weight"]}
    for kind, letter, block in itertools.product(("weight", "bias"), "qkv", range(3)):
        if order[block] == letter:
            state[f"{letter}_proj.{kind}"] = stacked()[f"in_proj_{kind}"].chunk(3)[block].clone()
    return state


def edited(make: Callable[[], State], edit: Callable[[State], Any]) -> Callable[[], State]:
    """Return what makes a state of which an edit changes a copy, or gives another."""

    def made() -> State:
        state = {name: tensor.clone() for name, tensor in make().items()}
        result = edit(state)
        return result if isinstance(result, dict) else state

    return made


def all_of(make: Callable[[], State], change: Callable[[Tensor], Tensor]) -> Callable[[], State]:
    return lambda: {name: change(tensor) for name, tensor in make().items()}


def named_as_meta(state: State) -> State:
    return {re.sub(r"self_attn\.(\w)_proj", r"attention.w\1", name): tensor for name, tensor in state.items()}


def halves(weight: Tensor, heads: int) -> Tensor:
    """Bring neighbours into halves, as the conversion script of Hugging Face does."""
    return weight.view(heads, len(weight) // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


Q, K, OUT = (f"layers.0.self_attn.{letter}_proj.weight" for letter in "qko")


def one_layer() -> State:
    return llama(layers=1)


def converted(state: State) -> State:
    state[Q], state[K] = halves(state[Q], HEADS), halves(state[K], KV_HEADS)
    return state


def with_biases() -> State:
    return one_layer() | drawn(7, **{Q.replace("weight", "bias"): (48,), K.replace("weight", "bias"): (16,)})


def converted_with_biases(state: State) -> State:
    """Reorder the biases with their weights."""
    for name, heads in ((Q, HEADS), (K, KV_HEADS)):
        bias = name.replace("weight", "bias")
        state[bias] = halves(state[bias], heads)
    return converted(state)


def some_heads(state: State) -> None:
    state["layers.1.self_attn.q_proj.weight"][8:16] *= 1.5
    state["layers.1.self_attn.q_proj.weight"][40:48] *= 1.25
    state[OUT][:, 24:32] *= 0.25


def bert(rows: list[int] | None = None) -> State:
    names = [f"encoder.layer.0.attention.self.{name}.weight" for name in ("query", "key", "value")]
    state = drawn(4, **dict.fromkeys(names, (64, 64)))
    return state if rows is None else {name: tensor[rows] for name, tensor in state.items()}


KEPT = [*range(32), *range(48, 64)]
"""The rows of heads 0, 1 and 3 of four."""
LIKE_FUSED = {"layer.attn.o_proj.weight": "layer.attention.dense.weight"}


def for_neox() -> tuple[State, State]:
    fused = drawn(4, w=(144, 48))["w"]
    out = drawn(5, o=(48, 48))["o"]
    left = {f"layer.attn.{n}_proj.weight": part for n, part in zip("qkv", fused.chunk(3), strict=True)}
    by_head = rearrange(fused, "(qkv heads head_dim) e -> (heads qkv head_dim) e", qkv=3, heads=HEADS)
    right = {"layer.attention.query_key_value.weight": by_head, "layer.attention.dense.weight": out}
    return left | {"layer.attn.o_proj.weight": out}, right


def of_vit() -> tuple[State, State]:
    """One tensor of keys and values beside a query, as vit-pytorch has it, and one for each."""
    right = drawn(1, **{f"a.to_{n}.weight": (12, 8) for n in "qkv"}, **{"a.to_out.weight": (8, 12)})
    left = {name: tensor for name, tensor in right.items() if name[:6] not in ("a.to_k", "a.to_v")}
    return left | {"a.to_kv.weight": torch.cat([right["a.to_k.weight"], right["a.to_v.weight"]])}, right


def unequal(change: Callable[[Tensor], Tensor]) -> Callable[[], State]:
    return edited(one_layer, lambda state: state | {Q: change(state[Q])})


def _nan(state: State) -> None:
    state["embed.weight"][3, 4] = float("nan")


def _less(state: State) -> State:
    del state["layers.0.norm.weight"]
    return state | {"embed.weight": torch.zeros(51, 48), "more": torch.zeros(3, 5)}


def _without_layer(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if "layers.1" not in name} | drawn(8, more=(3, 5))


def _one_element(state: State) -> None:
    state["h.0.attn.k_proj.weight"][13, 5] += 3


PERMUTED = "same, permuted"
ROUNDED, OTHER_QUERY = {"": "same within rounding"}, {"q_proj": "differs"}
FILES = [
    Files("Same", llama, llama, "same"),
    Files("InBfloat16", llama, all_of(llama, Tensor.bfloat16), "same", ROUNDED),
    Files("InFloat64", llama, all_of(llama, Tensor.double), "same", ROUNDED),
    Files(
        "SomeHeadsChanged",
        llama,
        edited(llama, some_heads),
        verdicts={"layers.1.self_attn.q": "differs", OUT: "differs"},
        changed={
            ("layers.1.self_attn", "W_q"): (0, 0.5, 0, 0, 0, 0.25),
            ("layers.0.self_attn", "W_o"): (0, 0, 0, 0.75, 0, 0),
        },
    ),
    Files("NamesOfMeta", llama, lambda: named_as_meta(llama()), "same", renamed={K: "layers.0.attention.wk.weight"}),
    Files(
        "PackedAndApart",
        packed,
        apart,
        verdicts={"weight": PERMUTED},
        config=None,
        num_heads=4,
    ),
    Files(
        "PackedAndApartOfOthers",
        packed,
        edited(apart, _one_element),
        verdicts={"k_proj.weight": "differs", "weight": PERMUTED},
        config=None,
        num_heads=4,
    ),
    Files(
        "Transposed",
        with_mlp,
        lambda: to_linear(with_mlp()),
        verdicts={"weight": PERMUTED},
        config={"n_head": 4},
    ),
    Files(
        "SquareNotTransposed",
        with_mlp,
        lambda: to_linear(with_mlp(), square=False),
        verdicts={"c_attn.weight": PERMUTED, "c_fc.weight": PERMUTED},
        config=None,
    ),
    Files(
        "SquareNotTransposedUnderAnotherName",
        with_mlp,
        lambda: {n.replace("c_proj", "out"): t for n, t in to_linear(with_mlp(), square=False).items()},
        verdicts={"c_attn.weight": PERMUTED, "c_fc.weight": PERMUTED},
        config=None,
        num_heads=4,
        renamed={"h.0.attn.c_proj.weight": "h.0.attn.out.weight"},
    ),
    Files(
        "OneSideAlone",
        llama,
        edited(llama, _less),
        verdicts={"embed": "other shape"},
        left_alone=("layers.0.norm.weight",),
        right_alone=("more",),
    ),
    Files(
        "KnownByItsNumbers",
        llama,
        lambda: {name.replace("embed", "tok_embeddings"): tensor.bfloat16() for name, tensor in llama().items()},
        "same",
        ROUNDED,
        renamed={"embed.weight": "tok_embeddings.weight"},
    ),
    Files("NaNBesideItself", edited(llama, _nan), all_of(edited(llama, _nan), Tensor.double), "same", ROUNDED),
    Files("NaNBesideANumber", edited(llama, _nan), llama, verdicts={"embed": "differs"}),
    Files("KeysAndValuesInOne", lambda: of_vit()[0], lambda: of_vit()[1], "same", config=None, num_heads=3),
    Files("StackedAndApart", stacked, unstacked, "same", config=None),
    Files("ApartAndStacked", unstacked, stacked, "same", config=None, num_heads=4),
    Files(
        "Exchanged",
        stacked,
        lambda: unstacked("qvk"),
        verdicts={"q_proj": "same bits", "in_proj": "differs"},
        config=None,
    ),
    Files(
        "PairsAndHalves",
        lambda: named_as_meta(one_layer()),
        edited(one_layer, converted),
        verdicts={"q_proj": PERMUTED, "k_proj": PERMUTED},
        orders={
            "wq": "(heads half two) -> (heads two half)",
            "wk": "(kv_heads half two) -> (kv_heads two half)",
        },
        num_heads=HEADS,
    ),
    Files(
        "PairsAndHalvesWithBiases",
        with_biases,
        edited(with_biases, converted_with_biases),
        verdicts={"q_proj": PERMUTED, "k_proj": PERMUTED},
        orders={"q_proj.bias": "(heads half two) -> (heads two half)", Q: "(heads half two) -> (heads two half)"},
        num_heads=HEADS,
    ),
    Files(
        "SharedAreTheSame",
        llama,
        edited(llama, _without_layer),
        left_alone=tuple(f"layers.1.self_attn.{letter}_proj.weight" for letter in "koqv"),
        right_alone=("more",),
    ),
    Files(
        "PackedByHead",
        lambda: for_neox()[0],
        lambda: for_neox()[1],
        verdicts=dict.fromkeys(("q_proj", "k_proj", "v_proj"), PERMUTED),
        orders=dict.fromkeys(("q_proj", "k_proj", "v_proj"), "(qkv heads head_dim) -> (heads qkv head_dim)"),
        config=None,
        num_heads=HEADS,
        renamed=LIKE_FUSED,
    ),
    Files(
        "Pruned",
        bert,
        lambda: bert(KEPT),
        verdicts={"": "other shape"},
        orders={"query": "without head 2 (pruned)"},
        config=None,
        num_heads=4,
    ),
    Files(
        "RowsLeftOut",
        bert,
        lambda: bert(KEPT),
        verdicts={"": "other shape"},
        orders={"query": "0–31, 48–63 of 64"},
        config=None,
    ),
    Files(
        "KeyHeadsRepeated",
        one_layer,
        edited(one_layer, lambda s: s | {K: s[K].view(2, 8, 48).repeat_interleave(3, 0).reshape(-1, 48)}),
        verdicts={"k_proj": "other shape"},
        orders={"k_proj": "repeat_interleave(3)"},
    ),
    Files(
        "OneHeadOfOthers", one_layer, unequal(lambda q: torch.cat([q[8:16] * 2, q[8:]])), verdicts={"q_proj": "differs"}
    ),
    Files("ALittleOther", one_layer, unequal(lambda q: q + 0.01 * q.roll(1, 0)), verdicts={"q_proj": "differs"}),
]
