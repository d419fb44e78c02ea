"""Measure what is told of a module's attention: by its kernels, by changing its inputs, and by changing its parameters.

Nothing of the program is asked but its public answers. What is true is taken from torch: every softmax and every fused
kernel that really ran is heard by a mode of its own, a row of a batch, a position or a head's part of a parameter is
changed, and what moves is compared with what the axes and the roles say.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mha_inspect
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_TRIED = 14
"""Heads' parts of parameters that are changed."""
_PARTS = {"W_q": "q_heads", "W_k": "k_heads", "W_v": "v_heads"}


@dataclass(frozen=True)
class Configuration:
    """A module, its arguments, and what its authors say of each of its attentions; None where there is no one answer."""

    name: str
    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    count: int | None = None
    """How many attentions; None for as many as there are softmaxes and kernels."""
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    kind: str | None = None
    scale: float | None = None
    parts: tuple[str, ...] = ("W_q", "W_k", "W_v")
    """Those that must be told of some parameter."""
    batch: int | None = 0
    """The dimension of each argument that is the batch; None where rows of it see each other."""
    along: int | None = None
    """The dimension of the first argument along which one position becomes one query, and one key where kind is self."""
    kwargs: Callable[[], dict[str, Any]] = dict

    def rows(self) -> int:
        """How many rows the batch has; 0 where there is none."""
        args, kwargs = self.call()
        values = [value for value in (*args, *kwargs.values()) if _is_batch(value, self.batch or 0)]
        return max((int(value.shape[self.batch]) for value in values), default=0) if self.batch is not None else 0

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(2)
        return self.args(), self.kwargs()


@dataclass
class Findings:
    """What is said and is not so."""

    wrong: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    crash: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "crash" if self.crash else "wrong" if self.wrong else "incomplete" if self.incomplete else "right"


class Heard(TorchDispatchMode):
    """Keeps the weights of every softmax and every fused kernel, keys last."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        if name in ("_softmax", "_safe_softmax"):
            self.weights.append(out.detach().clone().movedim(args[1], -1))
        elif name.startswith("_scaled_dot_product"):
            self.weights.append(_weights_of(func, args, kwargs or {}))
        return out


def _weights_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a fused kernel weighs its values by, in float64."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    query, key = named["query"].double(), named["key"].double()
    if query.shape[1] != key.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = named.get("scale")
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = named.get("attn_mask", named.get("attn_bias"))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if named.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1).float()


def heard(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The weights of each softmax that runs."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        torch.manual_seed(3)
        with torch.no_grad(), Heard() as mode:
            module(*args, **kwargs)
    except RuntimeError as error:
        if "torch.compile" not in str(error):  # what is compiled is not heard
            raise
        torch._dynamo.reset()
        return []
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return mode.weights


def judge(own: Configuration, *, thorough: bool = True) -> Findings:
    """Everything that is told of a configuration, measured."""
    found = Findings()
    torch.manual_seed(1)
    module = own.make()
    module.eval()
    _liven(module)
    args, kwargs = own.call()
    truth = heard(_copy(module), args, kwargs)
    try:
        told = _trace(module, args, kwargs)
    except Exception as error:
        found.crash.append(f"trace: {type(error).__name__}: {error}"[:300])
        return found
    _declared(own, told, truth, found)
    for at, one in enumerate(told.attentions):
        where = f"{at + 1} {one.module}"
        _weights(one, where, truth, own.rows(), found)
        _consistent(one, where, found)
    if own.batch is not None and told.attentions:
        _batch(own, module, told, found)
    if own.along is not None and told.attentions:
        _positions(own, module, told, found)
    if thorough:
        _roles(own, module, told, found)
        _others(own, module, found, bool(told.attentions))
    return found


def _copy(module: nn.Module) -> nn.Module:
    """A copy, of what can be copied."""
    try:
        return copy.deepcopy(module)
    except Exception:
        return module


def _liven(module: nn.Module) -> None:
    """Give parameters that begin at zero or at one numbers of their own: they would move nothing."""
    with torch.no_grad():
        for parameter in module.parameters():
            made = not isinstance(parameter, nn.UninitializedParameter) and parameter.is_floating_point()
            if made and parameter.dim() > 1 and parameter.numel() > 1 and float(parameter.std()) < 1e-3:
                parameter.normal_(std=0.3)


def _trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        return mha_inspect.trace(module, *args, keep=True, **kwargs)


# -- what the authors say ---------------------------------------------------------------------------------------------


def _declared(own: Configuration, told: Any, truth: list[Tensor], found: Findings) -> None:
    count = len(truth) if own.count is None else own.count
    if len(told.attentions) > count:
        found.wrong.append(f"count {len(told.attentions)}, and there are {count}")
    if len(told.attentions) < count:
        found.incomplete.append(f"count {len(told.attentions)}, and there are {count}")
    for name, wanted in (("num_heads", own.heads), ("num_kv_heads", own.heads if own.kv_heads is None else own.kv_heads), ("head_dim", own.head_dim)):
        values = {getattr(one, name) for one in told.attentions}
        if wanted is not None and values - {wanted}:
            found.wrong.append(f"{name} {sorted(values)}, and it is {wanted}")
    if own.scale is not None:
        values = {round(one.scale, 6) if one.scale is not None else None for one in told.attentions}
        if any(value is None or abs(value - own.scale) > 1e-4 * own.scale for value in values):
            found.wrong.append(f"scale {sorted(values, key=str)}, and it is {own.scale:.6f}")
    if own.kind is not None:
        for one in told.attentions:
            said, wanted_kind = set(one.kind), set(own.kind.split())
            if said - wanted_kind:
                found.wrong.append(f"kind {' '.join(one.kind)}, and it is {own.kind}")
            elif said != wanted_kind:
                found.incomplete.append(f"kind {' '.join(one.kind)}, and it is {own.kind}")
    for one in told.attentions:
        if one.num_kv_heads < one.num_heads and "grouped" not in one.kind:
            found.wrong.append(f"{one.num_kv_heads} of {one.num_heads} key heads, and not grouped")


# -- weights ----------------------------------------------------------------------------------------------------------


def _weights(one: Any, where: str, truth: list[Tensor], rows_of_batch: int, found: Findings) -> None:
    """The weights are those of a softmax that ran, row by row; and causal is what they show."""
    named = {stage.name: stage for stage in one.stages}
    if "weights" not in named:
        found.incomplete.append(f"{where}: no weights")
        return
    stage = named["weights"]
    sizes = _sizes(one, rows_of_batch)
    over = "query" if "over the queries" in stage.formula else "key"
    if not truth:  # it is none of torch's softmaxes
        return
    rows = _last(stage.tensor, stage.axes, over, sizes)
    if rows is None and over in stage.axes:
        return  # of which sizes nobody knows
    if rows is None:
        found.incomplete.append(f"{where}: weights [{stage.axes}] have no {over}")
        return
    matching = [own for own in truth if _same_rows(rows, own)]
    pieces = [own.reshape(-1, own.shape[-1]) for own in truth if own.shape[-1] == rows.shape[-1]]
    if not matching and pieces and _same_rows(rows, torch.cat(pieces)):
        return  # computed in pieces
    if not matching:
        near = [tuple(own.shape) for own in truth if own.numel() == rows.numel()]
        found.wrong.append(f"{where}: weights {stage.shape} [{stage.axes}] are those of no softmax; as large: {near}")
        return
    own = matching[0]
    if own.dim() > 2 and own.shape[-1] == own.shape[-2] > 1 and over == "key":
        ahead = torch.ones(own.shape[-2:], dtype=torch.bool).triu(1)
        shows = bool((own[..., ahead] == 0).all()) and bool((own.diagonal(dim1=-2, dim2=-1) > 0).any())
        if shows != ("causal" in one.kind):
            (found.incomplete if shows else found.wrong).append(f"{where}: kind {one.kind}, and its weights show {shows}")


def _same_rows(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same rows, in whatever order; those of sinks may be cut off."""
    if left.shape[-1] < right.shape[-1] and left.numel() * right.shape[-1] == right.numel() * left.shape[-1]:
        own = left.shape[-1]
        return _same_rows(left, right[..., :own]) or _same_rows(left, right[..., -own:])
    if left.numel() != right.numel() or left.shape[-1] != right.shape[-1]:
        return False
    place = torch.linspace(1, 2, left.shape[-1], dtype=torch.float64)
    sums = [(rows.reshape(-1, left.shape[-1]).double() * place).sum(-1).nan_to_num(7).sort()[0] for rows in (left, right)]
    return torch.allclose(*sums, atol=2e-5)


# -- axes -------------------------------------------------------------------------------------------------------------


def _dims(axes: str) -> list[list[str]]:
    return [dim.strip("()").split() for dim in re.findall(r"\([^)]*\)|\S+", axes)]


def _sizes(one: Any, rows: int = 0) -> dict[str, int]:
    sizes: dict[str, int] = {"batch": rows} if rows else {}
    for stage in one.stages:
        for dim, size in zip(_dims(stage.axes), stage.shape, strict=True):
            if len(dim) == 1 and dim[0].isidentifier():
                sizes.setdefault(dim[0], size)
    for name, size in (("heads", one.num_heads), ("kv_heads", one.num_kv_heads), ("head_dim", one.head_dim)):
        sizes.setdefault(name, size)
    if one.num_kv_heads:
        sizes.setdefault("group", one.num_heads // one.num_kv_heads)
    return sizes


def _length(stage: Any, name: str, sizes: dict[str, int]) -> int:
    """How long an axis of a stage is; 0 where it has none."""
    rows = _last(stage.tensor, stage.axes, name, sizes)
    return 0 if rows is None else rows.shape[-1]


def _last(tensor: Tensor, axes: str, name: str, sizes: dict[str, int]) -> Tensor | None:
    """A tensor with one axis last, and all others before it; None where it has no such axis."""
    dims = _dims(axes)
    flat = [word for dim in dims for word in dim]
    names = [name] if name in flat else [word for word in flat if re.fullmatch(f"{name}_\\d+", word)]
    if not names or tensor is None or tensor.dim() != len(dims):
        return None
    left, known, rest = [], {}, []
    for place, (dim, size) in enumerate(zip(dims, tensor.shape, strict=True)):
        words = []
        if len(dim) == 1 or not set(dim) & set(names):  # what is not asked for stays whole
            own = dim[0] if dim[0].isidentifier() and len(dim) == 1 else f"n{place}_0"
            left.append(own)
            rest += [own] if own not in names else []
            continue
        unknown, product = [], 1
        for at, word in enumerate(dim):
            own = word if word.isidentifier() else f"n{place}_{at}"
            if word.isdigit():
                known[own] = int(word)
            elif word in sizes:
                known[own] = sizes[word]
            else:
                unknown.append(own)
            product *= known.get(own, 1)
            words.append(own)
        if not unknown and product != size and "batch" in dim and size * known["batch"] % product == 0:
            known["batch"] = size * known["batch"] // product  # what a module makes its batch of
        if len(unknown) == 1:
            known[unknown[0]] = size // max(product, 1)
        elif unknown:
            return None
        left.append("(" + " ".join(words) + ")")
        rest += [word for word in words if word not in names]
    try:
        return rearrange(tensor, f"{' '.join(left)} -> ({' '.join(rest)}) ({' '.join(names)})", **known)
    except Exception:
        return None


def _moved(before: Tensor, after: Tensor, axes: str, name: str, sizes: dict[str, int]) -> set[int] | None:
    """At which places along an axis two tensors differ; None where it has no such axis."""
    if before.shape != after.shape:
        return None
    left, right = (_last(tensor, axes, name, sizes) for tensor in (before, after))
    if left is None or right is None:
        return None
    left, right = (side.nan_to_num(0, 0, 0).double() for side in (left, right))
    # Experts sum what they are given in another order where another row chose others: by the size of what is summed.
    differs = (left - right).abs() > 3e-6 * max(1.0, float(left.abs().max()) if left.numel() else 0.0)
    return set(differs.any(0).nonzero().flatten().tolist())


def _consistent(one: Any, where: str, found: Findings) -> None:
    """A name has one size, and no axis is left without one."""
    sizes: dict[str, int] = {"heads": one.num_heads, "head_dim": one.head_dim}
    for stage in one.stages:
        dims = _dims(stage.axes)
        if len(dims) != len(stage.shape):
            found.wrong.append(f"{where}: {stage.name} {stage.shape} [{stage.axes}]")
            continue
        for dim, size in zip(dims, stage.shape, strict=True):
            if len(dim) == 1 and dim[0] in ("batch", "heads", "query", "key", "head_dim", "windows"):
                if stage.name in ("query", "key", "value", "q_proj", "k_proj", "v_proj"):
                    continue
                if sizes.setdefault(dim[0], size) != size and dim[0] != "key":
                    found.wrong.append(f"{where}: {stage.name} {stage.shape} [{stage.axes}]: {dim[0]} is {sizes[dim[0]]}")
            if any(word.isdigit() and word != "1" for word in dim):
                found.incomplete.append(f"{where}: {stage.name} {stage.shape} [{stage.axes}]")


def _batch(own: Configuration, module: nn.Module, told: Any, found: Findings) -> None:
    """Change the first row of the batch: what is told to be of another row does not move."""
    args, kwargs = own.call()
    assert own.batch is not None
    rows = own.rows()
    if rows < 2:
        return
    changed = (_changed(args, own.batch, rows), {name: _changed((value,), own.batch, rows)[0] for name, value in kwargs.items()})
    try:
        after = _trace(module, *changed)
    except Exception as error:
        found.crash.append(f"trace with another row: {error}"[:200])
        return
    if len(after.attentions) != len(told.attentions):
        return
    for at, (left, right) in enumerate(zip(told.attentions, after.attentions, strict=True)):
        every = _sizes(left, rows)
        for stage, other in zip(left.stages, right.stages, strict=False):
            if stage.name != other.name or stage.tensor is None or stage.tensor.shape != other.tensor.shape:
                continue
            where = f"{at + 1} {left.module}: {stage.name} {stage.shape} [{stage.axes}]"
            moved = _moved(stage.tensor, other.tensor, stage.axes, "batch", every)
            if moved is None:
                if "batch" not in stage.axes and not torch.equal(stage.tensor, other.tensor):
                    found.incomplete.append(f"{where}: no batch")
            # Where a module folds more into its batch, each row of what comes in is several of them.
            elif len(moved) > max(1, _length(stage, "batch", every) // rows):
                found.wrong.append(f"{where}: another row of the batch moves {sorted(moved)[:5]}")


def _positions(own: Configuration, module: nn.Module, told: Any, found: Findings) -> None:
    """Change one position of the first argument: one query moves, one key where the kind is self, and no other."""
    (first, *others), kwargs = own.call()
    assert own.along is not None
    first = first.clone()
    row = first.select(own.along, 4)
    row.copy_(torch.randn_like(row) if first.is_floating_point() else row.flip(0) % 7 + 1)
    try:
        after = _trace(module, (first, *others), kwargs)
    except Exception as error:
        found.crash.append(f"trace with another position: {error}"[:200])
        return
    left, right = told.attentions[0], after.attentions[0]
    later = {stage.name: stage for stage in right.stages}
    for stage in left.stages:
        axis = {"q_heads": "query", "k_heads": "key", "v_heads": "key", "query": "query", "q_proj": "query"}.get(stage.name)
        if axis is None or stage.name not in later:
            continue
        moved = _moved(stage.tensor, later[stage.name].tensor, stage.axes, axis, _sizes(left, own.rows()))
        where = f"1 {left.module}: {stage.name} {stage.shape} [{stage.axes}]"
        most = 0 if axis == "key" and "cross" in left.kind else 1
        if moved is None:
            found.incomplete.append(f"{where}: no {axis}")
        elif len(moved) != most:
            found.wrong.append(f"{where}: one position moves {axis} {sorted(moved)[:8]}")


def _is_batch(value: Any, dim: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > dim


def _changed(args: tuple[Any, ...], dim: int, rows: int) -> tuple[Any, ...]:
    made = []
    for value in args:
        if _is_batch(value, dim) and value.shape[dim] == rows and value.dtype != torch.bool:
            value = value.clone()
            row = value.select(dim, 0)
            row.copy_(row.flip(-1) if not value.is_floating_point() else torch.randn_like(row))
        made.append(value)
    return tuple(made)


# -- roles ------------------------------------------------------------------------------------------------------------


def _roles(own: Configuration, module: nn.Module, told: Any, found: Findings) -> None:
    """Change a head's part of a parameter: that head moves first, and no other."""
    args, kwargs = own.call()
    try:
        torch.manual_seed(3)
        report = mha_inspect.params(module, *args, per_head=True, **kwargs)
    except Exception as error:
        found.crash.append(f"params: {type(error).__name__}: {error}"[:300])
        return
    if not told.attentions:
        claimed = [one.name for one in report.parameters if re.search(r"W_[qkvo]", one.role)]
        if claimed:
            found.wrong.append(f"roles without an attention: {claimed}")
        return
    parts = {part for one in report.parameters for part in re.findall(r"W_[qkvo]", one.role)}
    missing = set(own.parts) - parts
    if missing:
        found.incomplete.append(f"no parameter is {', '.join(sorted(missing))}")
    held = dict(module.named_parameters())
    tried = []
    for parameter in report.parameters:
        slices = [piece for piece in parameter.heads or () if piece.part in _PARTS or piece.part == "W_o"]
        by_part: dict[str, list[Any]] = {}
        for piece in slices:
            by_part.setdefault(piece.part, []).append(piece)
        for pieces in by_part.values():
            for piece in dict.fromkeys((pieces[0], pieces[-1])):
                tried.append((parameter, piece))
    # As many as tell: those of a large model are alike.
    for parameter, piece in tried[:: max(1, len(tried) // _TRIED)]:
        _role(own, module, held[parameter.name], parameter, piece, told, found)


def _role(own: Configuration, module: nn.Module, parameter: nn.Parameter, said: Any, piece: Any, told: Any, found: Findings) -> None:
    name = said.name
    args, kwargs = own.call()
    kept = parameter.detach().clone()
    with torch.no_grad():
        if piece.columns is None:
            view = parameter.view(-1)[slice(*piece.rows)]
        else:
            view = parameter.view(parameter.shape[0], -1) if parameter.dim() != 2 else parameter
            view = view[slice(*piece.rows), slice(*piece.columns)]
        view.copy_(view + 0.5 * torch.randn_like(view))
    try:
        after = _trace(module, args, kwargs)
    except Exception as error:
        found.crash.append(f"trace with another {name}: {error}"[:200])
        return
    finally:
        with torch.no_grad():
            parameter.copy_(kept)
    where = f"{name} {piece.part} of head {piece.head}"
    for at, (left, right) in enumerate(zip(told.attentions, after.attentions, strict=False)):
        before = {stage.name: stage for stage in left.stages}
        later = {stage.name: stage for stage in right.stages}
        moved = {
            stage
            for stage in ("q_heads", "k_heads", "v_heads", "context", "concat", "output")
            if stage in before
            and stage in later
            and before[stage].tensor.shape == later[stage].tensor.shape
            and not torch.allclose(before[stage].tensor, later[stage].tensor, atol=1e-7, rtol=0, equal_nan=True)
        }
        if not moved:
            continue
        if piece.part == "W_o":
            if "concat" in moved or "context" in moved:
                found.wrong.append(f"{where}: {at + 1} {left.module}: moves {sorted(moved)}")
            return
        target = _PARTS[piece.part]
        if any("heads are a loop" in note for note in left.notes):  # those of the first alone are shown
            if (target in moved) != (piece.head == 0):
                found.wrong.append(f"{where}: {at + 1} {left.module}: moves {sorted(moved)} of the first turn")
            return
        if target not in moved:
            found.wrong.append(f"{where}: {at + 1} {left.module}: moves {sorted(moved)}, not {target}")
            return
        stage = before[target]
        every = _sizes(left, own.rows())
        # What it is repeated to: the head of queries, or that of keys.
        for axis in ("heads", "kv_heads"):
            heads = _moved(stage.tensor, later[target].tensor, stage.axes, axis, every)
            if heads is None:
                continue
            each = left.num_heads // left.num_kv_heads if axis == "heads" and piece.part != "W_q" else 1
            # Where keys are not for neighbours it is said for which: `the first for 0, 2, 4`.
            first = [int(word) for word in re.findall(r"\d+", (re.findall(r"the first.* for [a-z ]*([\d, ]+)", said.role) or [""])[0])]
            wanted = {piece.head + head for head in first} if first and piece.part != "W_q" else set(range(piece.head * each, piece.head * each + each))
            own_heads = wanted if axis == "heads" else {piece.head}
            if axis == "kv_heads" and piece.part == "W_q":  # its group's, of those that are counted first or last
                order = [word for dim in _dims(stage.axes) for word in dim if word in ("kv_heads", "group")]
                group = left.num_heads // left.num_kv_heads
                own_heads = {piece.head // group if order[-1:] == ["group"] else piece.head % left.num_kv_heads}
            # A norm over all heads moves every one of them with each.
            through_norm = own_heads <= heads and len(heads) == (left.num_heads if axis == "heads" else left.num_kv_heads)
            if heads != own_heads and not through_norm:
                found.wrong.append(f"{where}: {at + 1} {left.module}: moves {axis} {sorted(heads)} of {target} [{stage.axes}]")
            break
        else:
            if left.num_heads > 1 and left.num_kv_heads > 1:
                found.incomplete.append(f"{where}: {target} [{stage.axes}] has no heads")
        return
    found.incomplete.append(f"{where}: nothing moves")


# -- the other commands -----------------------------------------------------------------------------------------------


def _others(own: Configuration, module: nn.Module, found: Findings, attends: bool) -> None:
    """Neither diff nor check fails, and a module is the same as its copy."""
    for name, run in _commands(own, module, attends):
        try:
            torch.manual_seed(3)
            run()
        except mha_inspect.errors.MhaInspectError as error:
            found.refused.append(f"{name}: {error}"[:300])
        except Exception as error:
            found.crash.append(f"{name}: {type(error).__name__}: {error}"[:300])


def _commands(own: Configuration, module: nn.Module, attends: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    args, kwargs = own.call()
    other = _copy(module)
    yield "diff", lambda: mha_inspect.diff(module, other, *args, same_weights=False, **kwargs)
    if attends:
        yield "diff with the same weights", lambda: mha_inspect.diff(module, other, *args, **kwargs)
        yield "check", lambda: mha_inspect.check(module, *args, **kwargs)
