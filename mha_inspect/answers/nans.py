"""Say where NaN first appears, where a module returns some."""

from __future__ import annotations

import torch

from ..naming.subject import Run, State, Subject
from ..record.arguments import tensors_in


def nans_in(own: Subject, before: State, seen: Run, *, kept: bool) -> tuple[str, ...]:
    """Return a line that says where the NaN of what a run returned begins; one more run keeps what is made on the way.

    Args:
        own: what was run.
        before: the state that it was run from.
        seen: the run.
        kept: whether its tensors were kept.
    """
    if not any(_has_nan(tensor) for _, tensor in tensors_in(seen.returned)):
        return ()
    if any(_has_nan(tensor) for _, tensor in tensors_in((own.args, own.kwargs))):
        return ("What is returned has NaN, and so has what came in.",)
    if any(_has_nan(tensor) for tensor in (*own.module.parameters(), *own.module.buffers())):
        return ("What is returned has NaN, and so have parameters or buffers.",)
    again = seen if kept else once_more(own, before)
    if again is None:
        return ("What is returned has NaN; where it begins is not seen, for the module does not run a second time.",)
    return (f"What is returned has NaN: {_beginning(again)}.",)


def once_more(own: Subject, before: State) -> Run | None:
    """Run it again from an earlier state, its tensors kept; None where it does not run a second time."""
    try:
        with own.replaying(before):
            return own.recorded(keep=True)
    except Exception:  # whatever somebody's forward may raise that counts its calls, or keeps what came in
        return None


def _beginning(seen: Run) -> str:
    several = len(seen.attentions) > 1
    stages = {
        tensor.id: f"the stage {stage}" + (f" of attention {number}" if several else "")
        for number, (found, _) in reversed([*enumerate(seen.attentions, 1)])
        for stage, tensor in found.stages.items()
    }
    for op in seen.recording.ops:
        for tensor in op.outputs:
            value = seen.recording.values.get(tensor.id)
            if value is not None and _has_nan(value):
                place = f" ({op.source})" if op.source else ""
                return f"it first appears in {stages.get(tensor.id, f'what {seen.recording.name_of(op)} gives')}{place}"
    return "where it begins is not seen"


def _has_nan(tensor: torch.Tensor) -> bool:
    known = tensor.is_floating_point() and not tensor.is_meta and tensor.layout == torch.strided
    return known and not tensor.is_nested and bool(torch.isnan(tensor).any())
