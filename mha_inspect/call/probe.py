"""What a module does with its arguments, seen by running it.

A matrix that multiplies an argument tells its width, an embedding that it holds token ids, a convolution that it is
an image. Where the width is not what was tried, the run goes on with one that fits, so that one run tells of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import is_out_of_memory
from ..record.arguments import changed
from ..running.subject import Subject


@dataclass(frozen=True)
class Evidence:
    """What one argument is."""

    kind: Literal["width", "ids", "image"]
    size: int
    """Width of the last axis, number of tokens, or channels."""
    firm: bool = True
    """Whether it says what the argument is: whatever is added to or multiplied by another tensor may be anything."""


@dataclass(frozen=True)
class Probed:
    """What one run told."""

    evidence: Mapping[str, Evidence]
    error: Exception | None
    """What ended the run, where it did not end by itself."""
    holder: str | None
    """An argument that was used as a dictionary or an object that holds tensors."""


class _EnoughError(BaseException):
    """The rest of the run tells nothing more."""


_ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "div", "__add__", "__radd__", "__iadd__", "__mul__", "__rmul__", "__sub__", "__truediv__"}
)
_MOVES = _ELEMENTWISE | {
    "transpose", "permute", "swapaxes", "swapdims", "movedim", "contiguous", "clone", "detach", "unsqueeze", "squeeze",
    "expand", "expand_as", "chunk", "split", "__getitem__", "to", "float", "half", "bfloat16", "double", "type_as",
    "long", "int", "dropout", "relu", "gelu", "masked_fill", "layer_norm", "rms_norm",
}  # fmt: skip
"""Functions that leave the width of a tensor what it is."""
_PRODUCTS = frozenset({"matmul", "__matmul__", "mm", "bmm"})


def probe(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], named: Mapping[str, Any], *, whole: bool
) -> Probed:
    """Run the module once, and say what its arguments turned out to be.

    Args:
        module: left as it was, with its buffers and every generator.
        args: of its forward; kwargs as well.
        kwargs: of its forward.
        named: the tensors among them that are asked about, by name.
        whole: whether to run to the end also when all of them are known.
    """
    watch = _Watch(named, whole=whole)
    error: Exception | None = None
    try:
        with torch.no_grad(), warnings.catch_warnings(), Subject(module, (), {}).apart() as copied, watch:
            warnings.simplefilter("ignore")  # what it warns of here is of a call that nobody asked for
            copied.module(*args, **kwargs)
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


class _Watch(TorchFunctionMode):
    """Looks at every function of torch that is called with one of the arguments."""

    def __init__(self, named: Mapping[str, Tensor], *, whole: bool) -> None:
        super().__init__()
        self.evidence: dict[str, Evidence] = {}
        self.holder: str | None = None
        self._open, self._whole = set(named), whole
        self._given = [id(tensor) for tensor in named.values()]
        # Each tensor that is an argument, or one only moved: itself, its names, and the dimension that holds its width.
        self._known: dict[int, tuple[Tensor, list[str], int]] = {}
        for name, tensor in named.items():
            self._known.setdefault(id(tensor), (tensor, [], tensor.dim() - 1))[1].append(name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take the evidence of one call, and make the call with arguments that fit."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        ours = next((value for value in tensors if id(value) in self._known), None)
        if ours is None:
            return func(*args, **kwargs)
        if name in ("__getitem__", "__contains__") and isinstance(args[1], str) and id(ours) in self._given:
            self.holder = self._known[id(ours)][1][-1]
            raise _EnoughError
        if name == "multi_head_attention_forward":
            widths = [args[3]] * 3
            if kwargs.get("use_separate_proj_weight", False):
                widths[1:] = [kwargs["k_proj_weight"].shape[1], kwargs["v_proj_weight"].shape[1]]
            fit = [self._tell(tensor, Evidence("width", width)) for tensor, width in zip(args, widths, strict=False)]
            return func(*fit, *args[3:], **kwargs)
        other = next((value for value in tensors if value is not ours), None)
        evidence = self._evidence(name, args, kwargs, ours, other)
        if evidence is not None:
            fitting = self._tell(ours, evidence)
            args, kwargs = changed((args, kwargs), lambda part: fitting if part is ours else part)
        result = func(*args, **kwargs)
        if name in _MOVES:
            self._follow(ours, result)
        return result

    def _follow(self, source: Tensor, result: Any) -> None:
        """Know what a function made of a known tensor, where one of its dimensions is still the width."""
        _, names, place = self._known[id(source)]
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                places = [at for at, size in enumerate(tensor.shape) if size == source.shape[place]]
                if len(places) == 1 or (places and places[-1] == tensor.dim() - 1):
                    self._known.setdefault(id(tensor), (tensor, names, places[-1]))

    def _evidence(
        self, func: str, args: tuple[Any, ...], kwargs: dict[str, Any], ours: Tensor, other: Tensor | None
    ) -> Evidence | None:
        """Return what a function says of a known tensor, with the first other tensor; None where it says nothing."""
        place = self._known[id(ours)][2]
        is_last = place == ours.dim() - 1
        width: int | None = None
        if func in ("layer_norm", "rms_norm") and is_last:
            shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else None)
            width = shape[-1] if shape else None
        elif func == "einsum" and is_last:
            width = _einsum_width(args, ours)
        elif other is None:
            return None
        elif func == "embedding":
            return Evidence("ids", other.shape[0]) if other.dim() == 2 else None
        elif func in ("conv1d", "conv2d", "conv3d"):
            channels = other.shape[1] * int(kwargs.get("groups", args[6] if len(args) > 6 else 1))
            is_turned = func == "conv1d" and ours.dim() == 3 and place == 1
            return Evidence("width" if is_turned else "image", channels)
        elif func == "linear" and is_last:
            width = other.shape[-1]
        elif func in _PRODUCTS and is_last and args and args[0] is ours:
            width = other.shape[-2] if other.dim() > 1 else other.shape[-1]
        elif func in _ELEMENTWISE and is_last and other.dim() > 0 and id(other) not in self._known:
            width = other.shape[-1] if other.shape[-1] != 1 else None
        return None if width is None else Evidence("width", width, firm=func not in _ELEMENTWISE)

    def _tell(self, ours: Tensor, evidence: Evidence) -> Tensor:
        """Note what an argument is. Return the tensor, or zeros of the kind and width that it should have been."""
        _, names, place = self._known.get(id(ours), (ours, [], ours.dim() - 1))
        for name in names:
            self.evidence.setdefault(name, evidence)
            self._open.discard(name)
        if not self._open and not self._whole:
            raise _EnoughError
        if evidence.kind == "ids":
            return torch.zeros(ours.shape[: 2 if ours.dim() > 2 else None], dtype=torch.long, device=ours.device)
        if evidence.kind == "image" or evidence.size == ours.shape[place]:
            return ours
        fitting = ours.new_zeros((*ours.shape[:place], evidence.size, *ours.shape[place + 1 :]))
        self._known[id(fitting)] = (fitting, names, place)
        return fitting


def _einsum_width(args: tuple[Any, ...], ours: Tensor) -> int | None:
    """Return the size that the other operands give to the letter of our last dimension; None where they give none."""
    if not args or not isinstance(args[0], str):
        return None
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])
    terms = args[0].replace(" ", "").partition("->")[0].split(",")
    letter = next((term[-1:] for term, operand in zip(terms, operands, strict=False) if operand is ours), "")
    for term, operand in zip(terms, operands, strict=False):
        if letter and operand is not ours and letter in term:
            return int(operand.shape[term.index(letter) - len(term)])
    return None
