"""What a forward takes, the arguments of one call of it, and what the forward does wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter
from math import prod
from traceback import walk_tb
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..build.arguments import signature_of
from ..build.importing import in_one_line
from ..build.vocabulary import Kind, kind_of, plain
from ..errors import ExitCode, MhaInspectError, SpecError, is_out_of_memory
from ..files.memory import require_memory
from ..layers.spec import InputSpec
from ..record.arguments import described
from ..running.subject import Subject
from ..text import did_you_mean, shown

Axis = int | Literal["batch", "query", "key"]
"""A size of a tensor, or which size of the inputs it is."""


@dataclass(frozen=True)
class Call:
    """The arguments of one forward, and what was decided about them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    described: str
    """`x float32 [2, 10, 512]`."""
    drawn: tuple[str, ...] = ()
    """Names of the tensors in whose place another forward's may stand: nobody gave them."""
    guessed: Mapping[str, str] = field(default_factory=dict)
    """Those among them of whose shape nobody said anything, with the shape that they got: `2x10x512:float32`."""
    origin: str = "drawn from the seed"
    """Where those come from."""
    batch_first: bool = True
    """Whether sequences are `batch sequence ...`, and not `sequence batch ...`."""
    said: tuple[str, ...] = ()
    """What else was decided about them, as sentences."""

    def of(self, module: nn.Module) -> Subject:
        """Return the module with these arguments, ready to run."""
        return Subject(module, self.args, self.kwargs)

    @property
    def told(self) -> tuple[str, ...]:
        """What the forward was called with and why, as sentences; empty where it takes nothing."""
        if not self.described:
            return self.said
        were = "was" if len(self.drawn) == 1 else "were"
        drawn = f" {', '.join(self.drawn)} {were} {self.origin}." if self.drawn else ""
        return (f"The forward was called with {self.described}.{drawn}", *self.said)

    @property
    def hint(self) -> str:
        """How to call it with other inputs than those that were guessed; empty where none were."""
        ways = [f"--input-shape {name}={shape}" for name, shape in self.guessed.items()]
        hint = f"If that is not what it takes: {' '.join(ways)}, or --set." if ways else ""
        masks = [name for name, value in self.kwargs.items() if value is None and "mask" in name]
        return f"{hint} No mask was given: {masks[0]} is made by --causal or --padding." if hint and masks else hint


@dataclass(frozen=True)
class Forward:
    """What a module's forward takes, as its signature says."""

    module: nn.Module
    label: str
    """What messages call it."""
    parameters: Mapping[str, Parameter]
    """Its arguments by name; `*args` where there is no other."""
    open_ended: bool
    """Whether it has `**kwargs`."""
    device: torch.device
    dtype: torch.dtype
    batch_first: bool = True

    @classmethod
    def of(cls, module: nn.Module, name: str = "") -> Forward:
        """Return the forward of a module that messages call by this name."""
        every = signature_of(module.forward)
        parameters = {n: p for n, p in every.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        weights = [*module.parameters()]
        return cls(
            module,
            f"{name or type(module).__name__}.forward",
            parameters or {n: p for n, p in every.items() if p.kind is p.VAR_POSITIONAL},
            any(p.kind is Parameter.VAR_KEYWORD for p in every.values()),
            weights[0].device if weights else torch.device("cpu"),
            next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32),
        )

    @property
    def tensors(self) -> list[str]:
        """The arguments that are tensors and say nothing of others."""
        return [name for name in self.parameters if self.kind(name) not in ("setting", "mask", "lengths")]

    @property
    def encodes_and_decodes(self) -> bool:
        """Whether it takes what goes into a decoder beside what is encoded."""
        return any(plain(name) in ("tgt", "trg", "decoderinputids", "target") for name in self.parameters)

    def kind(self, name: str) -> Kind:
        """Return what an argument is, by its name."""
        if name in self.parameters:
            return kind_of(self.parameters[name])
        return kind_of(Parameter(name, Parameter.KEYWORD_ONLY)) if name.isidentifier() else "unknown"

    def is_needed(self, name: str) -> bool:
        """Return whether it cannot be called without an argument."""
        return self.parameters[name].default is Parameter.empty

    def named(self, given: Mapping[str, Any], flag: str) -> dict[str, Any]:
        """Return what a flag gave by the names of the forward; what has no name is the first argument's.

        Raises `SpecError` for a name that it does not have.
        """
        tensors = self.tensors or list(self.parameters)
        for name in given:
            if name == "" and not tensors:
                raise SpecError(f"{self.label} takes no argument: {flag} has nothing to give a tensor to.")
            if name and name not in self.parameters and not self.open_ended:
                listed = ", ".join(self.parameters)
                raise SpecError(
                    f"{flag} names {shown(name)}, which is no argument of {self.label}: {listed}."
                    f"{did_you_mean(name, self.parameters)}"
                )
        return {name or tensors[0]: value for name, value in given.items()}

    def call(self, values: Mapping[str, Any]) -> Call:
        """Return a call with these values, and with None for what is needed and not there: no mask."""
        kwargs = {name: value for name, value in values.items() if name not in self.parameters}
        for name in self.parameters:
            if name in values or self.is_needed(name):
                kwargs[name] = values.get(name)
        text, args = described(kwargs), list[Any]()
        for name, parameter in self.parameters.items():
            if name in kwargs and parameter.kind is Parameter.POSITIONAL_ONLY:
                args.append(kwargs.pop(name))
            elif name in kwargs and parameter.kind is Parameter.VAR_POSITIONAL:
                value = kwargs.pop(name)
                args += [value] if isinstance(value, Tensor) else value or ()
        return Call(tuple(args), kwargs, text, batch_first=self.batch_first)


@dataclass(frozen=True)
class Plan:
    """One tensor to draw, for inputs of any size."""

    kind: Kind
    axes: tuple[Axis, ...]
    """Batch first; `batch query` and `batch key` are laid out as the forward takes them when they are drawn."""
    dtype: str = ""
    """Empty: that of the module's parameters; whole numbers for token ids."""
    below: int = 2
    """Token ids are drawn below this number."""
    avoid: tuple[int, ...] = ()
    """Token ids that mean something of their own, such as padding."""

    def shape(self, inputs: InputSpec) -> tuple[int, ...]:
        """Return its shape for inputs, batch first."""
        sizes = {"batch": inputs.batch, "query": inputs.seq_len, "key": inputs.keys}
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)

    @property
    def is_given(self) -> bool:
        """Whether somebody said its shape."""
        return all(isinstance(axis, int) for axis in self.axes)

    def draw(self, forward: Forward, inputs: InputSpec, generator: torch.Generator) -> Tensor:
        """Return the tensor for inputs, in the forward's dtype where the plan has none; on meta without content.

        Raises `DoesNotFitError` where it takes more memory than is free.
        """
        shape, dtype = self.shape(inputs), getattr(torch, self.dtype) if self.dtype else forward.dtype
        if forward.device.type == "meta":
            tensor = torch.empty(shape, dtype=dtype, device="meta")
        else:
            size = prod(shape) * dtype.itemsize
            require_memory(size, forward.device, f"an input {list(shape)}", "Try a smaller --batch or --seq-len.")
            tensor = self._drawn(shape, dtype, generator).to(device=forward.device, dtype=dtype)
        # Always drawn batch first: the content of a row does not hang on the layout.
        is_sequence = self.axes[:2] in (("batch", "query"), ("batch", "key"))
        return tensor.transpose(0, 1).contiguous() if is_sequence and not forward.batch_first else tensor

    def _drawn(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        if dtype == torch.bool:
            # Both words in every row: never fully masked, whichever of them means masked.
            return (torch.arange(shape[-1]) % 2 == 0).expand(shape).clone()
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        ids = torch.randint(0, max(self.below, 1), shape, generator=generator)
        free = next((n for n in range(self.below) if n not in self.avoid), None)
        if free is not None and self.avoid:
            ids[torch.isin(ids, torch.tensor(self.avoid))] = free
        return ids

    @property
    def code(self) -> str:
        """How to write it in Python."""
        shape = self.shape(InputSpec(batch=2))
        return f"torch.randint({self.below}, {shape})" if self.kind == "ids" else f"torch.randn{shape}"


class TargetFailedError(MhaInspectError):
    """The target's own forward raised."""

    exit_code = ExitCode.CONDITION


@contextmanager
def explaining(subject: Subject, how: str = "") -> Iterator[None]:
    """Run a subject inside: an error of its forward is raised as one that says how it was called, and a way out.

    Any other is a fault of ours and stays as it is, as does that of a module which somebody made: who calls the library
    sees their own. `how` says how it was built.
    """
    try:
        yield
    except Exception as error:
        of_forward = any(frame.f_code is nn.Module._call_impl.__code__ for frame, _ in walk_tb(error.__traceback__))
        if not subject.label or isinstance(error, MhaInspectError) or is_out_of_memory(error) or not of_forward:
            raise
        called = subject.described or "a call without tensors"
        said = f"{subject.label}{how} failed on {called}: {in_one_line(error)}. {way_out(subject)}"
        raise TargetFailedError(said.rstrip()) from error


def way_out(subject: Subject) -> str:
    """Return how to call a forward that raised otherwise, as a sentence: in training mode, where it runs so.

    Empty where nothing was guessed.
    """
    if subject.module.training:
        return subject.hint
    try:
        with torch.no_grad(), subject.apart() as fresh:
            fresh.module.train()
            fresh.plain()
    except Exception:  # it has another reason
        return subject.hint
    return "It runs in training mode: --train."
