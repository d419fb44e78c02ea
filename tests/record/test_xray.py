"""A run with its fused kernels opened computes what it computes without, and its steps are torch's own attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import mha_inspect
from mha_inspect.record import kernels
from mha_inspect.record.catalog import fused
from mha_inspect.record.ops import Kernel, Recording
from mha_inspect.record.xray import XRay
from mha_inspect.running.subject import Run

from ..recorded import record_opened
from ..torch_math import torch_math

BATCH, LENGTH, HEADS, HEAD_DIM = 3, 7, 2, 5
EMBED = HEADS * HEAD_DIM


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def opened(function: Callable[..., Any], *args: Any, budget: int = 1 << 30, keep: bool = True) -> tuple[Run, XRay]:
    recorder = XRay(function if isinstance(function, nn.Module) else None, keep=keep, budget=budget)
    recorder.take_inputs({str(place): arg for place, arg in enumerate(args)})
    with recorder:
        returned = function(*args)
    return Run(recorder.finish(returned), returned=returned), recorder


def stage(run: Run, name: str, place: int = 0) -> Tensor:
    content: Tensor = run.recording.values[run.attentions[place][0].stages[name].id]
    return content


def kernel(recording: Recording, start: str) -> Kernel:
    (matching,) = [candidate for candidate in recording.kernels if candidate.op.startswith(f"aten.{start}")]
    return matching


class Fused(nn.Module):
    def __init__(self, embed: int = EMBED, heads: int = HEADS, **settings: Any) -> None:
        super().__init__()
        self.heads, self.settings = heads, settings
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.packed, self.out = nn.Linear(embed, 3 * embed), nn.Linear(embed, embed)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        q, k, v = self.packed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        settings = {**self.settings}
        if not self.training:
            settings.pop("dropout_p", None)
        return self.out(F.scaled_dot_product_attention(q, k, v, **settings).transpose(1, 2).flatten(2))


# -- the steps are torch's own -----------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)]),
    query=st.integers(1, 9),
    key=st.integers(1, 9),
    mask=st.sampled_from(["none", "causal", "bool", "float", "row"]),
    scale=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_steps_are_those_of_torchs_math(
    batch: int, heads: tuple[int, int], query: int, key: int, mask: str, scale: float | None, dtype: torch.dtype
) -> None:
    q = drawn(batch, heads[0], query, HEAD_DIM, dtype=dtype)
    k, v = (drawn(batch, heads[1], key, HEAD_DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    attn_mask = mask_of(mask, batch, query, key, dtype)
    asked = {"attn_mask": attn_mask, "is_causal": mask == "causal", "scale": scale, "enable_gqa": heads[0] != heads[1]}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **asked)

    with torch.no_grad():
        plain = attend(q, k, v)
        run, _ = opened(attend, q, k, v)
    assert torch.equal(run.returned, plain)
    fused = [kernel for kernel in run.recording.kernels if "scaled_dot_product" in kernel.op]
    assert fused or heads[0] != heads[1] or dtype == torch.float16
    for kernel in fused:
        assert (kernel.opened, kernel.note) == (True, "")
        assert kernel.check is not None
        assert kernel.check.verdict != "differs"
    if not fused or key == 1:
        return
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype in (torch.float32, torch.float64) else {"rtol": 0.03, "atol": 0.03}
    assert ("masked_scores" in run.attentions[0][0].stages) == (mask != "none")
    expected = scores_and_weights(q, k, scale, allowed_or_added(mask, attn_mask, query, key))
    for name, exact in zip(("scores", "weights"), expected, strict=True):
        torch.testing.assert_close(stage(run, name).double().reshape(exact.shape), exact, **near)
    assert torch.equal(stage(run, "context").reshape(plain.shape), plain)


def mask_of(kind: str, batch: int, query: int, key: int, dtype: torch.dtype) -> Tensor | None:
    if kind == "bool":
        return drawn(query, key, seed=3) > 0
    if kind == "float":
        return drawn(batch, 1, query, key, dtype=dtype, seed=3)
    if kind == "row":
        return torch.arange(key).expand(batch, 1, 1, key) % 2 == 0
    return None


def allowed_or_added(kind: str, attn_mask: Tensor | None, query: int, key: int) -> Tensor | None:
    """Where a query may look, or the numbers that are added to its scores."""
    return torch.ones(query, key, dtype=torch.bool).tril() if kind == "causal" else attn_mask


def scores_and_weights(q: Tensor, k: Tensor, scale: float | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The oracle, in float64, with each key head repeated for its queries."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ keys.mT * (1 / math.sqrt(HEAD_DIM) if scale is None else scale)
    if mask is None:
        return scores, scores.softmax(-1)
    masked = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    return scores, masked.softmax(-1).nan_to_num(nan=0.0)


def mha(**settings: Any) -> nn.MultiheadAttention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, **settings}).eval()


@pytest.mark.parametrize(("padded", "need_weights"), [(False, False), (True, True)])
def test_the_fast_path_is_seen_from_inside(padded: bool, need_weights: bool) -> None:
    layer, x = mha(), drawn(BATCH, LENGTH, EMBED)
    mask = torch.arange(LENGTH).expand(BATCH, LENGTH) > torch.tensor([[6], [4], [2]]) if padded else None

    def forward(x: Tensor) -> Any:
        return layer(x, x, x, key_padding_mask=mask, need_weights=need_weights)

    with torch.no_grad():
        run, _ = opened(forward, x)
        plain = forward(x)
        with torch_math():
            _, weights = layer(x, x, x, key_padding_mask=mask, average_attn_weights=False)
    assert torch.equal(run.returned[0], plain[0])
    assert kernel(run.recording, "_native_multi_head").within is None
    assert kernel(run.recording, "_transform_bias").within == 0
    torch.testing.assert_close(stage(run, "weights"), weights)
    for inner in run.recording.kernels[1:]:
        assert inner.check is not None
        assert inner.check.verdict != "differs"


def test_a_mask_that_is_added_inside_of_a_product_leaves_scores_to_see() -> None:
    layer, x, mask = mha().train(), drawn(BATCH, LENGTH, EMBED), drawn(LENGTH, LENGTH, seed=1)
    plain, weights = layer(x, x, x, attn_mask=mask, average_attn_weights=False)
    run, _ = opened(lambda x: layer(x, x, x, attn_mask=mask), x)
    assert torch.equal(run.returned[0], plain)
    scores, masked = stage(run, "scores"), stage(run, "masked_scores")
    torch.testing.assert_close(scores + mask, masked)
    torch.testing.assert_close(masked.softmax(-1).view(weights.shape), weights)
    trace = mha_inspect.trace(layer, x, x, x, attn_mask=mask)
    assert {shown.name for shown in trace.attentions[0].stages if shown.opened} == {"scores"}
    assert trace.path.plain == "separate operations: baddbmm, softmax, bmm"


def test_a_mask_inside_of_a_large_product_has_shapes_and_no_numbers() -> None:
    layer, x, mask = mha().train(), drawn(BATCH, LENGTH, EMBED), drawn(LENGTH, LENGTH, seed=1)
    full, small = (opened(lambda x: layer(x, x, x, attn_mask=mask), x, budget=budget)[0] for budget in (1 << 30, 1))
    assert [op.name for op in full.recording.ops] == [op.name for op in small.recording.ops]
    (described,) = small.recording.kernels
    assert described.opened
    assert described.shapes_only
    assert described.check is not None
    assert described.check.verdict != "differs"
    stages = [run.attentions[0][0].stages for run in (full, small)]
    shapes = [{name: (t.shape, t.stride, t.dtype) for name, t in tensors.items()} for tensors in stages]
    assert shapes[0] == shapes[1]
    assert stages[1]["scores"].id not in small.recording.values
    assert not any(value.is_meta for value in small.recording.values.values())


# -- one run, and what it computes -------------------------------------------------------------------------------------


def encoder(**settings: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(EMBED, HEADS, 11, batch_first=True, **settings)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Checkpointed(Fused):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return output


class Normed(Fused):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


STEPS: dict[str, tuple[Callable[[], nn.Module], torch.dtype, bool]] = {
    "fused": (lambda: Normed(), torch.float32, False),
    "autocast": (lambda: Normed(), torch.float32, True),
    "checkpoint": (lambda: Checkpointed(dropout_p=0.5), torch.float32, False),
    "encoder, dropout": (lambda: encoder(dropout=0.3), torch.float32, False),
}


@pytest.mark.parametrize(("name", "keep"), [("fused", False), *((name, True) for name in STEPS)])
def test_a_training_step_is_the_plain_one_to_the_bit(name: str, keep: bool) -> None:
    make, dtype, autocast = STEPS[name]

    def step(recording: Any) -> list[Tensor]:
        module, x = make().to(dtype).train(), drawn(BATCH, LENGTH, EMBED, dtype=dtype).requires_grad_()
        torch.manual_seed(7)
        with recording, torch.autocast("cpu", enabled=autocast):
            output = module(x)
            output.float().square().sum().backward()
        grads = [p.grad for p in module.parameters()]
        return [output.detach(), x.grad, *grads, *module.buffers(), torch.get_rng_state()]  # type: ignore[list-item]

    class Nothing:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    plain = step(Nothing())
    block = mha_inspect.recording(keep=keep)
    shown = step(block)
    assert all(map(torch.equal, plain, shown))
    assert block.trace.attentions
    if "dropout" not in name and name != "checkpoint":
        assert {"scores", "weights"} <= {shown.name for shown in block.trace.attentions[0].stages}
        assert block.trace.proof.agrees


# -- limits ------------------------------------------------------------------------------------------------------------


def test_scores_beyond_the_budget_have_shapes_and_no_numbers() -> None:
    module, x = Fused(is_causal=True).eval(), drawn(BATCH, LENGTH, EMBED)
    with torch.no_grad():
        full, _ = opened(module, x)
        small, _ = opened(module, x, budget=BATCH * HEADS * LENGTH * LENGTH * 4 - 1)
    assert torch.equal(full.returned, small.returned)
    kept_kernel, described_kernel = (kernel(run.recording, "_scaled") for run in (full, small))
    assert (kept_kernel.shapes_only, described_kernel.shapes_only) == (False, True)
    assert described_kernel.check is not None
    assert described_kernel.check.verdict != "differs"
    stages = [run.attentions[0][0].stages for run in (full, small)]
    described = [{name: (t.shape, t.stride, t.dtype) for name, t in tensors.items()} for tensors in stages]
    assert described[0] == described[1]
    assert small.recording.values.keys().isdisjoint({stages[1][name].id for name in ("scores", "weights")})
    names = [[op.name for op in run.recording.ops] for run in (full, small)]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("error", "reason"), [(torch.OutOfMemoryError("out of memory"), "not enough memory"), (RuntimeError("odd"), "odd")]
)
def test_steps_that_fail_leave_the_run_as_it_is(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    module, x = Fused().eval(), drawn(BATCH, LENGTH, EMBED)
    monkeypatch.setattr("mha_inspect.record.kernels.AttentionCall.made", fail)
    with torch.no_grad():
        trace = mha_inspect.trace(module, x)
        assert torch.equal(record_opened(module, x)[1], module(x))
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert trace.path.not_opened == (f"{name}: {reason}",)
    assert trace.path.opened == ()
    assert trace.attentions == ()
    assert trace.proof.agrees is None


@pytest.mark.parametrize("everywhere", [False, True])
def test_wrong_steps_and_a_wrong_kernel_are_seen(everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where steps go wrong only as they run, and not in a dtype that is asked for: that is no rounding."""
    module, x = Fused().eval(), drawn(BATCH, LENGTH, EMBED)
    made = kernels.AttentionCall.made

    def wrong(asked: kernels.AttentionCall, dtype: torch.dtype | None = None) -> kernels.Stages:
        right = made(asked, dtype)
        return right if dtype and not everywhere else right._replace(result=right.result * 1.001)

    with torch.no_grad():
        assert mha_inspect.trace(module, x).proof.agrees
        assert mha_inspect.trace(module, x, keep=True).proof.agrees
        monkeypatch.setattr("mha_inspect.record.kernels.AttentionCall.made", wrong)
        assert mha_inspect.trace(module, x).proof.agrees is False
        assert mha_inspect.trace(module, x, keep=True).proof.agrees is False
        # Where none of the steps are kept, none run but those that are compared.
        monkeypatch.setattr("mha_inspect.questions.trace.ROOM", 0)
        assert mha_inspect.trace(module, x).proof.agrees is not everywhere


# -- kernels of other devices, by their schemas ------------------------------------------------------------------------


def attended(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The oracle: `heads query head_dim` in float64."""
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num(nan=0.0) @ v.double()


@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (False, (2, 1)), (True, (2, 1))])
def test_packed_rows_attend_to_their_own_sequence(causal: bool, window: tuple[int, int]) -> None:
    lengths, others = [3, 5, 2], [4, 5, 6]
    q, k, v = drawn(10, HEADS, 8), drawn(15, HEADS, 8, seed=1), drawn(15, HEADS, 8, seed=2)
    starts = [torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32) for sizes in (lengths, others)]
    func = torch.ops.aten._flash_attention_forward.default
    given = {"window_size_left": window[0], "window_size_right": window[1]}
    asked = kernels.read_attention(func, (q, k, v, *starts, 5, 6, 0.0, causal, False), given)
    assert asked.rows_first
    (contexts,) = asked.steps()
    for at, (rows, keys) in enumerate(zip(lengths, others, strict=True)):
        first_query, first_key = (s[at] for s in starts)
        # The last query stands where the last key does.
        distance = (torch.arange(rows) + keys - rows)[:, None] - torch.arange(keys)
        allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window != (-1, -1):
            allowed = allowed & (distance <= window[0]) & (distance >= -window[1])
        parts = (q[first_query : first_query + rows], k[first_key : first_key + keys], v[first_key : first_key + keys])
        expected = attended(*(part.transpose(0, 1) for part in parts), allowed).transpose(0, 1)
        torch.testing.assert_close(contexts[first_query : first_query + rows].double(), expected, rtol=1e-5, atol=1e-6)


class Packed(nn.Module):
    """Sequences one after the other, without padding, for a kernel that torch has on GPUs alone."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.query, self.key, self.value = (nn.Linear(EMBED, 8 * heads) for heads in (4, kv_heads, kv_heads))
            self.out = nn.Linear(32, EMBED)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)) for part in (self.query, self.key, self.value))
        forward = torch.ops.aten._flash_attention_forward
        context = forward(q, k, v, starts, starts, 6, 6, 0.0, True, False)[0]
        return self.out(context.flatten(1))


def packed_kernel(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, _: Tensor, *settings: Any, **further: Any) -> Any:
    """The oracle in the place of the kernel: each sequence by itself, causal."""
    context = torch.empty_like(q)
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        one = [part[start:end].transpose(0, 1).double() for part in (q, k, v)]
        one[1:] = [part.repeat_interleave(q.shape[1] // k.shape[1], 0) for part in one[1:]]
        allowed = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        context[start:end] = attended(*one, allowed).transpose(0, 1).to(q)
    return context, torch.zeros(q.shape[1], len(q)), torch.zeros(2), torch.zeros(()), torch.empty(0)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_kernel_with_packed_sequences_is_read_from_its_arguments(kv_heads: int) -> None:
    module, x, starts = Packed(kv_heads), drawn(11, EMBED), torch.tensor([0, 5, 11], dtype=torch.int32)
    with torch.library._scoped_library("aten", "IMPL") as library, torch.no_grad():
        library.impl("_flash_attention_forward", packed_kernel, "CPU")
        trace = mha_inspect.trace(module, x, starts)
        report = mha_inspect.check(module, x, starts)
    (attention,) = trace.attentions
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, kv_heads, 8)
    assert attention.kind[:2] == ("self", "causal")
    stages = {shown.name: (shown.axes, shown.formula) for shown in attention.stages}
    assert stages["masked_scores"] == ("heads query key", "scores + mask")
    assert stages["context"] == ("query heads head_dim", "weights · v_heads")
    assert stages["k_heads"][0] == f"key {'heads' if kv_heads == 4 else 'kv_heads'} head_dim"
    assert trace.proof.agrees
    assert not report.findings


READ: dict[str, tuple[Any, Callable[..., tuple[Any, ...]], dict[str, Any]]] = {
    "CUDA flash": (
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        lambda q, k, v: (q, k, v, 0.0, True),
        {"causal": True},
    ),
    "efficient": (
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        lambda q, k, v: (q, k, v, torch.zeros(7, 7), True, 0.25),
        {"dropout": 0.25},
    ),
    "mps": (
        torch.ops.aten._scaled_dot_product_attention_math_for_mps.default,
        lambda q, k, v: (q, k, v, None, 0.0, True),
        {"causal": True},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_kernels_of_other_devices_are_read_by_their_schemas(name: str) -> None:
    func, arguments, expected = READ[name]
    q, k, v = (drawn(BATCH, HEADS, LENGTH, HEAD_DIM, seed=seed) for seed in range(3))
    asked = kernels.read_attention(func, arguments(q, k, v), {"scale": 0.5})
    assert (asked.query is q, asked.scale, asked.rows_first) == (True, 0.5, False)
    assert {name: getattr(asked, name) for name in expected} == expected


def test_every_kernel_of_torch_that_could_hide_attention_is_known() -> None:
    words = ("scaled_dot_product", "flash_attention_forward", "efficient_attention_forward", "_multi_head_attention")
    words += ("cudnn_attention_forward", "transformer_encoder_layer_fwd", "masked_softmax", "triton_scaled_dot")
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::_")}
    hiding = {n.replace("::", ".") for n in names if any(word in n for word in words) and "backward" not in n}
    composite = {"aten._scaled_dot_product_attention_math"}
    assert {name for name in hiding if not fused(f"{name}.default")} == composite


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_steps_of_cuda_kernels(backend: str, causal: bool) -> None:
    q, k, v = (drawn(2, 4, 64, 32, dtype=torch.float16, seed=seed).cuda() for seed in range(3))
    with torch.no_grad(), sdpa_kernel(getattr(SDPBackend, backend)):
        plain = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        run, _ = opened(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    assert torch.equal(run.returned, plain)
    (fused_kernel,) = run.recording.kernels
    assert fused_kernel.opened
    assert fused_kernel.check is not None
    assert fused_kernel.check.verdict != "differs"
