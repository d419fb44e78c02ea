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

    kind: Literal["width", "ids", "image"]
    size: int
    """Width of the last axis, number of tokens, or channels."""
    firm: bool = True
    """Whether the kind is certain: an argument in a sum or an elementwise product may be of any kind."""
    is_1d: bool = False
    """Whether an image is one row of pixels, as a waveform or a spectrogram in a 1-D convolution."""


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
    if isinstance(error, AttributeError) and isinstance(error.obj, Tensor) and not hasattr(Tensor, error.name or ""):
        holder = next((name for name, tensor in named.items() if tensor is error.obj), None)
    return Probed(watch.evidence, error, holder)


_SUMS = ("add", "sub", "mul", "div", "__add__", "__radd__", "__iadd__", "__mul__", "__rmul__", "__sub__", "__truediv__")
_PRODUCTS = ("matmul", "__matmul__", "mm", "bmm")


class _Watch(TorchFunctionMode):
    """A mode that watches every function of torch called with one of the arguments."""

    def __init__(self, named: Mapping[str, Tensor], *, whole: bool) -> None:
        super().__init__()
        self.evidence: dict[str, Evidence] = {}
        self.holder: str | None = None
        self._open, self._whole = set(named), whole
        # Each argument, or tensor made from one: the tensor, its names, and the dimension of its width.
        self._known: dict[int, tuple[Tensor, list[str], int]] = {}
        for name, tensor in named.items():
            self._known.setdefault(id(tensor), (tensor, [], tensor.dim() - 1))[1].append(name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the evidence of one call, and make the call with tensors that fit."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        known = next((value for value in tensors if id(value) in self._known), None)
        if known is None:
            return func(*args, **kwargs)
        if name in ("__getitem__", "__contains__") and isinstance(args[1], str):
            self.holder = self._known[id(known)][1][-1]
            raise _EnoughError
        if name == "multi_head_attention_forward":
            widths = [args[3]] * 3
            if kwargs.get("use_separate_proj_weight", False):
                widths[1:] = [kwargs["k_proj_weight"].shape[1], kwargs["v_proj_weight"].shape[1]]
            fit = [self._record(tensor, Evidence("width", width)) for tensor, width in zip(args, widths, strict=False)]
            return func(*fit, *args[3:], **kwargs)
        evidence = self._evidence(name, args, kwargs, known)
        if evidence is not None:
            fitting = self._record(known, evidence)
            args, kwargs = changed((args, kwargs), lambda part: fitting if part is known else part)
        result = func(*args, **kwargs)
        self._follow(known, result)
        return result

    def _follow(self, source: Tensor, result: Any) -> None:
        """Follow the results of a known tensor, if one of their dimensions is still the width."""
        _, names, place = self._known[id(source)]
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                places = [at for at, size in enumerate(tensor.shape) if size == source.shape[place]]
                if len(places) == 1 or (places and places[-1] == tensor.dim() - 1):
                    self._known.setdefault(id(tensor), (tensor, names, places[-1]))

    def _evidence(self, func: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: Tensor) -> Evidence | None:
        """Return the evidence of a function on a known tensor; None if there is none."""
        place = self._known[id(known)][2]
        is_last = place == known.dim() - 1
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        other = next((value for value in tensors if value is not known), None)
        if func in ("layer_norm", "rms_norm") and is_last:
            shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else None)
            return Evidence("width", shape[-1]) if shape else None
        if other is None:
            return None
        if func == "embedding" and other.dim() == 2:
            return Evidence("ids", other.shape[0])
        if func in ("conv1d", "conv2d", "conv3d"):
            channels = other.shape[1] * int(kwargs.get("groups", args[6] if len(args) > 6 else 1))
            is_channels_first = func == "conv1d" and known.dim() == 3 and place == 1
            return Evidence("width" if is_channels_first else "image", channels, is_1d=func == "conv1d")
        if func == "linear" and is_last:
            return Evidence("width", other.shape[-1])
        if func in _PRODUCTS and is_last and args[0] is known:
            return Evidence("width", other.shape[-2 if other.dim() > 1 else -1])
        if func in _SUMS and is_last and other.dim() and other.shape[-1] != 1 and id(other) not in self._known:
            return Evidence("width", other.shape[-1], firm=False)
        return None

    def _record(self, known: Tensor, evidence: Evidence) -> Tensor:
        """Record the evidence on an argument. Return the tensor, or zeros of the kind and width that fit."""
        _, names, place = self._known.get(id(known), (known, [], known.dim() - 1))
        for name in names:
            self.evidence.setdefault(name, evidence)
            self._open.discard(name)
        if not self._open and not self._whole:
            raise _EnoughError
        if evidence.kind == "ids":
            return torch.zeros(known.shape[: 2 if known.dim() > 2 else None], dtype=torch.long, device=known.device)
        if evidence.kind == "image" or evidence.size == known.shape[place]:
            return known
        fitting = known.new_zeros((*known.shape[:place], evidence.size, *known.shape[place + 1 :]))
        self._known[id(fitting)] = (fitting, names, place)
        return fitting
