"""Forwards that take a tuple, a list, a dictionary or an object of tensors, called with what they use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.build.target import Target
from mha_inspect.build.values import parse_shapes
from mha_inspect.call.call import Call
from mha_inspect.call.inputs import Asked, make_call
from mha_inspect.errors import InputError
from mha_inspect.layers.spec import InputSpec
from mha_inspect.record.arguments import cast_tensors, parts_of, tensors_in


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(6, 6), nn.Linear(10, 6), nn.Linear(10, 6)

    def attend(self, query: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.query(query) @ self.key(context).mT
        return (scores if mask is None else scores.masked_fill(mask, -9.0)).softmax(-1) @ self.value(context)


class Unpacked(Attention):
    def forward(self, pair: Any) -> Tensor:
        query, context = pair
        return self.attend(query, context)


class Indexed(Attention):
    def forward(self, pair: Any) -> Tensor:
        return self.attend(pair[0], pair[1])


class WithMask(Attention):
    def forward(self, given: Any) -> Tensor:
        query, context, mask = given
        return self.attend(query, context, mask)


class Looped(Attention):
    def forward(self, streams: Any) -> list[Tensor]:
        return [self.attend(stream, torch.cat([stream, stream[..., :4]], -1)) for stream in streams]


class Annotated(Attention):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.attend(*pair)


class Keys(Attention):
    def forward(self, batch: Any) -> Tensor:
        return self.attend(batch["query"], batch["context"], batch.get("mask"))


class Attributes(Attention):
    def forward(self, sample: Any) -> Tensor:
        return self.attend(sample.query, sample.context, sample.mask)


@dataclass(frozen=True)
class Sample:
    query: Tensor
    context: Tensor
    mask: Tensor | None = None

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        return self.query, self.context


class OfClass(Attention):
    def forward(self, sample: Sample) -> Tensor:
        assert isinstance(sample, (Sample, tuple))
        return self.attend(*sample.both, sample.mask)


class Pair(NamedTuple):
    query: Tensor
    context: Tensor


class OfNames(Attention):
    def forward(self, sample: Pair) -> Tensor:
        return self.attend(sample.query, sample.context)


EVERY = [Unpacked, Indexed, WithMask, Looped, Annotated, Keys, Attributes, OfClass, OfNames]


def called(kind: type[Attention], batch: int = 2) -> tuple[Attention, Call]:
    torch.manual_seed(0)
    module = kind().eval()
    return module, make_call(Target(module, "x", {}), Asked(InputSpec(batch=batch, seq_len=5)))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("kind", EVERY)
def test_each_entry_has_the_width_that_its_product_takes(kind: type[Attention], batch: int) -> None:
    module, call = called(kind, batch)
    with torch.no_grad():
        module(**call.kwargs)
    shapes = [tuple(tensor.shape) for _, tensor in tensors_in(call.kwargs)]
    assert shapes == [(batch, 5, 6), (batch, 5, 6 if kind is Looped else 10)]


def test_it_is_what_the_forward_uses_or_its_annotation_says() -> None:
    types = {kind.__name__: type(next(iter(called(kind)[1].kwargs.values()))) for kind in EVERY}
    assert types["Unpacked"] is types["Indexed"] is types["Annotated"] is tuple
    assert types["Looped"] is list
    assert types["OfClass"] is Sample
    assert types["OfNames"] is Pair
    assert issubclass(types["Keys"], dict)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Unpacked, "pair is a tuple of 2: query, context, as the forward uses it."),
        (WithMask, "given is a tuple of 3: query, context, mask (None), as the forward uses it."),
        (Attributes, "sample holds query, context, mask (None), as the forward uses it."),
        (OfClass, "sample is Sample with query, context, as the forward uses it."),
    ],
)
def test_what_an_argument_holds_is_said(kind: type[Attention], said: str) -> None:
    assert called(kind)[1].said == (said,)


@pytest.mark.parametrize("kind", EVERY)
def test_a_cast_keeps_what_holds_the_tensors(kind: type[Attention]) -> None:
    given = next(iter(called(kind)[1].kwargs.values()))
    exact = cast_tensors(given, torch.float64)
    assert type(exact) is type(given)
    for (key, before), (other, after) in zip(parts_of(given), parts_of(exact), strict=True):
        assert key == other
        assert (before is after is None) or (after.dtype == torch.float64 and torch.equal(before.double(), after))


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (OfClass, "sample.other", "no Sample can be made of other: TypeError"),
        (Annotated, "pair.999999999", "999999999 is no place in a tuple: write a number below 64, as in x.0."),
        (Annotated, "pair.first", "first is no place in a tuple"),
    ],
)
def test_an_entry_that_it_cannot_have_is_refused(kind: type[Attention], name: str, said: str) -> None:
    asked = Asked(InputSpec(), shapes=parse_shapes([f"{name}=2x5x6"]))
    with pytest.raises(InputError, match=said):
        make_call(Target(kind(), "x", {}), asked)


class Rows(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.query(row).softmax(-1) for row in x])


class Length(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) * x[0].shape[0]


@pytest.mark.parametrize("kind", [Rows, Length])
def test_a_tensor_whose_rows_are_looked_at_stays_a_tensor(kind: type[Attention]) -> None:
    _, call = called(kind)
    assert tuple(call.kwargs["x"].shape) == (2, 5, 6)


class Joined(Attention):
    def forward(self, states: Any) -> Tensor:
        x = torch.cat(states, dim=1)
        return self.attend(x, torch.cat([x, x[..., :4]], -1))


class Stacked(Attention):
    def forward(self, x: Tensor, layers: Any) -> Tensor:
        return self.attend(x, torch.cat([x, x[..., :4]], -1)) + sum([*layers, x])


class Deep(Attention):
    def forward(self, state: Any) -> Tensor:
        (query, context), more = state
        return self.attend(query, context) + more


class ListInside(Attention):
    def forward(self, batch: Any) -> Tensor:
        return self.attend(batch["streams"][0], batch["streams"][1])


class Pairs(Attention):
    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        for query, context in past:
            x = x + self.attend(query, context)
        return x


class Stars(Attention):
    def forward(self, *args: Tensor) -> Tensor:
        query, context = args
        return self.attend(query, torch.cat([context, context[..., :4]], -1))


class JoinedIds(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 6)

    def forward(self, parts: Any) -> Tensor:
        x = self.embedding(torch.cat(parts, dim=1))
        return self.attend(x, torch.cat([x, x[..., :4]], -1))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("kind", "places", "said"),
    [
        (Joined, "states.0 states.1", "states is a list of 2, as the forward uses it."),
        (Stacked, "x layers.0 layers.1", "layers is a list of 2, as the forward uses it."),
        (Deep, "state.0.0 state.0.1 state.1", "state.0 is a tuple of 2: query, context, as the forward uses it."),
        (ListInside, "batch.streams.0 batch.streams.1", "batch holds streams, as the forward uses it."),
        (Pairs, "x past.0.0 past.0.1 past.1.0 past.1.1", "past is a list of 2, as the forward uses it."),
        (Stars, "args.0 args.1", "args is a tuple of 2, as the forward uses it."),
        (JoinedIds, "parts.0 parts.1", "parts is a list of 2, as the forward uses it."),
    ],
)
def test_what_holds_tensors_is_found_however_deep(kind: type[Attention], batch: int, places: str, said: str) -> None:
    module, call = called(kind, batch)
    module(*call.args, **call.kwargs)
    assert said in call.said
    assert sorted(call.guessed) == sorted(places.split())
    again = Asked(InputSpec(batch=batch), shapes=parse_shapes([f"{n}={s}" for n, s in call.guessed.items()]))
    same = make_call(Target(module, "x", {}), again)
    assert (same.described, same.guessed) == (call.described, {})
