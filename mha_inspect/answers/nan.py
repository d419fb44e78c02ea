"""Where NaN first appears in what a module returns."""

from __future__ import annotations

import torch

from ..record.arguments import tensors_in
from ..running.run import Run
from ..running.state import State
from ..running.subject import Subject


def nan_note(subject: Subject, before: State, run: Run, *, kept: bool) -> tuple[str, ...]:
    """Return a line that says where the NaN of what a run returned begins; one more run keeps what is made on the way.

    Args:
        subject: what was run.
        before: the state that it was run from.
        run: the run.
        kept: whether its tensors were kept.
    """
    if not any(_has_nan(tensor) for _, tensor in tensors_in(run.returned)):
        return ()
    if any(_has_nan(tensor) for _, tensor in tensors_in((subject.args, subject.kwargs))):
        return ("What is returned has NaN, and so has what came in.",)
    if any(_has_nan(tensor) for tensor in (*subject.module.parameters(), *subject.module.buffers())):
        return ("What is returned has NaN, and so have parameters or buffers.",)
    again = run if kept else once_more(subject, before)
    if again is None:
        return ("What is returned has NaN; where it begins is not seen, for the module does not run a second time.",)
    return (f"What is returned has NaN: {_beginning(again)}.",)


def once_more(subject: Subject, before: State) -> Run | None:
    """Run it again from an earlier state, its tensors kept; None where it does not run a second time."""
    try:
        with subject.replaying(before):
            return subject.recorded(keep=True)
    except Exception:  # whatever somebody's forward may raise that counts its calls, or keeps what came in
        return None


def _beginning(run: Run) -> str:
    several = len(run.attentions) > 1
    stages = {
        tensor.id: f"the stage {stage}" + (f" of attention {number}" if several else "")
        for number, (attention, _) in reversed([*enumerate(run.attentions, 1)])
        for stage, tensor in attention.stages.items()
    }
    values = run.recording.values
    for op in run.recording.ops:
        for tensor in op.outputs:
            if tensor.id in values and _has_nan(values[tensor.id]):
                place = f" ({op.source})" if op.source else ""
                what = stages.get(tensor.id, f"what {run.recording.name_of(op)} gives")
                return f"it first appears in {what}{place}"
    return "where it begins is not seen"


def _has_nan(tensor: torch.Tensor) -> bool:
    known = tensor.is_floating_point() and not tensor.is_meta and tensor.layout == torch.strided
    return known and not tensor.is_nested and bool(torch.isnan(tensor).any())
