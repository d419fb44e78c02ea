"""Faults that show when the module is run again with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...record.arguments import argument_names, tensors_in
from ...record.ops import Op
from ...reports.check import Finding
from .bench import Bench
from .facts import scale_words
from .reach import other_tokens, reach_in_bits, reach_of_others, reach_of_tokens
from .runner import NotPossibleError, RaisedError, difference
from .sources import Source, batch_axis_of

_OTHER_KERNELS = 20.0
"""Train may take other kernels than eval, which round otherwise: so many times what counts within one."""


def inputs(bench: Bench) -> Iterator[Finding]:
    """Yield arguments that the forward wrote into."""
    before = dict(tensors_in(argument_names(bench.module, *bench.given.of_call({}))))
    changed: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors_in(argument_names(bench.module, *bench.base.after)):
        same = tensor.shape != before[name].shape or torch.equal(tensor.nan_to_num(), before[name].nan_to_num())
        if not same and name.split(".")[0] != bench.intent.cache:
            changed.setdefault(id(tensor), (name, tensor))
    for name, tensor in changed.values():
        storages = {named.tensor.storage for named in bench.recorded.recording.inputs if named.name == name}
        yield Finding(
            "inputs",
            f"The forward writes into its argument {name}.",
            f"{int((tensor != before[name]).sum())} of {tensor.numel()} numbers are others after the run.",
            sure=tensor.is_floating_point() and "mask" not in name and "cache" not in name,
            source=next((op.source for op in _writes(bench) if op.inputs[0].storage in storages), ""),
            fix="write into a copy: x = x + ..., not x += ....",
        )


def _writes(bench: Bench) -> Iterator[Op]:
    return (op for op in bench.recorded.recording.ops if op.kind == "write" and op.inputs)


def batch(bench: Bench) -> Iterator[Finding]:
    """Yield rows of the batch that move others."""
    if not bench.sources:
        raise NotPossibleError("no argument holds tokens that could be changed")
    source = bench.sources[0]
    if source.batch is None:
        raise NotPossibleError("the input has no batch")
    if bench.output.dim() <= source.batch or bench.output.shape[source.batch] != source.rows:
        raise NotPossibleError("the output has no place for each row of the batch")
    if source.rows < 2:
        yield from _leaks(bench, {0: _moved_of_two(bench, source.batch)}, source)
        return
    findings = list(_leaks(bench, reach_of_tokens(bench), source))
    yield from findings
    for place, moved in reach_of_others(bench).items() if not findings else ():
        further = bench.sources[place]
        yield from _leaks(bench, {further.length // 2: moved}, further)


def _moved_of_two(bench: Bench, axis: int) -> Tensor:
    """Return what moves when the one row is given twice, and the first token of the first is another.

    Raises `NotPossibleError` where it does not run so.
    """
    changes = {
        name: torch.cat([value, value], dim=axis)
        for name, value in bench.values.items()
        if isinstance(value, Tensor) and value.dim() > max(axis, 1) and value.shape[axis] == 1
    }
    try:
        doubled = bench.with_arguments(changes)
        source = doubled.sources[0]
        _ = doubled.output
    except (RaisedError, NotPossibleError):
        why = "there is one row, and the module does not run with two: give a batch of 2"
        raise NotPossibleError(why) from None
    return doubled.moved(doubled.run(other_tokens(doubled, source, source.at(0, 0))))


def _leaks(bench: Bench, reach: Mapping[int, Tensor], source: Source) -> Iterator[Finding]:
    """Yield what is wrong where tokens of row 0 move other rows; `reach` has what each of them moves."""
    leaks = {place: moved for place, moved in reach.items() if bool((moved[1:] > 0).any())}
    if not leaks:
        return
    place, moved = next(iter(leaks.items()))
    row, position = (int(number) for number in (moved[1:] > 0).nonzero()[0])
    alone = not _moves_beside(moved[:1], place)
    mixes = not any(_moves_beside(moved, at) for at, moved in reach.items() if at < moved.shape[1])
    others = int((moved[1:].amax(1) > 0).sum())
    is_own = source.names == bench.sources[0].names
    fix = "keep the batch apart: look at each view, repeat and mask that joins it with heads or positions."
    axis, sure = batch_axis_of(bench.module, bench.values, bench.intent)
    if not (mixes and alone and bench.follows):
        sure = not (is_own and any(sight.queries == bench.sources[0].length < sight.keys for sight in bench.sights))
        sentence = "A row of the batch moves the output of another row" + (
            "." if sure else ": it may be meant, where keys beside the row's own are a memory that rows share."
        )
    elif sure:
        sentence = (
            "Attention runs over the batch, not over the positions: rows move each other, and the tokens of a row do "
            "not."
        )
        fix = "transpose(0, 1) before and after, or batch_first=True."
    else:
        sentence = (
            f"Attention may run over the batch: dimension {axis} of the input is mixed, and dimension {1 - axis} is "
            "not. It is right where the sequence comes first; say so with batch_axis."
        )
        fix = ""
    evidence = (
        f"Token {place} of row 0 of {source.names[0]} was changed, and the output of row {row + 1} moved at position "
        f"{position} by {float(moved[row + 1, position]):.3g}; {others} of {len(moved) - 1} other rows moved."
    )
    yield Finding("batch", sentence, evidence, sure, bench.scores_line, fix=fix)


def _moves_beside(moved: Tensor, place: int) -> bool:
    """Whether anything moves at other positions: `batch position`."""
    return bool((moved[:, torch.arange(moved.shape[1]) != place] > 0).any())


def mixing(bench: Bench) -> Iterator[Finding]:
    """Yield where tokens never meet although nothing keeps them apart."""
    if not bench.follows or bench.sources[0].length < 2:
        raise NotPossibleError("the output has no place for each token")
    source, reach = bench.sources[0], reach_in_bits(bench)
    if not any(_moves_beside(moved[:1], place) for place, moved in reach.items()):
        if any(bool((moved[1:] > 0).any()) for moved in reach.values()):
            return  # the check of the batch tells that
        if any(bool((moved[0] > 0).any()) for moved in reach_of_others(bench).values()):
            return  # the keys are of another source
        yield Finding(
            "mixing",
            "No token moves another: attention runs over heads or features, not over positions, or nothing is made of "
            "it.",
            f"Tokens {', '.join(map(str, reach))} of {source.names[0]} were changed one by one, and no other position "
            "of the output moved, by one bit.",
            sure=not all(sight.alone for sight in bench.sights),
            source=bench.scores_line,
            fix="positions must be the last but one dimension of q, k, v: transpose(1, 2) after the heads are split.",
        )
        return
    sights = bench.sights
    if not sights or not all(sight.open and sight.queries == source.length == sight.keys for sight in sights):
        return
    # A weight that is next to nothing moves nothing: the softmax is saturated.
    counts = torch.stack([sight.heavy for sight in sights]).all(0)
    deaf = [(p, int(i)) for p, moved in reach.items() for i in (~(moved[0] > 0) & counts[:, p]).nonzero()]
    if deaf:
        place, position = deaf[0]
        yield Finding(
            "mixing",
            f"Tokens that no mask keeps apart never meet: position {position} does not see token {place}.",
            f"Token {place} was changed, and {sum(p == place for p, _ in deaf)} of {source.length} positions did not "
            "move by one bit; no score is masked.",
            source=bench.scores_line,
            fix="split heads with view(batch, positions, heads, head_dim), then transpose(1, 2).",
        )


def repeat(bench: Bench) -> Iterator[Finding]:
    """Yield where two runs give something else."""
    if isinstance(bench.base.again, RaisedError):
        raise bench.base.again
    if _apart(bench, bench.output_of(bench.base.again)) <= bench.limit:
        return
    apart = _apart(bench, bench.run(seed=bench.runner.seed + 1))
    same = _apart(bench, bench.output_of(bench.returned(first=False)))
    if same > bench.limit:
        buffers = {named.tensor.storage for named in bench.recorded.recording.buffers}
        yield Finding(
            "repeat",
            "A run changes what the next one gives: the module keeps something between calls.",
            f"Two runs in a row on the same input, with the same seed, are {same:.3g} apart.",
            sure=not any(op.inputs[0].storage in buffers for op in _writes(bench)),
        )
    elif apart > bench.limit:
        nothing = "native_dropout", (False,)
        ops = bench.recorded.recording.ops
        drawn = [op for op in ops if op.does("draws") and (op.base_name, op.args[2:3]) != nothing]
        dropout = [op for op in drawn if "dropout" in op.base_name or "bernoulli" in op.base_name]
        where = next(iter(dropout or drawn), None)
        cause, fix = "Random numbers are drawn in eval, and two runs give different outputs.", ""
        if dropout:
            cause = "Dropout is on in eval: two runs give different outputs."
            fix = "pass training=self.training to F.dropout (dropout_p=self.p if self.training else 0.0)."
        yield Finding(
            "repeat",
            cause,
            f"Two runs on the same input with other seeds are {apart:.3g} apart.",
            sure=bool(dropout),
            source=where.source if where else "",
            module=where.module if where else "",
            fix=fix,
        )


def _apart(bench: Bench, output: Tensor) -> float:
    """Return how far an output is from that of the base run."""
    return float(difference(output, bench.output).max())


def training(bench: Bench) -> Iterator[Finding]:
    """Yield where train gives something else than eval, with every dropout set to 0."""
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in bench.module.modules()):
        raise NotPossibleError("batch norm takes other statistics in train")
    enough = _OTHER_KERNELS * bench.limit
    with bench.runner.changed_by(_train_without_dropout):
        row = bench.first_row()
        if row and _apart_from_eval(bench, row)[1] <= enough:
            return
        output, apart = _apart_from_eval(bench, {})  # where rows move each other, one alone gives something else
        if apart <= enough:
            return
        if float(difference(output, bench.run(seed=bench.runner.seed + 1)).max()) > bench.limit:
            raise NotPossibleError("dropout that cannot be set to 0 is drawn in train")
    yield Finding(
        "training",
        f"Train gives something else than eval, and no dropout is on: {apart:.3g} apart.",
        "The same input with the same seed in both modes, every dropout set to 0.",
    )


def _train_without_dropout(module: nn.Module) -> None:
    for part in module.modules():
        part.training = True
        for name, value in list(vars(part).items()):
            drops = "drop" in name.lower() or (isinstance(part, nn.modules.dropout._DropoutNd) and name == "p")
            if drops and isinstance(value, float):
                setattr(part, name, 0.0)


def _apart_from_eval(bench: Bench, row: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    """Return what a run with these inputs gives, and how far it is from what the same rows gave in eval."""
    output = bench.run(row)
    axis = bench.sources[0].batch if row else None
    base = bench.output if axis is None or output.shape == bench.output.shape else bench.output.narrow(axis, 0, 1)
    return output, float(difference(output, base).max())


def causal(bench: Bench) -> Iterator[Finding]:
    """Yield what a causal module sees of its future, and does not see of its past."""
    if bench.intent.causal is None:
        findings = list(_not_as_called(bench))[:1]
        if not findings:
            raise NotPossibleError("not declared: causal")
        yield from findings
    if not bench.intent.causal:
        return
    findings = [f for sight in bench.sights if (f := sight.against_causal(bench.intent.window)) is not None]
    if findings:
        yield findings[0]
        return
    reach = reach_of_tokens(bench) if bench.follows and not bench.failed & {"heads", "masking"} else {}
    for place, moved in reach.items():
        early = (moved[0, :place] > 0).nonzero().flatten().tolist()
        if early:
            yield Finding(
                "causal",
                "A position sees its future, and not by its weights: something else joins the positions.",
                f"Token {place} was changed, and the output at position {early[-1]} moved by "
                f"{float(moved[0, early[-1]]):.3g}; so did {len(early) - 1} more before it.",
                fix="look at norms, convolutions and means over the positions.",
            )
            break
    if not bench.follows and not bench.sights:
        raise NotPossibleError("neither the output nor the scores show who sees whom")


def _not_as_called(bench: Bench) -> Iterator[Finding]:
    """Yield attentions that are called causal, by an argument, their class or a flag of it, and are not."""
    words = ("is_causal", "causal")
    asked = [f"{name} is True" for name in words if bench.values.get(name) is True]
    parts = dict(bench.module.named_modules(remove_duplicate=False))
    for sight in bench.sights:
        part = parts[sight.module]
        called = type(part).__name__
        flags = [f"{called}.{name} is True" for name in reversed(words) if vars(part).get(name) is True]
        who = [*([called] if "causal" in called.lower() else []), *asked, *flags]
        finding = sight.against_causal(bench.intent.window or sight.width) if who else None
        if finding is not None:
            yield replace(finding, evidence=f"{finding.evidence} It is meant to be causal: {who[0]}.")


def window(bench: Bench) -> Iterator[Finding]:
    """Yield what is seen beyond a declared window, or not seen within."""
    width = bench.intent.window
    if width is None:
        raise NotPossibleError("not declared: window")
    if not bench.sights:
        raise NotPossibleError("the scores do not show who sees whom")
    findings = [sight.against_window(width, bench.intent.causal) for sight in bench.sights]
    local = [finding for sight, finding in zip(bench.sights, findings, strict=True) if sight.width is not None]
    if None in findings and len(local) < len(findings) and not any(local):
        return  # some layers have the window, others see everything, as is common
    yield from list(filter(None, findings))[:1]


def scale(bench: Bench) -> Iterator[Finding]:
    """Yield scales that are not 1/√head_dim, where that was declared."""
    if bench.intent.scale is None:
        raise NotPossibleError("not declared: scale")
    for attention, names in bench.recorded.attentions:
        if not attention.is_dot:
            raise NotPossibleError("the scores are additive: there is no dot product that a scale is for")
        wanted = max(names.head_dim, 1) ** -0.5
        if attention.scale is None:
            raise NotPossibleError("the scale is no number that can be read off the run")
        if abs(attention.scale / wanted - 1) > 0.01:
            yield Finding(
                "scale",
                f"The scores are scaled by {scale_words(attention, names)}, and 1/√head_dim is {wanted:.4g}.",
                f"head_dim is {names.head_dim}; what q·kᵀ is multiplied by on the way to the softmax was read off the "
                "run.",
                source=attention.score_product.op.source,
                module=attention.module,
                fix="divide by math.sqrt(head_dim), once.",
            )
            return
