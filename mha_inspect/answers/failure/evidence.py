"""What is known of the call that raised, and of the tensors that it was given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ...record.arguments import tensors_in
from ...record.ops import Recording, TensorRef
from ...record.run import AttemptRecorder
from .called import Reading, dispatched
from .site import only_argument, site_of

_ROLES: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "layer_norm": ("input", "", "weight", "bias"),
    "embedding": ("input", "weight"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask"),
}
"""Names of the arguments by place, for functions of torch that have no signature to ask."""


class Evidence:
    """What is known of the call that raised: by the traceback, and by what the run's recorder says of its tensors."""

    def __init__(
        self, error: Exception, reading: Reading, recorder: AttemptRecorder | None, *, in_block: bool = False
    ) -> None:
        self.call = reading.call
        self.op = dispatched(error)
        self.known = recorder is not None
        site = site_of(error, "" if self.call is None else self.call.name, in_block=in_block)
        self.site = site if self.known else replace(site, variables=(), attention=None)
        self.module = "" if recorder is None else recorder.path_of(site.module)
        self._recorder = recorder
        self._made = reading.made

    def identify(self, tensor: torch.Tensor) -> TensorRef:
        """What the recording calls this tensor."""
        assert self._recorder is not None
        made = next((known for own, known in self._made if own is tensor), None)
        return self._recorder.identify(tensor) if made is None else made


@dataclass(frozen=True)
class Argument:
    """One tensor of the failing call, as torch has it."""

    role: str
    name: str
    value: torch.Tensor
    tensor: TensorRef


def arguments_of(evidence: Evidence, recording: Recording) -> Iterable[Argument]:
    """The tensors that the failing call was given, in order, by role and name."""
    call, site = evidence.call, evidence.site
    outside = {named.tensor.id: named.name for named in (*recording.parameters, *recording.buffers)}

    def argument(role: str, text: str, value: torch.Tensor) -> Argument:
        tensor = evidence.identify(value)
        name = text or site.name_of(value) or outside.get(tensor.id, "") or role
        return Argument(role, name, value, tensor)

    if site.attention is not None:
        for role, value in site.attention.arguments.items():
            if isinstance(value, torch.Tensor):
                yield argument(role, "", value)
        weight = next(site.attention.module.parameters())
        given = [value for value in site.attention.arguments.values() if isinstance(value, torch.Tensor)]
        if any(v.device != weight.device or (v.is_floating_point() and v.dtype != weight.dtype) for v in given):
            yield argument("weight", "", weight)
        return
    if call is None:
        if site.by_user:
            for name, value in site.named_here():
                yield argument("", name, value)
        return
    texts, named = site.texts(call.name)
    roles = _ROLES.get(call.name.rpartition(".")[2], ())
    number = 0
    for place, value in enumerate(call.args):
        role = roles[place] if place < len(roles) else ""
        for inner, tensor in tensors_in(value):
            number += 1
            text = texts[place] if place < len(texts) and not inner else ""
            if not text and role == "input":
                text = only_argument(site.tree)
            made = argument(role, text, tensor)
            yield made if made.name else replace(made, name=f"operand {number}")
    for role, value in call.kwargs.items():
        for _, tensor in tensors_in(value):
            yield argument(role, named.get(role, ""), tensor)
