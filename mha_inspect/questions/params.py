"""List every parameter tensor of a module, its role, and the part of it that belongs to each head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..call.call import explaining
from ..call.inputs import Asked, make_call
from ..errors import InputError
from ..layers.catalog import evaluate, find_layer
from ..layers.spec import AttentionSpec, InputSpec, Show, spec_of
from ..making.target import Target
from ..measure.content import stats_of, values_of
from ..measure.run_report import environment_of, layer_of
from ..naming.parameter_words import ParameterRole, layer_class, roles_of
from ..naming.score_formulas import unlike_dot
from ..record.ranks import Piece, local, parameters_of, piece_of
from ..record.rounding import same_bits
from ..reports.params import Buffer, HeadCountColumn, HeadSlice, Parameter, ParametersTotal, ParamsReport
from ..reports.trace import Rank
from ..running.subject import Run, Subject
from ..text import first_few, listed, span, spans

INPUTS = InputSpec(batch=2, seq_len=5)
"""The inputs of a layer built from flags: small, with no size of one."""
_AXES = {
    nn.Linear: {"weight": "out_features in_features", "bias": "out_features"},
    nn.Embedding: {"weight": "num_embeddings embedding_dim"},
}
"""Kind of module to the axes of its parameters, for parameters outside attentions."""
Roles = dict[str, ParameterRole]
"""Name of a parameter to its role; a parameter without a known role is absent."""
_TORCHS_FORWARD = nn.MultiheadAttention.forward
_NO_ATTENTION = "No attention was found. Each role is the class of the layer, or the operation that uses the parameter."


def params(
    subject: Subject,
    show: Show | None = None,
    *,
    per_head: bool = False,
    beside: Sequence[Subject] = (),
    called: bool = True,
    cut: Mapping[str, Tensor] | None = None,
    ranks: tuple[Rank, ...] | None = None,
) -> ParamsReport:
    """Report every parameter of a module, and with `beside` the same module under other head counts.

    The module is run once and recorded, which shows the role of each parameter, and the rows and columns of each head.
    The run restores the module's state. If not `called`, roles come from the kinds of modules alone. `cut` replaces
    parameters by the part that one rank has, and `ranks` is what each has.

    Raises `InputError` if the module has lazy parameters, which have no shape before the first call, or if `beside` is
    given and the module has no attention.
    """
    module = subject.module
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise InputError(f"parameter {name!r} is lazy: it has no shape before the first call. Run the module once.")
    show = show or Show()
    run = _recorded(subject, of_several=bool(beside)) if called else None
    named = parameters_of(module) | dict(cut or {})
    rows = _parameters(named, _roles(module, run), _tied(module), show, per_head)
    formula = ""
    formula_numel: int | None = None
    if not cut:
        formula, formula_numel = _formula(subject)
    total = ParametersTotal(
        sum(row.numel for row in rows),
        sum(row.nbytes for row in rows),
        formula,
        formula_numel,
    )
    columns: tuple[HeadCountColumn, ...] | None = None
    changes = ""
    if run is not None and beside:
        runs = [_recorded(further, of_several=True) for further in beside]
        columns, changes = _side_by_side([subject, *beside], [run, *runs])
    environment = replace(environment_of(Subject(module, (), {})), seed=subject.seed)
    return ParamsReport(
        environment=environment,
        layer=layer_of(subject),
        parameters=rows,
        total=total,
        side_by_side=columns,
        changes=changes,
        notes=(*_notes(run), *show.without_numbers(environment.device)),
        ranks=ranks,
        buffers=tuple(_buffers(module)),
    )


def _notes(run: Run | None) -> tuple[str, ...]:
    """Return what roles do not say: attention that is no dot product, or that there is none."""
    if run is None:
        return ()
    return unlike_dot(run) if run.attentions else (_NO_ATTENTION,)


def _side_by_side(subjects: Sequence[Subject], runs: Sequence[Run]) -> tuple[tuple[HeadCountColumn, ...], str]:
    """Return the column of each head count, and what changes from the first one to the others."""
    columns = tuple(_column(subject, run) for subject, run in zip(subjects, runs, strict=True))
    baseline, *_ = columns
    first = dict(subjects[0].module.named_parameters())
    changes = []
    for column, subject in zip(columns[1:], subjects[1:], strict=True):
        parameters = dict(subject.module.named_parameters())
        change = _change(baseline.num_heads, first, column.num_heads, parameters)
        if change:
            changes.append(change)
    return columns, " ".join(changes) or _unchanged(columns, first)


def _tied(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the first name of each tied parameter with its other names: `{"embed.weight": ("head.weight",)}`."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(further) for first, *further in names.values() if further}


def _buffers(module: nn.Module) -> Iterator[Buffer]:
    """Yield the buffers, which are no parameters: masks, tables of positions, statistics of batch norms."""
    for name, buffer in module.named_buffers():
        path, _, last = name.rpartition(".")
        yield Buffer(
            name=name,
            shape=tuple(buffer.shape),
            dtype=_dtype(buffer),
            numel=buffer.numel(),
            nbytes=buffer.numel() * buffer.element_size(),
            saved=last not in getattr(module.get_submodule(path), "_non_persistent_buffers_set", ()),
        )


def _recorded(subject: Subject, *, of_several: bool = False) -> Run:
    """Return a run of the module; its state is restored. Raises `TargetFailedError` if a target's forward raises."""
    suffix = ""
    if of_several and subject.made_with:
        settings = [f"{name} {value}" for name, value in subject.made_with.items()]
        suffix = f" with {', '.join(settings)}"
    with torch.no_grad(), subject.replaying(subject.state()), explaining(subject, suffix):
        # Tables of indices decide which features are used.
        return subject.recorded(tables=True)


def _roles(module: nn.Module, run: Run | None) -> Roles:
    """Return the roles from a run, or without one from runs of torch's own layers, and from the kinds of submodules."""
    shown: Roles = {}
    if run is not None:
        shown = dict(roles_of(run, module))
    roles: Roles = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if run is None and _is_torchs_layer(part):
            for name, role in _of_torchs_layer(part).items():
                shown.setdefault(prefix + name, role)
        axes = _axes_of(part)
        for name, _ in part.named_parameters(recurse=False):
            roles[prefix + name] = ParameterRole(axes.get(name, ""), layer_class(part, ""))
    for name, role in shown.items():
        if not role.axes and name in roles:
            role = replace(role, axes=roles[name].axes)
        roles[name] = role
    return roles


def _is_torchs_layer(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Return whether a module is torch's own layer, or of a class with its forward."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is _TORCHS_FORWARD


def _axes_of(module: nn.Module) -> dict[str, str]:
    """Return the axes of the parameters of a module outside attentions, by name; empty if its kind has none."""
    for kind, axes in _AXES.items():
        if isinstance(module, kind):
            return axes
    return {}


def _of_torchs_layer(module: nn.MultiheadAttention) -> Roles:
    """Return the roles from a run of torch's own layer, whose arguments are known; empty for dtypes without inputs."""
    if _dtype(module.out_proj.weight) != spec_of(module).dtype:
        return {}
    call = make_call(Target(module, "torch", {}), Asked(INPUTS))
    return dict(roles_of(_recorded(call.of(module)), module))


def _formula(subject: Subject) -> tuple[str, int | None]:
    """Return the closed formula of a layer's parameter count, and its value; empty and None for any other module."""
    if subject.layer:
        layer = find_layer(subject.layer)
        spec = AttentionSpec(**subject.made_with)
    elif type(subject.module) is nn.MultiheadAttention:
        layer = find_layer("torch")
        spec = spec_of(subject.module)
    else:
        return "", None
    formula = layer.formula(spec)
    return formula, evaluate(formula, spec)


def _parameters(
    named: Mapping[str, Tensor],
    roles: Mapping[str, ParameterRole],
    tied: Mapping[str, tuple[str, ...]],
    show: Show,
    per_head: bool,
) -> tuple[Parameter, ...]:
    whole = sum(local(parameter).numel() for parameter in named.values())
    rows = []
    for name, spread in named.items():
        role = roles.get(name, ParameterRole("", ""))
        parameter = local(spread)
        piece = piece_of(spread)
        texts = [text for text in (role.text, _place(role, piece, parameter)) if text]
        rows.append(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                axes=role.axes or " ".join(map(str, parameter.shape)),
                dtype=_dtype(parameter),
                numel=parameter.numel(),
                nbytes=parameter.numel() * parameter.element_size(),
                share=parameter.numel() / whole if whole else 0.0,
                role="; ".join(texts),
                heads=_local_heads(role, parameter) if per_head and role.is_part else None,
                stats=stats_of(parameter) if show.stats else None,
                values=values_of(parameter, show) if show.values else None,
                whole=None if piece is None else piece.whole,
                start=None if piece is None else piece.start,
                tied=tied.get(name, ()),
            )
        )
    return tuple(rows)


def _place(role: ParameterRole, piece: Piece | None, local: Tensor) -> str:
    """Return where a rank's part is in the whole: `rows 16–31 of 32: heads 2–3`; empty for a whole parameter."""
    if piece is None:
        return ""
    places = []
    for dim, (size, whole, start) in enumerate(zip(local.shape, piece.whole, piece.start, strict=True)):
        if size >= whole:
            continue
        unit = _unit(dim, local.dim())
        bounds = (start, start + size)
        place = f"no {unit} of {whole}"
        if size:
            place = f"{unit} {span(bounds)} of {whole}"
        heads = _heads_of(role, dim, bounds, whole)
        places.append(f"{place}: {heads}" if heads else place)
    return ", ".join(places)


def _unit(dim: int, rank: int) -> str:
    """Return what a dimension of a tensor counts: elements of a vector, rows or columns of a matrix."""
    if rank == 1:
        return "elements"
    if rank == 2:
        return "columns" if dim else "rows"
    return f"dimension {dim}:"


def _heads_of(role: ParameterRole, dim: int, bounds: tuple[int, int], whole: int) -> str:
    """Return the heads between two bounds of a dimension; empty if these bounds are not between heads."""
    width = _width_of_heads(role, dim)
    if width is None or whole % (width * len(role.heads)):
        return ""
    start, stop = bounds
    if start % width or stop % width:
        return ""
    heads = range(start // width, stop // width)
    word = "heads" if len(heads) > 1 else "head"
    return f"{word} {spans(heads)}"


def _width_of_heads(role: ParameterRole, dim: int) -> int | None:
    """Return the width of a head in rows (0) or columns (1) that are the heads one after the other; else None."""
    width = None
    for number, head in enumerate(role.heads):
        bounds = head.columns if dim == 1 else head.rows
        if dim > 1 or not bounds:
            return None
        if width is None:
            width = bounds[1]
        if bounds != (number * width, (number + 1) * width):
            return None
    return width or None


def _local_heads(role: ParameterRole, local: Tensor) -> tuple[HeadSlice, ...]:
    """Return the slices of the heads; empty if they are of a tensor that was gathered from several ranks."""
    sizes = list(local.shape)
    if local.dim() > 2:
        sizes = [size for size in local.shape if size > 1]
    for head in role.heads:
        stops = [head.rows[1]]
        if head.columns is not None:
            stops.append(head.columns[1])
        if any(stop > size for stop, size in zip(stops, sizes, strict=False)):
            return ()
    return role.heads


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _column(subject: Subject, run: Run) -> HeadCountColumn:
    """Return the column of a subject under the head count of its first attention. Raises `InputError` without one."""
    if not run.attentions:
        raise InputError(
            f"No attention was found in the forward of {subject.name}, so head counts cannot be compared. "
            "Give one number: --num-heads 8."
        )
    parameters = dict(subject.module.named_parameters())
    _, names = run.attentions[0]
    roles = roles_of(run, subject.module)
    first_head = {}
    for name in parameters:
        if name not in roles:
            continue
        pieces = tuple(piece for piece in roles[name].heads if piece.head == 0)
        if pieces:
            first_head[name] = pieces
    return HeadCountColumn(
        num_heads=names.num_heads,
        head_dim=names.head_dim,
        numel=sum(parameter.numel() for parameter in parameters.values()),
        shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        first_head=first_head,
    )


def _change(heads: int, before: Mapping[str, Tensor], heads_after: int, after: Mapping[str, Tensor]) -> str:
    """Return a sentence about parameters that differ from the baseline's; empty if all are the same bit for bit."""
    reshaped: list[str] = []
    values: list[str] = []
    missing: list[str] = []
    for name, parameter in before.items():
        if name not in after:
            missing.append(name)
        elif parameter.shape != after[name].shape:
            reshaped.append(f"{name} {list(parameter.shape)} becomes {list(after[name].shape)}")
        elif not same_bits(parameter, after[name]):
            values.append(name)
    added = [name for name in after if name not in before]
    changes = []
    if reshaped:
        changes.append(first_few(reshaped, 3))
    if added:
        changes.append(f"{len(added)} new: {first_few(added, 3)}")
    if missing:
        changes.append(f"{len(missing)} missing: {first_few(missing, 3)}")
    if values:
        changes.append(f"other values in {first_few(values, 3)}")
    if not changes:
        return ""
    return f"From {heads} to {heads_after} heads, the parameters change: {'; '.join(changes)}."


def _unchanged(columns: Sequence[HeadCountColumn], parameters: Mapping[str, Tensor]) -> str:
    heads = listed([str(column.num_heads) for column in columns])
    widths = listed([str(column.head_dim) for column in columns])
    on_meta = any(parameter.is_meta for parameter in parameters.values())
    values = " (on meta they have no values)" if on_meta else " and values, bit for bit"
    return (
        f"With {heads} heads, all {len(parameters)} parameters have the same shapes{values}. "
        f"Only the rows and columns of each head change: head_dim {widths}."
    )
