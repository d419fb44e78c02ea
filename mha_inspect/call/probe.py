"""What a module does with its arguments, seen by running it.

A matrix that multiplies an argument tells its width, an embedding that it holds token ids, a convolution that it is
an image. Where the width is not what was tried, the run goes on with one that fits, so that one run tells of all.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import is_out_of_memory
from ..naming.subject import Subject
from ..record.arguments import changed
from .holders import Holder, WantedError, unpacked_into


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
    holder: str | None = None
    """The argument that was used as something that holds tensors."""
    maybe: str | None = None
    """One of which places were asked for, as of a tuple: a tensor has them too."""
    wanted: Holder | None = None
    """What was asked of an argument that does not hold it."""


class _EnoughError(BaseException):
    """Every argument is known: the rest of the run tells nothing more."""


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
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    named: Mapping[str, Any],
    *,
    whole: bool = False,
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
    wanted: Holder | None = None
    try:
        with torch.no_grad(), warnings.catch_warnings(), Subject(module, (), {}).apart() as own, watch:
            warnings.simplefilter("ignore")  # what it warns of here is of a call that nobody asked for
            own.module(*args, **kwargs)
    except _EnoughError:
        pass
    except WantedError as asked:
        wanted = asked.holder
    except Exception as raised:
        if is_out_of_memory(raised):
            raise
        error = raised
    holder = watch.holder
    if isinstance(error, AttributeError) and isinstance(error.obj, Tensor) and not hasattr(Tensor, error.name or ""):
        holder = next((name for name, tensor in named.items() if tensor is error.obj), None)
    return Probed(watch.evidence, error, holder, watch.maybe, wanted)


class _Watch(TorchFunctionMode):
    """Looks at every function of torch that is called with one of the arguments."""

    def __init__(self, named: Mapping[str, Tensor], *, whole: bool) -> None:
        super().__init__()
        self.evidence: dict[str, Evidence] = {}
        self.holder: str | None = None
        self.maybe: str | None = None
        self._open, self._whole = set(named), whole
        self._alive: list[Tensor] = list(named.values())
        # Each tensor that is an argument, or one only moved: its names, and the dimension that holds its width.
        self._known: dict[int, tuple[list[str], int]] = {}
        for name, tensor in named.items():
            self._known.setdefault(id(tensor), ([], tensor.dim() - 1))[0].append(name)
        self._given = frozenset(self._known)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take the evidence of one call, and make the call with arguments that fit."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        flat = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        ours = next((value for value in flat if id(value) in self._known), None)
        if ours is None:
            return func(*args, **kwargs)
        if id(ours) in self._given:
            self._hold(name, self._known[id(ours)][0][-1], args)
        if name == "multi_head_attention_forward":
            return func(*self._whole_attention(args, kwargs), **kwargs)
        fitting = self._look(name, args, kwargs, ours)
        if fitting is not None:
            args, kwargs = changed((args, kwargs), lambda part: fitting if part is ours else part)
        result = func(*args, **kwargs)
        if name in _MOVES:
            self._follow(ours, result)
        return result

    def _hold(self, func: str, name: str, args: tuple[Any, ...]) -> None:
        """See whether an argument is used as something that holds tensors."""
        key = args[1] if func in ("__getitem__", "__contains__") and len(args) > 1 else None
        caller = sys._getframe(2)  # what called torch's function
        is_loop = func == "unbind" and caller.f_code is getattr(Tensor.__iter__, "__code__", None)
        if is_loop and caller.f_back is not None:
            # A loop may go over the rows of a batch, or over a list: there the name tells.
            key = "" if unpacked_into(caller.f_back) else 0 if name.endswith("s") or "list" in name else None
        if isinstance(key, str):
            self.holder = name
            raise _EnoughError
        if type(key) is int:
            self.maybe = name

    def _follow(self, source: Tensor, result: Any) -> None:
        known, place = self._known[id(source)]
        width = source.shape[place]
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and id(tensor) not in self._known:
                places = [at for at, size in enumerate(tensor.shape) if size == width]
                if len(places) == 1 or (places and places[-1] == tensor.dim() - 1):
                    self._known[id(tensor)] = (known, places[-1])
                    self._alive.append(tensor)

    def _look(self, func: str, args: tuple[Any, ...], kwargs: dict[str, Any], ours: Tensor) -> Tensor | None:
        """Take the evidence; return what fits in the place of ours, where that does not."""
        names, place = self._known[id(ours)]
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        others = [value for value in tensors if value is not ours]
        last = place == ours.dim() - 1
        wanted: int | None = None
        if func == "embedding" and others:
            table = others[0] if others[0].dim() == 2 else None
            if table is not None:
                self._tell(names, Evidence("ids", table.shape[0]))
                return torch.zeros(ours.shape[: 2 if ours.dim() > 2 else None], dtype=torch.long, device=ours.device)
        elif func == "linear" and others and last:
            wanted = others[0].shape[-1]
        elif func in ("layer_norm", "rms_norm") and last:
            shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else None)
            wanted = shape[-1] if shape else None
        elif func in _PRODUCTS and others and last and args and args[0] is ours:
            wanted = others[0].shape[-2] if others[0].dim() > 1 else others[0].shape[-1]
        elif func == "einsum":
            wanted = _einsum_width(args, ours) if last else None
        elif func in ("conv1d", "conv2d", "conv3d") and others:
            groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
            channels = others[0].shape[1] * int(groups)
            if func == "conv1d" and ours.dim() == 3 and place == 1:
                wanted = channels
            else:
                self._tell(names, Evidence("image", channels))
        elif func in _ELEMENTWISE and others and last and others[0].dim() > 0:
            size = others[0].shape[-1]
            wanted = size if size != 1 and id(others[0]) not in self._known else None
        if wanted is None:
            return None
        self._tell(names, Evidence("width", wanted, firm=func not in _ELEMENTWISE))
        if wanted == ours.shape[place]:
            return None
        fitting = ours.new_zeros((*ours.shape[:place], wanted, *ours.shape[place + 1 :]))
        self._known[id(fitting)] = (names, place)
        self._alive.append(fitting)
        return fitting

    def _whole_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """torch.nn.MultiheadAttention: its weights say all three widths. Return its arguments as they fit."""
        widths, fitting = [args[3]] * 3, list(args)
        if kwargs.get("use_separate_proj_weight", False):
            widths[1:] = [kwargs["k_proj_weight"].shape[1], kwargs["v_proj_weight"].shape[1]]
        for at, width in enumerate(widths):
            tensor = args[at]
            if id(tensor) in self._known:
                self._tell(self._known[id(tensor)][0], Evidence("width", width))
            if tensor.shape[-1] != width:
                fitting[at] = tensor.new_zeros((*tensor.shape[:-1], width))
        return fitting

    def _tell(self, names: list[str], evidence: Evidence) -> None:
        for name in names:
            self.evidence.setdefault(name, evidence)
            self._open.discard(name)
        if not self._open and not self._whole:
            raise _EnoughError


def _einsum_width(args: tuple[Any, ...], ours: Tensor) -> int | None:
    """The size that the other operands give to the letter of our last dimension."""
    if not args or not isinstance(args[0], str):
        return None
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])
    terms = args[0].replace(" ", "").partition("->")[0].split(",")
    own = next((term for term, operand in zip(terms, operands, strict=False) if operand is ours), "")
    for term, operand in zip(terms, operands, strict=False):
        if own and operand is not ours and own[-1] in term:
            return int(operand.shape[term.index(own[-1]) - len(term)])
    return None
