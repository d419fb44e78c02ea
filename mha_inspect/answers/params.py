"""params(): every parameter tensor, what it is for, and which part of it belongs to which head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..build.target import Target
from ..call.call import explaining
from ..call.inputs import Asked, make_call
from ..errors import InputError
from ..layers import torch_mha
from ..layers.catalog import find_layer
from ..layers.spec import AttentionSpec, InputSpec, Show, evaluate, symbols
from ..measure.statistics import stats_of, values_of
from ..naming.parameter_words import ParameterRole, roles_of
from ..naming.stage_facts import unlike_dot
from ..naming.subject import Run, Subject
from ..reports.params import HeadCountColumn, HeadNorms, Parameter, ParametersTotal, ParamsReport
from ..text import first_few, listed
from .run_report import environment_of, layer_of

INPUTS = InputSpec(batch=2, seq_len=5)
"""On what a layer built from flags is run: small, and of no size one."""
_AXES = {
    nn.Linear: {"weight": "out_features in_features", "bias": "out_features"},
    nn.Embedding: {"weight": "num_embeddings embedding_dim"},
}
"""What the axes of parameters are that belong to no attention, by the kind of module."""
Roles = dict[str, ParameterRole]
"""The roles of a module's parameters, those that are known, by name."""
_NO_ATTENTION = "No attention was found in the forward: it tells what reads the parameters."


def params(
    own: Subject,
    show: Show | None = None,
    *,
    per_head: bool = False,
    norms: bool = False,
    beside: Sequence[Subject] = (),
    called: bool = True,
) -> ParamsReport:
    """Report every parameter of a module.

    Args:
        own: is run once and recorded: what the parameters are for is read off that, and which rows and columns belong
            to which head. The run leaves buffers and generators as they were.
        show: whether statistics and values are shown.
        per_head: whether to show each head's rows and columns.
        norms: whether to measure each head's part of each matrix.
        beside: the same under other head counts, to be set side by side.
        called: whether the arguments are those of a call. Without one it is said what the kind of module tells.

    Raises:
        InputError: the module has lazy parameters, which have no shape before its first call; or nothing tells how many
            heads the attention has that is to be set side by side.
    """
    for name, parameter in own.module.named_parameters():
        if is_lazy(parameter):
            raise InputError(f"parameter {name!r} is lazy: it has no shape before the first call. Run the module once.")
    seen = _seen(own, bool(beside)) if called else None
    roles = _known(own, seen)
    columns, changes = None, ""
    if seen and beside:
        columns, changes = side_by_side([_counted(own, seen), *(_counted(one, _seen(one, True)) for one in beside)])
    no_attention = seen is not None and not seen.attentions
    show = Show() if show is None else show
    rows = _parameters(own.module, roles, show, per_head)
    environment = replace(environment_of(Subject(own.module, (), {})), seed=own.seed)
    found = () if seen is None else (_NO_ATTENTION,) if no_attention else unlike_dot(seen)
    return ParamsReport(
        environment=environment,
        layer=layer_of(own),
        parameters=rows,
        total=ParametersTotal(sum(row.numel for row in rows), sum(row.nbytes for row in rows), *_formula(own)),
        side_by_side=columns,
        changes=changes,
        notes=(*found, *show.without_numbers(environment.device)),
        head_norms=head_norms(own.module.get_parameter, _parameters(own.module, roles, Show(), True))
        if norms
        else None,
    )


def _seen(own: Subject, one_of_several: bool = False) -> Run:
    """Run the module, which leaves no trace.

    Raises `TargetFailedError` where the forward of a target raises.
    """
    with torch.no_grad(), own.replaying(own.state()):
        built = ", ".join(f"{name} {value}" for name, value in own.made_with.items()) if one_of_several else ""
        with explaining(own, f" with {built}" if built else ""):
            # Kept for tables of indices: which features they pick is a matter of their numbers.
            return own.recorded(keep=True)


def _known(own: Subject, seen: Run | None) -> Roles:
    """Return what a run shows, and where it says less, what the kinds of the module's parts tell."""
    if seen is None:
        return _by_kind(own.module)
    shown = dict(roles_of(seen))
    if own.layer:
        return shown
    roles = _by_kind(own.module)
    return roles | {name: replace(role, axes=role.axes or roles.get(name, role).axes) for name, role in shown.items()}


def _by_kind(module: nn.Module) -> Roles:
    """Return what the kinds of a module's parts tell: torch's attention layers are each run alone, to be read off."""
    table: Roles = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, nn.MultiheadAttention) and type(part).forward is nn.MultiheadAttention.forward:
            roles = _of_torchs_layer(part)
        else:
            axes_of = next((axes for kind, axes in _AXES.items() if isinstance(part, kind)), {})
            roles = {name: ParameterRole(axes, "") for name, axes in axes_of.items()}
        for name, role in roles.items():
            # named_modules goes from the outside in: what an attention layer says of its Linear stands.
            table.setdefault(prefix + name, role)
    return table


def _of_torchs_layer(module: nn.MultiheadAttention) -> Roles:
    """Read off a run of torch's own layer, whose arguments are known; nothing in a dtype that none is drawn in."""
    if _dtype(module.out_proj.weight) != torch_mha.spec_of(module).dtype:
        return {}
    own = make_call(Target(module, "torch", {}), Asked(INPUTS)).of(module)
    return dict(roles_of(_seen(own)))


def _formula(own: Subject) -> tuple[str, int | None]:
    """Return the closed formula of a layer's parameter count, and what that gives; of any other module nothing."""
    if own.layer:
        kind, spec = find_layer(own.layer), AttentionSpec(**own.made_with)
    elif type(own.module) is nn.MultiheadAttention:
        kind, spec = find_layer("torch"), torch_mha.spec_of(own.module)
    else:
        return "", None
    text = kind.formula(spec)
    return text, evaluate(text, symbols(spec))


def _counted(own: Subject, seen: Run) -> Counted:
    """A subject under its head count, which the first attention in its run tells."""
    parameters = {name: parameter.detach() for name, parameter in own.module.named_parameters()}
    if not seen.attentions:
        raise InputError(
            f"No attention was found in the forward of {own.name}, so that nothing is told of its heads. Give one "
            "number: --num-heads 8."
        )
    names = seen.attentions[0][1]
    return Counted(names.num_heads, names.head_dim, parameters, roles_of(seen))


def _parameters(
    module: nn.Module, roles: Mapping[str, ParameterRole], show: Show, per_head: bool
) -> tuple[Parameter, ...]:
    """A row for each parameter. One of which nothing is known has its sizes for axes."""
    named = dict(module.named_parameters())
    whole = sum(parameter.numel() for parameter in named.values())
    rows = []
    for name, parameter in named.items():
        role = roles.get(name, ParameterRole("", ""))
        rows.append(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                axes=role.axes or " ".join(map(str, parameter.shape)),
                dtype=_dtype(parameter),
                numel=parameter.numel(),
                nbytes=parameter.numel() * parameter.element_size(),
                share=parameter.numel() / whole if whole else 0.0,
                role=role.text,
                heads=role.heads if per_head and role.is_part else None,
                stats=stats_of(parameter) if show.stats else None,
                values=values_of(parameter, show) if show.values else None,
            )
        )
    return tuple(rows)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Counted:
    """A module under one head count."""

    num_heads: int
    head_dim: int
    parameters: Mapping[str, Tensor]
    roles: Mapping[str, ParameterRole]


def side_by_side(counted: Sequence[Counted]) -> tuple[tuple[HeadCountColumn, ...], str]:
    """Return a column a head count, and a sentence on what changes from the first: found by comparing, bit for bit."""
    baseline, *others = counted
    changes = [sentence for other in others if (sentence := _change(baseline, other))]
    return tuple(map(_column, counted)), " ".join(changes) or _unchanged(counted)


def _column(one: Counted) -> HeadCountColumn:
    roles = {name: one.roles[name] for name in one.parameters if name in one.roles}
    first = {name: tuple(piece for piece in role.heads if piece.head == 0) for name, role in roles.items()}
    return HeadCountColumn(
        num_heads=one.num_heads,
        head_dim=one.head_dim,
        numel=sum(parameter.numel() for parameter in one.parameters.values()),
        shapes={name: tuple(parameter.shape) for name, parameter in one.parameters.items()},
        first_head={name: pieces for name, pieces in first.items() if pieces},
    )


def _change(baseline: Counted, own: Counted) -> str:
    """Say what became of the baseline's parameters; empty where all have the same shape and content."""
    pairs = {name: (left, own.parameters[name]) for name, left in baseline.parameters.items() if name in own.parameters}
    shapes = [
        f"{name} {list(left.shape)} becomes {list(right.shape)}"
        for name, (left, right) in pairs.items()
        if left.shape != right.shape
    ]
    values = [
        name
        for name, (left, right) in pairs.items()
        if left.shape == right.shape and not left.is_meta and not torch.equal(left, right)
    ]
    gone, new = ([name for name in one.parameters if name not in pairs] for one in (baseline, own))
    said = {"": shapes, f"{len(new)} new: ": new, f"{len(gone)} gone: ": gone, "other values in ": values}
    parts = "; ".join(what + first_few(names, 3) for what, names in said.items() if names)
    return f"From {baseline.num_heads} to {own.num_heads} heads the parameters change: {parts}." if parts else ""


def _unchanged(counted: Sequence[Counted]) -> str:
    heads, widths = [str(one.num_heads) for one in counted], [str(one.head_dim) for one in counted]
    on_meta = any(parameter.is_meta for parameter in counted[0].parameters.values())
    values = "(on meta they hold no values)" if on_meta else "and the same values, bit for bit,"
    return (
        f"Nothing but the slices: all {len(counted[0].parameters)} parameters have the same shapes {values} with "
        f"{listed(heads)} heads. Only which rows and columns belong to a head changes: head_dim {listed(widths)}."
    )


def head_norms(content_of: Callable[[str], Tensor], parameters: Iterable[Parameter]) -> tuple[HeadNorms, ...]:
    """Return the norm of each head's part of W_q, W_k, W_v and W_o, in float64.

    `content_of` gives a parameter by its name. The parameters come with their `heads`, in the order of the module:
    where a part of a head comes again, the matrices of the next attention begin.
    """
    attentions: list[tuple[list[str], dict[tuple[str, int], Tensor]]] = []
    for parameter in parameters:
        slices = [one for one in parameter.heads or () if one.part.startswith("W_") and one.columns is not None]
        if not slices:
            continue
        if not attentions or any((one.part, one.head) in attentions[-1][1] for one in slices):
            attentions.append(([], {}))
        names, squares = attentions[-1]
        names.append(parameter.name)
        content = content_of(parameter.name).detach()
        for one in slices:
            assert one.columns is not None
            own = content[slice(*one.rows), slice(*one.columns)].double().square().sum()
            squares[one.part, one.head] = squares.get((one.part, one.head), torch.zeros_like(own)) + own
    norms = []
    for names, squares in attentions:
        for part in sorted(dict.fromkeys(part for part, _ in squares), key=lambda part: "qkvo".find(part[2:3])):
            heads = sorted(head for own, head in squares if own == part)
            norms.append(HeadNorms(_owner(names), part, tuple(float(squares[part, head].sqrt()) for head in heads)))
    return tuple(norms)


def _owner(names: list[str]) -> str:
    """Return the path of the module that all of these parameters are in."""
    paths = [name.split(".")[:-1] for name in names]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in alike)
