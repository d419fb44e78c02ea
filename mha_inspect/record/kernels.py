"""How PyTorch runs an attention: the kernels of the plain forward, and which stages they hide."""

from __future__ import annotations

from ..reports.trace import Path
from .ops import Op, Recording
from .subject import Run

_INSIDE_SDPA = frozenset({"scores", "masked_scores", "weights"})
_INSIDE_LAYER = frozenset(
    {"q_proj", "k_proj", "v_proj", "q_heads", "k_heads", "v_heads", "context", "concat"} | _INSIDE_SDPA
)
_FUSED: tuple[tuple[str, str, frozenset[str]], ...] = (
    ("aten._native_multi_head_attention", "the fast path: the whole layer is one kernel", _INSIDE_LAYER),
    ("aten._transformer_encoder_layer_fwd", "the fast path: the whole encoder layer is one kernel", _INSIDE_LAYER),
    ("aten._scaled_dot_product", "fused attention: scores and weights never reach memory", _INSIDE_SDPA),
    ("higher_order.flex_attention", "flex attention: one kernel, which cannot be opened", frozenset()),
)
"""Start of a kernel's name, what it is, and the stages that it hides."""


_UNSAID = "torch names none; its fast path asks for biases"
"""It goes on without a word where there is no in_proj_bias."""


def fused_kernels(recording: Recording) -> list[Op]:
    """The operations that hide stages of an attention, in order."""
    return [op for op in recording.ops if is_fused(op.name)]


def is_fused(name: str) -> bool:
    """Whether an operation of this name does several steps of attention in one."""
    return any(name.startswith(fused) for fused, _, _ in _FUSED)


def hidden_stages(plain: Run) -> list[frozenset[str]]:
    """For each attention of the plain forward, in order, the stages that it hides."""
    sites = [(op.index, _hides(op)) for op in fused_kernels(plain.recording)]
    sites += [(found.softmax.index, frozenset()) for found, _ in plain.attentions]
    return [hidden for _, hidden in sorted(sites, key=lambda site: site[0])]


def describe(plain: Run) -> Path:
    """The kernels of the plain forward, why it is not the fast path in torch's own words, and what was opened."""
    refusals = dict.fromkeys(reason for reason in plain.recording.fast_path_refusals if reason)
    fast = any(op.name.startswith(_FUSED[0][0]) for op in plain.recording.ops)
    if plain.recording.fast_path_refusals and not refusals and not fast:
        refusals[_UNSAID] = None
    return Path(
        plain=_in_one_phrase(plain),
        reason="; ".join(" ".join(reason.split()) for reason in refusals) or None,
        opened=tuple(dict.fromkeys(_short(op) for op in fused_kernels(plain.recording))),
    )


def _in_one_phrase(plain: Run) -> str:
    phrases = [
        f"{_short(op)} ({next(text for name, text, _ in _FUSED if op.name.startswith(name))})"
        for op in fused_kernels(plain.recording)
    ]
    phrases += [
        f"separate operations: {found.score_product.name}, {found.softmax.base_name.strip('_')}, "
        f"{found.value_product.name}"
        for found, _ in plain.attentions
    ]
    return "; ".join(dict.fromkeys(phrases)) or "no attention kernel"


def _hides(op: Op) -> frozenset[str]:
    return next((hidden for name, _, hidden in _FUSED if op.name.startswith(name)), frozenset())


def _short(op: Op) -> str:
    return op.name.rpartition(".")[0]
