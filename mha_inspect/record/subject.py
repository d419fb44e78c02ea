"""One forward pass, of a module that was brought along or built from flags, and what is seen when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..graph.attention import Attention, Graph, attentions_of
from ..layers.registry import find_layer
from ..layers.settings import check_settings, own_spec
from ..naming.axes import AxisNames
from ..naming.unit_sizes import named_after
from ..targets.flag_inputs import Inputs, make_inputs
from ..targets.footprint import kept_bytes
from ..targets.spec import AttentionSpec, DerivedInt, InputSpec, RunSpec
from .arguments import tensors_in
from .copying import copy_module
from .ops import Recording
from .xray import record_opened

_SMALL = 1 << 29
"""Bytes of the results of a run up to which it is worth another one to know the names of its axes."""


@dataclass(frozen=True)
class State:
    """Generators and buffers at one moment."""

    cpu: torch.Tensor
    gpus: dict[int, torch.Tensor]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]

    def restore(self) -> None:
        """Put everything back to this moment."""
        torch.set_rng_state(self.cpu)
        for gpu, numbers in self.gpus.items():
            torch.cuda.set_rng_state(numbers, gpu)
        with torch.no_grad():
            for buffer, content in self.buffers:
                buffer.copy_(content)


@dataclass(frozen=True)
class Subject:
    """A module and its arguments, ready to run again and again with the same numbers."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wider: Callable[[nn.Module], Subject] | None = field(default=None, kw_only=True, compare=False)
    """Where a size of the arguments is one, the same forward of a copy of the module with arguments in which none is;
    None where there is no such forward, or nobody knows how to call it."""

    def recorded(self, *, keep: bool = False) -> Run:
        """Run it once and record it, its fused kernels opened; with `keep` the tensors are kept."""
        return Run(*record_opened(self.module, *self.args, keep=keep, **self.kwargs))

    def wider_run(self, seen: Run) -> Run | None:
        """A wider run, where there is one and it costs little. It leaves no trace.

        It is run with a copy of the module that shares its parameters. One that fails is none.
        """
        parameters = list(self.module.parameters())
        costs_nothing = bool(parameters) and parameters[0].is_meta
        if self.wider is None or (kept_bytes(seen.recording) > _SMALL and not costs_nothing):
            return None
        try:
            own = self.wider(copy_module(self.module, {id(parameter): parameter for parameter in parameters}))
            with own.replaying(own.state()):
                return Run(own.recorded().recording, None)
        except Exception:  # whatever somebody's code may raise at sizes that nobody asked for
            return None

    def state(self) -> State:
        """What a run may change: the generators and the module's buffers."""
        return State(
            torch.get_rng_state(),
            {gpu: torch.cuda.get_rng_state(gpu) for gpu in self._gpus()},
            [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()],
        )

    @contextmanager
    def replaying(self, state: State) -> Iterator[None]:
        """Run the body from an earlier state, and put back what is there now: the run leaves no trace."""
        now = self.state()
        state.restore()
        try:
            yield
        finally:
            now.restore()

    def _gpus(self) -> list[int]:
        """The CUDA devices whose generators a run may draw from."""
        tensors = [*self.module.parameters(), *(tensor for _, tensor in tensors_in((self.args, self.kwargs)))]
        return sorted({tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"})


@dataclass(frozen=True)
class Forward(Subject):
    """A layer that was built from flags, and its inputs."""

    layer: str
    spec: AttentionSpec
    run: RunSpec
    inputs: Inputs

    def recorded(self, *, keep: bool = False) -> Run:
        """Run it once and record it, under the settings that were asked for."""
        with self._settings():
            return super().recorded(keep=keep)

    def plain(self) -> Any:
        """Run it as it is, under the settings that were asked for, and hand on what it returned."""
        with self._settings():
            return self.module(*self.args, **self.kwargs)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Gradients as asked, and the same dropout in every run; the global generators are put back."""
        with torch.set_grad_enabled(self.run.grad), torch.random.fork_rng(devices=self._gpus()):
            if self.spec.training and self.spec.dropout:
                torch.manual_seed(self.spec.seed)
            yield


@dataclass(frozen=True)
class Run:
    """A recorded run and the attentions in it."""

    recording: Recording
    returned: Any
    wider: Run | None = None
    """A run of the same forward in which no size is one: names of axes are taken from it."""

    @cached_property
    def graph(self) -> Graph:
        """The dataflow."""
        return Graph(self.recording)

    @cached_property
    def attentions(self) -> tuple[tuple[Attention, AxisNames], ...]:
        """Every attention with the names of its axes."""
        own = tuple((found, AxisNames(found, self.graph.dimensions)) for found in attentions_of(self.graph))
        return own if self.wider is None else named_after(own, self.wider.attentions)


def build_forward(spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str = "torch") -> Forward:
    """The layer and its inputs.

    Raises:
        SpecError: the layer is unknown, or has no use for a setting.
        InputError: a file or a mask does not fit.
        DeviceError: the device is not there or cannot run the dtype.
    """
    kind = find_layer(layer)
    spec = own_spec(kind, spec)
    check_settings(kind, spec, inputs, run)
    made = make_inputs(spec, inputs, run)
    return _forward(layer, spec, run, made)


def _forward(layer: str, spec: AttentionSpec, run: RunSpec, inputs: Inputs) -> Forward:
    code = find_layer(layer).load()
    module = code.build(spec, run.device)
    args, kwargs = code.arguments(inputs, run)
    return Forward(module, args, kwargs, layer=layer, spec=spec, run=run, inputs=inputs)


def of_other_sizes(forward: Forward, module: nn.Module, inputs: InputSpec) -> Forward:
    """The same forward of a copy of its module, on other inputs."""
    made = make_inputs(forward.spec, inputs, forward.run)
    args, kwargs = find_layer(forward.layer).load().arguments(made, forward.run)
    return replace(forward, module=module, args=args, kwargs=kwargs, inputs=made, wider=None)


def tiny(forward: Forward) -> Forward:
    """The same layer and the same kind of inputs at small sizes, on the CPU, no size one and independent sizes prime.

    A dimension of size one leaves no trace in a view: this run has none, so that every axis can be named.
    """
    spec = _tiny_spec(forward.spec)
    real = forward.inputs
    cross = real.key is not real.query or real.query_len != real.key_len
    asked = InputSpec(
        batch=1 if real.unbatched else 7,
        seq_len=11,
        key_len=13 if cross else None,
        unbatched=real.unbatched,
        padding=() if real.key_padding_mask is None else (2,),
    )
    run = replace(forward.run, device="cpu")
    inputs = make_inputs(spec, asked, run)
    if real.value is not real.key and inputs.value is inputs.key:
        inputs = replace(inputs, value=inputs.value.clone())
    if real.attn_mask is not None:
        shape: tuple[int, ...] = (inputs.query_len, inputs.key_len)
        if real.attn_mask.dim() == 3:
            shape = (inputs.batch * spec.num_heads, *shape)
        inputs = replace(inputs, attn_mask=torch.zeros(shape, dtype=real.attn_mask.dtype))
    return _forward(forward.layer, spec, run, inputs)


def _tiny_spec(spec: AttentionSpec) -> AttentionSpec:
    few = 3 if spec.num_heads % 2 else 2  # torch's fast path is taken for an even number of heads
    kv_heads = 1 if spec.kv_heads == 1 < spec.num_heads else few if spec.kv_heads == spec.num_heads else 3
    num_heads = few if spec.kv_heads in (1, spec.num_heads) else 2 * kv_heads
    head_dim = 10 if spec.rope else 5
    small = replace(
        spec,
        num_heads=num_heads,
        num_kv_heads=None if spec.num_kv_heads is None else kv_heads,
        embed_dim=num_heads * head_dim,
        kdim=17 if spec.key_width != spec.embed_dim else None,
        vdim=19 if spec.value_width != spec.embed_dim else None,
        head_dim=DerivedInt(0),
    )
    if not spec.head_dim_given:
        return small
    return replace(small, head_dim=small.embed_dim if spec.head_dim == spec.embed_dim else head_dim + 4)
