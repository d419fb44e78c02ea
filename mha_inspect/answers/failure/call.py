"""Which call of torch raised, and what it was given, read off the traceback: nothing of the user's is run again.

The frames of a traceback still have their variables, and which expression of a frame was running is known: what it gave
to the call is worked out from that. Where an operation had been dispatched, its own arguments are in the traceback too.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from ...record.arguments import tensors_in
from ...record.ops import Recording, TensorRef
from ...record.recorder import Recorder
from ...record.site import place_of
from .expression import Call, CannotTellError, Expression, NoCallError, Reading
from .operand import Operand
from .site import (
    ATTENTION_FORWARDS,
    MODULE_CALL,
    Entry,
    Site,
    entries_inside,
    entries_of,
    entries_of_calls,
    expression_of,
)

_ROLES: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "layer_norm": ("input", "", "weight", "bias"),
    "embedding": ("input", "weight"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask"),
}
"""Names of the arguments by place, for functions of torch that have no signature to ask."""


def read_call(error: BaseException, recorder: Recorder, recording: Recording, *, in_block: bool) -> Reading:
    """Read the call that raised off the error that came out of a recorded run.

    Args:
        error: with its traceback.
        recorder: of the run.
        recording: the operations up to the error.
        in_block: whether the run was the body of a `with` block, and not the forward of a module.
    """
    entries = entries_inside(error, in_block=in_block)
    reading = _of_layer(entries) or _read(error, recorder, recording, in_block=in_block)
    asked = _dispatched(error)
    if reading.told or asked is None:
        return reading
    if reading.call is None:
        return replace(reading, call=asked, told=True)
    if asked.base == reading.call.base:
        # The operation is the call itself: what it was given is what the call was given.
        return replace(reading, call=replace(reading.call, args=asked.args, kwargs=asked.kwargs), told=True)
    return reading


def dispatched(error: BaseException) -> str:
    """Return the innermost operation that was dispatched when an error was raised in a recorded run; else empty."""
    call = _dispatched(error)
    return "" if call is None else call.name


def _dispatched(error: BaseException) -> Call | None:
    code = Recorder.__torch_dispatch__.__code__
    found = [frame.f_locals for frame, _ in entries_of(error) if frame.f_code is code]
    return Call(str(found[-1]["func"]), tuple(found[-1]["args"]), found[-1]["kwargs"] or {}) if found else None


def _of_layer(entries: list[Entry]) -> Reading | None:
    """Return the call of torch's own multi-head attention, or transformer, that the error came out of, the inmost one.

    Its weight is among what it was given, where that is on another device, or of another dtype.
    """
    for (before, _), (frame, _) in zip(reversed(entries[:-1]), reversed(entries[1:]), strict=True):
        if frame.f_code in ATTENTION_FORWARDS and before.f_code is MODULE_CALL:
            layer, called = frame.f_locals["self"], before.f_locals
            try:
                bound = inspect.signature(layer.forward).bind(*called["args"], **called["kwargs"])
            except TypeError:
                return None
            given = {name: value for name, value in bound.arguments.items() if isinstance(value, torch.Tensor)}
            weight = next(layer.parameters())
            numbers = [value for value in given.values() if value.is_floating_point()]
            if {v.device for v in given.values()} - {weight.device} or {v.dtype for v in numbers} - {weight.dtype}:
                given["weight"] = weight
            name = "nn.MultiheadAttention" if isinstance(layer, nn.MultiheadAttention) else "nn.Transformer"
            return Reading(Call(name, kwargs=given), told=True, layer=layer)
    return None


def _read(error: BaseException, recorder: Recorder, recording: Recording, *, in_block: bool) -> Reading:
    for frame, tb in entries_of_calls(error, in_block=in_block):
        if frame.f_code in ATTENTION_FORWARDS:
            return Reading(None, told=True)  # its arguments are those of the module's call
        line = f"{place_of(frame.f_code).file}:{tb.tb_lineno}"
        try:
            found = Expression(frame, line, recorder, recording.ops).call(expression_of(frame, tb))
        except CannotTellError:
            return Reading(None, told=False)
        except NoCallError:
            return Reading(None, told=True)
        if found is not None:
            return found
    last = entries_inside(error, in_block=in_block)[-1:]
    return Reading(None, told=any(_raises(entry) for entry in last))


def _raises(entry: Entry) -> bool:
    """Whether a frame was at a `raise` or an `assert` of its own, and is not torch's, which was given something."""
    (frame, tb), code = entry, entry[0].f_code.co_code
    if place_of(frame.f_code).file.startswith("torch/"):
        return False
    return 0 <= tb.tb_lasti < len(code) and dis.opname[code[tb.tb_lasti]] == "RAISE_VARARGS"


def operands_of(
    site: Site, reading: Reading, identify: Callable[[torch.Tensor], TensorRef], recording: Recording
) -> Iterator[Operand]:
    """Yield the tensors that the failing call was given, in order, by role and name."""
    outside = {n.tensor.id: n.name for n in (*recording.parameters, *recording.buffers)}
    for place, (role, text, value) in enumerate(_given(site, reading.call), 1):
        tensor = next((known for own, known in reading.made if own is value), None) or identify(value)
        name = text or site.name_of(value) or outside.get(tensor.id, "") or role or f"operand {place}"
        yield Operand(role, name, value, tensor)


def _given(site: Site, call: Call | None) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield role, text and tensor."""
    if call is None:
        yield from (("", name, value) for name, value in site.named_here() if site.by_user)
    else:
        roles = _ROLES.get(call.base, ())
        for place, value in enumerate(call.args):
            role = roles[place] if place < len(roles) else ""
            text = call.texts.get(place, "") or (site.only_argument() if role == "input" else "")
            yield from ((role, "" if inner else text, tensor) for inner, tensor in tensors_in(value))
        for key, value in call.kwargs.items():
            yield from ((key, call.texts.get(key, ""), tensor) for _, tensor in tensors_in(value))
