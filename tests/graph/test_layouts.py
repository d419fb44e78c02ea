"""What each element is made of: torch moves the numbers of two parameters, and layouts say which numbers they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mha_inspect.graph.dataflow import Graph
from mha_inspect.graph.layout import Layout, Source, Span, View, read, whole
from mha_inspect.graph.layouts import Layouts

from ..recorded import record

SECOND = 1000
"""The first number of the second parameter; that of the first is 1, and 0 is made of none."""


class Numbered(nn.Module):
    """Two parameters whose numbers say where they are; the forward moves them."""

    def __init__(self, shape: Sequence[int], move: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        numbers = torch.arange(float(prod(shape))).view(*shape)
        self.first, self.second, self.move = nn.Parameter(numbers + 1), nn.Parameter(numbers + SECOND), move

    def forward(self, x: Tensor) -> Tensor:
        return self.move(self.first, self.second) + 0 * x


def layout_of(module: nn.Module, *args: Tensor) -> tuple[Layout, Tensor]:
    with torch.no_grad():
        recording, returned = record(module, *args, keep=True)
    layouts = Layouts(Graph(recording))
    layouts.follow(recording.ops)
    return layouts.of(recording.outputs[0].tensor), returned


def numbers_of(layout: Layout, module: Numbered) -> np.ndarray:
    """The numbers that a layout says; 0 where it says nothing."""
    numbers = np.zeros(layout.shape)
    for name, start in (("first", 1), ("second", SECOND)):
        tensor = module.get_parameter(name)
        places = layout.places_in(name, tuple(tensor.shape), tensor.stride())
        if places is not None and layout.spans.get(Source(name, 0)) is not None:
            low, high = (np.broadcast_to(end, layout.shape) for end in places)
            assert (low == high).all()
            assert not numbers[low >= 0].any()  # an element is made of one number
            numbers[low >= 0] = low[low >= 0] + start
    return numbers


def assert_layout_is_true(shape: Sequence[int], move: Callable[[Tensor, Tensor], Tensor]) -> None:
    module = Numbered(shape, move)
    layout, returned = layout_of(module, torch.zeros(()))
    np.testing.assert_array_equal(numbers_of(layout, module), returned.numpy())


# -- chains of moves --------------------------------------------------------------------------------------------------


def divided(random: Random, size: int) -> list[int]:
    """Up to four sizes whose product is this one."""
    sizes = []
    for _ in range(random.randrange(4)):
        sizes.append(random.choice([n for n in range(1, size + 1) if size % n == 0]))
        size //= sizes[-1]
    return [*sizes, size]


def rows(random: Random, x: Tensor, dim: int) -> Tensor:
    start = random.randrange(x.shape[dim])
    return x.narrow(dim, start, random.randrange(1, x.shape[dim] - start + 1))


def every_nth(random: Random, x: Tensor, dim: int) -> Tensor:
    return x[(slice(None),) * dim + (slice(random.randrange(x.shape[dim]), None, random.choice([2, 3])),)]


def halves_exchanged(random: Random, x: Tensor, dim: int) -> Tensor:
    half = x.shape[dim] // 2
    return torch.cat([x.narrow(dim, half, x.shape[dim] - half), x.narrow(dim, 0, half)], dim)


def shuffled(random: Random, x: Tensor, dim: int) -> Tensor:
    pieces = list(x.split(random.choice([1, 2, 3]), dim))
    random.shuffle(pieces)
    return torch.cat(pieces, dim)


def written(random: Random, x: Tensor, dim: int) -> Tensor:
    out, start = x.new_zeros(x.shape), random.randrange(x.shape[dim])
    out.narrow(dim, 0, x.shape[dim] - start).copy_(x.narrow(dim, start, x.shape[dim] - start))
    return out


def windows(random: Random, x: Tensor, dim: int) -> Tensor:
    return x.unfold(dim, random.randrange(1, x.shape[dim] + 1), random.choice([1, 2])).transpose(dim, -1)


def indexed(random: Random, x: Tensor, dim: int) -> Tensor:
    table = torch.tensor([random.randrange(x.shape[dim]) for _ in range(random.choice([2, 4]))])
    if random.random() < 0.5:
        table = table.view(2, -1)
    return x[(slice(None),) * dim + (table,)]


MOVES: dict[str, Callable[[Random, Tensor, int], Tensor]] = {
    "view": lambda random, x, dim: x.reshape(divided(random, x.numel())),
    "permute": lambda random, x, dim: x.permute(random.sample(range(x.dim()), x.dim())),
    "copy transposed": lambda random, x, dim: x.transpose(0, dim).contiguous(),
    "rows": rows,
    "every nth": every_nth,
    "select": lambda random, x, dim: x.select(dim, random.randrange(x.shape[dim])) if x.dim() > 1 else x,
    "halves exchanged": halves_exchanged,
    "shuffled": shuffled,
    "stack": lambda random, x, dim: torch.stack(x.unbind(dim), random.randrange(x.dim())),
    "chunk": lambda random, x, dim: random.choice(x.chunk(random.choice([2, 3]), dim)),
    "flip": lambda random, x, dim: x.flip(dim),
    "roll": lambda random, x, dim: x.roll(random.randrange(1, 5), dim),
    "expand": lambda random, x, dim: x.unsqueeze(dim).expand(*x.shape[:dim], 2, *x.shape[dim:]),
    "repeat": lambda random, x, dim: x.repeat([1 + (at == dim) for at in range(x.dim())]),
    "repeat each": lambda random, x, dim: x.repeat_interleave(2, dim),
    "index": indexed,
    "index select": lambda random, x, dim: x.index_select(dim, torch.randperm(x.shape[dim])),
    "gather": lambda random, x, dim: x.gather(dim, torch.randint(0, x.shape[dim], x.shape)),
    "pad": lambda random, x, dim: nn.functional.pad(x, (1, 2) if dim else (0, 0, 1, 0)) if x.dim() > 1 else x,
    "written": written,
    "windows": windows,
    "strides": lambda random, x, dim: x.contiguous().as_strided(x.shape[::-1], x.contiguous().stride()[::-1]),
}


@settings(max_examples=150, deadline=None)
@given(
    shape=st.sampled_from([(24,), (6, 4), (2, 3, 4), (12, 5), (3, 10), (4, 6, 2)]),
    names=st.lists(st.sampled_from([*MOVES]), max_size=8),
    random=st.randoms(use_true_random=False),
)
def test_what_moves_is_followed_through_any_chain(shape: tuple[int, ...], names: list[str], random: Random) -> None:
    state = random.getstate()

    def move(first: Tensor, second: Tensor) -> Tensor:
        random.setstate(state)
        torch.manual_seed(0)
        x = first
        for name in names:
            if not x.dim() or x.numel() > 300:
                x = x.reshape(-1)[:24]
            x = MOVES[name](random, x, random.randrange(x.dim()))
            if x.shape == second.shape and random.random() < 0.3:
                x = torch.cat([second, x], random.randrange(x.dim()))
        return x.clone()

    assert_layout_is_true(shape, move)


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two matrices in one": lambda a, b: torch.cat([a, b])[3:9].view(2, 3, 4).transpose(0, 1),
    "columns of two": lambda a, b: torch.cat([a, torch.zeros(6, 1), b], 1).view(6, 3, 3),
    "one of a stack": lambda a, b: torch.stack([a, b], 1).unbind(1)[1],
    "padded with infinity": lambda a, b: nn.functional.pad(a, (1, 1), value=-torch.inf).clamp(min=0),
    "cleared": lambda a, b: torch.cat([cleared(a), b]),
    "a buffer in turns": lambda a, b: filled(a, b),
    "pairs as complex numbers": lambda a, b: torch.view_as_real(torch.view_as_complex(a.view(6, 2, 2)).mT),
    "windows that overlap": lambda a, b: a.as_strided((4, 3), (4, 2)),
    "channels of patches": lambda a, b: nn.functional.unfold(a.view(1, 2, 3, 4), 2),
}


def cleared(a: Tensor) -> Tensor:
    buffer = a.clone()
    buffer[2:].zero_()
    return buffer


def halves(both: Tensor) -> Tensor:
    buffer = torch.zeros(12, 5)
    buffer[:, :4] = both
    return torch.cat([buffer[6:], buffer[:6]])


def filled(a: Tensor, b: Tensor) -> Tensor:
    buffer = torch.zeros(12, 4)
    buffer[:6], buffer[6:] = b, b
    buffer.view(6, 2, 4)[:, 1] = a
    return buffer.T


@pytest.mark.parametrize("name", CASES)
def test_what_is_put_together_is_taken_apart(name: str) -> None:
    assert_layout_is_true((6, 4), CASES[name])


# -- products and sums ------------------------------------------------------------------------------------------------


def indices(layout: Layout, name: str, dim: int = 0) -> list[list[int]]:
    """The lowest and the highest row of each element, without dimensions along which they do not differ."""
    return [np.squeeze(end).tolist() for end in layout.spans[Source(name, dim)]]


class Projected(nn.Module):
    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.project, self.after = nn.Linear(4, 6), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.project(x))


def test_a_product_has_the_rows_of_its_weight_and_the_first_column() -> None:
    layout, _ = layout_of(Projected(lambda y: y.view(2, 5, 2, 3)[:, :, 1]), torch.randn(2, 5, 4))
    assert layout.spans[Source("project.weight", 0)].low.shape == (1, 1, 3)  # neither batch nor positions
    assert indices(layout, "project.weight") == [[3, 4, 5]] * 2
    assert indices(layout, "project.bias") == [[3, 4, 5]] * 2
    assert indices(layout, "project.weight", 1) == [0, 0]


def test_a_rotated_feature_is_made_of_two() -> None:
    def rotated(y: Tensor) -> Tensor:
        return y * 0.6 + torch.cat([-y[..., 3:], y[..., :3]], -1) * 0.8

    layout, _ = layout_of(Projected(rotated), torch.randn(2, 5, 4))
    assert indices(layout, "project.weight") == [[0, 1, 2, 0, 1, 2], [3, 4, 5, 3, 4, 5]]


def test_a_mean_of_features_is_made_of_none_and_changes_nothing() -> None:
    mean, _ = layout_of(Projected(lambda y: y.mean(-1, keepdim=True)), torch.randn(2, 5, 4))
    assert not mean.spans
    normed, _ = layout_of(Projected(lambda y: y - y.mean(-1, keepdim=True)), torch.randn(2, 5, 4))
    assert indices(normed, "project.weight") == [[0, 1, 2, 3, 4, 5]] * 2
    pooled, _ = layout_of(Projected(lambda y: y.mean(1)), torch.randn(2, 5, 4))
    assert indices(pooled, "project.weight") == [[0, 1, 2, 3, 4, 5]] * 2


def test_memory_outside_of_a_tensor_is_made_of_none() -> None:
    rows = [(View((3, 4), (4, 1)), whole("x", (3, 4)))]
    assert not read(View((4,), (1,), 20), rows).spans
    beside = read(View((4,), (1,), 10), rows)
    assert beside.spans[Source("x", 0)].low.tolist() == [2, 2, -1, -1]


def test_what_memory_had_before_a_write_is_known_after_it() -> None:
    def forward(first: Tensor, second: Tensor) -> Tensor:
        buffer = first.clone()
        sums = buffer.view(4, 6) + 0
        buffer.copy_(second)
        return sums + 0 * buffer.view(4, 6)

    with torch.no_grad():
        recording, _ = record(Numbered((6, 4), forward), torch.zeros(()), keep=True)
    layouts = Layouts(Graph(recording))
    layouts.follow(recording.ops)
    before, after = (op.output for op in recording.ops if op.base_name == "view")
    assert [{source.of for source in layouts.of(view).spans} for view in (before, after)] == [{"first"}, {"second"}]


def test_an_unknown_choice_by_a_mask_is_no_guess() -> None:
    mask = torch.tensor([True, False, True, True, False, True])
    with torch.no_grad():
        recording, _ = record(Projected(lambda y: y[..., mask]), torch.randn(2, 5, 4))
    layouts = Layouts(Graph(recording))
    layouts.follow(recording.ops)
    assert not layouts.of(recording.outputs[0].tensor).spans


def test_two_spans_together_ignore_what_is_absent() -> None:
    first, second = (Span.of(np.array(numbers)) for numbers in ([3, -1, 5, -1], [1, 2, -1, -1]))
    assert [end.tolist() for end in first.together(second)] == [[1, 2, 5, -1], [3, 2, 5, -1]]
