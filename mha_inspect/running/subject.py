"""A module and its arguments, ready to run, what is seen when it runs, and what a run may change, kept and put back."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..naming.named_run import NamedRun
from ..record.arguments import argument_names, cast_tensors, changed, copy_module, described, tensors_in
from ..record.ops import Recording
from ..record.tensors import Stages, unshared
from ..record.xray import XRay

_SMALL = 1 << 29
"""Bytes of the results of a run up to which it is worth another one to know the names of its axes."""
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Run(NamedRun):
    """A recorded run, and the attentions in it."""

    returned: Any = None
    error: Exception | None = None
    """What it raised; None where it returned."""
    recorder: XRay | None = None
    """What recorded a run that raised, to be asked what any tensor of it is."""


def run_and_record(
    module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool = False
) -> Run:
    """Run `module(*args, **kwargs)` once and record it, as far as it comes; with `keep` every tensor is kept.

    An exception that is no `Exception` (an interrupt) passes through.
    """
    recorder = XRay(module if isinstance(module, nn.Module) else None, keep=keep)
    recorder.take_inputs(argument_names(module, args, kwargs))
    try:
        with recorder:
            returned = module(*args, **kwargs)
    except Exception as error:
        # Not kept in a variable of this frame: the error's traceback holds the frame.
        return Run(recorder.finish(), error=error, recorder=recorder)
    return Run(recorder.finish(returned), returned=returned)


def keep_stages(run: Run) -> Stages:
    """Return the tensors of each attention's stages, in memory of their own. The recording keeps none any longer."""
    values = run.recording.values
    stages = tuple(
        {stage: values[tensor.id] for stage, tensor in attention.stages.items()} for attention, _ in run.attentions
    )
    values.clear()
    return unshared(stages)


@dataclass(frozen=True)
class State:
    """What a run may change, at one moment: generators, buffers, modes, and what modules hold by name."""

    cpu: torch.Tensor
    gpus: dict[int, torch.Tensor]
    contents: list[tuple[torch.Tensor, torch.Tensor]]
    """Each buffer with a copy of its content."""
    held: list[tuple[Any, Any]]
    """What each module holds, with a copy of it; one that is scripted holds its own out of reach."""
    modes: list[tuple[nn.Module, bool]]
    """Whether each module is in training mode."""

    def restore(self) -> None:
        """Put everything back to this moment."""
        torch.set_rng_state(self.cpu)
        for gpu, numbers in self.gpus.items():
            torch.cuda.set_rng_state(numbers, gpu)
        with torch.no_grad():
            for buffer, content in self.contents:
                buffer.copy_(content)
        for names, held in self.held:
            _put_back(names, held)
        for part, mode in self.modes:
            if part.training != mode:
                part.training = mode


@dataclass(frozen=True)
class Subject:
    """A module and its arguments, ready to run again and again with the same numbers."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str = field(default="", kw_only=True)
    """What reports call it; empty: the name of its class."""
    layer: str = field(default="", kw_only=True)
    """The name that it has in the catalog, whose spec is what it was made with; empty for any other module."""
    made_with: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """What it was built with, by name, as plain data."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """What was decided when it was made, as sentences."""
    seed: int | None = field(default=None, kw_only=True)
    """Every run seeds the generators with it, and puts them back; None: a run draws from them as they are."""
    grad: bool | None = field(default=None, kw_only=True)
    """Whether runs record gradients; None: as is set around them."""
    hint: str = field(default="", kw_only=True)
    """How to call it otherwise, as a sentence, where it was guessed what its forward takes."""
    without_ones: Callable[[nn.Module], Subject] | None = field(default=None, kw_only=True, compare=False)
    """Makes the same forward of a copy of the module with arguments in which no size is one.

    None where nobody knows how: then what was given is repeated where it has a size of one.
    """

    instead: Mapping[int, torch.Tensor] = field(default_factory=dict, kw_only=True, repr=False)
    """What stands for parameters while it runs, by their ids."""

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.label or type(self.module).__name__

    @property
    def described(self) -> str:
        """The arguments by name, a tensor as its dtype and shape: `x float32 [2, 10, 512]`."""
        return described(argument_names(self.module, self.args, self.kwargs))

    @property
    def elements(self) -> int:
        """How many numbers its arguments hold."""
        return sum({id(t): t.numel() for _, t in tensors_in((self.args, self.kwargs))}.values())

    def leaves(self, recording: Recording) -> dict[int, torch.Tensor]:
        """Return the content of what came from outside in a recording of it, by the ids of that."""
        given = dict(tensors_in(argument_names(self.module, self.args, self.kwargs)))
        held = {**dict(self.module.named_buffers()), **dict(self.module.named_parameters())}
        kept = (*recording.buffers, *recording.parameters)
        leaves = {named.tensor.id: held[named.name] for named in kept if named.name in held}
        leaves |= {named.tensor.id: given[named.name] for named in recording.inputs if named.name in given}
        return {number: tensor.detach() for number, tensor in leaves.items()}

    def recorded(self, *, keep: bool = False) -> Run:
        """Run it once and record it, its fused kernels opened; with `keep` the tensors are kept."""
        with self.settings():
            seen = run_and_record(self.module, self.args, self.kwargs, keep=keep)
        if seen.error is None:
            return seen
        try:
            raise seen.error
        finally:
            del seen  # the error's traceback leads to this frame

    def plain(self) -> Any:
        """Run it as it is, and hand on what it returned."""
        with self.settings():
            return self.module(*self.args, **self.kwargs)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Set gradients as asked, the generators to the seed and what stands for parameters, and put all back."""
        with ExitStack() as stack:
            for part in self.module.modules() if self.instead else ():
                own: dict[str, Any] = part._parameters
                stack.callback(own.update, dict(own))
                own.update({name: self.instead.get(id(held), held) for name, held in own.items()})
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.seed is not None:
                stack.enter_context(torch.random.fork_rng(devices=self._gpus()))
                stack.callback(random.setstate, random.getstate())
                stack.callback(np.random.set_state, np.random.get_state())
                seed_everything(self.seed)
            yield

    def wider_run(self, run: Run) -> Run | None:
        """Run it with no size one, beside an opened run in which one is; None where it cannot be, or costs much.

        It is run with a copy of the module that shares its parameters, and leaves no trace. One that fails is none.
        """
        if self.without_ones is not None:
            return self._run_wider(run, self.without_ones)
        places = self._places_of_one()
        if not places or not run.attentions:
            return None
        tries = (self._run_wider(run, partial(self._repeated, each)) for each in places)
        return next(filter(None, tries), None)

    def _run_wider(self, run: Run, make: Callable[[nn.Module], Subject]) -> Run | None:
        """Run what `make` makes of a copy of the module; None where that fails, or costs much."""
        parameters = list(self.module.parameters())
        costs_nothing = bool(parameters) and parameters[0].is_meta
        try:
            other = make(copy_module(self.module, {id(parameter): parameter for parameter in parameters}))
            computed = sum(op.output.nbytes for op in run.recording.ops if op.kind == "compute")
            larger = other.elements > self.elements and not costs_nothing
            if larger and computed > _SMALL:
                return None
            with other.replaying(other.state()):
                return Run(other.recorded().recording)
        except Exception:  # whatever somebody's code may raise at sizes that nobody asked for
            return None

    def _places_of_one(self) -> list[tuple[int, ...]]:
        """Return which of the first two dimensions of the arguments to enlarge: all that have a size of one, then each.

        Empty where there is anything among the arguments that a run may change and no copy can stand for.
        """
        held: list[Any] = []
        changed((self.args, self.kwargs), held.append)
        if not all(isinstance(value, (torch.Tensor, *_PLAIN)) or value in ((), [], {}) for value in held):
            return []
        tensors = [value for value in held if isinstance(value, torch.Tensor) and value.dtype != torch.bool]
        # Features of several sequences, or tokens: without a batch nothing tells a mask's dimensions apart.
        shapes = [value.shape for value in tensors if value.dim() == (3 if value.is_floating_point() else 2)]
        places = [place for place in (0, 1) if any(shape[place] == 1 for shape in shapes)]
        return [tuple(places), *((place,) for place in places if len(places) > 1)] if places else []

    def _repeated(self, places: tuple[int, ...], module: nn.Module) -> Subject:
        """Return this call of a module with arguments that stand side by side where their size is one."""

        def repeated(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            for place in places:
                if value.dim() > max(place, 1) and value.shape[place] == 1:
                    value = value.repeat_interleave(2 + place, place)
            return value.detach().clone()

        args, kwargs = changed((self.args, self.kwargs), repeated)
        return replace(self, module=module, args=args, kwargs=kwargs)

    def copied(self, dtype: torch.dtype) -> Subject:
        """Return it in another dtype: a copy of the module and of the arguments, without gradients.

        On the CPU where the device has no such dtype. Raises what copying a module may raise.
        """
        arguments = self.args, self.kwargs
        on_cpu = any(tensor.device.type == "mps" for _, tensor in tensors_in(arguments)) and dtype == torch.float64
        module = copy_module(self.module).to(device="cpu" if on_cpu else None, dtype=dtype)
        device = next((p.device for p in module.parameters() if p.device.type == "cpu"), None)
        args, kwargs = cast_tensors(arguments, dtype, device)
        return replace(self, module=module, args=args, kwargs=kwargs, grad=False)

    def shaken(self) -> Subject:
        """Return it with every number that goes into it off by half a last digit, without a copy of the module."""
        generator = torch.Generator("cpu").manual_seed(0)

        def off(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            signs = torch.randint(0, 2, value.shape, generator=generator).mul_(2).sub_(1).to(value.device)
            # A number is at most half a last digit off what it stands for, and a product as much off what it comes to.
            half = signs * (torch.finfo(value.dtype).eps / 2)
            return (value.detach().double() * (1 + half.double())).to(value.dtype)

        instead = {id(parameter): off(parameter) for parameter in self.module.parameters()}
        args, kwargs = changed((self.args, self.kwargs), off)
        return replace(self, instead=instead, args=args, kwargs=kwargs)

    def fresh(self) -> Subject:
        """Return it with what a run may change in copies of its own, and with the same parameters.

        What cannot be copied stays as it is.
        """
        # A lazy parameter gets its shape in the first run, and so from one that is to leave no trace.
        shared = {id(parameter): parameter for parameter in self.module.parameters() if not is_lazy(parameter)}
        try:
            module = copy_module(self.module, shared)
        except Exception:  # whatever the copying of somebody's objects may raise
            module = self.module
        args, kwargs = changed((self.args, self.kwargs), _fresh)
        return replace(self, module=module, args=args, kwargs=kwargs)

    @contextmanager
    def apart(self) -> Iterator[Subject]:
        """Yield it with copies of what a run may change, as that is now: no run of those leaves a trace."""
        own = self.fresh()
        with own.replaying(own.state()):
            yield own

    def state(self) -> State:
        """Return what a run may change, as it is now."""
        return State(
            torch.get_rng_state(),
            {gpu: torch.cuda.get_rng_state(gpu) for gpu in self._gpus()},
            [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()],
            [content for part in self.module.modules() for content in _contents(part)],
            [(part, part.training) for part in self.module.modules()],
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


def _fresh(value: Any) -> Any:
    """Return an argument, or a copy of one that may be written to: of a tensor, of a cache of keys.

    What overlaps in memory is no such tensor: torch does not write to it.
    """
    if isinstance(value, (nn.Module, *_PLAIN)):
        return value
    try:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        overlaps = value.layout == torch.strided and 0 in value.stride() and value.numel() > 1
        return value if value.is_meta or overlaps else value.detach().clone()
    except Exception:  # whatever the copying of somebody's objects may raise
        return value


def _contents(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield what a module holds by name, and each list or dict of its own that a run may add to, with a copy of it."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    yield vars(module), dict(vars(module))
    yield module._buffers, dict(module._buffers)
    for name, value in vars(module).items():
        if type(value) in (list, dict, set) and name not in _OF_EVERY_MODULE:
            yield value, copy.copy(value)


def _put_back(now: Any, before: Any) -> None:
    """Make a list, dict or set what it was. One that is so is not touched: another thread may be reading it."""
    if isinstance(now, dict):
        for name in [name for name in now if name not in before]:
            del now[name]
        now.update({name: value for name, value in before.items() if name not in now or now[name] is not value})
    elif isinstance(now, list) and [*map(id, now)] != [*map(id, before)]:
        now[:] = before
    elif isinstance(now, set) and {*map(id, now)} != {*map(id, before)}:
        now.clear()
        now.update(before)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def seed_everything(seed: int) -> None:
    """Seed every generator that a module may draw from: torch's, Python's and numpy's."""
    # For a device that may yet come torch would write down the stack each time: a tenth of what a check takes.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
