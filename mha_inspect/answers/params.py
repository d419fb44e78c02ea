"""List every parameter tensor of a module, its role, and the part of it that belongs to each head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

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
from ..naming.parameter_words import ParameterRole, layer_class, roles_of
from ..naming.score_formulas import unlike_dot
from ..record.ranks import Piece, local, parameters_of, piece_of
from ..record.rounding import same_bits
from ..reports.params import Buffer, HeadCountColumn, HeadSlice, Parameter, ParametersTotal, ParamsReport
from ..reports.trace import Rank
from ..running.subject import Run, Subject
from ..text import first_few, listed, span, spans
from .run_report import environment_of, layer_of

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
    run = _recorded(subject, of_several=bool(beside)) if called else None
    roles, show = _roles(module, run), show or Show()
    columns, changes = None, ""
    if run and beside:
        runs = [(subject, run), *((other, _recorded(other, of_several=True)) for other in beside)]
        columns = tuple(_column(*pair) for pair in runs)
        parameters = [dict(other.module.named_parameters()) for other in (subject, *beside)]
        pairs = zip(columns[1:], parameters[1:], strict=True)
        differing = (_change(columns[0].num_heads, parameters[0], column.num_heads, each) for column, each in pairs)
        changes = " ".join(filter(None, differing)) or _unchanged(columns, parameters[0])
    rows = _parameters(parameters_of(module) | dict(cut or {}), roles, show, per_head)
    tied = _tied(module)
    rows = tuple(replace(row, tied=tied.get(row.name, ())) for row in rows)
    environment = replace(environment_of(Subject(module, (), {})), seed=subject.seed)
    notes = () if run is None else unlike_dot(run) if run.attentions else (_NO_ATTENTION,)
    return ParamsReport(
        environment=environment,
        layer=layer_of(subject),
        parameters=rows,
        total=ParametersTotal(
            sum(row.numel for row in rows), sum(row.nbytes for row in rows), *(("", None) if cut else _formula(subject))
        ),
        side_by_side=columns,
        changes=changes,
        notes=(*notes, *show.without_numbers(environment.device)),
        ranks=ranks,
        buffers=tuple(_buffers(module)),
    )


def _tied(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the first name of each tied parameter with its other names: `{"embed.weight": ("head.weight",)}`."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}


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
    with torch.no_grad(), subject.replaying(subject.state()):
        built = ", ".join(f"{name} {value}" for name, value in subject.made_with.items()) if of_several else ""
        with explaining(subject, f" with {built}" if built else ""):
            # Tables of indices decide which features are used.
            return subject.recorded(tables=True)


def _roles(module: nn.Module, run: Run | None) -> Roles:
    """Return the roles from a run, or without one from runs of torch's own layers, and from the kinds of submodules."""
    shown = {} if run is None else dict(roles_of(run, module))
    roles: Roles = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if run is None and isinstance(part, nn.MultiheadAttention) and type(part).forward is _TORCHS_FORWARD:
            for name, role in _of_torchs_layer(part).items():
                shown.setdefault(prefix + name, role)
        axes = next((axes for kind, axes in _AXES.items() if isinstance(part, kind)), {})
        for name, _ in part.named_parameters(recurse=False):
            roles[prefix + name] = ParameterRole(axes.get(name, ""), layer_class(part, ""))
    return roles | {name: replace(role, axes=role.axes or roles.get(name, role).axes) for name, role in shown.items()}


def _of_torchs_layer(module: nn.MultiheadAttention) -> Roles:
    """Return the roles from a run of torch's own layer, whose arguments are known; empty for dtypes without inputs."""
    if _dtype(module.out_proj.weight) != spec_of(module).dtype:
        return {}
    return dict(roles_of(_recorded(make_call(Target(module, "torch", {}), Asked(INPUTS)).of(module)), module))


def _formula(subject: Subject) -> tuple[str, int | None]:
    """Return the closed formula of a layer's parameter count, and its value; empty and None for any other module."""
    if subject.layer:
        kind, spec = find_layer(subject.layer), AttentionSpec(**subject.made_with)
    elif type(subject.module) is nn.MultiheadAttention:
        kind, spec = find_layer("torch"), spec_of(subject.module)
    else:
        return "", None
    text = kind.formula(spec)
    return text, evaluate(text, spec)


def _parameters(
    named: Mapping[str, Tensor], roles: Mapping[str, ParameterRole], show: Show, per_head: bool
) -> tuple[Parameter, ...]:
    whole = sum(local(parameter).numel() for parameter in named.values())
    rows = []
    for name, spread in named.items():
        role, parameter, piece = roles.get(name, ParameterRole("", "")), local(spread), piece_of(spread)
        rows.append(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                axes=role.axes or " ".join(map(str, parameter.shape)),
                dtype=_dtype(parameter),
                numel=parameter.numel(),
                nbytes=parameter.numel() * parameter.element_size(),
                share=parameter.numel() / whole if whole else 0.0,
                role="; ".join(filter(None, (role.text, _place(role, piece, parameter)))),
                heads=_local_heads(role, parameter) if per_head and role.is_part else None,
                stats=stats_of(parameter) if show.stats else None,
                values=values_of(parameter, show) if show.values else None,
                whole=None if piece is None else piece.whole,
                start=None if piece is None else piece.start,
            )
        )
    return tuple(rows)


def _place(role: ParameterRole, piece: Piece | None, local: Tensor) -> str:
    """Return where a rank's part is in the whole: `rows 16–31 of 32: heads 2–3`; empty for a whole parameter."""
    if piece is None:
        return ""
    places = []
    for dim, (size, whole, start) in enumerate(zip(local.shape, piece.whole, piece.start, strict=True)):
        if size < whole:
            units = {1: ["elements"], 2: ["rows", "columns"]}
            unit = units[local.dim()][dim] if local.dim() in units else f"dimension {dim}:"
            heads = _heads_of(role, dim, (start, start + size), whole)
            place = f"{unit} {span((start, start + size))} of {whole}" if size else f"no {unit} of {whole}"
            places.append(place + (f": {heads}" if heads else ""))
    return ", ".join(places)


def _heads_of(role: ParameterRole, dim: int, rows: tuple[int, int], whole: int) -> str:
    """Return the heads between two bounds of a dimension; empty if these bounds are not between heads."""
    bounds = [(head.rows, head.columns)[dim] for head in role.heads] if dim < 2 else []
    _, width = bounds[0] or (0, 0) if bounds else (0, 0)
    in_order = bounds == [(number * width, (number + 1) * width) for number in range(len(bounds))]
    if width == 0 or not in_order or whole % (width * len(bounds)) or rows[0] % width or rows[1] % width:
        return ""
    heads = range(rows[0] // width, rows[1] // width)
    return f"head{'s' if len(heads) > 1 else ''} {spans(heads)}"


def _local_heads(role: ParameterRole, local: Tensor) -> tuple[HeadSlice, ...]:
    """Return the slices of the heads; empty if they are of a tensor that was gathered from several ranks."""
    ends = ((piece.rows[1], *(piece.columns or ())[1:]) for piece in role.heads)
    large = [size for size in local.shape if size > 1] if local.dim() > 2 else local.shape
    fits = all(stop <= size for end in ends for stop, size in zip(end, large, strict=False))
    return role.heads if fits else ()


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
    names, roles = run.attentions[0][1], roles_of(run, subject.module)
    first = {
        name: tuple(piece for piece in roles[name].heads if piece.head == 0) for name in parameters if name in roles
    }
    return HeadCountColumn(
        num_heads=names.num_heads,
        head_dim=names.head_dim,
        numel=sum(parameter.numel() for parameter in parameters.values()),
        shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        first_head={name: pieces for name, pieces in first.items() if pieces},
    )


def _change(heads: int, before: Mapping[str, Tensor], other_heads: int, after: Mapping[str, Tensor]) -> str:
    """Return a sentence about parameters that differ from the baseline's; empty if all are the same bit for bit."""
    both = [name for name in before if name in after]
    reshaped = [name for name in both if before[name].shape != after[name].shape]
    shapes = [f"{name} {list(before[name].shape)} becomes {list(after[name].shape)}" for name in reshaped]
    values = [name for name in both if name not in reshaped and not same_bits(before[name], after[name])]
    gone, new = [name for name in before if name not in both], [name for name in after if name not in both]
    kinds = {"": shapes, f"{len(new)} new: ": new, f"{len(gone)} gone: ": gone, "other values in ": values}
    parts = "; ".join(what + first_few(names, 3) for what, names in kinds.items() if names)
    return f"From {heads} to {other_heads} heads, the parameters change: {parts}." if parts else ""


def _unchanged(columns: Sequence[HeadCountColumn], parameters: Mapping[str, Tensor]) -> str:
    heads, widths = ([str(getattr(column, name)) for column in columns] for name in ("num_heads", "head_dim"))
    on_meta = any(parameter.is_meta for parameter in parameters.values())
    values = " (on meta they have no values)" if on_meta else " and values, bit for bit"
    return (
        f"With {listed(heads)} heads, all {len(parameters)} parameters have the same shapes{values}. "
        f"Only the rows and columns of each head change: head_dim {listed(widths)}."
    )
