"""The use of a module's arguments, found by running it.

A matrix that multiplies an argument gives its width, an embedding shows token ids, a convolution shows an image. If
the width differs from the guess, the run continues with a tensor that fits, so that one run covers all arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import is_out_of_memory
from ..record.arguments import changed
from ..running.subject import Subject


@dataclass(frozen=True)
class Evidence:
    """The kind and size of one argument."""

    kind: Literal["width", "ids", "image", "channels_first"]
    size: int
    """Width of the last axis, number of tokens, or channels."""


@dataclass(frozen=True)
class Probed:
    """The result of one run."""

    evidence: Mapping[str, Evidence]
    error: Exception | None
    """The error that ended the run; None if it succeeded."""
    holder: str | None
    """An argument that was used as a dictionary or an object with tensors in it."""


class _EnoughError(BaseException):
    """Raised once all arguments are known: the rest of the run is not needed."""


def probe(subject: Subject, named: Mapping[str, Tensor], *, whole: bool) -> Probed:
    """Run a copy of a subject once, and return the kinds of the named arguments.

    With `whole` it runs to the end even if all of them are known before.
    """
    watch = _Watch(named, whole=whole)
    error: Exception | None = None
    try:
        with torch.no_grad(), warnings.catch_warnings(), Subject(subject.module, (), {}).apart() as copied, watch:
            warnings.simplefilter("ignore")  # the user did not ask for this call
            copied.module(*subject.args, **subject.kwargs)
    except _EnoughError:
        pass
    except Exception as raised:
        if is_out_of_memory(raised):
            raise
        error = raised
    holder = watch.holder
    if isinstance(error, AttributeError):
        holder = _read_as_object(error, named) or holder
    return Probed(watch.evidence, error, holder)


def _read_as_object(error: AttributeError, named: Mapping[str, Tensor]) -> str | None:
    """Return the argument whose missing attribute raised this error, e.g. `x.last_hidden_state`; None if it is none."""
    if not isinstance(error.obj, Tensor) or hasattr(Tensor, error.name or ""):
        return None
    for name, tensor in named.items():
        if tensor is error.obj:
            return name
    return None


_PRODUCTS = ("matmul", "__matmul__", "mm", "bmm")
_NORMS = ("layer_norm", "rms_norm")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


@dataclass(frozen=True)
class _Followed:
    """An argument, or a tensor made from arguments whose width is still one of its dimensions."""

    tensor: Tensor
    names: list[str]
    """The arguments with this tensor."""
    place: int
    """The dimension of the width."""

    @property
    def is_last(self) -> bool:
        """Whether the width is the last dimension."""
        return self.place == self.tensor.dim() - 1

    def with_width(self, width: int) -> Tensor:
        """Return zeros of this shape, but with another width."""
        sizes = list(self.tensor.shape)
        sizes[self.place] = width
        return self.tensor.new_zeros(sizes)


@dataclass(frozen=True)
class _Use:
    """A call of a function of torch with a followed tensor."""

    func: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    followed: _Followed

    def argument(self, name: str, place: int, default: Any) -> Any:
        """Return an argument of the function, given by name or by position."""
        if name in self.kwargs:
            return self.kwargs[name]
        if place < len(self.args):
            return self.args[place]
        return default

    @property
    def operand(self) -> Tensor | None:
        """The first tensor besides the followed one, e.g. the weight of a matrix; None if there is none."""
        for tensor in _tensors_among(self.args, self.kwargs):
            if tensor is not self.followed.tensor:
                return tensor
        return None

    def evidence(self) -> Evidence | None:
        """Return what this use shows; None if it shows nothing."""
        operand = self.operand
        if self.func in _NORMS:
            return self._of_norm()
        if operand is None:
            return None
        if self.func == "embedding":
            return Evidence("ids", operand.shape[0]) if operand.dim() == 2 else None
        if self.func in _CONVOLUTIONS:
            return self._of_convolution(operand)
        if not self.followed.is_last:
            return None
        if self.func == "linear":
            return Evidence("width", operand.shape[-1])
        return self._of_product(operand) if self.func in _PRODUCTS else None

    def _of_norm(self) -> Evidence | None:
        shape = self.argument("normalized_shape", 1, None)
        if not shape or not self.followed.is_last:
            return None
        return Evidence("width", shape[-1])

    def _of_convolution(self, weight: Tensor) -> Evidence:
        """Return the channels of `out in/groups kernel…`: of an image, or of a sequence turned to channels first."""
        groups = int(self.argument("groups", 6, 1))
        channels = weight.shape[1] * groups
        if self.func != "conv1d":
            return Evidence("image", channels)
        is_sequence = self.followed.tensor.dim() == 3 and self.followed.place == 1
        return Evidence("width" if is_sequence else "channels_first", channels)

    def _of_product(self, operand: Tensor) -> Evidence | None:
        """Return the width by a right operand, `width features` or one vector."""
        if self.argument("input", 0, None) is not self.followed.tensor:
            return None
        width = operand.shape[-2] if operand.dim() > 1 else operand.shape[-1]
        return Evidence("width", width)


def _tensors_among(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments of a function that are tensors, without those in lists."""
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
    return tensors


class _Watch(TorchFunctionMode):
    """A mode that watches every function of torch called with one of the arguments."""

    def __init__(self, named: Mapping[str, Tensor], *, whole: bool) -> None:
        super().__init__()
        self.evidence: dict[str, Evidence] = {}
        self.holder: str | None = None
        self._open = set(named)
        self._whole = whole
        # By the id of the tensor, which is kept, so that no later tensor gets its id.
        self._followed: dict[int, _Followed] = {}
        for name, tensor in named.items():
            place = tensor.dim() - 1
            followed = self._followed.setdefault(id(tensor), _Followed(tensor, [], place))
            followed.names.append(name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the evidence of one call, and make the call with tensors that fit."""
        kwargs = kwargs or {}
        followed = self._first_followed(args, kwargs)
        if followed is None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        is_lookup = name in ("__getitem__", "__contains__")
        if is_lookup and isinstance(args[1], str):
            self.holder = followed.names[-1]
            raise _EnoughError
        evidence = _Use(name, args, kwargs, followed).evidence()
        if evidence is not None:
            fitting = self._record(followed, evidence)
            args, kwargs = changed((args, kwargs), lambda part: fitting if part is followed.tensor else part)
        result = func(*args, **kwargs)
        self._follow(followed, result)
        return result

    def _first_followed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Followed | None:
        """Return the first of these arguments that is followed; None if there is none."""
        for tensor in _tensors_among(args, kwargs):
            if id(tensor) in self._followed:
                return self._followed[id(tensor)]
        return None

    def _follow(self, source: _Followed, result: Any) -> None:
        """Follow the results of a followed tensor, if one of their dimensions is still the width."""
        width = source.tensor.shape[source.place]
        results = result if isinstance(result, (tuple, list)) else (result,)
        for tensor in results:
            if not isinstance(tensor, Tensor) or id(tensor) in self._followed:
                continue
            places = [place for place, size in enumerate(tensor.shape) if size == width]
            if not places:
                continue
            place = places[-1]
            # Of several dimensions of this size, only the last one is likely to be the width.
            if len(places) == 1 or place == tensor.dim() - 1:
                followed = _Followed(tensor, source.names, place)
                self._followed[id(tensor)] = followed

    def _record(self, followed: _Followed, evidence: Evidence) -> Tensor:
        """Record the evidence on an argument. Return the tensor, or zeros of the kind and width that fit."""
        for name in followed.names:
            self.evidence.setdefault(name, evidence)
            self._open.discard(name)
        if not self._open and not self._whole:
            raise _EnoughError
        tensor = followed.tensor
        if evidence.kind == "ids":
            # Tokens are `batch sequence`, without the width of the vectors that were drawn.
            shape = tensor.shape[:2] if tensor.dim() > 2 else tensor.shape
            return torch.zeros(shape, dtype=torch.long, device=tensor.device)
        if evidence.kind != "width" or evidence.size == tensor.shape[followed.place]:
            return tensor
        fitting = followed.with_width(evidence.size)
        self._followed[id(fitting)] = _Followed(fitting, followed.names, followed.place)
        return fitting
