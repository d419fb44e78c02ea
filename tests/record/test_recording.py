"""What a recording holds: every operation that torch dispatched, the dataflow between them, and who asked for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mha_inspect.record.arguments import tensors_in
from mha_inspect.record.ops import Recording

from ..recorded import record

BATCH, QUERY, EMBED, HEADS = 3, 5, 22, 2


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


Seen = tuple[tuple[int, ...], tuple[int, ...], int, str, int]


class Bare(TorchDispatchMode):
    """The oracle: torch's own mode, that notes operations and holds all memory, so that no address is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.tensors: list[tuple[list[Seen], list[Seen]]] = []
        self.memory: list[tuple[list[torch.UntypedStorage], list[torch.UntypedStorage]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sides = []
        for side in ((args, kwargs or {}), result := func(*args, **(kwargs or {}))):
            tensors = [tensor for _, tensor in tensors_in(side)]
            looks = [(tuple(t.shape), t.stride(), t.storage_offset(), str(t.dtype)[6:], t.nbytes) for t in tensors]
            sides.append((looks, [tensor.untyped_storage() for tensor in tensors]))
        self.names.append(str(func))
        self.tensors.append((sides[0][0], sides[1][0]))
        self.memory.append((sides[0][1], sides[1][1]))
        return result


FORWARDS: dict[str, Callable[[], Callable[[], Any]]] = {
    "attention": lambda: attention(batch_first=True),
    "recurrent": lambda: with_input(nn.LSTM(EMBED, 7)),
    "encoder layer": lambda: with_input(nn.TransformerEncoderLayer(EMBED, HEADS, 7, batch_first=True).eval()),
}


def with_input(module: nn.Module) -> Callable[[], Any]:
    return lambda: module(drawn(BATCH, QUERY, EMBED))


def attention(*, batch_first: bool = False, **settings: Any) -> Callable[[], Any]:
    layer, x = nn.MultiheadAttention(EMBED, HEADS, batch_first=batch_first).eval(), drawn(BATCH, QUERY, EMBED)
    if not batch_first:
        x = x.transpose(0, 1)
    return lambda: layer(x, x, x, **settings)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", FORWARDS)
def test_it_holds_what_a_bare_mode_sees(name: str, mode: Callable[[], Any]) -> None:
    forward, bare = FORWARDS[name](), Bare()
    with mode():
        with bare:
            forward()
        recording, _ = record(forward)
    assert [op.name for op in recording.ops] == bare.names
    assert [op.index for op in recording.ops] == list(range(len(bare.names)))
    for op, sides in zip(recording.ops, bare.tensors, strict=True):
        for ours, theirs in zip((op.inputs, op.outputs), sides, strict=True):
            assert [(t.shape, t.stride, t.offset, t.dtype, t.nbytes) for t in ours] == theirs


@pytest.mark.parametrize("name", FORWARDS)
def test_memory_is_shared_where_torch_shares_it(name: str) -> None:
    forward, bare = FORWARDS[name](), Bare()
    with torch.no_grad():
        with bare:
            forward()
        recording, _ = record(forward)
    numbers: dict[int, int] = {}
    for op, (inputs, outputs) in zip(recording.ops, bare.memory, strict=True):
        for ours, storage in zip((*op.inputs, *op.outputs), (*inputs, *outputs), strict=True):
            assert numbers.setdefault(storage._cdata, ours.storage) == ours.storage
        shares = bool(outputs) and {s._cdata for s in outputs} <= {s._cdata for s in inputs}
        assert (op.kind in ("view", "write")) == shares
        assert (op.kind == "write") == (shares and op.base_name.endswith("_"))
    assert len(set(numbers.values())) == len(numbers)


def ops_named(recording: Recording, name: str) -> list[Any]:
    return [op for op in recording.ops if op.base_name == name]


def write_through_views() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.zeros(4)
    square = base.view(2, 2)
    square[0].add_(1)
    twice = base * 2
    base.mul_(3)
    return twice, square + 0


def test_each_input_is_what_the_last_writer_of_it_left() -> None:
    """In-place operations through one view are seen by whoever reads another."""
    recording, (twice, square) = record(write_through_views)
    zeros, add, mul, times, plus = (ops_named(recording, name)[0] for name in ("zeros", "add_", "mul", "mul_", "add"))
    assert recording.producer(mul.inputs[0]) is add
    assert recording.producer(plus.inputs[0]) is times
    assert recording.producer(times.inputs[0]) is add
    assert recording.producer(add.inputs[0]).base_name == "select"  # type: ignore[union-attr]
    assert len({t.storage for t in (zeros.output, add.output, mul.inputs[0], plus.inputs[0])}) == 1
    assert len({t.id for t in (zeros.output, mul.inputs[0], times.output)}) == 3
    assert [add.kind, times.kind, mul.kind] == ["write", "write", "compute"]
    assert twice.tolist() == [2, 2, 0, 0]
    assert square.tolist() == [[3, 3], [0, 0]]


def test_what_is_kept_is_as_it_was_before_later_writes() -> None:
    recording, _ = record(write_through_views, keep=True)
    (mul,) = ops_named(recording, "mul")
    values = {op.base_name: recording.values[op.output.id].tolist() for op in recording.ops}
    assert values["zeros"] == [0, 0, 0, 0]
    assert values["view"] == [[0, 0], [0, 0]]
    assert values["select"] == [0, 0]
    assert values["add_"] == [1, 1]
    assert recording.values[mul.inputs[0].id].tolist() == [1, 1, 0, 0]
    assert values["mul_"] == [3, 3, 0, 0]


def test_what_is_written_into_and_not_returned_is_new_all_the_same() -> None:
    def forward() -> torch.Tensor:
        a, b = torch.ones(3), torch.ones(5)
        torch._foreach_add_([a, b], 1)
        torch.mul(a, 3, out=a)
        return torch.cat((a, b))

    recording, result = record(forward, keep=True)
    (joined,) = ops_named(recording, "cat")
    writers = [recording.producer(tensor).base_name for tensor in joined.inputs]  # type: ignore[union-attr]
    assert writers == ["mul", "_foreach_add_"]
    assert result.tolist() == [6, 6, 6, 2, 2, 2, 2, 2]
    assert joined.inputs[1] in ops_named(recording, "_foreach_add_")[0].outputs
    assert [recording.values[tensor.id].tolist() for tensor in joined.inputs] == [[6, 6, 6], [2] * 5]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_address_that_is_used_again_is_another_tensor(mode: Callable[[], Any]) -> None:
    """torch.tensor and torch.from_numpy make tensors that no operation made."""

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for number in (2.0, 3.0, 5.0):
            scale = torch.tensor(number)
            results.append(x * scale)
            del scale
            y = x / number
            results.append(y.sum())
            del y
            results.append(torch.from_numpy(np.full(7, number, dtype=np.float32)) - 1)
        return results

    with mode():
        recording, _ = record(forward, drawn(7))
    scales = [op.inputs[1] for op in ops_named(recording, "mul")]
    assert [recording.scalars[tensor.id] for tensor in scales] == [2.0, 3.0, 5.0]
    assert len({tensor.storage for tensor in scales}) == 3
    outside = [op.inputs[0] for op in ops_named(recording, "sub")]
    assert [recording.producer(tensor) for tensor in outside] == [None] * 3
    assert len({tensor.id for tensor in outside}) == 3


def test_kept_tensors_are_plain_numbers_without_gradients() -> None:
    layer, x = nn.Linear(EMBED, 7), drawn(BATCH, EMBED).requires_grad_()
    recording, _ = record(layer, x, keep=True)
    assert recording.values
    assert not any(value.requires_grad for value in recording.values.values())
    assert not record(layer, x)[0].values
    assert recording.values[recording.inputs[0].tensor.id].equal(x)


def test_names_of_inputs_parameters_buffers_and_outputs() -> None:
    layer, x = nn.BatchNorm1d(EMBED), drawn(BATCH, EMBED)
    recording, _ = record(layer, x)
    assert [named.name for named in recording.inputs] == ["input"]
    assert [named.name for named in recording.parameters] == ["weight", "bias"]
    assert [named.name for named in recording.buffers] == ["running_mean", "running_var", "num_batches_tracked"]
    nested = {"a": x, "b": (x + 1, [x * 2, None])}
    recording, _ = record(lambda y: nested, x)
    assert [named.name for named in recording.outputs] == ["a", "b.0", "b.1.0"]
    assert [named.name for named in record(lambda y: y, x)[0].outputs] == [""]
    assert recording.input_ids == {recording.outputs[0].tensor.id}


USER = """
from torch import nn


class Scorer(nn.Identity):
    def forward(self, q, k):
        return (q @ k.transpose(-1, -2)).softmax(-1)  # scores


class Layer(nn.ModuleDict):
    def __init__(self):
        inner = nn.Sequential(nn.Linear(22, 22), nn.ReLU())
        super().__init__({"wq": nn.Linear(22, 22), "inner": inner, "scorer": Scorer()})

    def forward(self, x):
        q = self["wq"](x)  # q
        k = self["inner"](x)  # k
        weights = self["scorer"](q, k)
        return weights @ x  # context
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "users_own.py"
    path.write_text(USER)
    spec = importlib.util.spec_from_file_location("users_own", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line_of(mark: str) -> str:
    return f"users_own.py:{next(n for n, line in enumerate(USER.splitlines(), 1) if line.endswith(f'# {mark}'))}"


def test_source_module_and_call_of_each_operation(user: ModuleType) -> None:
    recording, _ = record(user.Layer(), drawn(BATCH, QUERY, EMBED))
    asked = [
        (op.base_name, op.source, op.module)
        for op in recording.ops
        if op.base_name in ("addmm", "relu", "bmm", "_softmax")
    ]
    assert asked == [
        ("addmm", line_of("q"), "wq"),
        ("addmm", line_of("k"), "inner.0"),
        ("relu", line_of("k"), "inner.1"),
        ("bmm", line_of("scores"), "scorer"),
        ("_softmax", line_of("scores"), "scorer"),
        ("bmm", line_of("context"), ""),
    ]
    # A matrix product of three dimensions is taken apart: all that comes of it is one call.
    products = [[op for op in recording.ops if op.call == product.call] for product in ops_named(recording, "bmm")]
    names = ["expand", "view", "expand", "view", "bmm", "_unsafe_view"]
    assert [[op.base_name for op in ops] for ops in products] == [names, names]
    (transposed,) = ops_named(recording, "transpose")
    assert transposed.call not in {ops[0].call for ops in products}
