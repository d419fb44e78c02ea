"""Recording changes nothing: not a bit of the result, no setting, no generator, no lifetime, and no exception."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import mha_inspect
from mha_inspect.record import recorder

from ..recorded import record, record_opened

EMBED, HEADS, BATCH, QUERY = 22, 2, 3, 5


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mha(*, train: bool = False, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.MultiheadAttention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, **settings})
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter)  # torch starts biases at 0: a bias that is lost would not show
    return layer.to(dtype).train(train)


def same(left: Any, right: Any) -> bool:
    """The same tensors to the bit, in the same layout, with gradients where the other has them."""
    if left is None or right is None:
        return left is right
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return (
        torch.equal(left, right)
        and left.stride() == right.stride()
        and left.dtype == right.dtype
        and left.requires_grad == right.requires_grad
        and left.is_inference() == right.is_inference()
    )


MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "train": lambda: mha(train=True, dropout=0.5),
    "bfloat16": lambda: mha(dtype=torch.bfloat16),
    "float64": lambda: mha(dtype=torch.float64, batch_first=False),
    "bias_kv": lambda: mha(add_bias_kv=True, add_zero_attn=True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recorded_by", [record, record_opened], ids=["closed", "opened"])
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "fused"])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_result_is_the_same_to_the_bit_also_the_second_time(
    mode: str, recorded_by: Callable[..., Any], need_weights: bool, layer: str
) -> None:
    module = LAYERS[layer]()
    x = drawn(BATCH, QUERY, EMBED, dtype=next(module.parameters()).dtype)
    with MODES[mode]():
        torch.manual_seed(7)
        plain = module(x, x, x, need_weights=need_weights)
        after = torch.get_rng_state()
        for _ in range(2):
            torch.manual_seed(7)
            _, recorded = recorded_by(module, x, x, x, need_weights=need_weights)
            assert same(plain, recorded)
            assert torch.equal(torch.get_rng_state(), after)


def test_a_composite_operation_takes_the_kernels_of_a_plain_run() -> None:
    """In inference mode they arrive whole. What a product is taken apart into hangs on the views that it is given."""
    dtype = torch.float32
    for width in (7, 64):
        linear, weight = nn.Linear(width, 3 * width).to(dtype), nn.Parameter(drawn(3 * width, width, dtype=dtype))
        x, y = drawn(BATCH, QUERY, width, dtype=dtype), drawn(2, BATCH, width, QUERY, seed=1, dtype=dtype)
        with torch.inference_mode():
            for run in (
                lambda linear=linear, x=x: linear(x.transpose(0, 1)),
                lambda weight=weight, x=x: tuple(nn.functional.linear(x, part) for part in weight.chunk(3)),
                lambda linear=linear, x=x: linear(torch.cat((x, x), -1).chunk(2, -1)[1]),
                lambda weight=weight, x=x: x[..., ::2] @ weight[:, ::2].T,
                lambda x=x, y=y: x @ y,
                lambda x=x, y=y: torch.einsum("bqe,cbek->cbqk", x, y),
            ):
                assert same(run(), record(run)[1])


def settings() -> tuple[Any, ...]:
    cuda = torch.backends.cuda
    return (
        torch.backends.mha.get_fastpath_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView),
    )


def test_an_error_inside_of_a_composite_operation_leaves_the_modes_as_they_were() -> None:
    with torch.inference_mode():
        before = settings()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            record(lambda: torch.matmul(torch.ones(2, 3), torch.ones(5, 7)))
        assert settings() == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_intermediate_result_is_held(mode: Callable[[], Any]) -> None:
    alive: list[bool] = []

    class Chain(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = super().forward(x)
            memory = StorageWeakRef(first.untyped_storage())
            second = first.relu()
            alive.append(not memory.expired())
            del first
            third = second * 2
            alive.append(not memory.expired())
            return third

    with mode():
        record(Chain(EMBED, EMBED), drawn(BATCH, QUERY, EMBED))
    assert alive == [True, False]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_a_shape_or_memory_are_recorded_too() -> None:
    """Rows of different lengths, as torch's own encoder packs them; zeros that take no memory; sparse ones."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, HEADS, 7, batch_first=True), 2).eval()
    x, padding = drawn(BATCH, QUERY, EMBED), torch.zeros(BATCH, QUERY, dtype=torch.bool)
    padding[1, 3:] = padding[2, 4:] = True
    with torch.no_grad():
        plain = encoder(x, src_key_padding_mask=padding)
        recording, recorded = record(encoder, x, src_key_padding_mask=padding)
    assert same(plain, recorded)
    packed = next(op.output for op in recording.ops if op.base_name == "_nested_tensor_from_mask")
    assert packed.shape == (int((~padding).sum()) * EMBED,)
    sparse, dense = torch.eye(QUERY).to_sparse(), drawn(QUERY, EMBED)
    recording, result = record(lambda: torch.sparse.mm(sparse * 2, dense))
    assert same(result, 2 * dense)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_rows_are_one_buffer_that_nothing_is_claimed_of() -> None:
    class Jagged(nn.ModuleList):
        def forward(self, *rows: torch.Tensor) -> torch.Tensor:
            x = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
            q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in self)
            return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).values()

    module, rows = Jagged(nn.Linear(EMBED, EMBED) for _ in range(3)).eval(), (drawn(3, EMBED), drawn(5, EMBED))
    with torch.no_grad():
        plain = module(*rows)
        recording, recorded = record(module, *rows)
        trace = mha_inspect.trace(module, *rows)
    assert same(plain, recorded)
    jagged = next(op for op in recording.ops if op.base_name == "linear")
    assert jagged.inputs[0].shape == jagged.output.shape == (8 * EMBED,)
    assert recording.outputs[0].tensor.shape == (8, EMBED)
    assert not trace.attentions
    (note,) = trace.notes
    assert "nested tensors" in note


def test_the_worked_example_records_what_it_says() -> None:
    result = doctest.testmod(recorder)
    assert result.attempted >= 5
    assert result.failed == 0
