"""Make a Subject of what was asked for: a layer of the catalog, or a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..build.device import resolve
from ..build.target import Target
from ..build.vocabulary import Flags
from ..errors import InputError
from ..files.memory import require_memory
from ..files.tensors import read_tensor
from ..layers.catalog import find_layer
from ..layers.settings import check_settings
from ..layers.spec import DTYPES, AttentionSpec, DerivedInt, InputSpec, RunSpec, plain_fields
from ..naming.subject import Subject
from .call import Call, TargetFailedError, explained
from .inputs import Asked, make_call
from .part import layer_inputs
from .triple import Triple


@dataclass(frozen=True)
class Layer(Subject):
    """A layer of the catalog with its inputs, and the specs that they were made from."""

    layer: str
    spec: AttentionSpec
    run: RunSpec
    inputs: InputSpec

    @property
    def tensors(self) -> Triple:
        """Query, key and value, laid out as the layer takes them."""
        return layer_inputs(self.module, Call(self.args, self.kwargs, ""))

    def small(self) -> Layer:
        """Return the same layer with little input: enough to see where its weights are."""
        asked = InputSpec(batch=1 if self.inputs.unbatched else 2, seq_len=3, unbatched=self.inputs.unbatched)
        return called_with(self.module, self.spec, asked, self.run, self.layer)


def load_layer(
    spec: AttentionSpec,
    inputs: InputSpec,
    run: RunSpec,
    layer: str = "torch",
    given: Triple | None = None,
) -> Layer:
    """Build a layer of the catalog, and make its inputs, or take query, key and value as they are `given`.

    Raises:
        SpecError: the layer is unknown, or has no use for a setting.
        InputError: a file or a mask does not fit.
        DeviceError: the device is not there or cannot run the dtype.
        DoesNotFitError: its parameters and inputs alone take more memory than is free.
    """
    kind = find_layer(layer)
    spec = kind.own(spec)
    check_settings(kind, spec, inputs, run)
    resolve(run.device, spec.dtype)
    require_memory_of_layer(spec, inputs, run)
    return called_with(kind.build(spec, run.device), spec, inputs, run, layer, given)


def require_memory_of_layer(spec: AttentionSpec, inputs: InputSpec, run: RunSpec) -> None:
    """Raise `DoesNotFitError` where what is certainly there at one time takes more memory than is free.

    That is the parameters, the input, q, k, v and context, and where weights are returned these and the scores.
    """
    batch, queries, keys = (0, 0, 0) if inputs.input else (inputs.batch, inputs.seq_len, inputs.keys)
    q_width, kv_width = (heads * int(spec.head_dim) for heads in (spec.num_heads, spec.kv_heads))
    parameters = 2 * spec.embed_dim * (q_width + kv_width)
    rows = batch * (queries * (spec.embed_dim + 2 * q_width) + keys * 2 * kv_width)
    scores = batch * spec.num_heads * queries * keys if run.need_weights else 0
    need = (parameters + rows + 2 * scores) * int(getattr(torch, spec.dtype).itemsize)
    sizes = f"embed_dim {spec.embed_dim}, num_heads {spec.num_heads}, batch {inputs.batch}, seq_len {inputs.seq_len}"
    way_out = "Try a smaller batch, seq_len or embed_dim. --device meta shows every shape without memory."
    require_memory(need, run.device, sizes, way_out)


def called_with(
    module: nn.Module,
    spec: AttentionSpec,
    inputs: InputSpec,
    run: RunSpec,
    layer: str,
    given: Triple | None = None,
    blank: Tensor | None = None,
) -> Layer:
    """Return a layer that was built from this spec, with inputs; `blank` stands for a mask that bars nothing."""
    switches = {"need_weights": run.need_weights, "average_weights": run.average_weights}
    asked = Asked(
        inputs,
        Flags(switches, frozenset(switches), frozenset({"causal"})),
        seed=spec.seed,
        given=given,
        blank=blank,
    )
    call = make_call(Target(module, layer, {}, spec=spec, masks=find_layer(layer).masks), asked)
    own = Layer(
        module,
        call.args,
        call.kwargs,
        label=layer,
        made_with=plain_fields(spec),
        seed=spec.seed,
        grad=run.grad,
        layer=layer,
        spec=spec,
        run=run,
        inputs=inputs,
    )
    return replace(own, without_ones=_without_ones(own))


def _without_ones(own: Layer) -> Callable[[nn.Module], Layer] | None:
    """Make what runs a copy of the module on the same kind of inputs at small sizes, of which none is one.

    Where a size of the layer itself is one, another layer of its kind is built. None where no size is one.
    """
    spec, unbatched = own.spec, own.inputs.unbatched
    query, key, value = own.tensors
    own_ones = 1 in (spec.num_heads, int(spec.head_dim), spec.embed_dim, spec.key_width, spec.value_width)
    if not own_ones and 1 not in (*query.shape[:-1], *key.shape[:-1]):
        return None
    asked = InputSpec(
        batch=1 if unbatched else 7,
        seq_len=11,
        key_len=13 if key is not query or query.shape != key.shape else None,
        unbatched=unbatched,
        padding=(2,) if own.inputs.padding else (),
    )

    def make(module: nn.Module) -> Layer:
        weight = next(module.parameters())
        small = replace(spec, dtype=next(name for name in DTYPES if getattr(torch, name) == weight.dtype))
        there = replace(own.run, device=str(weight.device))
        if own_ones:
            small = _small(small)
            module = find_layer(own.layer).build(small, there.device)
        blank = torch.zeros(1, 1, dtype=torch.bool) if own.inputs.causal else None
        blank = blank if own.inputs.attn_mask is None else read_tensor(own.inputs.attn_mask)
        made = called_with(module, small, asked, there, own.layer, blank=blank)
        q, k, v = made.tensors
        if value is key or v is not k:
            return made
        return called_with(module, small, asked, there, own.layer, (q, k, v.clone()), blank)

    return make


def _small(spec: AttentionSpec) -> AttentionSpec:
    """The same settings and as many heads, but not one, at small sizes: no size one and independent sizes prime."""
    num_heads, head_dim = 3 if spec.num_heads == 1 else spec.num_heads, 10 if spec.rope else 5
    given = num_heads * head_dim if spec.head_dim == spec.embed_dim else head_dim + 4
    return replace(
        spec,
        num_heads=num_heads,
        num_kv_heads=None if spec.kv_heads == spec.num_heads else spec.kv_heads,
        embed_dim=num_heads * head_dim,
        kdim=17 if spec.key_width != spec.embed_dim else None,
        vdim=19 if spec.value_width != spec.embed_dim else None,
        head_dim=given if spec.head_dim_given else DerivedInt(0),
    )


def call_target(target: Target, asked: Asked, *, may_fail: bool = False, like: Call | None = None) -> Call:
    """Make the arguments of a target's forward; lazy parameters get their shapes from one call with them.

    Args:
        target: what is called.
        asked: what was asked for its inputs.
        may_fail: whether a forward that raises in that call is left to raise again, where it is recorded.
        like: the arguments of the same forward of another module, built alike: they are taken as they are.

    Raises:
        InputError: it has no forward, an argument is needed that nothing tells, or a file does not fit.
        SpecError: a name is none of the forward's, or a flag is of no use to it.
        TargetFailedError: it has lazy parameters, and its forward raises.
    """
    module = target.module
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise InputError(f"{target.name} has no forward, and its inside is seen in a call. Name a module that has one.")
    lazy = any(map(is_lazy, module.parameters()))
    call = like or make_call(target, asked)
    if lazy:
        own = subject_of(target, call, asked.seed)
        try:
            with torch.no_grad():
                own.plain()
        except Exception as error:
            told = explained(error, own)
            if not (may_fail and isinstance(told, TargetFailedError)):
                raise told from error
    return call


def subject_of(target: Target, call: Call, seed: int, grad: bool | None = None) -> Subject:
    """A target with what its forward is called with, every run of it seeded."""
    return replace(
        call.of(target.module),
        label=target.name,
        made_with=target.passed,
        notes=(*target.notes, *call.told),
        hint=call.hint,
        seed=seed,
        grad=grad,
    )
