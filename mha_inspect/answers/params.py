"""params(): every parameter tensor, what it is for, and which part of it belongs to which head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import InputError
from ..layers import torch_mha
from ..layers.catalog import LayerKind, find_layer
from ..layers.settings import own_spec
from ..measure.statistics import stats_of, values_of
from ..naming.formulas import evaluate, symbols
from ..naming.parameter_words import ParameterRole, roles_of
from ..record.subject import Subject
from ..reports.common import Environment, LayerInfo
from ..reports.params import Parameter, ParametersTotal, ParamsReport, PerHeadProof
from ..targets.device import resolve
from ..targets.flag_inputs import make_inputs
from ..targets.load import load_layer
from ..targets.memory import require_memory
from ..targets.placing import arguments_of
from ..targets.spec import AttentionSpec, InputSpec, RunSpec, Show, plain_fields
from .head_norms import head_norms
from .head_proof import prove
from .parameter_columns import Counted, side_by_side

_INPUTS = InputSpec(batch=2, seq_len=5)
"""On what a layer built from flags is run: small, and of no size one."""
_AXES = {
    nn.Linear: {"weight": "out_features in_features", "bias": "out_features"},
    nn.Embedding: {"weight": "num_embeddings embedding_dim"},
}
"""What the axes of parameters are that belong to no attention, by the kind of module."""


@dataclass(frozen=True)
class _Known:
    """What is known of a module beyond its parameters."""

    roles: Mapping[str, ParameterRole]
    formula: str = ""
    formula_numel: int | None = None
    proof: PerHeadProof | None = None
    has_attention: bool = True

    def of(self, name: str, parameter: torch.Tensor) -> ParameterRole:
        """The role of one parameter. What nothing is known of keeps its sizes for axes."""
        role = self.roles.get(name, ParameterRole("", ""))
        return replace(role, axes=role.axes or " ".join(map(str, parameter.shape)))


def params_spec(
    spec: AttentionSpec,
    run: RunSpec,
    show: Show,
    *,
    layer: str = "torch",
    per_head: bool = False,
    num_heads: tuple[int, ...] = (),
    norms: bool = False,
) -> ParamsReport:
    """The parameters of a layer built from a spec.

    Args:
        spec: the layer's sizes and settings.
        run: for the device; on meta there are shapes and counts, and no content.
        show: whether statistics and values are shown.
        layer: name in the catalog of layers.
        per_head: whether to show each head's rows and columns, and to prove them by running.
        num_heads: several head counts are set side by side, with what changes between them.
        norms: whether to measure each head's part of each matrix.

    Raises:
        SpecError: the layer is unknown, or a head count does not fit.
        DeviceError: the device is not there, or cannot run spec.dtype.
        DoesNotFitError: the parameters are larger than the free memory.
    """
    kind = find_layer(layer)
    spec = own_spec(kind, spec)
    device = resolve(run.device, spec.dtype)
    _require_memory(kind, spec, device, per_head, several=len(num_heads) > 1)
    every = [replace(spec, num_heads=count) for count in num_heads] if len(num_heads) > 1 else []
    forward = load_layer(spec, _INPUTS, run, layer)
    known = _with_formula(_read_off(forward, per_head), kind, spec)
    module = forward.module
    columns, changes = side_by_side([_counted(one, run, layer) for one in every]) if every else (None, "")
    return ParamsReport(
        environment=Environment(torch=torch.__version__, device=str(device), dtype=spec.dtype, seed=spec.seed),
        layer=LayerInfo(name=layer, spec=plain_fields(spec)),
        parameters=_parameters(module, known, show, per_head),
        total=_total(module, known),
        per_head_proof=known.proof,
        side_by_side=columns,
        changes=changes,
        head_norms=head_norms(module, _parameters(module, known, Show(), per_head=True)) if norms else None,
    )


def params(
    module: nn.Module,
    *,
    own: Subject | None = None,
    show: Show | None = None,
    per_head: bool = False,
    norms: bool = False,
) -> ParamsReport:
    """The parameters of any module.

    Args:
        module: any module.
        own: a call of it, which is run once and recorded: what the parameters are for is read off that, and which rows
            and columns belong to which head. Without one it is said where the kind of module tells it. The run leaves
            buffers and generators as they were.
        show: whether statistics and values are shown.
        per_head: whether to show each head's rows and columns.
        norms: whether to measure each head's part of each matrix.

    Raises:
        InputError: the module has lazy parameters, which have no shape before its first call.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise InputError(f"parameter {name!r} is lazy: it has no shape before the first call. Run the module once.")
    by_kind = _by_kind(module, per_head and own is None)
    known, notes = by_kind, tuple[str, ...]()
    if own is not None:
        seen = _read_off(own, per_head)
        # What a recording shows stands where a kind of module says less.
        axes = {name: replace(r, axes=r.axes or by_kind.roles.get(name, r).axes) for name, r in seen.roles.items()}
        known = replace(
            seen, roles={**by_kind.roles, **axes}, formula=by_kind.formula, formula_numel=by_kind.formula_numel
        )
        if not seen.has_attention:
            notes = ("No attention was found in the forward: it tells what reads the parameters.",)
    first = next(module.parameters(), None)
    return ParamsReport(
        environment=Environment(
            torch=torch.__version__,
            device="cpu" if first is None else str(first.device),
            dtype="" if first is None else _dtype(first),
            seed=None,
        ),
        layer=LayerInfo(name=type(module).__qualname__, spec={}),
        parameters=_parameters(module, known, Show() if show is None else show, per_head),
        total=_total(module, known),
        per_head_proof=known.proof,
        notes=notes,
        head_norms=head_norms(module, _parameters(module, known, Show(), per_head=True)) if norms else None,
    )


def _read_off(own: Subject, per_head: bool) -> _Known:
    """What a run of the module shows its parameters to be for; it leaves no trace.

    Where heads are to be proved, dropout is off, which would change them.
    """
    training = [module for module in own.module.modules() if module.training] if per_head else []
    for module in training:
        module.training = False
    try:
        with torch.no_grad(), own.replaying(own.state()):
            # Kept for tables of indices: which features they pick is a matter of their numbers.
            seen = own.recorded(keep=True)
    finally:
        for module in training:
            module.training = True
    proof = prove(own, seen) if per_head else None
    return _Known(roles_of(seen), proof=proof, has_attention=bool(seen.attentions))


def _counted(spec: AttentionSpec, run: RunSpec, layer: str) -> Counted:
    forward = load_layer(spec, _INPUTS, run, layer)
    parameters = {name: parameter.detach() for name, parameter in forward.module.named_parameters()}
    return Counted(spec.num_heads, int(spec.head_dim), parameters, _read_off(forward, False).roles)


def _with_formula(known: _Known, kind: LayerKind, spec: AttentionSpec) -> _Known:
    """With the layer's own formula; its line in the registry stands in for one that it does not declare."""
    formula = getattr(kind.load(), "formula", None)
    text = kind.parameter_formula if formula is None else formula(spec)
    return replace(known, formula=text, formula_numel=evaluate(text, symbols(spec)))


def _by_kind(module: nn.Module, per_head: bool) -> _Known:
    """What the kinds of a module's parts tell: torch's attention layers are each run by themselves, to be read off."""
    table: dict[str, ParameterRole] = {}
    known = _Known(table)
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, nn.MultiheadAttention):
            seen = _of_torchs_layer(part, per_head and part is module)
            roles = seen.roles
            known = replace(known, proof=seen.proof) if part is module else known
        else:
            roles = {name: ParameterRole(axes, "") for name, axes in _axes_by_kind(part).items()}
        for name, role in roles.items():
            # named_modules goes from the outside in: what an attention layer says of its Linear stands.
            table.setdefault(prefix + name, role)
    if type(module) is nn.MultiheadAttention:
        known = _with_formula(known, find_layer("torch"), torch_mha.spec_of(module))
    return known


def _of_torchs_layer(module: nn.MultiheadAttention, per_head: bool) -> _Known:
    """Read off a run of torch's own layer, whose arguments are known; nothing in a dtype that none is drawn in."""
    spec, weight = torch_mha.spec_of(module), module.out_proj.weight
    if _dtype(weight) != spec.dtype:
        return _Known({})
    run = RunSpec(device=str(weight.device))
    args, kwargs = arguments_of(module, "torch", make_inputs(spec, _INPUTS, run), run)
    return _read_off(Subject(module, args, kwargs), per_head)


def _parameters(module: nn.Module, known: _Known, show: Show, per_head: bool) -> tuple[Parameter, ...]:
    named = dict(module.named_parameters())
    whole = sum(parameter.numel() for parameter in named.values())
    rows = []
    for name, parameter in named.items():
        role = known.of(name, parameter)
        rows.append(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                axes=role.axes,
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


def _total(module: nn.Module, known: _Known) -> ParametersTotal:
    parameters = list(module.parameters())
    return ParametersTotal(
        numel=sum(parameter.numel() for parameter in parameters),
        nbytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        formula=known.formula,
        formula_numel=known.formula_numel,
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _require_memory(kind: LayerKind, spec: AttentionSpec, device: torch.device, per_head: bool, several: bool) -> None:
    """Refuse before anything is allocated: drawn in float32, cast, and for the proof held in float64 as well."""
    count = _with_formula(_Known({}), kind, spec).formula_numel or 0
    size = torch.finfo(getattr(torch, spec.dtype)).bits // 8
    drawn = 4 + (size if size != 4 else 0)
    need = count * max(drawn + (size if several else 0), size + (8 + 4 if per_head else 0))
    way_out = "Shapes and counts need none: try --device meta."
    require_memory(need, device, f"{count} parameters ({spec.dtype}, embed_dim {spec.embed_dim})", way_out)


def _axes_by_kind(module: nn.Module) -> Mapping[str, str]:
    return next((axes for kind, axes in _AXES.items() if isinstance(module, kind)), {})
