"""What padding masks, caches and a reference show: checks of what somebody declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...naming.canonical import contents_of
from ...naming.stages import STAGES
from ...reports.check import Finding
from .bench import Bench, NotPossibleError, RaisedError, Source, difference
from .masks import mask_faults
from .sight import sights

_CACHES = ("past_key_values", "past_key_value", "layer_past", "past", "kv_cache", "cache", "past_kv", "caches")
"""Names of arguments that take what the forward returned second."""
_LOOSE = 100.0
"""Results at other sizes are rounded otherwise: so many times what counts at the same sizes."""


def padding(bench: Bench) -> Iterator[Finding]:
    """Yield where padding moves real outputs, or its mask means the opposite of what was declared."""
    found = list(mask_faults(bench))
    yield from found
    name = bench.intent.padding
    if name is None and not found:
        raise NotPossibleError("not declared: padding")
    if name is None or any(finding.sure for finding in found):
        return
    bench.require(name)
    if not bench.sources or not bench.follows or bench.sources[0].batch is None:
        raise NotPossibleError("the output has no place for each token of each row")
    source = _padded_source(bench, name)
    if source.length < 3:
        raise NotPossibleError("there are fewer than 3 tokens: give more")
    side = bench.intent.padding_side or "right"
    count = max(min(2, source.length - 2), source.length // 4)
    pads = slice(source.length - count, None) if side == "right" else slice(0, count)
    real = slice(0, source.length - count) if side == "right" else slice(count, None)
    padded = torch.zeros(source.rows, source.length, dtype=torch.bool)
    padded[0::2, pads] = True
    told = bench.intent.padding_true
    tries = [told == "keep"] if told else [True, False]
    made = None
    for keeps in tries:
        made = _under(bench, name, source, padded, keeps, real)
        if not made["leaks"] and not made["dead"]:
            break
    assert made is not None
    mask, base = made["mask"], made["base"]
    own = source is bench.sources[0]
    start = 0 if real.start is None else real.start
    if bool(base[_rows(bench, 0, real if own else slice(None))].isnan().any()):
        yield Finding(
            "padding",
            "Padding gives NaN at real tokens.",
            f"The {'last' if side == 'right' else 'first'} {count} tokens of row 0 were padded with {name}.",
            source=_mask_line(bench),
        )
        return
    meaning = f"{name} with True or 1 for {'keep' if (told or 'keep') == 'keep' else 'ignore'}"
    if made["dead"]:
        yield Finding(
            "padding",
            f"The mask works the other way round: what {name} keeps is barred"
            + (", and what it ignores is seen." if made["leaks"] else "."),
            f"With {meaning}, a real token of row 0 was changed, and no other real output moved by one bit"
            + (f"; padding was changed, and they moved by {made['leaks']:.3g}." if made["leaks"] else "."),
            source=_mask_line(bench),
            fix=f"turn the mask round where it is applied (~{name}), or say what it means otherwise.",
        )
        return
    if made["leaks"]:
        yield Finding(
            "padding",
            "The content of padding moves real outputs" + ("." if told else ", whichever value of the mask ignores."),
            f"With {meaning}, the {'last' if side == 'right' else 'first'} {count} tokens of row 0 were padded and "
            f"changed, and a real output moved by {made['leaks']:.3g}.",
            source=_mask_line(bench),
            fix="the mask belongs to the keys: mask[:, None, None, :] beside batch heads query key.",
        )
        return
    if made["others"]:
        yield Finding(
            "padding",
            "The mask of one row bars keys of another row.",
            made["others"],
            source=_mask_line(bench),
            fix="repeat the mask in the order in which batch and heads are folded: repeat_interleave(heads, 0) for "
            "(batch heads).",
        )
        return
    try:
        short = _cropped(bench, name, source, mask, real)
    except RaisedError as error:
        bench.aside("padding", f"its length: the forward does not take the row without it ({error})")
        return
    before = base[_rows(bench, 0, real)] if own else base[_rows(bench, 0, slice(None))]
    after = short[_rows(bench, 0, slice(None))]
    apart = float(difference(after, before).max())
    if apart > _LOOSE * bench.limit:
        yield Finding(
            "padding",
            f"{'The side' if side == 'left' else 'The length'} of the padding moves real outputs, by {apart:.3g}.",
            f"Row 0 with {count} tokens of padding on the {side} gives something else at tokens {start}–"
            f"{start + source.length - count - 1} than without it; the padding's content moves nothing.",
            source=_mask_line(bench),
            fix="count positions from the first real token: position_ids = mask.cumsum(-1) - 1."
            if side == "left"
            else "",
        )


def _padded_source(bench: Bench, name: str) -> Source:
    given = bench.values.get(name)
    sources = [source for source in bench.sources if source.positions is not None]
    if isinstance(given, Tensor):
        for source in sources:
            if given.shape[-1] == source.length:
                return source
    if len(sources) > 1 and any(word in name for word in ("encoder", "memory", "key", "src", "context")):
        return sources[1]
    return sources[0]


def _rows(bench: Bench, row: int, positions: slice) -> tuple[Any, ...]:
    return bench.sources[0].at(row, positions)[: bench.output.dim()]


def mask_like(given: Any, padded: Tensor, keeps: bool) -> Tensor:
    """A mask as the forward takes it, of `batch key` where True is padded."""
    kept = ~padded
    if isinstance(given, Tensor) and given.is_floating_point() and bool((given <= 0).all()) and given.dim() > 2:
        value = torch.zeros(padded.shape, dtype=given.dtype).masked_fill(padded, torch.finfo(given.dtype).min)
    else:
        value = kept if keeps else padded
        dtype = given.dtype if isinstance(given, Tensor) else torch.bool
        value = value.to(dtype)
    if isinstance(given, Tensor):
        value = value.to(given.device)
        if given.dim() == 2 and given.shape == padded.shape[::-1] and given.shape != padded.shape:
            value = value.T
        while value.dim() < given.dim():
            value = value.unsqueeze(1)
        if given.dim() > 2:
            value = value.expand(value.shape[0], *given.shape[1:-2], given.shape[-2], value.shape[-1]).contiguous()
    return value


def _under(bench: Bench, name: str, source: Source, padded: Tensor, keeps: bool, real: slice) -> dict[str, Any]:
    """What moves under a mask: real outputs by padding, and by real tokens."""
    given = bench.values.get(name)
    mask = mask_like(given, padded, keeps)
    try:
        base = bench.run({name: mask})
    except RaisedError:
        if given is not None:
            raise
        mask = mask.long()
        base = bench.run({name: mask})
    own = source is bench.sources[0]
    places = torch.arange(source.length)[real] if own else torch.arange(bench.sources[0].length)
    index = source.at(0, torch.arange(source.length)[padded[0]])
    with_pads = bench.run({name: mask, **bench.other_tokens(source, index, by=6.0)})
    moved = bench.moved(with_pads, base)
    leaks = float(moved[0, places].max())
    first = int(torch.arange(source.length)[real][0])
    with_real = bench.run({name: mask, **bench.other_tokens(source, source.at(0, first))})
    apart = bench.apart(with_real, base)[0]
    rest = [int(p) for p in places if not own or int(p) != first]
    dead = not bool((apart[rest] > 0).any())
    pads = [int(place) for place in torch.arange(source.length)[padded[0]]]
    behind = own and len(pads) > 1 and pads[0] > first
    if behind and not dead and not leaks and not bool((apart[pads] > 0).any()):
        # Behind a causal mask real tokens see no padding; what padding sees tells the mask's direction.
        of_pad = bench.run({name: mask, **bench.other_tokens(source, source.at(0, pads[0]))})
        dead = bool((bench.apart(of_pad, base)[0, pads[1:]] > 0).any())
    others = ""
    if own and source.rows > 1 and not dead and not leaks:
        # Row 1 has no padding: where row 0 is padded it has real tokens.
        place = int(torch.arange(source.length)[padded[0]][0])
        again = bench.run({name: mask, **bench.other_tokens(source, source.at(1, place))})
        far = bench.apart(again, base)[1]
        far[place] = 0
        later = bool((far > 0).any())
        open_there = bool(
            (bench.apart(bench.run(bench.other_tokens(source, source.at(1, place))), bench.output)[1] > 0).sum() > 1
        )
        if not later and open_there:
            others = (
                f"Token {place} of row 1, where row 0 alone is padded, was changed, and no other output of row 1 "
                "moved; without padding they do."
            )
        elif bool((moved[1:] > 0).any()):
            others = "Padding of row 0 was changed, and outputs of another row moved."
    return {"mask": mask, "base": base, "leaks": leaks, "dead": dead, "others": others}


def _cropped(bench: Bench, name: str, source: Source, mask: Tensor, real: slice) -> Tensor:
    """The output of row 0 alone, without its padding."""
    changes: dict[str, Any] = {}
    length, rows = source.length, source.rows
    for own, value in bench.values.items():
        value = mask if own == name else value
        if not isinstance(value, Tensor):
            continue
        changes[own] = value
        if own in source.names:
            changes[own] = value[source.at(slice(0, 1), real)]
            continue
        sizes = list(value.shape)
        index: list[Any] = [slice(None)] * value.dim()
        if sizes and sizes[0] == rows and value.dim() > 1 and not (value.dim() == 2 and sizes == [length, length]):
            index[0] = slice(0, 1)
        if bench.sources[0] is source or own == name:
            for place, size in enumerate(sizes):
                if size == length and (place > 0 or sizes == [length, length]) and place >= value.dim() - 2:
                    index[place] = real
        other = next((s for s in bench.sources if own in s.names), None)
        if other is not None:
            index = list(other.at(slice(0, 1), slice(None)))
        changes[own] = value[tuple(index)]
    if name not in changes:
        changes[name] = mask[:1, ..., real] if mask.dim() > 1 else mask[real]
    return bench.run(changes)


def _mask_line(bench: Bench) -> str:
    for found, _ in bench.seen.attentions:
        if found.masks:
            return found.masks[0].source
    return bench.seen.attentions[0][0].score_product.op.source if bench.seen.attentions else ""


def cache(bench: Bench) -> Iterator[Finding]:
    """Yield where going on from a cache gives something else than going in one go."""
    told = bench.intent.cache
    name = told or _cache_name(bench)
    if name is None:
        raise NotPossibleError("not declared: cache")
    bench.require(name)
    if not bench.sources or not bench.follows or bench.sources[0].length < 3:
        raise NotPossibleError("the output has no place for each of 3 tokens or more")
    length = bench.sources[0].length
    half = length // 2
    singles = [(0, length - 3 if length > 16 else 1)]
    singles += [(at, at + 1) for at in range(singles[0][1], length)]
    limit = _LOOSE * bench.limit
    results = {}
    # Where nobody declared the cache it costs little to look.
    only = bench.first_row() if told is None else {}
    batch = bench.sources[0].batch
    base = bench.output.narrow(batch, 0, 1) if only and batch is not None else bench.output
    for how, steps in (("chunks", [(0, half), (half, length)]), ("token by token", singles)):
        if how != "chunks" and told is None:
            break
        try:
            made = _stepwise(bench, name, steps, {**bench.values, **only})
        except RaisedError as error:
            if told is None:
                raise NotPossibleError("not declared: cache") from error
            yield Finding(
                "cache",
                f"The forward raises when it goes on from its cache, {how}: {error}.",
                f"It was given what it returned second as {name}, and the tokens that follow.",
                source="",
            )
            return
        apart = bench.apart(made, base).amax(0)
        results[how] = [int(i) for i in (apart > limit).nonzero().flatten()], apart
    wrong = {how: (places, apart) for how, (places, apart) in results.items() if places}
    if not wrong:
        return
    how, (places, apart) = next(iter(wrong.items()))
    if "token by token" not in results:
        cause = (
            "The mask of a chunk may be aligned top left, positions may begin at 0 in each call, or keys be put in "
            "another order."
        )
        fix = "offset positions by the length of the cache, and align the mask bottom right: triu(diagonal=1 + past)."
    elif "token by token" not in wrong:
        cause = (
            "The mask of a chunk is aligned top left: its queries do not see the keys in front of them, or see too few."
        )
        fix = "align it bottom right: triu(diagonal=1 + past), past = keys - queries."
    elif 0 in places or bool(wrong["token by token"][0][0] == 0):
        cause = "In one go sees what is not there yet token by token: the future."
        fix = ""
    else:
        cause = (
            "What was cached is not what one go computes: positions that begin at 0 in each call do this, keys that "
            "are cached before they are rotated, and new keys that are not put behind the earlier ones."
        )
        fix = "offset positions by the length of the cache."
    yield Finding(
        "cache",
        f"Going on from the cache ({', '.join(wrong)}) gives something else than one go, from position {places[0]} on, "
        f"by {float(apart.max()):.3g}. {cause}",
        "; ".join(
            f"{way}: {'the same' if not at else f'{len(at)} of {length} positions differ'}"
            for way, (at, _) in results.items()
        )
        + ".",
        source=_mask_line(bench),
        fix=fix,
    )


def _cache_name(bench: Bench) -> str | None:
    """Return the argument that takes a cache by its name, of a causal module that returns something second."""
    name = next((name for name in _CACHES if name in bench.parameters and bench.values.get(name) is None), None)
    every = sights(bench)
    if name is None or not every or not all(s.words().startswith("causal") and s.queries == s.keys for s in every):
        return None
    try:
        _second(bench.seen.returned)
    except NotPossibleError:
        return None
    return name


def _stepwise(bench: Bench, name: str, steps: list[tuple[int, int]], given: dict[str, Any]) -> Tensor:
    """The outputs of some calls that follow each other, side by side; `given` are the arguments of one go."""
    source = bench.sources[0]
    outputs = []
    past: Any = None
    assert source.positions is not None
    for start, stop in steps:
        changes: dict[str, Any] = {name: past} if past is not None else {}
        for own, value in given.items():
            if isinstance(value, Tensor) and own != name:
                changes[own] = _piece(own, value, source, start, stop)
        returned = bench.returned(changes)
        outputs.append(bench.output_of(returned))
        past = _second(returned)
    return torch.cat(outputs, dim=source.positions)


def _piece(name: str, value: Tensor, source: Source, start: int, stop: int) -> Tensor:
    """The part of an argument that belongs to some positions; of a mask, to those before them as well."""
    length = source.length
    if name in source.names:
        assert source.positions is not None
        return value.narrow(source.positions, start, stop - start)
    if "mask" in name or value.dtype == torch.bool:
        if value.dim() > 1 and value.shape[-2] == length:
            value = value.narrow(-2, start, stop - start)
        return value.narrow(-1, 0, stop) if value.shape[-1] == length else value
    if "position" in name and value.shape[-1] == length:
        return value.narrow(-1, start, stop - start)
    return value


def _second(returned: Any) -> Any:
    """What a forward returned second: its cache."""
    for name in ("past_key_values", "past_key_value", "cache"):
        if getattr(returned, name, None) is not None:
            return getattr(returned, name)
    if hasattr(returned, "to_tuple"):
        returned = returned.to_tuple()
    if isinstance(returned, dict):
        returned = tuple(returned.values())
    if not isinstance(returned, (tuple, list)) or len(returned) < 2 or returned[1] is None:
        raise NotPossibleError("the forward returns no second thing that could be its cache")
    return returned[1]


def reference(bench: Bench) -> Iterator[Finding]:
    """Yield the first stage at which a trusted module computes something else, and what would make it the same."""
    trusted = bench.intent.reference
    if trusted is None:
        raise NotPossibleError("not declared: reference")
    args, kwargs = bench.arguments({})
    modes = [(part, part.training) for part in trusted.modules()]
    trusted.eval()
    try:
        other = replace(bench.own, module=trusted, args=args, kwargs=kwargs, without_ones=None).recorded(keep=True)
    except Exception as error:  # whatever somebody's code may raise
        raise NotPossibleError(f"the reference raises on these arguments: {type(error).__name__}") from error
    finally:
        for part, mode in modes:
            part.training = mode
    limit = _LOOSE * bench.limit
    theirs = bench.output_of(other.returned)
    if theirs.shape != bench.output.shape:
        yield Finding(
            "reference",
            f"The output is {list(bench.output.shape)}, and the reference's is {list(theirs.shape)}.",
            "Both were run on the same arguments.",
        )
        return
    apart = float(difference(bench.output, theirs).max())
    if apart <= limit:
        return
    where, line, module, fix = "the output", "", "", ""
    if len(bench.seen.attentions) == len(other.attentions):
        for place, (mine, yours) in enumerate(zip(bench.seen.attentions, other.attentions, strict=True)):
            ours, held = contents_of(bench.seen, *mine), contents_of(other, *yours)
            stage = next((s for s in STAGES if s in ours and s in held and _differs(ours[s], held[s])), None)
            if stage is not None:
                where = f"{stage} of attention {place + 1}"
                tensor = mine[0].stages[stage]
                op = bench.seen.recording.producer(tensor)
                line, module = (op.source if op else ""), mine[0].module
                fix = _same_if(stage, ours, held)
                break
    yield Finding(
        "reference",
        f"The reference gives something else, by {apart:.3g}: the first that differs is {where}.",
        "Both were run on the same arguments, and their stages compared in canonical axes.",
        source=line,
        module=module,
        fix=fix,
    )


def _differs(mine: Tensor, yours: Tensor) -> bool:
    if mine.shape != yours.shape:
        return True
    mine, yours = mine.double(), yours.double()
    near = (
        (mine - yours).abs() <= 1e-4 * yours[yours.isfinite()].abs().max().clamp(min=1e-6)
        if yours.numel()
        else mine == yours
    )
    low = (mine < -1e4) & (yours < -1e4)
    return not bool((near | low | (mine == yours)).all())


def _same_if(stage: str, ours: dict[str, Tensor], held: dict[str, Tensor]) -> str:
    """What would make a stage the same as the reference's; empty where nothing that was tried does."""
    if stage.endswith("_proj") or stage.endswith("_heads"):
        kind = stage[2:]
        same = [
            s
            for s in ("q_" + kind, "k_" + kind, "v_" + kind)
            if s in held and s != stage and not _differs(ours[stage], held[s])
        ]
        if same:
            return f"it is the same as the reference's {same[0]}: take query, key and value in another order."
    mine, yours = ours[stage], held[stage]
    if stage.endswith(("_heads", "_proj", "concat", "context")) and mine.shape == yours.shape:
        head_dim = ours["q_heads"].shape[-1] if "q_heads" in ours else 0
        for name, order in _orders(mine, head_dim):
            if not _differs(order, yours):
                return f"it would be the same with {name}."
    if stage == "scores" and mine.shape == yours.shape:
        known = yours.abs() > 1e-3 * yours.abs().max()
        ratio = (mine[known] / yours[known]).double()
        if ratio.numel() and float(ratio.std() if ratio.numel() > 1 else 0) < 1e-3 * abs(float(ratio.mean())):
            return f"they are {float(ratio.mean()):.4g} times the reference's: another scale."
    if stage in ("masked_scores", "weights"):
        return "the scores are the same: the masks differ."
    return ""


def _orders(value: Tensor, head_dim: int) -> Iterator[tuple[str, Tensor]]:
    """A stage with its heads or features in other orders."""
    if value.dim() == 4:
        yield "the heads in reverse", value.flip(1)
        width = value.shape[-1]
        if width % 2 == 0:
            pairs = torch.cat([value[..., ::2], value[..., 1::2]], -1)
            yield "rotary halves instead of pairs", pairs
            yield "rotary pairs instead of halves", torch.stack(value.chunk(2, -1), -1).flatten(-2)
    elif head_dim and value.shape[-1] % head_dim == 0:
        split = value.reshape(*value.shape[:-1], -1, head_dim)
        yield "features as (head_dim heads), not (heads head_dim)", split.transpose(-1, -2).flatten(-2)
        yield (
            "features as (heads head_dim), not (head_dim heads)",
            value.reshape(*value.shape[:-1], head_dim, -1).transpose(-1, -2).flatten(-2),
        )
        yield "the heads in reverse", split.flip(-2).flatten(-2)
