"""Make a Subject of what was asked for: a layer of the catalog, or a target."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..build.target import Target, resolve
from ..build.vocabulary import Flags
from ..errors import InputError
from ..files.memory import require_memory
from ..layers.catalog import find_layer
from ..layers.spec import AttentionSpec, DerivedInt, InputSpec, RunSpec, plain_fields
from ..record.arguments import tensors_in
from ..running.subject import Subject
from .call import Call, TargetFailedError, explaining
from .inputs import Asked, make_call
from .part import layer_inputs
from .triple import Triple


def load_layer(
    spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str = "torch", given: Triple | None = None
) -> Subject:
    """Build a layer of the catalog, and make its inputs, or take query, key and value as they are `given`.

    Raises:
        SpecError: the layer is unknown, or has no use for a setting.
        InputError: a file or a mask does not fit.
        DeviceError: the device is not there or cannot run the dtype.
        DoesNotFitError: its parameters and inputs alone take more memory than is free.
    """
    kind = find_layer(layer)
    kind.check(spec, inputs, run)
    resolve(run.device, spec.dtype)
    require_memory_of_layer(spec, inputs, run)
    return layer_called(kind.build(spec, run.device), spec, inputs, run, layer, given)


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


def layer_called(
    module: nn.Module, spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str, given: Triple | None = None
) -> Subject:
    """Return a layer that was built from this spec, with inputs."""
    switches = {"need_weights": run.need_weights, "average_weights": run.average_weights}
    flags = Flags(switches, frozenset(switches), frozenset({"causal"}))
    target = Target(module, layer, plain_fields(spec), spec=spec, masks=find_layer(layer).masks)
    call = make_call(target, Asked(inputs, flags, seed=spec.seed, given=given))
    subject = replace(subject_of(target, call, spec.seed, run.grad), label=layer, layer=layer, notes=(), hint="")
    sizes = {spec.num_heads, spec.head_dim, spec.embed_dim, spec.key_width, spec.value_width}
    if 1 not in sizes.union(*(tensor.shape for _, tensor in tensors_in((call.args, call.kwargs)))):
        return subject
    small, (query, key, _) = _small(spec), layer_inputs(module, call)
    few = InputSpec(
        batch=1 if inputs.unbatched else 7,
        seq_len=11,
        key_len=None if key is query else 13,
        unbatched=inputs.unbatched,
        causal=inputs.causal or inputs.attn_mask is not None,
        padding=(2,) if inputs.padding else (),
    )

    def wider(_: nn.Module) -> Subject:
        return layer_called(find_layer(layer).build(small, run.device), small, few, run, layer)

    return replace(subject, without_ones=wider)


def _small(spec: AttentionSpec) -> AttentionSpec:
    """Return a spec with the same settings and as many heads, or three for one, of which no size is one."""
    num_heads, head_dim = 3 if spec.num_heads == 1 else spec.num_heads, 10 if spec.rope else 5
    wide = spec.head_dim == spec.embed_dim
    return replace(
        spec,
        num_heads=num_heads,
        num_kv_heads=None if spec.kv_heads == spec.num_heads else spec.kv_heads,
        embed_dim=num_heads * head_dim,
        kdim=17 if spec.key_width != spec.embed_dim else None,
        vdim=19 if spec.value_width != spec.embed_dim else None,
        head_dim=(num_heads * head_dim if wide else head_dim + 4) if spec.head_dim_given else DerivedInt(0),
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
    call = like or make_call(target, asked)
    if any(map(is_lazy, module.parameters())):
        try:
            with torch.no_grad(), explaining(subject := subject_of(target, call, asked.seed)):
                subject.plain()
        except TargetFailedError:
            if not may_fail:
                raise
    return call


def subject_of(target: Target, call: Call, seed: int, grad: bool | None = None) -> Subject:
    """Return a target with what its forward is called with, every run of it seeded."""
    return replace(
        call.of(target.module),
        label=target.name,
        made_with=target.passed,
        notes=(*target.notes, *call.told),
        hint=call.hint,
        seed=seed,
        grad=grad,
    )
