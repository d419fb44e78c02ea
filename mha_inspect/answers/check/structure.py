"""Faults that the axes and numbers of the stages show, read off one recording."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...graph.evaluate import Replay
from ...naming.axes import AxisNames
from ...record.arguments import argument_names, tensors_in
from ...record.ops import Op, Recording, TensorRef
from ...reports.check import Finding
from ...text import listed
from ..masked_rows import fully_masked_rows
from . import evidence
from .bench import Bench, NotPossibleError
from .sight import sights
from .tokens import LostError, Row, Side, Tokens

_WEAK = 1.0
"""A constant of this size or less, put where a mask bars, is no bar."""


def kinds(bench: Bench) -> list[tuple[Attention, AxisNames, int]]:
    """Each kind of attention once, with how many there are. Raises `NotPossibleError` where there is none."""
    found = evidence.kinds(bench.seen)
    if not found:
        raise NotPossibleError("no product, softmax and product with values follow one another")
    return found


def heads(bench: Bench) -> Iterator[Finding]:
    """Yield where heads are split or merged so that tokens are mixed."""
    looked_at = 0
    for found, names, count in kinds(bench):
        tokens = Tokens(bench.flow, found, names)
        more = f" The same in {count} attentions." if count > 1 else ""
        shared = 0
        split: dict[str, list[tuple[str, str]]] = {}
        for name in ("key", "value", "query"):
            try:
                side = tokens.side(name)
                pieces = side.by_piece(side.token(1 if _size(side.tokens) > 1 else 0))
            except LostError:
                continue
            looked_at += 1
            shared = shared or (len(pieces) if name != "query" else 0)
            apart = _apart(pieces)
            if apart is None or (name == "query" and 0 < shared < len(pieces)):
                continue  # beside a key head that they share, query heads may stand in the rows of one product
            start, other, group, row, other_row = apart
            at, end = _splitting(bench, side) or found.score_product.op, side.width - 1
            evidence = (
                f"Changed in one token of {name[0]}_proj: features {start}–{start + end} are position {row} of head "
                f"{group}, features {other}–{other + end} position {other_row} of the same head."
            )
            split.setdefault(at.source, []).append((name, evidence))
        for source, sides in split.items():
            sides.sort(key=lambda one: ("query", "key", "value").index(one[0]))
            yield Finding(
                "heads",
                f"The heads of the {listed([name for name, _ in sides])} are split without transposing: pieces of one "
                "token stand where positions of one head belong, so a head attends within a few tokens alone.",
                sides[0][1] + more,
                source=source,
                module=found.module,
                fix="view(batch, positions, heads, head_dim), then transpose(1, 2).",
            )
        if not split:
            try:
                merged = _merged(tokens)
                looked_at += 1
            except LostError:
                merged = None
            if merged is not None:
                op = bench.seen.recording.producer(found.stages["concat"])
                yield Finding(
                    "heads",
                    merged[0],
                    merged[1] + more,
                    source=op.source if op else "",
                    module=found.module,
                    fix="transpose(1, 2) before the heads are put side by side.",
                )
    if not looked_at:
        raise NotPossibleError("no projection leads to the products by steps that can be computed again")


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _apart(pieces: dict[int, set[Row]]) -> tuple[int, int, int, int, int] | None:
    """Two pieces of one token that are two rows of one group; None where there are none."""
    first: dict[int, tuple[int, int]] = {}
    for start, rows in pieces.items():
        if len({row for _, row in rows}) > 1:
            return None  # neighbours are mixed on purpose, as by a convolution
        for group, row in rows:
            if group in first and first[group][1] != row:
                return first[group][0], start, group, first[group][1], row
            first.setdefault(group, (start, row))
    return None


def _splitting(bench: Bench, side: Side) -> Op | None:
    """The view that splits the heads."""
    tensor: TensorRef = side.target
    last = None
    while (op := bench.seen.recording.producer(tensor)) is not None and tensor.id != side.source.id and op.inputs:
        if op.kind == "view" and len(op.output.shape) > len(op.inputs[0].shape):
            last = op
        tensor = op.inputs[0]
    return last


def _merged(tokens: Tokens) -> tuple[str, str] | None:
    """What is wrong with the rows of concat; None where each has the numbers of one token.

    Raises `LostError` where that cannot be told.
    """
    side = tokens.side("query")
    concat = tokens.found.stages.get("concat")
    if concat is None or tokens.found.branches:
        raise LostError
    total = _size(side.tokens)
    comparable = side.tokens == concat.shape[:-1] and len(set(side.tokens)) == len(side.tokens)
    for number in sorted({0, 1, total // 2, total - 1} & set(range(total))):
        token = side.token(number)
        rows = side.changed(token)
        if len(rows) > tokens.names.num_heads:
            raise LostError  # a token is in several rows of a head on purpose, as with windows that overlap
        made = tokens.concat_rows(rows)
        if len(made) > 1:
            return (
                f"The heads are merged without transposing: the context of one query is spread over {len(made)} tokens "
                "of concat, each of which holds numbers of several queries.",
                f"The context of the query at {list(token)} was changed in all heads, and concat moved at "
                f"{', '.join(str(list(row)) for row in sorted(made)[:4])}{', …' if len(made) > 4 else ''}.",
            )
        if comparable and made and next(iter(made)) != token:
            return (
                "The context comes out at another token than the one that asked: queries change places.",
                f"The context of the query at {list(token)} was changed, and concat moved at {list(next(iter(made)))}.",
            )
    return None


def softmax(bench: Bench) -> Iterator[Finding]:
    """Yield where what the values are averaged with does not sum to one over them."""
    looked_at = 0
    for found, names, count in kinds(bench):
        tokens = Tokens(bench.flow, found, names)
        try:
            weights, over = tokens.weights()
        except LostError:
            continue
        if found.sinks is not None or found.divided is not None or found.mixed_weights or _drops(found):
            continue
        looked_at += 1
        sums = _sums(weights, over)
        if sums is None or weights.shape[over] < 2:
            continue
        lowest, highest = sums
        if abs(lowest - 1) < 0.02 and abs(highest - 1) < 0.02:
            continue
        more = f" The same in {count} attentions." if count > 1 else ""
        other = _sums(weights, -1 if over == -2 else -2)
        through = [op for op in found.weights_path if op.does("scales", "masks", "fills") and op.kind != "view"]
        probs = bench.seen.recording.values.get(found.softmax.output.id)
        evidence = f"What meets the values sums to {lowest:.3g} at the least and {highest:.3g} at the most, row by row."
        if other is not None and max(abs(n - 1) for n in other) < 0.02:
            yield Finding(
                "softmax",
                "The softmax runs over the queries: the weights of a query do not sum to one over its keys.",
                f"{evidence} Over the queries they sum to 1.{more}",
                source=found.softmax.source,
                module=found.module,
                fix="softmax over the keys: dim=-1 of scores that are query by key.",
            )
        elif through and highest < 1.02 and _is_masked(bench, found, through):
            yield Finding(
                "softmax",
                "The mask comes after the softmax: what it bars has taken its part of the weight, and the rest does "
                "not sum to one.",
                evidence + more,
                source=through[-1].source,
                module=found.module,
                fix="mask the scores with -inf before the softmax.",
            )
        elif not through and probs is not None:
            axis = _axis_that_sums(weights)
            yield Finding(
                "softmax",
                f"The softmax runs over {axis}, not over the keys: the weights of a query do not sum to one.",
                evidence + more,
                source=found.softmax.source,
                module=found.module,
                fix="softmax over the keys: dim=-1 of scores that are query by key.",
            )
        else:
            yield Finding(
                "softmax",
                "The weights of a query may be meant not to sum to one: they are changed after the softmax.",
                evidence + more,
                sure=False,
                source=(through or [found.softmax])[-1].source,
                module=found.module,
            )
    yield from lone_softmaxes(bench)
    if not looked_at:
        raise NotPossibleError("the weights meet sinks, a mixing matrix or dropout, or the values without a product")


def lone_softmaxes(bench: Bench) -> Iterator[Finding]:
    """Yield softmaxes between two products that make no attention: of another softmax, or over another axis."""
    recording, graph = bench.seen.recording, bench.seen.graph
    known = {branch.softmax.index for found, _ in bench.seen.attentions for branch in (found, *found.branches)}
    told: set[str] = set()
    for op in recording.ops:
        if not op.does("softmax") or op.index in known or op.source in told:
            continue
        behind = _before(recording, op)
        if behind is not None and behind.does("softmax"):
            told.add(op.source)
            yield Finding(
                "softmax",
                "The softmax is taken twice: the weights are next to equal, whatever the scores are.",
                f"What the softmax at {op.source} is taken of was made by another one, at {behind.source}.",
                source=op.source,
                module=op.module,
                fix="take one of them out.",
            )
        elif behind is not None and graph.product(behind) is not None and _meets_values(bench, op):
            told.add(op.source)
            dim, shape = int(op.args[1]) % len(op.output.shape), op.output.shape
            yield Finding(
                "softmax",
                f"The softmax runs over dimension {dim} of {list(shape)}, and the values are averaged over another: "
                "the weights of a query do not sum to one over its keys.",
                f"It is taken of the product at {behind.source}, and meets the values in a product that sums over "
                "another dimension.",
                source=op.source,
                module=op.module,
                fix="softmax over the keys: dim=-1 of scores that are query by key.",
            )


def _before(recording: Recording, op: Op) -> Op | None:
    """The operation before what is moved, scaled and masked in between."""
    behind = recording.producer(op.inputs[0]) if op.inputs else None
    while behind is not None and behind.inputs and (behind.pointwise or behind.kind != "compute"):
        behind = recording.producer(max(behind.inputs, key=lambda tensor: tensor.numel))
    return behind


def _meets_values(bench: Bench, op: Op) -> bool:
    """Whether what an operation gives meets something else in a product, moved, dropped or masked at most."""
    recording = bench.seen.recording
    queue, seen = [op.output], set()
    while queue:
        tensor = queue.pop()
        for reader in recording.consumers.get(tensor.id, ()):
            if reader.index in seen:
                continue
            seen.add(reader.index)
            if reader.does("product"):
                return bench.seen.graph.product(reader) is not None
            if reader.pointwise or reader.kind != "compute" or reader.does("draws"):
                queue += reader.outputs
    return False


def _drops(found: Attention) -> bool:
    return any(op.does("draws") for op in found.weights_path)


def _sums(weights: Tensor, over: int) -> tuple[float, float] | None:
    """The smallest and the largest sum of rows; None where none is finite. A row of zeros alone has no keys."""
    sums = weights.double().sum(over)
    sums = sums[sums.isfinite() & (weights != 0).any(over)]
    return (float(sums.min()), float(sums.max())) if sums.numel() else None


def _axis_that_sums(weights: Tensor) -> str:
    return "heads or sequences" if weights.dim() < 3 or weights.shape[0] > 1 else "another axis"


def _is_masked(bench: Bench, found: Attention, through: list[Op]) -> bool:
    """Whether one of these operations multiplies by zeros and ones, or fills in zeros, whatever the weights are."""
    recording = bench.seen.recording
    for op in through:
        for tensor in op.inputs:
            value = recording.values.get(tensor.id)
            if value is None or value.numel() < 2 or not _is_zero_one(value):
                continue
            if not evidence.between(recording, {found.softmax.output.id}, tensor):
                return True
    return False


def masking(bench: Bench) -> Iterator[Finding]:
    """Yield masks that leave weight where they bar: scores multiplied by a mask, or filled with a small number."""
    for sight in sights(bench):
        if sight.masked and not bool(sight.seen.any()):
            yield Finding(
                "masking",
                "The mask bars every key to every query: the weights are what they are without scores, or NaN.",
                f"Of {sight.seen.numel()} pairs of a query and a key not one is left, with the mask that was given.",
                source=sight.line,
                module=sight.module,
                fix="turn the mask round, or give it the other way round.",
            )
            return
    for found, _, count in kinds(bench):
        more = f" The same in {count} attentions." if count > 1 else ""
        for op in found.masks:
            values = [bench.seen.recording.values.get(tensor.id) for tensor in op.inputs]
            if op.does("fills_where"):
                number = _filled(op, values)
                bars = next((v for v in values if v is not None and v.dtype == torch.bool), None)
                bars = ~bars if bars is not None and op.base_name == "where" and op.inputs[-1].numel > 1 else bars
                if number is not None and 0 < abs(number) <= _WEAK and _weighs(bench, found, bars):
                    yield Finding(
                        "masking",
                        f"The mask fills in {number:.3g}, which bars nothing: a barred key keeps a weight like any "
                        "other.",
                        f"exp({number:.3g}) is {torch.tensor(number).exp():.3g}; a bar is -inf, or -1e9.{more}",
                        source=op.source,
                        module=found.module,
                        fix="masked_fill(mask, float('-inf')).",
                    )
            elif op.base_name.rstrip("_") == "mul":
                mask = next((v for v in values if v is not None and v.numel() > 1 and _is_zero_one(v)), None)
                if mask is not None and not bool((mask == 1).all()) and _weighs(bench, found, mask == 0):
                    yield Finding(
                        "masking",
                        "The scores are multiplied by the mask: a barred key gets the score 0, not -inf, and keeps its "
                        "weight.",
                        f"{int((mask == 0).sum())} of {mask.numel()} factors are 0 before the softmax.{more}",
                        source=op.source,
                        module=found.module,
                        fix="masked_fill(mask == 0, float('-inf')).",
                    )
            elif op.base_name.rstrip("_") in ("add", "sub", "baddbmm"):
                weak = _weak_bar(values)
                if weak:
                    yield Finding(
                        "masking", weak, f"It is added before the softmax.{more}", source=op.source, module=found.module
                    )


def _weighs(bench: Bench, found: Attention, bars: Tensor | None) -> bool:
    """Whether weight is left where a mask bars; where that is not known, it is."""
    weights = bench.seen.recording.values.get(found.softmax.output.id)
    if bars is None or weights is None:
        return True
    try:
        return bool((weights * bars.expand(weights.shape)).amax() > 1e-6)
    except RuntimeError:  # laid out otherwise
        return True


def _is_zero_one(value: Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def _filled(op: Op, values: list[Tensor | None]) -> float | None:
    """The one number that is put where a mask says; None where it is none."""
    if op.base_name.startswith("masked_fill"):
        if len(op.args) > 2 and isinstance(op.args[2], (int, float)):
            return float(op.args[2])
        last = values[-1] if len(values) > 2 else None
        return float(last) if last is not None and last.numel() == 1 else None
    single = [v for v in values if v is not None and v.numel() == 1 and v.dtype != torch.bool]
    numbers = [float(a) for a in op.args[1:] if isinstance(a, (int, float)) and not isinstance(a, bool)]
    return float(single[0]) if single else numbers[0] if numbers else None


def _weak_bar(values: list[Tensor | None]) -> str:
    """What is wrong with a mask of zeros and one other number that is added; empty where nothing is."""
    for value in values:
        if value is None or value.numel() < 4 or not value.is_floating_point():
            continue
        known = torch.unique(value.detach().float())
        if len(known) == 2 and 0.0 in known.tolist():
            number = next(n for n in known.tolist() if n)
            if 0 < abs(number) < 1e-3:
                return f"The mask adds {number:.3g} where it bars, which changes no weight."
            if number == 1.0:
                return "The mask is added as zeros and ones: it bars nothing, and what it marks gains weight."
    return ""


def grouped(bench: Bench) -> Iterator[Finding]:
    """Yield where shared key heads are given to other query heads than those of their group."""
    looked_at = 0
    for found, names, count in kinds(bench):
        if names.num_kv_heads == 1 and names.num_heads == 1:
            continue
        tokens = Tokens(bench.flow, found, names)
        try:
            read = {name: _heads_read(tokens.side(name)) for name in ("query", "key", "value")}
        except LostError:
            continue
        query, key, value = read["query"], read["key"], read["value"]
        if query is None or key is None or value is None or not (query.keys() == key.keys() == value.keys()):
            continue
        heads, kv, values = (len(set(one.values())) for one in (query, key, value))
        if heads != len(query) or kv != values or kv in (1, heads) or heads % kv:
            continue
        looked_at += 1
        order = [group for group, _ in sorted(query.items(), key=lambda item: item[1])]
        reads = [key[group] for group in order]
        means = [place // (heads // kv) for place in range(heads)]
        more = f" The same in {count} attentions." if count > 1 else ""
        tiled = [place % kv for place in range(heads)]
        told = f"Query heads 0–{heads - 1} read key heads {', '.join(map(str, reads))}"
        if [value[group] for group in order] != reads:
            yield Finding(
                "grouped",
                "A query head takes its values from another head than its keys.",
                f"{told}, and value heads {', '.join(str(value[group]) for group in order)}.{more}",
                source=found.value_product.op.source,
                module=found.module,
            )
        elif reads != means:
            yield Finding(
                "grouped",
                "The shared key heads are repeated in the wrong order: "
                + ("one after the other (repeat, expand in front)" if reads == tiled else "in an order of its own")
                + f", so query head 1 reads key head {reads[1]}, and a group of {heads // kv} neighbours should share "
                "one. Weights that were trained as Llama's or torch's are met by the wrong heads.",
                f"{told}; in groups it is {', '.join(map(str, means))}.{more}",
                source=found.score_product.op.source,
                module=found.module,
                fix="repeat_interleave(group, dim=1), or expand behind the heads.",
            )
    if not looked_at:
        raise NotPossibleError("no key heads are shared, or it cannot be told which")


def _heads_read(side: Side) -> dict[int, int] | None:
    """Group of the product to the head of a projection that it reads, by one token; None where that is not one each."""
    pieces = side.by_piece(side.token(0))
    found: dict[int, int] = {}
    for place, rows in enumerate(pieces.values()):
        for group, _ in rows:
            if group in found:
                return None
            found[group] = place
    return found or None


def finite(bench: Bench) -> Iterator[Finding]:
    """Yield the first stage that is not finite."""
    given = argument_names(bench.module, bench.own.args, bench.own.kwargs)
    for name, tensor in tensors_in(given):
        if tensor.is_floating_point() and "mask" not in name and bool(tensor.isnan().any()):
            raise NotPossibleError(f"the argument {name} has NaN in it")
    replay = Replay(bench.seen.recording, bench.own.leaves(bench.seen.recording))
    rows = fully_masked_rows(bench.seen, replay)
    for (found, _), masked in zip(bench.seen.attentions, rows, strict=True):
        for stage, made in found.stages.items():
            nan, infinite = bench.evidence.unfinite.get(made.id, (0, 0))
            infinite = 0 if stage == "masked_scores" else infinite
            if not nan and not infinite:
                continue
            op = bench.seen.recording.producer(made)
            if nan and masked:
                row, query = masked[0]
                yield Finding(
                    "finite",
                    f"A query to which no key is left gives NaN, first in {stage}.",
                    f"Every key is barred to query {query} of row {row}"
                    + (f", and to {len(masked) - 1} more" if len(masked) > 1 else "")
                    + f"; {nan} of {made.numel} numbers are NaN.",
                    source=op.source if op else "",
                    module=found.module,
                    fix="leave each query a key, or set the weights of such rows to zero.",
                )
            elif infinite and made.dtype in ("float16", "bfloat16") and stage in ("scores", "masked_scores"):
                yield Finding(
                    "finite",
                    f"The {stage} overflow in {made.dtype}: {infinite} of {made.numel} are infinite.",
                    f"The largest number of this dtype is {torch.finfo(getattr(torch, made.dtype)).max:.3g}.",
                    source=op.source if op else "",
                    module=found.module,
                    fix="scale the queries before the product, or compute the scores in float32.",
                )
            else:
                yield Finding(
                    "finite",
                    f"{stage} is the first stage that is not finite: {nan} NaN and {infinite} infinite of "
                    f"{made.numel}.",
                    "Every argument is finite.",
                    source=op.source if op else "",
                    module=found.module,
                )
            return
    yield from _too_large_for_half(bench)
    if not bool(bench.output.isfinite().all()):
        yield Finding(
            "finite",
            "The output is not finite, and every stage of attention is.",
            f"{int((~bench.output.isfinite()).sum())} of {bench.output.numel()} numbers.",
        )


def _too_large_for_half(bench: Bench) -> Iterator[Finding]:
    """Yield products of queries and keys that float16 has no number for."""
    largest = torch.finfo(torch.float16).max
    for found, _, count in evidence.kinds(bench.seen):
        op = found.score_product.op
        value = bench.seen.recording.values.get(op.output.id)
        if value is None or value.dtype not in (torch.float32, torch.float64) or not value.numel():
            continue
        size = float(value.abs().max())
        if largest < size < float("inf"):
            yield Finding(
                "finite",
                f"In float16 the scores would overflow: the largest product of a query and a key is {size:.3g}.",
                f"The largest number of float16 is {largest:.3g}; in {op.output.dtype} the product is finite."
                + (f" The same in {count} attentions." if count > 1 else ""),
                sure=False,
                source=op.source,
                module=found.module,
                fix="scale the queries before the product, or compute the scores in float32.",
            )


def kernels(bench: Bench) -> Iterator[Finding]:
    """Yield fused kernels whose own steps give something else."""
    ran = bench.seen.recording.kernels
    if not ran:
        raise NotPossibleError("no fused kernel ran")
    for place, kernel in enumerate(ran):
        check = kernel.check
        if check is not None and check.verdict == "differs" and check.difference > 1e-3:
            op = next((op for op in bench.seen.recording.ops if op.kernel == place), None)
            yield Finding(
                "kernels",
                f"{kernel.title} gives something else than its own steps: {check.difference:.3g} apart.",
                f"That is {check.times:.3g} times its rounding error.",
                sure=False,
                source=op.source if op else "",
                module=op.module if op else "",
            )
