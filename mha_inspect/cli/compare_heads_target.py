"""compare-heads of a target: it is built once for each head count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError
from . import subject
from .options import Options
from .subject import call_of, load_target, require_head_count, tell, with_heads

if TYPE_CHECKING:
    from ..reports.compare_heads import CompareHeadsReport
    from ..targets.call import Call
    from ..targets.target import Target


def check_counts(options: Options, counts: tuple[int, ...]) -> None:
    """Look at everything that can be judged before torch is imported.

    Raises `MhaInspectError` when an option is of no use to a target, or contradicts another.
    """
    subject.inputs(options)
    subject.show(options)
    if options.device == "meta":
        raise DeviceError("device meta has shapes and no numbers, and compare-heads compares them. Try --device cpu.")
    subject.require_open_head_count(options, counts, "--heads gives the counts to compare.")


def compare_heads_target(
    text: str, options: Options, counts: tuple[int, ...], extras: Mapping[str, Any]
) -> CompareHeadsReport:
    """Build the target with each number of heads, and compare; `extras` are those of `compare_modules`.

    Raises:
        MhaInspectError: it cannot be built or called as asked, or takes no number of heads.
        TargetFailedError: its forward raised.
    """
    import torch

    from ..answers.head_counts.modules import Counted, compare_modules
    from ..answers.sides.module_run import ModuleSide
    from ..reports.common import LayerInfo
    from ..targets.call import try_once
    from ..targets.importing import stdout_for_the_answer
    from ..targets.load import subject_of
    from ..targets.room import Room
    from ..targets.same_inputs import with_the_same

    built: list[Counted] = []
    made: list[tuple[Target, Call]] = []
    room = Room(kept=True, exact=True)
    with stdout_for_the_answer(), torch.set_grad_enabled(options.grad):
        for count in counts:
            target = load_target(text, with_heads(options, count))
            require_head_count(target, "compare-heads")
            call = call_of(target, options, room)
            room.exact = False  # rounding is measured of the baseline alone
            if made:
                call = with_the_same(call, target.module, made[0][1], made[0][0].module)
            try_once(subject_of(target, call, options.seed), f" with num_heads {count}")
            made.append((target, call))
            own = call.of(target.module)
            side = ModuleSide("left", target.name, own, LayerInfo(target.name, target.passed), options.seed)
            built.append(Counted(count, side))
        report = compare_modules(built, **extras)
    for note in (*made[0][0].notes, made[0][1].told):
        if note:
            tell(note)
    return report
