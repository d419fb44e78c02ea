"""The signature of a forward, the arguments of one call, and the errors of that call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter
from traceback import walk_tb
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ExitCode, MhaInspectError, SpecError, is_out_of_memory
from ..layers.spec import InputSpec
from ..making.arguments import signature_of
from ..making.importing import in_one_line
from ..making.vocabulary import DECODED, Kind, kind_of, plain
from ..record.arguments import described, tensors_in
from ..running.subject import Subject
from ..text import did_you_mean, shown

Axis = int | Literal["batch", "query", "key"]
"""A size of a tensor, or the size of the inputs that gives it."""


@dataclass(frozen=True)
class Call:
    """The arguments of one forward, and what was decided about them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    described: str
    """`x float32 [2, 10, 512]`."""
    drawn: tuple[str, ...] = ()
    """Names of the tensors that the user did not give: another forward's tensors may replace them."""
    guessed: Mapping[str, str] = field(default_factory=dict)
    """Drawn tensors whose shape was guessed, with that shape: `2x10x512:float32`."""
    missed: tuple[str, ...] = ()
    """Required arguments that are None because no usual mask runs."""
    drawn_width: int = 0
    """The width of drawn tensors if nothing in the module shows their width, else 0."""
    origin: str = "drawn from the seed"
    """Where the drawn tensors come from."""
    batch_first: bool = True
    """Whether sequences are `batch sequence ...` rather than `sequence batch ...`."""
    is_layout_known: bool = True
    """Whether that was chosen, rather than assumed of arguments that came with the module."""
    said: tuple[str, ...] = ()
    """Other decisions about the arguments, as sentences."""

    def of(self, module: nn.Module) -> Subject:
        """Return the module with these arguments, ready to run."""
        return Subject(module, self.args, self.kwargs)

    @property
    def notes(self) -> tuple[str, ...]:
        """The arguments of the call and why, as sentences; without the first if there are none."""
        if not self.described:
            return self.said
        return (f"Called with {self.described}{self._origin_of_drawn()}.", *self.said)

    def _origin_of_drawn(self) -> str:
        """Return where the drawn tensors come from: `, key and value drawn from the seed`; empty if none are drawn."""
        if not self.drawn:
            return ""
        if len(self.drawn) == len(list(tensors_in((self.args, self.kwargs)))):
            return f", {self.origin}"
        return f", {' and '.join(self.drawn)} {self.origin}"

    @property
    def hint(self) -> str:
        """How to replace guessed inputs; empty if none were guessed."""
        ways: list[str] = []
        for name, shape in self.guessed.items():
            # Sizes are left open: those of the guess are the ones that failed.
            dtype = shape.partition(":")[2]
            ways.append(f"--input-shape {name}=SIZES:{dtype}")
        if not ways:
            return ""
        hint = f"If the module takes other inputs, use {' '.join(ways)}, or --set."
        masks = [name for name, value in self.kwargs.items() if value is None and "mask" in name]
        if not masks:
            return hint
        return f"{hint} No mask was given: --causal or --padding makes {masks[0]}."


@dataclass(frozen=True)
class Forward:
    """The arguments of a module's forward, from its signature."""

    module: nn.Module
    label: str
    """Its name in messages."""
    parameters: Mapping[str, Parameter]
    """Its arguments by name; `*args` if there is no other."""
    open_ended: bool
    """Whether it has `**kwargs`."""
    device: torch.device
    dtype: torch.dtype
    batch_first: bool = True

    @classmethod
    def of(cls, module: nn.Module, name: str = "") -> Forward:
        """Return the forward of a module, which has this name in messages."""
        named: dict[str, Parameter] = {}
        nameless: dict[str, Parameter] = {}
        open_ended = False
        for key, parameter in signature_of(module.forward).items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                open_ended = True
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                nameless[key] = parameter
            else:
                named[key] = parameter
        weights = list(module.parameters())
        dtypes = [weight.dtype for weight in weights if weight.is_floating_point()]
        return cls(
            module=module,
            label=f"{name or type(module).__name__}.forward",
            parameters=named or nameless,
            open_ended=open_ended,
            device=weights[0].device if weights else torch.device("cpu"),
            dtype=dtypes[0] if dtypes else torch.float32,
        )

    @property
    def tensors(self) -> list[str]:
        """The arguments that are tensors, other than masks and lengths."""
        return [name for name in self.parameters if self.kind(name) not in ("setting", "mask", "lengths")]

    @property
    def encodes_and_decodes(self) -> bool:
        """Whether it takes the input of a decoder as well as that of an encoder."""
        return any(plain(name) in DECODED for name in self.parameters)

    def kind(self, name: str) -> Kind:
        """Return the kind of an argument by its name."""
        if name in self.parameters:
            return kind_of(self.parameters[name])
        if not name.isidentifier():
            return "unknown"
        return kind_of(Parameter(name, Parameter.KEYWORD_ONLY))

    def is_needed(self, name: str) -> bool:
        """Return whether an argument is required."""
        return self.parameters[name].default is Parameter.empty

    def named(self, given: Mapping[str, Any], flag: str) -> dict[str, Any]:
        """Return the values of a flag by the names of the forward. A value without a name is the first argument's.

        Raises `SpecError` for an unknown name.
        """
        tensors = self.tensors or list(self.parameters)
        for name in given:
            if name == "" and not tensors:
                raise SpecError(f"{self.label} takes no arguments, so {flag} does not apply. Drop it.")
            if name and name not in self.parameters and not self.open_ended:
                listed = ", ".join(self.parameters)
                raise SpecError(
                    f"{flag} names {shown(name)}, which is not an argument of {self.label}: {listed}."
                    f"{did_you_mean(name, self.parameters)}"
                )
        return {name or tensors[0]: value for name, value in given.items()}

    def call(self, values: Mapping[str, Any]) -> Call:
        """Return a call with these values, and with None for other required arguments: masks."""
        kwargs = {name: value for name, value in values.items() if name not in self.parameters}
        for name in self.parameters:
            if name in values or self.is_needed(name):
                kwargs[name] = values.get(name)
        text = described(kwargs)
        args: list[Any] = []
        for name, parameter in self.parameters.items():
            if name not in kwargs:
                continue
            if parameter.kind is Parameter.POSITIONAL_ONLY:
                args.append(kwargs.pop(name))
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                value = kwargs.pop(name)
                args += [value] if isinstance(value, Tensor) else value or ()
        return Call(tuple(args), kwargs, text, batch_first=self.batch_first)


@dataclass(frozen=True)
class Plan:
    """One tensor to draw, for inputs of any size."""

    kind: Kind
    axes: tuple[Axis, ...]
    """Batch first. `draw` lays out `batch query` and `batch key` as the forward takes them."""
    dtype: str = ""
    """Empty for the dtype of the module's parameters, or of whole numbers for token ids."""
    below: int = 2
    """Token ids are drawn below this number."""
    avoid: tuple[int, ...] = ()
    """Special token ids, such as padding."""

    def shape(self, inputs: InputSpec) -> tuple[int, ...]:
        """Return its shape for inputs, batch first."""
        by_name = {"batch": inputs.batch, "query": inputs.seq_len, "key": inputs.keys}
        sizes: list[int] = []
        for axis in self.axes:
            sizes.append(axis if isinstance(axis, int) else by_name[axis])
        return tuple(sizes)

    @property
    def is_given(self) -> bool:
        """Whether the user gave its shape."""
        return all(isinstance(axis, int) for axis in self.axes)

    def draw(self, forward: Forward, inputs: InputSpec, generator: torch.Generator) -> Tensor:
        """Return the tensor for inputs, in the forward's dtype if the plan has none. On meta it has no content."""
        shape = self.shape(inputs)
        dtype = getattr(torch, self.dtype) if self.dtype else forward.dtype
        if forward.device.type == "meta":
            tensor = torch.empty(shape, dtype=dtype, device="meta")
        else:
            tensor = self._drawn(shape, dtype, generator).to(device=forward.device, dtype=dtype)
        # Always drawn batch first: the content of a batch item does not depend on the layout.
        is_sequence = self.axes[:2] in (("batch", "query"), ("batch", "key"))
        if forward.batch_first or not is_sequence:
            return tensor
        return tensor.transpose(0, 1).contiguous()

    def _drawn(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        if dtype == torch.bool:
            # Both values in every row: never fully masked, whichever value means masked.
            row = torch.arange(shape[-1]) % 2 == 0
            return row.expand(shape).clone()
        if dtype.is_complex:
            return _rotation(shape)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        ids = torch.randint(0, max(self.below, 1), shape, generator=generator)
        usual = self._usual_token()
        if usual is not None and self.avoid:
            ids[torch.isin(ids, torch.tensor(self.avoid))] = usual
        return ids

    def _usual_token(self) -> int | None:
        """Return the first token that is not special; None if all of them are."""
        for token in range(self.below):
            if token not in self.avoid:
                return token
        return None


def _rotation(shape: tuple[int, ...]) -> Tensor:
    """Return rotary positions as complex numbers, `… query … pair`: position · 10000^(-pair / pairs) is the angle.

    Positions are along the largest dimension before the last. Complex inputs of attention are rotations: other numbers
    would change the lengths of queries and keys.
    """
    *outer, pairs = shape
    sizes = [1] * len(outer)
    length = max(outer, default=1)
    if outer:
        sizes[outer.index(length)] = length
    exponents = torch.arange(pairs) / pairs
    positions = torch.arange(length).reshape(*sizes, 1)
    angles = positions * 10_000.0**-exponents
    lengths = torch.ones(shape)
    return torch.polar(lengths, angles.expand(shape).clone())


class TargetFailedError(MhaInspectError):
    """The forward of the target raised."""

    exit_code = ExitCode.CONDITION

    def __init__(self, said: str, way: str = "", subject: Subject | None = None) -> None:
        super().__init__(f"{said} {way}".rstrip())
        self.said = said
        """The call and its error, as a sentence."""
        self.subject = subject
        """The module and the arguments with which it failed."""

    def with_way(self, *sentences: str) -> TargetFailedError:
        """Return the error with these sentences as its way out."""
        return TargetFailedError(self.said, " ".join(filter(None, sentences)), self.subject)


@contextmanager
def explaining(subject: Subject, how: str = "") -> Iterator[None]:
    """Run a subject in the block. An error of its forward is raised with the call and a way out.

    Other errors are bugs and stay unchanged. So do errors of modules that a caller of the library made. `how` says how
    the subject was built.
    """
    try:
        yield
    except Exception as error:
        if not _is_of_users_forward(error, subject):
            raise
        called = subject.described or "a call without tensors"
        said = f"{subject.label}{how} failed on {called}: {in_one_line(error)}."
        raise TargetFailedError(said, subject.hint, subject) from error


def _is_of_users_forward(error: Exception, subject: Subject) -> bool:
    """Return whether the forward of a user's module raised an error, and not what runs it."""
    if isinstance(error, MhaInspectError) or is_out_of_memory(error):
        return False
    # Modules that a caller of the library made have no label.
    if not subject.label:
        return False
    call_of_module = nn.Module._call_impl.__code__
    return any(frame.f_code is call_of_module for frame, _ in walk_tb(error.__traceback__))
