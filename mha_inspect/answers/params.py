"""params(): every parameter tensor, what it is for, and which part of it belongs to which head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import InputError
from ..layers import torch_mha
from ..layers.catalog import LayerKind, find_layer
from ..layers.roles import Role
from ..layers.settings import own_spec
from ..measure.statistics import stats_of, values_of
from ..naming.formulas import evaluate, symbols
from ..naming.parameter_roles.found import FoundRole, found_roles
from ..record.subject import Subject
from ..reports.common import Environment, LayerInfo
from ..reports.params import Parameter, ParametersTotal, ParamsReport, PerHeadProof
from ..targets.device import resolve
from ..targets.flag_inputs import make_inputs
from ..targets.memory import require_memory
from ..targets.placing import arguments_of
from ..targets.spec import AttentionSpec, InputSpec, RunSpec, Show, plain_fields
from .head_norms import head_norms
from .head_proof import prove
from .parameter_columns import side_by_side


@dataclass(frozen=True)
class _Known:
    """What is known of a module beyond its parameters."""

    roles: Mapping[str, Role]
    formula: str = ""
    formula_numel: int | None = None
    found: Mapping[str, FoundRole] = field(default_factory=dict)
    """What a recording shows; it stands where a kind of module says less."""

    def of(self, name: str, parameter: torch.Tensor) -> FoundRole:
        """The role of one parameter. What nothing is known of keeps its sizes for axes."""
        sizes = " ".join(map(str, parameter.shape))
        declared = self.roles.get(name) or Role("", "")
        found = self.found.get(name) or FoundRole(declared.axes, declared.text, declared.slices(), bool(declared.parts))
        return replace(found, axes=found.axes or declared.axes or sizes)


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
    code = kind.load()
    module = code.build(spec, str(device))
    known = _known_layer(kind, spec)
    proof = None
    if per_head and device.type != "meta":
        inputs = make_inputs(spec, InputSpec(), run)
        proof = prove(module, known.roles, spec, inputs, arguments_of(module, layer, inputs, run))
    columns, changes = side_by_side(kind, spec, device, num_heads) if len(num_heads) > 1 else (None, "")
    return ParamsReport(
        environment=Environment(torch=torch.__version__, device=str(device), dtype=spec.dtype, seed=spec.seed),
        layer=LayerInfo(name=layer, spec=plain_fields(spec)),
        parameters=_parameters(module, known, show, per_head),
        total=_total(module, known),
        per_head_proof=proof,
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
    known, notes = _known_module(module), tuple[str, ...]()
    if own is not None:
        known, notes = _read_off(own, known)
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
        per_head_proof=_prove_module(module, known.roles) if per_head else None,
        notes=notes,
        head_norms=head_norms(module, _parameters(module, known, Show(), per_head=True)) if norms else None,
    )


def _read_off(own: Subject, known: _Known) -> tuple[_Known, tuple[str, ...]]:
    """What a run of the module shows its parameters to be for, and a sentence where it has no attention."""
    with torch.no_grad(), own.replaying(own.state()):
        seen = own.recorded(keep=True)
    found = found_roles(own.module, seen)
    notes = () if seen.attentions else ("No attention was found in the forward: it tells what reads the parameters.",)
    return replace(known, found=found), notes


def _known_layer(kind: LayerKind, spec: AttentionSpec) -> _Known:
    """What the layer's own file declares; its line in the catalog stands in for a formula that it does not."""
    code = kind.load()
    roles = getattr(code, "roles", None)
    formula = getattr(code, "formula", None)
    text = kind.parameter_formula if formula is None else formula(spec)
    return _Known({} if roles is None else roles(spec), text, evaluate(text, symbols(spec)))


def _known_module(module: nn.Module) -> _Known:
    """Roles by the kind of each submodule; a formula for torch's own layer alone."""
    table: dict[str, Role] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, role in _roles_by_kind(part).items():
            # named_modules goes from the outside in: what an attention layer says of its Linear stands.
            table.setdefault(prefix + name, role)
    if type(module) is not nn.MultiheadAttention:
        return _Known(table)
    spec = torch_mha.spec_of(module)
    text = torch_mha.formula(spec)
    return _Known(table, text, evaluate(text, symbols(spec)))


def _roles_by_kind(module: nn.Module) -> dict[str, Role]:
    if isinstance(module, nn.MultiheadAttention):
        return torch_mha.roles(torch_mha.spec_of(module))
    if isinstance(module, nn.Linear):
        return {"weight": Role("out_features in_features", ""), "bias": Role("out_features", "")}
    if isinstance(module, nn.Embedding):
        return {"weight": Role("num_embeddings embedding_dim", "")}
    return {}


def _prove_module(module: nn.Module, roles: Mapping[str, Role]) -> PerHeadProof | None:
    """For torch's own layer, whose arguments are known, where it holds numbers, of a dtype to draw inputs in."""
    if type(module) is not nn.MultiheadAttention:
        return None
    spec = torch_mha.spec_of(module)
    weight = module.out_proj.weight
    if weight.is_meta or _dtype(weight) != spec.dtype:
        return None
    run = RunSpec(device=str(weight.device))
    inputs = make_inputs(spec, InputSpec(), run)
    return prove(module, roles, spec, inputs, arguments_of(module, "torch", inputs, run))


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
    count = _known_layer(kind, spec).formula_numel or 0
    size = torch.finfo(getattr(torch, spec.dtype)).bits // 8
    drawn = 4 + (size if size != 4 else 0)
    need = count * max(drawn + (size if several else 0), size + (8 + 4 if per_head else 0))
    way_out = "Shapes and counts need none: try --device meta."
    require_memory(need, device, f"{count} parameters ({spec.dtype}, embed_dim {spec.embed_dim})", way_out)
