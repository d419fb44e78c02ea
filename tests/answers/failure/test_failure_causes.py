"""Each mistake that people make is told by its name, at its line; every other error gets facts and no guess."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from mha_inspect.answers.failure.causes import CAUSES
from mha_inspect.errors import ForwardError
from mha_inspect.reports.trace import Failure

from ...built import trace_module

HERE = Path(__file__).parent / "failing"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"failing_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # inspect looks for its classes there
    spec.loader.exec_module(module)
    return module


HAND, TORCH, OWN = load("by_hand"), load("with_torch"), load("own_errors")


def make(file: ModuleType, name: str) -> nn.Module:
    """Return a module whose forward is the method of that name."""
    kind = type(name, (file.Mistakes,), {"forward": getattr(file.Mistakes, name)})
    return kind(**file.SETTINGS.get(name, {}))


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def bools(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def ints(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.long)


X, MEMORY = floats(2, 7, 24), floats(2, 11, 24)  # batch 2, query 7, key 11; 3 heads of 8


def failure_of(module: nn.Module, *args: Any, **kwargs: Any) -> Failure:
    with pytest.raises(ForwardError) as caught:
        trace_module(module, *args, **kwargs)
    assert caught.value.trace.failure is not None
    return caught.value.trace.failure


def line_of(code: Callable[..., Any], mark: str) -> str:
    """`by_hand.py:32`: the only line of a function or class that bears a mark."""
    lines, first = inspect.getsourcelines(code)
    (place,) = (place for place, line in enumerate(lines) if mark in line)
    return f"{Path(inspect.getfile(code)).name}:{first + place}"


BY_HAND: list[tuple[str, str, tuple[Any, ...]]] = [
    ("key_not_transposed", "heads_not_transposed", (X,)),
    ("none_transposed", "heads_not_transposed", (X,)),
    ("value_not_transposed_in_sdpa", "heads_not_transposed", (X,)),
    ("einsum_not_transposed", "heads_not_transposed", (X,)),
    ("transposed_twice", "heads_not_transposed", (X,)),
    ("no_key_transpose", "key_not_transposed", (X,)),
    ("single_head_no_transpose", "key_not_transposed", (X,)),
    ("sequence_first", "key_not_transposed", (floats(7, 2, 24),)),
    ("key_not_split", "heads_not_split", (X,)),
    ("cross_batch", "batch_differs", (X, floats(5, 11, 24))),
    ("value_of_other_length", "lengths_differ", (X, MEMORY)),
    ("head_dim_differs", "head_dim_differs", (X,)),
    ("heads_do_not_divide", "heads_do_not_divide", (floats(2, 7, 32),)),
    ("wrong_head_dim", "wrong_head_dim", (X,)),
    ("concat_not_contiguous", "not_contiguous", (X,)),
    ("concat_forgotten", "heads_not_joined", (X,)),
    ("wrong_width", "wrong_width", (floats(2, 7, 23),)),
    ("wrong_width", "features_not_last", (floats(2, 24, 7),)),
    ("wrong_width", "mixed_dtypes", (X.double(),)),
    ("transposed_weight", "weight_not_transposed", (X,)),
    ("token_ids", "mixed_dtypes", (ints(2, 24),)),
    ("half_product", "mixed_dtypes", (X,)),
    ("mask_elsewhere", "mixed_devices", (X,)),
    ("masked", "mask_rank", (X, bools(2, 7))),
    ("masked", "mask_rank", (X, bools(6, 7, 7))),
    ("masked", "mask_size", (X, bools(13, 13))),
    ("masked", "batch_and_sequence_swapped", (floats(7, 2, 24), bools(7, 7))),
    ("added_mask", "mask_transposed", (X, MEMORY, floats(11, 7))),
    ("added_mask", "mask_rank", (X, MEMORY, floats(2, 11))),
    ("integer_mask", "mask_dtype", (X, ints(7, 7))),
    ("sdpa_mask", "mask_rank", (X, bools(2, 7))),
    ("heads_stacked", "heads_not_joined", (X,)),
    ("batch_of_the_query", "batch_differs", (X, floats(5, 11, 24))),
    ("heads_by_einops", "heads_do_not_divide", (X,)),
    ("bytes_mask", "mask_dtype", (X,)),
    ("too_many_tokens", "index_out_of_range", (X,)),
    ("needs_mask", "argument_is_none", (X,)),
    ("needs_heads_of_mask", "argument_is_none", (X,)),
    ("needs_context", "argument_is_none", (X,)),
    ("image_convolved", "wrong_rank", (floats(2, 5, 7, 24),)),
    ("more_than_positions", "no_room", (X,)),
    ("full_cache", "no_room", (floats(2, 7, 24),)),
    ("cache_of_another_batch", "no_room", (floats(3, 7, 24),)),
    ("full_cache_by_index", "index_out_of_range", (floats(2, 7, 24),)),
    ("no_batch", "wrong_rank", (floats(7, 24),)),
    ("heads_of_an_odd_width", "heads_do_not_divide", (X,)),
]


@pytest.mark.parametrize(("name", "cause", "args"), BY_HAND, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_by_hand_is_named_at_its_line(name: str, cause: str, args: tuple[Any, ...]):
    forward = getattr(HAND.Mistakes, name)
    failure = failure_of(make(HAND, name), *args)
    assert failure.cause is not None
    assert failure.cause.name == cause
    assert cause in CAUSES
    assert failure.source.endswith(line_of(forward, "# fails"))
    assert failure.line.endswith("# fails")
    for mark, words in (("# split here", "split but not transposed"), ("# back here", "transposed back")):
        if mark in inspect.getsource(forward):
            assert f"{line_of(forward, mark)})" in failure.cause.explanation
            assert words in failure.cause.explanation


def told(name: str, batch: int) -> str:
    """Return what is told of a mistake, without its numbers."""
    failure = failure_of(make(HAND, name), floats(batch, 7, 24))
    assert failure.cause is not None
    axes = [(stage.name, stage.variable, stage.axes) for stage in failure.completed]
    operands = [operand.axes for operand in failure.operands]
    return re.sub(r"\d+", "#", str((failure.clash, failure.cause.explanation, axes, operands)))


@pytest.mark.parametrize("name", ["key_not_transposed", "no_key_transpose", "key_not_split", "concat_forgotten"])
def test_a_batch_of_one_is_named_as_one_of_three(name: str):
    assert told(name, 1) == told(name, 3)


@pytest.mark.parametrize(
    ("name", "x", "what"),
    [
        ("full_cache", X, "k is [2, 3, 7, 8]; slots is [2, 3, 9, 8], with room for 5 in dimension 2."),
        (
            "cache_of_another_batch",
            floats(3, 7, 24),
            "k is [3, 3, 7, 8]; slots is [2, 3, 9, 8], with room for 2 in dimension 0.",
        ),
        ("full_cache_by_index", X, "positions has numbers from 4 to 10; slots is [2, 3, 9, 8]: 0 to 8 are in range."),
        ("more_than_positions", X, "x is [2, 7, 24]; positions is [1, 5, 24], with room for 5 in dimension 1."),
        ("no_batch", X[0], "x is [7, 24], 2 dimensions; this line expects 3."),
        ("heads_of_an_odd_width", X, "Width 24 cannot be split into heads of 7: 24 / 7 = 3.429."),
    ],
)
def test_what_a_table_or_a_line_lacks_is_said_with_its_numbers(name: str, x: torch.Tensor, what: str):
    failure = failure_of(make(HAND, name), x)
    assert failure.cause is not None
    assert failure.cause.explanation == what


def test_a_wrong_index_of_a_cache_gets_no_guess():
    assert failure_of(make(HAND, "wrong_index_of_cache"), X).cause is None


def attend(**settings: Any) -> nn.Module:
    return TORCH.Attend(**settings)


FIRST = {"batch_first": True}
WITH_TORCH: list[tuple[nn.Module, str, tuple[Any, ...], dict[str, Any]]] = [
    (TORCH.Clip(), "batch_and_sequence_swapped", (X,), {}),
    (attend(), "batch_and_sequence_swapped", (X,), {"key_padding_mask": bools(2, 7)}),
    (TORCH.Encoder(), "batch_and_sequence_swapped", (X,), {"src_key_padding_mask": bools(2, 7)}),
    (attend(**FIRST), "batch_differs", (X, floats(5, 11, 24)), {}),
    (attend(**FIRST), "wrong_width", (X, floats(2, 11, 13)), {}),
    (attend(**FIRST), "features_not_last", (floats(2, 24, 7),), {}),
    (TORCH.OtherValues(), "lengths_differ", (X, MEMORY), {}),
    (attend(**FIRST), "mask_dtype", (X,), {"key_padding_mask": ints(2, 7)}),
    (attend(**FIRST), "mask_size", (X,), {"attn_mask": bools(13, 13)}),
    (attend(**FIRST), "mask_transposed", (X, MEMORY), {"attn_mask": bools(11, 7)}),
    (attend(**FIRST), "mask_rank", (X,), {"attn_mask": bools(2, 7, 7)}),
    (attend(**FIRST), "mask_rank", (X,), {"attn_mask": bools(2, 7)}),
    (attend(**FIRST), "mixed_dtypes", (X, MEMORY.double()), {}),
    (TORCH.Translate(), "batch_and_sequence_swapped", (X, MEMORY), {}),
]


@pytest.mark.parametrize(("module", "cause", "args", "masks"), WITH_TORCH)
def test_a_mistake_in_a_call_of_torch_is_named(
    module: nn.Module, cause: str, args: tuple[Any, ...], masks: dict[str, Any]
):
    failure = failure_of(module, *args, **masks)
    assert failure.cause is not None
    assert failure.cause.name == cause
    assert failure.call == ("nn.Transformer" if isinstance(module, TORCH.Translate) else "nn.MultiheadAttention")
    assert failure.source.endswith(line_of(type(module), "# fails"))


MASKS = [
    {"attn_mask": bools(2, 7, 7).triu(1)},
    {"attn_mask": floats(2, 3, 7, 7)},
    {"attn_mask": ints(7, 7).tril()},
    {"key_padding_mask": ints(2, 7).tril(3)},
]


@pytest.mark.parametrize("masks", MASKS, ids=lambda masks: str([list(mask.shape) for mask in masks.values()]))
def test_the_fix_of_a_mask_is_one_that_torch_takes_for_what_was_meant(masks: dict[str, torch.Tensor]):
    ((name, mask),) = masks.items()
    module = attend(**FIRST)
    failure = failure_of(module, X, **masks)
    assert failure.cause is not None
    code = failure.cause.fix.removesuffix(".").partition(" if 0 means masked out")[0]
    fixed = eval(code, {name: mask})
    heads = module.attn(X, X, X, **{name: fixed}, average_attn_weights=False)[1]
    hidden = mask if mask.dtype == torch.bool else mask == 0
    meant = mask if mask.is_floating_point() else torch.zeros(mask.shape).masked_fill(hidden, float("-inf"))
    if name == "key_padding_mask":
        meant = meant[:, None, None]
    elif meant.dim() == 3:
        meant = meant[:, None]
    q, k, _ = module.attn.in_proj_weight.chunk(3)
    split = [(X @ w.T).unflatten(-1, (3, 8)).transpose(1, 2) for w in (q, k)]
    expected = (split[0] @ split[1].mT / 8**0.5 + meant).softmax(-1)
    torch.testing.assert_close(heads, expected)


OTHERS: list[tuple[str, tuple[Any, ...]]] = [
    ("own_check", (X,)),
    ("own_assert", (X,)),
    ("unused_mask", (X,)),
    ("absent_key", (X,)),
    ("missing", (X,)),
    ("recovered", (X,)),
    ("wrong_axis", (X,)),
    ("residual", (X,)),
    ("reused", (X,)),
    ("context_and_more", (X,)),
]


@pytest.mark.parametrize(("name", "args"), OTHERS, ids=lambda value: value if isinstance(value, str) else "")
def test_any_other_error_gets_facts_and_no_guess(name: str, args: tuple[Any, ...]):
    module = make(OWN, name)
    with pytest.raises(Exception) as plain:  # noqa: PT011 - the plain run is the oracle
        module(*args)
    failure = failure_of(module, *args)
    assert failure.cause is None
    assert failure.error == type(plain.value).__name__
    assert failure.message.splitlines()[0] == str(plain.value).splitlines()[0]
    assert failure.source.endswith(line_of(getattr(OWN.Mistakes, name), "# fails"))


def test_operands_have_the_names_of_the_users_line():
    def names(file: ModuleType, name: str, *args: Any) -> list[str]:
        return [operand.name for operand in failure_of(make(file, name), *args).operands]

    assert names(OWN, "own_assert", X) == ["q"]
    assert names(HAND, "no_batch", floats(7, 24)) == ["x"]
    assert names(HAND, "key_not_transposed", X) == ["q", "k.transpose(-2, -1)"]
    assert names(HAND, "half_product", X) == ["q", "k.to(...).transpose(-2, -1)"]
    assert names(HAND, "concat_not_contiguous", X) == ["context.transpose(1, 2)"]
    assert names(HAND, "masked", X, bools(2, 7)) == ["scores", "mask.eq(0)"]
    assert names(HAND, "added_mask", X, MEMORY, floats(11, 7)) == ["scores", "mask"]
    assert names(HAND, "wrong_width", floats(2, 7, 23)) == ["x", "q_proj.weight", "q_proj.bias"]
    assert names(HAND, "sdpa_mask", X, bools(2, 7)) == ["q", "k", "v", "attention_mask"]


class ViewOfOneNumber(nn.Module):
    """Views a number without dimensions as one size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.sum().view(2)
        return x * scale


def test_a_view_of_a_number_splits_no_width() -> None:
    failure = failure_of(ViewOfOneNumber(), X)
    assert failure.cause is None
    assert failure.clash.endswith("1 elements; [2] has 2.")
