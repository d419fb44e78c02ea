"""Refuse a run that would not fit in memory before it is tried, and say what would."""

from __future__ import annotations

from dataclasses import replace

from ..record.ops import Recording
from ..record.subject import build_forward
from .footprint import given_bytes, kept_bytes, peak_bytes
from .memory import free_memory, largest, require_memory
from .spec import AttentionSpec, InputSpec, RunSpec

SAFE = 8
"""A rough estimate that fits this many times is not looked at more closely."""
_HELD = 1.5
"""What a layer's own names hold on to after its last use, measured over the layers: up to half as much again."""
_IN_FLOAT64 = 3 * 8
"""Bytes an element of a tensor that statistics are worked out of."""
_CHUNK = 1 << 20
"""Elements that they are worked out of at a time."""


def require_fit(spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str, *, keep: bool) -> None:
    """Raise `DoesNotFitError` where a trace needs more memory than the device has free.

    The need is read off a recording of the same pass on meta, which has shapes and no memory. Importing what meta needs
    takes a second: it is spent only where a rough estimate comes near to what is free.
    """
    free = free_memory(run.device)
    if free is None or rough_need(spec, inputs) * SAFE < free:
        return
    need = need_of(spec, inputs, run, layer, keep=keep)
    if need <= free:
        return

    def fits(seq_len: int) -> bool:
        return need_of(spec, replace(inputs, seq_len=seq_len, padding=()), run, layer, keep=keep) <= free

    best = largest(fits, inputs.seq_len) if inputs.input is None and inputs.attn_mask is None else 0
    way_out = f"The largest seq_len that fits is {best}." if best else "Try a smaller batch or embed_dim."
    asked = f"embed_dim {spec.embed_dim}, num_heads {spec.num_heads}, batch {inputs.batch}, seq_len {inputs.seq_len}"
    require_memory(need, run.device, asked, f"{way_out} --device meta shows every shape without memory.")


def rough_need(spec: AttentionSpec, inputs: InputSpec) -> int:
    """More bytes than any of the layers takes, float64 reference included."""
    keys = inputs.seq_len if inputs.key_len is None else inputs.key_len
    heads = spec.num_heads * inputs.batch
    width = max(spec.embed_dim, spec.num_heads * int(spec.head_dim), spec.key_width, spec.value_width)
    scores = heads * inputs.seq_len * (keys + 2)
    rows = inputs.batch * (inputs.seq_len + keys) * width
    return 8 * (6 * scores + 16 * rows + 8 * width * max(width, spec.embed_dim))


def need_of(spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str, *, keep: bool) -> int:
    """Bytes that a trace takes at its peak: the opened run, and the reference in float64 beside what is held."""
    opened = _on_meta(spec, inputs, run, layer)
    exact = _on_meta(replace(spec, dtype="float64"), inputs, run, layer)
    results = sum(named.tensor.nbytes for named in opened.outputs)
    # What a run leaves behind: its results, all tensors where they are kept, and what a backward pass would need.
    left = kept_bytes(opened) if run.grad else results
    shown = kept_bytes(opened) if keep else left
    statistics = _IN_FLOAT64 * min(_CHUNK, max((t.numel for t in opened.tensors()), default=0)) if keep else 0
    running = _HELD * peak_bytes(opened)
    reference = given_bytes(exact) + _HELD * peak_bytes(exact)
    return int(given_bytes(opened) + left + max(running, shown + reference, shown + statistics))


def _on_meta(spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str) -> Recording:
    return build_forward(spec, replace(inputs, input=None), replace(run, device="meta"), layer).recorded().recording
