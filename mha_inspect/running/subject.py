"""Run a module with its arguments, record the run, and restore everything that a run may change."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..naming.named_run import NamedRun
from ..record.arguments import (
    PLAIN,
    argument_names,
    cast_module,
    cast_tensors,
    changed,
    copy_module,
    described,
    tensors_in,
    with_copies,
)
from ..record.ops import Recording, TensorRef
from ..record.ranks import local, needs_ranks, wait, wraps
from ..record.tensors import unshared
from ..record.xray import XRay
from .without_dropout import WithoutDropout

_SMALL = 1 << 29
"""Bytes of a run's results up to which a second run is worthwhile to name its axes."""


@dataclass(frozen=True)
class Run(NamedRun):
    """A recorded run, and the attentions in it."""

    returned: Any = None
    error: Exception | None = None
    """The exception that the run raised; None if it returned."""
    recorder: XRay | None = None
    """The recorder of a run that raised, to look up its tensors; None if it returned."""


@contextmanager
def original_code() -> Iterator[None]:
    """Run the original Python code of compiled functions and modules in the body; do nothing if none is compiled.

    A compiled kernel hides its operations from a recorder.
    """
    # torch imports it for the first compiled function, and it takes a second.
    if "torch._dynamo" not in sys.modules or torch.compiler.is_compiling():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def run_and_record(
    module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    keep: bool = False,
    room: int | None = None,
    tables: bool = False,
) -> Run:
    """Run `module(*args, **kwargs)` once and record it up to an exception; with `keep` keep every tensor.

    If the tensors take more than `room` bytes, none is kept. With `tables` keep only integers and booleans.

    An exception that is no `Exception`, e.g. an interrupt, is raised.
    """
    root = module if isinstance(module, nn.Module) else None
    recorder = XRay(root, keep=keep or tables, room=room, tables=tables)
    recorder.opens_compiled = True
    recorder.take_inputs(argument_names(module, args, kwargs))
    try:
        with recorder, original_code():
            returned = module(*args, **kwargs)
        if wraps(type(tensor) for _, tensor in tensors_in(returned)):
            wait(returned)
    except Exception as error:
        # No variable of this frame refers to the error: its traceback refers to the frame.
        return Run(recorder.finish(), error=error, recorder=recorder, as_recorded=True)
    return Run(recorder.finish(returned), returned=returned)


def keep_stages(run: Run) -> None:
    """Keep only the tensors of stages in the recording, each turn of a loop included, in memory of their own."""
    values = run.recording.values
    turns: list[Mapping[str, TensorRef]] = []
    for attention, _ in run.attentions:
        turns.append(attention.stages)
        turns += [branch.stages for branch in attention.branches]
    contents: list[dict[str, torch.Tensor]] = []
    for stages in turns:
        of_turn = {stage: values[tensor.id] for stage, tensor in stages.items()}
        contents.append(of_turn)
    values.clear()
    for stages, tensors in zip(turns, unshared(tuple(contents)), strict=True):
        for stage, tensor in tensors.items():
            values[stages[stage].id] = tensor


@dataclass(frozen=True)
class State:
    """Everything that a run may change, at one moment: generators, buffers, modes, and attributes of modules."""

    cpu: torch.Tensor
    gpus: dict[int, torch.Tensor]
    of_python: Any
    of_numpy: Any
    contents: list[tuple[torch.Tensor, torch.Tensor]]
    """Each buffer with a copy of its content."""
    attributes: list[tuple[Any, Any]]
    """Attributes of each module, with a copy of them; the attributes of a scripted module cannot be read."""
    modes: list[tuple[nn.Module, bool]]
    """Whether each module is in training mode."""

    def restore(self) -> None:
        """Restore everything to this moment."""
        torch.set_rng_state(self.cpu)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        for gpu, numbers in self.gpus.items():
            torch.cuda.set_rng_state(numbers, gpu)
        with torch.no_grad():
            for buffer, content in self.contents:
                buffer.copy_(content)
        for now, before in self.attributes:
            _put_back(now, before)
        for part, mode in self.modes:
            if part.training != mode:
                part.training = mode


@dataclass(frozen=True)
class Subject:
    """A module and its arguments, ready for repeated runs with the same numbers."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str = field(default="", kw_only=True)
    """The name in reports; empty for the name of the class."""
    layer: str = field(default="", kw_only=True)
    """The name in the catalog, whose spec it was made with; empty for any other module."""
    made_with: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """The arguments that it was built with, by name, as plain data."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """The decisions when it was made, as sentences."""
    seed: int | None = field(default=None, kw_only=True)
    """Every run seeds the generators with this number, and restores them. None: a run draws from the current state."""
    random: str = field(default="", kw_only=True)
    """The random numbers of a built-in layer: `weights and inputs`, or `weights`; empty for any other module."""
    grad: bool | None = field(default=None, kw_only=True)
    """Whether runs record gradients; None for the surrounding setting."""
    hint: str = field(default="", kw_only=True)
    """How to call it differently, as a sentence, if its arguments were guessed; otherwise empty."""
    drawn_width: int = field(default=0, kw_only=True)
    """The width of its inputs if nothing in the module shows it, else 0."""
    guessed: tuple[str, ...] = field(default=(), kw_only=True)
    """Inputs of a guessed shape, or left None: that a forward raises on one of them may be the fault of the guess."""
    batch_first: bool | None = field(default=None, kw_only=True)
    """Whether its inputs, which were drawn for it, are `batch seq embed`; None if somebody else made them."""
    without_ones: Callable[[nn.Module], Subject] | None = field(default=None, kw_only=True, compare=False)
    """Builds the same call of a copy of the module with no size of 1.

    If None, arguments are repeated along their sizes of 1.
    """

    drops: bool = field(default=True, kw_only=True)
    """Whether dropout drops anything; if not, it returns its input in every run."""
    instead: Mapping[int, torch.Tensor] = field(default_factory=dict, kw_only=True, repr=False)
    """Replacements of parameters during a run, by the ids of the parameters."""

    @property
    def name(self) -> str:
        """The name in reports."""
        return self.label or type(self.module).__name__

    @property
    def described(self) -> str:
        """The arguments by name, a tensor as its dtype and shape: `x float32 [2, 10, 512]`."""
        return described(argument_names(self.module, self.args, self.kwargs))

    @property
    def elements(self) -> int:
        """Number of elements in all arguments."""
        sizes: dict[int, int] = {}
        for tensor in self._tensors():
            # One that is given twice counts once.
            sizes[id(tensor)] = tensor.numel()
        return sum(sizes.values())

    def _tensors(self) -> list[torch.Tensor]:
        """Return the tensors in its arguments; one that is given twice is there twice."""
        return [tensor for _, tensor in tensors_in((self.args, self.kwargs))]

    def leaves(self, recording: Recording) -> dict[int, torch.Tensor]:
        """Return the inputs, parameters and buffers in a recording of it, detached, by tensor id."""
        arguments = dict(tensors_in(argument_names(self.module, self.args, self.kwargs)))
        tensors: dict[str, torch.Tensor] = dict(self.module.named_buffers())
        tensors.update(self.module.named_parameters())
        leaves = {}
        for named in (*recording.buffers, *recording.parameters):
            if named.name in tensors:
                leaves[named.tensor.id] = local(tensors[named.name]).detach()
        for named in recording.inputs:
            if named.name in arguments:
                leaves[named.tensor.id] = local(arguments[named.name]).detach()
        return leaves

    def recorded(self, *, keep: bool = False, tables: bool = False) -> Run:
        """Run it once, record it and open its fused kernels; with `keep` keep the tensors. Raise the run's error.

        With `tables` keep only integers and booleans.
        """
        with self.settings():
            run = run_and_record(self.module, self.args, self.kwargs, keep=keep, tables=tables)
        if run.error is None:
            return run
        try:
            raise run.error
        finally:
            del run  # the error's traceback refers to this frame

    def plain(self) -> Any:
        """Run it without recording, and return its result."""
        with self.settings():
            return self.module(*self.args, **self.kwargs)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Set gradients, seed and replaced parameters for the body, and restore all of them."""
        with ExitStack() as stack:
            if self.instead:
                for part in self.module.modules():
                    stack.callback(part._parameters.update, dict(part._parameters))
                    self._replace_parameters(part._parameters)
            if not self.drops:
                stack.enter_context(WithoutDropout())
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.seed is not None:
                stack.enter_context(torch.random.fork_rng(devices=self.gpus()))
                stack.callback(random.setstate, random.getstate())
                stack.callback(np.random.set_state, np.random.get_state())
                seed_everything(self.seed)
            yield

    def _replace_parameters(self, parameters: dict[str, Any]) -> None:
        for name, tensor in parameters.items():
            parameters[name] = self.instead.get(id(tensor), tensor)

    def wider_run(self, run: Run) -> Run | None:
        """Run it with no size of 1, given an opened run with such a size; None if this fails or costs too much.

        The run uses a copy of the module with the same parameters, and leaves no trace.
        """
        if needs_ranks(self.module, run.recording):
            return None
        if self.without_ones is not None:
            return self._run_wider(run, self.without_ones)
        if not run.attentions:
            return None
        for times in self._repetitions():
            wider = self._run_wider(run, partial(self._repeated, times))
            if wider is not None:
                return wider
        return None

    def _run_wider(self, run: Run, make: Callable[[nn.Module], Subject]) -> Run | None:
        """Run the subject that `make` builds of a copy of the module; None if this fails or costs too much."""
        parameters = list(self.module.parameters())
        shared = {id(parameter): parameter for parameter in parameters}
        costs_nothing = bool(parameters) and parameters[0].is_meta
        try:
            wider = make(copy_module(self.module, shared))
            computed = sum(op.output.nbytes for op in run.recording.ops if op.kind == "compute")
            larger = wider.elements > self.elements and not costs_nothing
            if larger and computed > _SMALL:
                return None
            with wider.replaying(wider.state()):
                return Run(wider.recorded().recording)
        except Exception:  # user code may raise anything at sizes that nobody asked for
            return None

    def _repetitions(self) -> list[dict[int, int]]:
        """Return how to enlarge arguments of size 1 in their first two dimensions, in the order to try: `{0: 2, 1: 3}`.

        First both dimensions, to different sizes; then each alone; at last both to the same size, because a dimension
        of one argument may be another one of the next: the tokens of `token batch embed` and of a mask `batch token`.
        Empty if no size is 1, or if a run may change an argument that cannot be copied.
        """
        values: list[Any] = []
        changed((self.args, self.kwargs), values.append)
        if not all(map(_can_be_repeated, values)):
            return []
        times: dict[int, int] = {}
        for value in values:
            if not isinstance(value, torch.Tensor) or not _is_batched(value):
                continue
            for dim in (0, 1):
                if value.shape[dim] == 1:
                    times[dim] = 2 + dim
        if not times:
            return []
        first = [times, {0: 2}, {1: 3}] if len(times) == 2 else [times]
        return [*first, {0: 3, 1: 3}]

    def _repeated(self, times: Mapping[int, int], module: nn.Module) -> Subject:
        """Return this call of a module with every argument repeated along these dimensions if its size there is 1."""

        def repeated(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            for dim, count in times.items():
                if value.dim() > max(*times, 1) and value.shape[dim] == 1:
                    value = value.repeat_interleave(count, dim)
            return value.detach().clone()

        args, kwargs = changed((self.args, self.kwargs), repeated)
        return replace(self, module=module, args=args, kwargs=kwargs)

    def copied(self, dtype: torch.dtype) -> Subject:
        """Return a copy in another dtype: the module and its arguments, without gradients.

        The copy is on the CPU if the device lacks the dtype. Raise any error of copying the module.
        """
        devices = {tensor.device.type for tensor in self._tensors()}
        lacks_dtype = "mps" in devices and dtype == torch.float64
        device_of_copy = "cpu" if lacks_dtype else None
        module = cast_module(copy_module(self.module), dtype, device_of_copy)
        devices_of_parameters = {parameter.device.type for parameter in module.parameters()}
        device = "cpu" if "cpu" in devices_of_parameters else None
        args, kwargs = cast_tensors((self.args, self.kwargs), dtype, device)
        return replace(self, module=module, args=args, kwargs=kwargs, grad=False)

    def shaken(self) -> Subject:
        """Return it with every input and parameter changed by half a last digit, without a copy of the module."""
        generator = torch.Generator("cpu").manual_seed(0)
        shake = partial(_shaken, generator=generator)
        instead = {id(parameter): shake(parameter) for parameter in self.module.parameters()}
        args, kwargs = changed((self.args, self.kwargs), shake)
        return replace(self, instead=instead, args=args, kwargs=kwargs)

    def fresh(self, instead: Mapping[int, torch.Tensor] | None = None) -> Subject:
        """Return it with copies of everything that a run may change, and with the same parameters.

        An object that cannot be copied is shared. `instead` has replacements of parameters, by their ids.
        """
        # A lazy parameter gets its shape in its first run, so a run without a trace needs a copy.
        shared = {id(parameter): parameter for parameter in self.module.parameters() if not is_lazy(parameter)}
        try:
            module = copy_module(self.module, {**shared, **(instead or {})})
        except Exception:  # user classes may raise anything when copied
            module = self.module
        args, kwargs = with_copies((self.args, self.kwargs))
        return replace(self, module=module, args=args, kwargs=kwargs)

    @contextmanager
    def apart(self) -> Iterator[Subject]:
        """Yield it with copies of everything that a run may change, as it is now, so that runs leave no trace."""
        subject = self.fresh()
        with ExitStack() as stack:
            state = subject.state()
            if subject.module is not self.module:
                # A kept tensor may be a view of a copy's buffer, so that buffer stays as the run leaves it.
                state = replace(state, contents=[])
            stack.callback(state.restore)
            yield subject

    def state(self) -> State:
        """Return everything that a run may change, as it is now."""
        contents = []
        for buffer in self.module.buffers():
            contents.append((buffer, buffer.detach().clone()))
        attributes: list[tuple[Any, Any]] = []
        modes = []
        for part in self.module.modules():
            attributes += _contents(part)
            modes.append((part, part.training))
        return State(
            cpu=torch.get_rng_state(),
            gpus={gpu: torch.cuda.get_rng_state(gpu) for gpu in self.gpus()},
            of_python=random.getstate(),
            of_numpy=np.random.get_state(),
            contents=contents,
            attributes=attributes,
            modes=modes,
        )

    @contextmanager
    def replaying(self, state: State) -> Iterator[None]:
        """Run the body from an earlier state, then restore the current state: the body leaves no trace."""
        now = self.state()
        state.restore()
        try:
            yield
        finally:
            now.restore()

    def gpus(self) -> list[int]:
        """Return the CUDA devices whose generators a run may draw from."""
        gpus = set()
        for tensor in chain(self.module.parameters(), self._tensors()):
            if tensor.device.type == "cuda":
                gpus.add(tensor.device.index or 0)
        return sorted(gpus)


def _shaken(value: Any, generator: torch.Generator) -> Any:
    """Return a tensor with each number half a last digit larger or smaller; any other value unchanged.

    Rounding moves every number by at most so much, in the inputs and in each product.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    signs = torch.randint(0, 2, value.shape, generator=generator).mul_(2).sub_(1)
    half_a_digit = torch.finfo(value.dtype).eps / 2
    halves = signs.to(value.device) * half_a_digit
    shaken = value.detach().double() * (1 + halves.double())
    return shaken.to(value.dtype)


def _can_be_repeated(value: Any) -> bool:
    """Return whether an argument is a tensor, or has nothing that a run may change: a number, or an empty list."""
    if isinstance(value, (torch.Tensor, *PLAIN)):
        return True
    # An array compares each of its elements, so containers are recognized by their type.
    return isinstance(value, (tuple, list, dict)) and not value


def _is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is batched features or tokens: without a batch the dimensions of a mask are ambiguous."""
    if tensor.dtype == torch.bool:
        return False
    return tensor.dim() == (3 if tensor.is_floating_point() else 2)


def _contents(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the attributes of a module with a copy, and each of its lists, dicts and sets with a copy."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    yield vars(module), dict(vars(module))
    yield module._buffers, dict(module._buffers)
    for name, value in vars(module).items():
        if type(value) in (list, dict, set) and name not in _OF_EVERY_MODULE:
            yield value, copy.copy(value)


def _put_back(now: Any, before: Any) -> None:
    """Restore a list, dict or set. An unchanged one is not written: another thread may be reading it."""
    if isinstance(now, dict):
        _put_back_dict(now, before)
    elif isinstance(now, list) and [*map(id, now)] != [*map(id, before)]:
        now[:] = before
    elif isinstance(now, set) and {*map(id, now)} != {*map(id, before)}:
        now.clear()
        now.update(before)


def _put_back_dict(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in list(now):
        if name not in before:
            del now[name]
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def seed_everything(seed: int) -> None:
    """Seed every generator that a module may draw from: torch's, Python's and numpy's."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # torch.manual_seed stores a stack trace for every device without a context: a tenth of the time of a check.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
