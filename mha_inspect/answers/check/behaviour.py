"""Faults that show when the module is run again with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...record.arguments import argument_names, tensors_in
from ...record.ops import Op
from ...reports.check import Finding
from .bench import Bench, NotPossibleError, RaisedError, difference, modules_of
from .sight import sights

_OTHER_KERNELS = 20.0
"""Train may take other kernels than eval, which round otherwise: so many times what counts within one."""


def inputs(bench: Bench) -> Iterator[Finding]:
    """Yield arguments that the forward wrote into."""
    _ = bench.seen
    before = dict(tensors_in(argument_names(bench.module, *bench.arguments({}))))
    told = set()
    for known, tensor in tensors_in(argument_names(bench.module, *bench.after)):
        if tensor.shape == before[known].shape and not torch.equal(tensor.nan_to_num(), before[known].nan_to_num()):
            if id(tensor) in told or known.split(".")[0] == bench.intent.cache:
                continue
            told.add(id(tensor))
            yield Finding(
                "inputs",
                f"The forward writes into its argument {known}.",
                f"{int((tensor != before[known]).sum())} of {tensor.numel()} numbers are others after the run.",
                sure=tensor.is_floating_point() and "mask" not in known and "cache" not in known,
                source=_written(bench, known),
                fix="write into a copy: x = x + ..., not x += ....",
            )


def _written(bench: Bench, name: str) -> str:
    """The line that writes into an argument."""
    storages = {named.tensor.storage for named in bench.seen.recording.inputs if named.name == name}
    ops = bench.seen.recording.ops
    return next((op.source for op in ops if op.kind == "write" and op.inputs and op.inputs[0].storage in storages), "")


def _with_more_rows(bench: Bench) -> Bench | None:
    """The same with two rows, where there is one; None where it cannot be run so."""
    source = bench.sources[0]
    axis = source.batch
    if axis is None:
        return None
    changes = {}
    for name, value in bench.values.items():
        if isinstance(value, Tensor) and value.dim() > axis and value.dim() > 1 and value.shape[axis] == 1:
            changes[name] = torch.cat([value, value], dim=axis)
    try:
        args, kwargs = bench.arguments(changes)
        wider = Bench(replace(bench.own, args=args, kwargs=kwargs, without_ones=None), bench.intent)
        wider.plain_output()
    except (RaisedError, NotPossibleError):
        return None
    return wider


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
        wider = _with_more_rows(bench)
        if wider is None:
            raise NotPossibleError("there is one row, and the module does not run with two: give a batch of 2")
        first = wider.sources[0]
        made = wider.run(wider.other_tokens(first, first.at(0, 0)))
        bench.runs += wider.runs
        yield from _leaks(bench, {0: wider.moved(made, wider.plain_output())}, source.names)
        return
    found = bench.reach
    leaked = False
    for finding in _leaks(bench, found, source.names):
        leaked = True
        yield finding
    for place, moved in bench.reach_of_others.items() if not leaked else ():
        other = bench.sources[place]
        yield from _leaks(bench, {other.length // 2: moved}, other.names)


def _leaks(bench: Bench, reach: dict[int, Tensor], names: tuple[str, ...]) -> Iterator[Finding]:
    leaks = {place: moved for place, moved in reach.items() if moved.shape[0] > 1 and bool((moved[1:] > 0).any())}
    if not leaks:
        return
    place, moved = next(iter(leaks.items()))
    rows, columns = (moved[1:] > 0).nonzero(as_tuple=True)
    row, position = int(rows[0]) + 1, int(columns[0])
    own = moved[0].clone()
    if place < own.numel():
        own[place] = 0
    alone = not bool((own > 0).any())
    axis, who = bench.batch_axis
    mixes = all(
        not bool((m[:, [p for p in range(m.shape[1]) if p != at]] > 0).any())
        for at, m in reach.items()
        if at < m.shape[1]
    )
    others = int((moved[1:].amax(1) > 0).sum())
    evidence = (
        f"Token {place} of row 0 of {names[0]} was changed, and the output of row {row} moved at position {position} "
        f"by {float(moved[row, position]):.3g}; {others} of {moved.shape[0] - 1} other rows moved."
    )
    own_keys = names == bench.sources[0].names
    remembers = own_keys and any(sight.queries == bench.sources[0].length < sight.keys for sight in sights(bench))
    if mixes and alone and reach and bench.follows:
        sure = bool(who)
        yield Finding(
            "batch",
            "Attention runs over the batch, not over the positions: rows move each other, and the tokens of a row do "
            "not."
            if sure
            else f"Attention may run over the batch: dimension {axis} of the input is mixed, and dimension {1 - axis} "
            "is not. It is right where the sequence comes first; say so with batch_axis.",
            evidence,
            sure=sure,
            source=_line(bench),
            fix="transpose(0, 1) before and after, or batch_first=True." if sure else "",
        )
        return
    yield Finding(
        "batch",
        "A row of the batch moves the output of another row"
        + (": it may be meant, where keys beside the row's own are a memory that rows share." if remembers else "."),
        evidence,
        sure=not remembers,
        source=_line(bench),
        fix="keep the batch apart: look at each view, repeat and mask that joins it with heads or positions.",
    )


def _line(bench: Bench) -> str:
    found = bench.seen.attentions
    return found[0][0].score_product.op.source if found else ""


def mixing(bench: Bench) -> Iterator[Finding]:
    """Yield where tokens never meet although nothing keeps them apart."""
    if not bench.follows or bench.sources[0].length < 2:
        raise NotPossibleError("the output has no place for each token")
    source = bench.sources[0]
    reach = {place: bench.apart_of(place) for place in bench.reach}
    others = {p: [i for i in range(m.shape[1]) if i != p] for p, m in reach.items()}
    if not any(bool((reach[p][0, others[p]] > 0).any()) for p in reach):
        if any(bool((m[1:] > 0).any()) for m in reach.values()):
            return  # the check of the batch tells that
        if any(bool((moved[0] > 0).any()) for moved in bench.reach_of_others.values()):
            return  # the keys are of another source
        single = all(sight.alone for sight in sights(bench))
        yield Finding(
            "mixing",
            "No token moves another: attention runs over heads or features, not over positions, or nothing is made of "
            "it.",
            f"Tokens {', '.join(map(str, reach))} of {source.names[0]} were changed one by one, and no other position "
            "of the output moved, by one bit.",
            sure=not single,
            source=_line(bench),
            fix="positions must be the last but one dimension of q, k, v: transpose(1, 2) after the heads are split.",
        )
        return
    every = sights(bench)
    if not every or not all(sight.open and sight.queries == source.length == sight.keys for sight in every):
        return
    # A weight that is next to nothing moves nothing: the softmax is saturated.
    counts = torch.stack([sight.heavy for sight in every]).all(0)
    deaf = [(p, i) for p, m in reach.items() for i in range(m.shape[1]) if not bool(m[0, i] > 0) and bool(counts[i, p])]
    if deaf:
        place, position = deaf[0]
        yield Finding(
            "mixing",
            f"Tokens that no mask keeps apart never meet: position {position} does not see token {place}.",
            f"Token {place} was changed, and {sum(p == place for p, _ in deaf)} of {source.length} positions did not "
            "move by one bit; no score is masked.",
            source=_line(bench),
            fix="split heads with view(batch, positions, heads, head_dim), then transpose(1, 2).",
        )


def repeat(bench: Bench) -> Iterator[Finding]:
    """Yield where two runs give something else."""
    if bench.raised_again is not None:
        raise bench.raised_again
    if bench.evidence.again is not None:
        apart = float(difference(bench.output_of(bench.evidence.again), bench.output).max())
        if apart <= bench.limit:
            return
    again = bench.run(seed=(bench.own.seed or 0) + 1)
    same = float(difference(bench.output_of(bench.returned(first=False)), bench.output).max())
    if same > bench.limit:
        buffers = any(op.kind == "write" and op.inputs[0].storage in _buffers(bench) for op in bench.seen.recording.ops)
        yield Finding(
            "repeat",
            "A run changes what the next one gives: the module keeps something between calls.",
            f"Two runs in a row on the same input, with the same seed, are {same:.3g} apart.",
            sure=not buffers,
        )
        return
    apart = float(difference(again, bench.output).max())
    if apart <= bench.limit:
        return
    drawn = [op for op in bench.seen.recording.ops if op.does("draws") and not _keeps_all(op)]
    dropout = [op for op in drawn if "dropout" in op.base_name or "bernoulli" in op.base_name]
    where = next(iter(dropout or drawn), None)
    yield Finding(
        "repeat",
        "Dropout is on in eval: two runs give different outputs."
        if dropout
        else "Random numbers are drawn in eval, and two runs give different outputs.",
        f"Two runs on the same input with other seeds are {apart:.3g} apart.",
        sure=bool(dropout),
        source=where.source if where else "",
        module=where.module if where else "",
        fix="pass training=self.training to F.dropout (dropout_p=self.p if self.training else 0.0)." if dropout else "",
    )


def _buffers(bench: Bench) -> set[int]:
    """The storages of the module's buffers."""
    return {named.tensor.storage for named in bench.seen.recording.buffers}


def _keeps_all(op: Op) -> bool:
    """Whether a dropout drops nothing."""
    return op.base_name == "native_dropout" and op.args[2:3] == (False,)


def training(bench: Bench) -> Iterator[Finding]:
    """Yield where train gives something else than eval, with every dropout set to 0."""
    if modules_of(bench.module, nn.modules.batchnorm._BatchNorm):
        raise NotPossibleError("batch norm takes other statistics in train")
    changed: list[tuple[nn.Module, str, float]] = []
    bench.restore()
    try:
        for part in bench.module.modules():
            part.training = True
            for name, value in list(vars(part).items()):
                drops = "drop" in name.lower() or (isinstance(part, nn.modules.dropout._DropoutNd) and name == "p")
                if drops and isinstance(value, float) and value:
                    changed.append((part, name, value))
        for part, name, _ in changed:
            setattr(part, name, 0.0)
        bench.remember()
        row = bench.first_row()
        if row and _apart_from_eval(bench, row)[1] <= _OTHER_KERNELS * bench.limit:
            return
        made, apart = _apart_from_eval(bench, {})  # where rows move each other, one alone gives something else
        if apart <= _OTHER_KERNELS * bench.limit:
            return
        other = bench.run({}, seed=(bench.own.seed or 0) + 1)
        if float(difference(made, other).max()) > bench.limit:
            raise NotPossibleError("dropout that cannot be set to 0 is drawn in train")
    finally:
        bench.restore()
        for part, name, given in changed:
            setattr(part, name, given)
        for part in bench.module.modules():
            part.training = False
        bench.remember()
    yield Finding(
        "training",
        f"Train gives something else than eval, and no dropout is on: {apart:.3g} apart.",
        "The same input with the same seed in both modes, every dropout set to 0.",
    )


def _apart_from_eval(bench: Bench, row: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    """Return what a run with these inputs gives, and how far it is from what the same rows gave in eval."""
    made = bench.run(row)
    axis = bench.sources[0].batch if row else None
    base = bench.output if axis is None or made.shape == bench.output.shape else bench.output.narrow(axis, 0, 1)
    return made, float(difference(made, base).max())


def causal(bench: Bench) -> Iterator[Finding]:
    """Yield what a causal module sees of its future, and does not see of its past."""
    if bench.intent.causal is None:
        found = list(_not_as_called(bench))
        yield from found
        if not found:
            raise NotPossibleError("not declared: causal")
        return
    if not bench.intent.causal:
        return
    for sight in sights(bench):
        problem = sight.against_causal(window=bench.intent.window)
        if problem is not None:
            yield Finding("causal", problem[0], problem[1], source=sight.line, module=sight.module, fix=problem[2])
            return
    for place, moved in bench.reach.items() if bench.follows and not bench.found & {"heads", "masking"} else ():
        early = [i for i in range(place) if bool(moved[0, i] > 0)]
        if early:
            yield Finding(
                "causal",
                "A position sees its future, and not by its weights: something else joins the positions.",
                f"Token {place} was changed, and the output at position {max(early)} moved by "
                f"{float(moved[0, max(early)]):.3g}; so did {len(early) - 1} more before it.",
                fix="look at norms, convolutions and means over the positions.",
            )
            break
    if not bench.follows and not sights(bench):
        raise NotPossibleError("neither the output nor the scores show who sees whom")


def _not_as_called(bench: Bench) -> Iterator[Finding]:
    """Yield an attention that is called causal, by its class, a flag of it, or an argument, and is not."""
    asked = next((name for name in ("is_causal", "causal") if bench.values.get(name) is True), None)
    for sight in sights(bench):
        part = bench.module.get_submodule(sight.module)
        flag = next((name for name in ("causal", "is_causal") if vars(part).get(name) is True), None)
        called = "causal" in type(part).__name__.lower()
        if asked is None and flag is None and not called:
            continue
        problem = sight.against_causal(window=bench.intent.window or sight.width)
        if problem is not None:
            who = f"{asked} is True" if asked else f"{type(part).__name__}.{flag} is True" if flag else "its class says"
            yield Finding(
                "causal",
                problem[0],
                f"{problem[1]} It is meant to be causal: {who if not called else type(part).__name__}.",
                source=sight.line,
                module=sight.module,
                fix=problem[2],
            )
            return


def window(bench: Bench) -> Iterator[Finding]:
    """Yield what is seen beyond a declared window, or not seen within."""
    width = bench.intent.window
    if width is None:
        raise NotPossibleError("not declared: window")
    every = sights(bench)
    if not every:
        raise NotPossibleError("the scores do not show who sees whom")
    wrong = [
        (sight, problem) for sight in every if (problem := sight.against_window(width, bench.intent.causal)) is not None
    ]
    local = [sight for sight in every if sight.width is not None]
    if (
        wrong
        and len(wrong) < len(every)
        and len(local) < len(every)
        and all(s.against_window(width, bench.intent.causal) is None for s in local)
    ):
        return  # some layers have the window, others see everything, as is common
    for sight, problem in wrong[:1]:
        yield Finding("window", problem[0], problem[1], source=sight.line, module=sight.module)


def scale(bench: Bench) -> Iterator[Finding]:
    """Yield scales that are not 1/√head_dim, where that was declared."""
    if bench.intent.scale is None:
        raise NotPossibleError("not declared: scale")
    for found, names in bench.seen.attentions:
        wanted = max(names.head_dim, 1) ** -0.5
        if found.scale is None:
            raise NotPossibleError("the scale is no number that can be read off the run")
        if abs(found.scale / wanted - 1) > 0.01:
            from .facts import scale_words

            yield Finding(
                "scale",
                f"The scores are scaled by {scale_words(found, names)}, and 1/√head_dim is {wanted:.4g}.",
                f"head_dim is {names.head_dim}; what q·kᵀ is multiplied by on the way to the softmax was read off the "
                "run.",
                source=found.score_product.op.source,
                module=found.module,
                fix="divide by math.sqrt(head_dim), once.",
            )
            return
