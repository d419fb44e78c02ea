"""Say how PyTorch runs an attention: by which kernels, what they hide, and how near their steps come to them."""

from __future__ import annotations

from ..naming.subject import Run
from ..record.arguments import tensors_in
from ..record.ops import Kernel, TensorRef
from ..reports.trace import Path, Proof

_UNSAID = "torch names none; its fast path asks for biases"
"""It goes on without a word where there is no in_proj_bias."""
_PRODUCTS = ("aten.baddbmm", "aten.addmm")
"""Kernels that are a product, with a mask added: they are told as operations like any others."""


def path_of(seen: Run) -> Path:
    """Return the kernels of a run, why it is not the fast path in torch's own words, and which kernels were opened."""
    recording = seen.recording
    outer = [kernel for kernel in recording.kernels if kernel.within is None and not kernel.op.startswith(_PRODUCTS)]
    refusals = dict.fromkeys(reason for reason in recording.fast_path_refusals if reason)
    fast = any(kernel.op.startswith("aten._native_multi_head_attention") for kernel in recording.kernels)
    if recording.fast_path_refusals and not refusals and not fast:
        refusals[_UNSAID] = None
    return Path(
        plain=_in_one_phrase(seen, outer),
        reason="; ".join(" ".join(reason.split()) for reason in refusals) or None,
        opened=tuple(dict.fromkeys(_short(kernel) for kernel in outer if kernel.opened)),
        not_opened=tuple(dict.fromkeys(f"{_short(k)}: {k.note}" for k in recording.kernels if not k.opened)),
    )


def _in_one_phrase(seen: Run, outer: list[Kernel]) -> str:
    phrases = [f"{_short(kernel)} ({kernel.title})" for kernel in outer]
    for found, _ in seen.attentions:
        if found.softmax.kernel is None:
            product, place = found.score_product, found.score_product.op.kernel
            scores = product.name if place is None else seen.recording.kernels[place].op.split(".")[1]
            softmax = found.softmax.base_name.strip("_")
            phrases.append(f"separate operations: {scores}, {softmax}, {found.value_product.name}")
    return "; ".join(dict.fromkeys(phrases)) or "no attention kernel"


def is_hidden(seen: Run, stage: str, tensor: TensorRef) -> bool:
    """Return whether a stage was hidden in a fused kernel, which was opened to show it."""
    op = seen.recording.producer(tensor)
    return op is not None and op.kernel is not None and stage in seen.recording.kernels[op.kernel].hides


def has_shape_only(seen: Run, tensor: TensorRef) -> bool:
    """Return whether a stage was never made, its kernel having too many scores to make them."""
    op = seen.recording.producer(tensor)
    kernel = None if op is None or op.kernel is None else seen.recording.kernels[op.kernel]
    return kernel is not None and kernel.shapes_only and op is not None and not op.makes_result


def drops_at_random(seen: Run) -> bool:
    """Return whether a run drops elements at random: by a dropout, or in a fused kernel."""
    ops, kernels = seen.recording.ops, seen.recording.kernels
    return any(op.does("draws") for op in ops) or any(kernel.drops for kernel in kernels)


def proof_of(seen: Run) -> Proof:
    """Return how near the steps of the run's kernels come to what the kernels gave: of all of them, the farthest."""
    kernels = seen.recording.kernels
    meta = any(tensor.is_meta for _, tensor in tensors_in(seen.returned))
    if not kernels and not meta:
        return Proof(0.0, None, True, "nothing was hidden: the stages shown are the plain run's")
    checked = [(kernel.check, kernel) for kernel in kernels if kernel.opened and kernel.check is not None]
    notes = dict.fromkeys(f"{_short(kernel)}: {kernel.note}" for kernel in kernels if kernel.note)
    if not checked:
        return Proof(None, None, None, "device meta has shapes and no numbers" if meta else "; ".join(notes))
    worst, kernel = max(checked, key=lambda one: (one[0].times, one[0].difference))
    if worst.verdict == "differs":
        notes = {f"{_short(kernel)} differs": None, **notes}
    return Proof(worst.difference, worst.error, worst.verdict != "differs", "; ".join(notes))


def _short(kernel: Kernel) -> str:
    return kernel.op.rpartition(".")[0] or kernel.op
