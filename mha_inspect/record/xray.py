"""Record one run with its fused kernels opened: each is computed in steps where it runs, on the tensors it was given.

What a kernel gave flows on, untouched; what its steps give is compared with it and forgotten. So a run with the x-ray
computes what it computes without it, bit for bit, gradients and random numbers included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import is_out_of_memory
from ..text import first_line
from .arguments import tensors_in
from .catalog import MULTI_HEAD, Fused, fused
from .kernel_proof import Check, Shelf, check_part, few_rows
from .kernels import PARTS, Attention, Do, NotOpenedError, attention, bound, read_attention, run
from .ops import Kernel, Op, Recording
from .recorder import LINK, Recorder
from .replay import Entry
from .rounding import max_difference
from .schema import About, about
from .sight import Sight, sight_of, sight_of_kernel
from .site import put_on, take_off
from .sketch import Sketch, sketched
from .storage import Hold

_Key = torch._C.DispatchKey
BUDGET = 1 << 30
"""Bytes of scores up to which they are made; beyond, a kernel's steps have shapes alone."""


@dataclass(frozen=True)
class _Call:
    """A kernel with what it was given."""

    known: About
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Run it as it is."""
        return self.func(*self.args, **self.kwargs)


class XRay(Recorder):
    """The recorder that opens fused kernels."""

    def __init__(self, root: nn.Module | None = None, *, keep: bool | Hold = False, budget: int = BUDGET) -> None:
        super().__init__(root, keep=keep)
        self._budget = budget
        self._kernels: list[Kernel] = []
        self._shelf = Shelf()
        self._within: int | None = None
        """Place of the kernel that runs now."""
        self._whole = False
        """Whether a composite operation inside a kernel is being taken apart: all of it is one call."""

    def finish(self, returned: Any = None) -> Recording:
        """Return the recording up to here, with the names of what was returned."""
        recording = super().finish(returned)
        if not self._kernels:
            return recording
        ways = [fused(kernel.op) for kernel in self._kernels]
        watched = {place for place, known in enumerate(ways) if known is not None and known.way == "reopen"}
        calls = _calls_of([op for op in recording.ops if op.kernel in watched])
        ops = tuple([replace(op, call=calls[op.index]) if op.index in calls else op for op in recording.ops])
        return replace(recording, ops=ops, kernels=tuple(self._kernels))

    def _look_into(
        self, known: About, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        asking, whole = self._asking, self._whole
        self._asking = asking or frame
        try:
            if known.fused and (known.way != "adding" or _adds_scores(args, kwargs)):
                return self._open(known.fused, _Call(known, func, args, kwargs))
            if not self._inside:
                return NotImplemented
            if not whole:
                # Inside a kernel Python stands still: what tells calls apart is that C++ makes them one by one.
                self._new_call()
            if known.composite:
                self._whole = True
                return self._take_apart(func, args, kwargs, frame)
            return self._run_out(known, func, args, kwargs) if known.name.endswith("out") else NotImplemented
        finally:
            self._asking, self._whole = asking, whole

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Record what a kernel's own code dispatches."""
        was, self._inside = self._inside, True
        put_on(self)
        try:
            yield
        finally:
            take_off(self)
            self._inside = was

    # -- the three ways -----------------------------------------------------------------------------------------------

    def _open(self, hiding: Fused, call: _Call) -> Any:
        place, was = len(self._kernels), (self._within, self._kernel, self._inside)
        told = partial(Kernel, call.known.name, hiding.title, hiding.hides, within=self._within)
        self._kernels.append(told(opened=False, note="it raised"))
        self._within, self._inside = place, False
        self._kernel = place if self._kernel is None else self._kernel
        self._new_call()
        try:
            result, changes = self._reopen(call) if hiding.way == "reopen" else self._rebuild(call)
        finally:
            self._within, self._kernel, self._inside = was
            self._new_call()
        self._kernels[place] = told(**changes)
        return result

    def _reopen(self, call: _Call) -> tuple[Any, dict[str, Any]]:
        """Run a kernel's own code with the mode on: what is recorded is the run itself."""
        tensors = [tensor for _, tensor in tensors_in((call.args, call.kwargs))]
        nested = any(tensor.is_nested for tensor in tensors)
        if nested and call.known.name.startswith(MULTI_HEAD):
            return self._rebuild(call)
        if isinstance(call.func, torch._ops.HigherOrderOperator):
            code: Callable[..., Any] = call.func.py_kernels[_Key.CompositeExplicitAutograd]
        else:
            key = _code_for(call.func, ("NestedTensor" if nested else "") + tensors[0].device.type.upper())
            if key is None:
                result = call.run()
                self._log(call.known, call.args, call.kwargs, result)
                return result, {"opened": False, "note": f"torch has no code of it for {tensors[0].device.type}"}
            code = partial(call.func._op_dk, key)
        with self._watching():
            return code(*call.args, **call.kwargs), {}

    def _rebuild(self, call: _Call) -> tuple[Any, dict[str, Any]]:
        """Run a leaf, and beside it its steps. Where these fail it is recorded as the one operation that it is."""
        result = call.run()
        start = len(self._entries), len(self._kernels)
        try:
            with self._beside():
                if call.known.way == "reopen":
                    return result, self._pad(call, result)
                steps = self._attend if call.known.way == "attention" else self._take_part
                with self._one_call():
                    return result, steps(call, result)
        except Exception as error:  # whatever a step may raise on somebody's tensors: the run goes on
            reason = _reason(error)
        self._rewind(start)
        self._log(call.known, call.args, call.kwargs, result)
        return result, {"opened": False, "note": reason}

    def _attend(self, call: _Call, result: Any) -> dict[str, Any]:
        """Compute an attention step by step beside its kernel."""
        asked, rows_first = read_attention(call.func, call.args, call.kwargs)
        given = result[0] if isinstance(result, tuple) else result
        shapes_only = 4 * prod(asked.scores_shape) > self._budget and not given.is_meta
        runs = self._runs_steps(given, shapes_only)
        whole = asked.heads_first(run) if rows_first else asked
        dtype = given.dtype
        unbatched = self._has_put_on_a_batch()

        def steps(do: Do, own: Attention) -> list[Any]:
            own = own.heads_first(do) if rows_first else own
            made = attention(do, own.without_batch(do) if unbatched else own)
            if made.dtype != dtype:
                made = do(torch.ops.aten._to_copy.default, made, dtype=dtype)
            made = do(torch.ops.aten.unsqueeze.default, made, 0) if unbatched else made
            return [do(torch.ops.aten.transpose.int, made, -3, -2) if rows_first else made]

        changes: dict[str, Any] = {"shapes_only": shapes_only}
        made = None
        if runs:
            (made,) = steps(self._step, asked)
            self._link(call, made, result)
        check: Check | None = None
        if asked.dropout > 0:
            changes |= {"drops": True, "note": "it draws its dropout itself, and its steps drop nothing: not compared"}
        elif _is_comparable(given):
            if rows_first:
                given, made = given.transpose(-3, -2), None if made is None else made.transpose(-3, -2)
            try:
                check = few_rows(whole, given, made, len(self._kernels), self._shelf)
            except Exception as error:
                changes["note"] = _not_compared(error)
        if not runs:
            sight = None
            with suppress(Exception):  # whatever its masks may raise: the run goes on
                sight = sight_of_kernel(whole.without_batch(run) if unbatched else whole)
            self._tell_later(call, result, partial(steps, own=asked.with_tensors(self._sketch)), check, sight)
        elif check is not None:
            changes |= _checked(check)
        return changes

    def _has_put_on_a_batch(self) -> bool:
        """Return whether the call to this kernel itself made a batch of one of what has none, as newer torches do."""
        site = self._site(self._asking)
        last = self._entries[-3:]
        return len(last) == 3 and all(
            isinstance(entry[0], About) and entry[0].base_name == "unsqueeze" and entry[5] is site for entry in last
        )

    def _take_part(self, call: _Call, result: Any) -> dict[str, Any]:
        """Compute a part of an attention step by step beside its kernel."""
        part = PARTS.get(call.known.name)
        if part is None:
            raise NotOpenedError("no steps are known of it")
        if any(tensor.is_nested for _, tensor in tensors_in(call.args)):
            raise NotOpenedError("its rows have different lengths (nested tensors)")
        given = result if isinstance(result, tuple) else (result,)
        shapes_only = 4 * given[0].numel() > self._budget and not given[0].is_meta
        made = None
        if self._runs_steps(given[0], shapes_only):
            made = part.steps(self._step, *call.args, **call.kwargs)
            for one, other in zip(made, given, strict=True):
                self._link(call, one, other)
        else:
            own = [self._sketch(arg) if isinstance(arg, Tensor) else arg for arg in call.args]
            kwargs = call.kwargs  # the call itself would hold its tensors until then
            sight = None
            if call.known.base_name == "_masked_softmax":
                sight = sight_of(None, result, -1 if len(call.args) < 3 or call.args[2] is None else call.args[2])
            self._tell_later(call, result, lambda do: part.steps(do, *own, **kwargs), sight=sight)
        check = partial(check_part, part, call.args, call.kwargs, given, made)
        return {"shapes_only": shapes_only} | (_checked(check) if _is_comparable(given[0]) else {})

    def _pad(self, call: _Call, result: Any) -> dict[str, Any]:
        """Open the fast path on padded rows and a mask, beside it on rows of different lengths."""
        got = bound(call.func, call.args, call.kwargs)
        rows = got["query"]
        lengths = rows._nested_tensor_size()[:, 0].to(rows.device)
        padded = self._step(torch.ops.aten.to_padded_tensor.default, rows, 0.0)
        barred = torch.arange(padded.shape[1], device=padded.device)[None] >= lengths[:, None]
        got |= {"query": padded, "key": padded, "value": padded, "mask": barred, "mask_type": 1}
        key = _code_for(call.func, padded.device.type.upper())
        if key is None:
            raise NotOpenedError(f"torch has no code of it for {padded.device.type}")
        with self._watching():
            made = call.func._op_dk(key, *(got[argument.name] for argument in call.func._schema.arguments))[0]
        self._new_call()
        self._link(call, made, result)
        told = [(one[: len(row)], row) for one, row in zip(made, result[0].unbind(), strict=True)]
        apart = max((max_difference(one, row) for one, row in told), default=0.0)
        return {"note": f"it ran on rows of different lengths, its steps on padded ones, {apart:.1e} apart"}

    # -- what goes into the recording ---------------------------------------------------------------------------------

    def _step(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step and write it down."""
        result = func(*args, **kwargs)
        self._log(about(func), args, kwargs, result)
        return result

    def _runs_steps(self, given: Tensor, shapes_only: bool) -> bool:
        """Whether steps are run; they are described alone where nobody keeps what comes of them, or it is too much."""
        return (self._kept is not None and not shapes_only) or given.is_meta

    def _tell_later(
        self,
        call: _Call,
        result: Any,
        steps: Callable[[Do], Sequence[Any]],
        check: Check | None = None,
        sight: Sight | None = None,
    ) -> None:
        """Note that a kernel is to be told in steps when the run is over; none of these holds a tensor of the run."""
        place = len(self._entries)
        self._log(call.known, call.args, call.kwargs, result)
        told = partial(self._tell, self._entries[place], steps, check, len(self._kernels) - 1, sight)
        self._entries[place] = (told,)

    def _tell(
        self,
        whole: Entry,
        steps: Callable[[Do], Sequence[Any]],
        check: Check | None,
        place: int,
        sight: Sight | None,
    ) -> list[Entry]:
        """Return the steps of a kernel; where they fail, the one operation that it is."""
        told: list[Entry] = []

        def describe(func: Any, *args: Any, **kwargs: Any) -> Any:
            result = sketched(func, *args, **kwargs)
            looks = [one.look for one in (result if isinstance(result, list) else [result])]
            values = (*args, *kwargs.values())
            given = [value.look if isinstance(value, Sketch) else self._write_down((value,))[0] for value in values]
            if sight is not None and about(func).base_name.endswith("softmax"):
                looks = [(*looks[0], None, None, sight)]
            told.append((about(func), given, tuple(kwargs), looks, None, *whole[5:7], None, whole[8]))
            return result

        try:
            made = steps(describe)
        except Exception as error:  # whatever may be asked of a step
            self._kernels[place] = replace(self._kernels[place], opened=False, note=_reason(error))
            return [whole]
        results = [whole[3]] if len(made) == 1 else whole[3]
        for one, given in zip(made, results, strict=True):
            told.append((LINK, [one.look, whole[0].name], ("kernel",), given, None, *whole[5:7], "copy", whole[8]))
        if check is not None:
            with self._beside():
                self._kernels[place] = replace(self._kernels[place], **_checked(check))
        return told

    def _sketch(self, tensor: Tensor) -> Sketch:
        return Sketch.of(tensor, self._write_down((tensor,))[0])

    def _run_out(self, known: About, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record `bmm.out(a, b, out=c)` as `bmm(a, b)`, which makes c."""
        written = self._about_to_write(known, args, kwargs)
        result = func(*args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        plain = replace(known, name=known.name.removesuffix("out") + "default")
        self._log(plain, args, rest, result, kind="compute", written=written)
        return result

    def _link(self, call: _Call, made: Tensor, result: Any) -> None:
        """Lead from the last step to what the kernel itself has made."""
        self._log(LINK, (made,), {"kernel": call.known.name}, result, kind="copy")

    def _rewind(self, start: tuple[int, int]) -> None:
        """Forget the operations that were recorded since, and the kernels."""
        mark, kernels = start
        self._entries[mark:] = [entry for entry in self._entries[mark:] if isinstance(entry[0], list)]
        del self._kernels[kernels:]


def _calls_of(ops: list[Op]) -> dict[int, int]:
    """The call of each view that C++ made for a product, and of the one that it made of its result: the product's."""
    calls: dict[int, int] = {}
    for place, op in enumerate(ops):
        if op.base_name != "bmm":
            continue
        before = place - 1
        while before >= 0 and ops[before].kind == "view":
            calls[ops[before].index] = op.call
            before -= 1
        after = ops[place + 1] if place + 1 < len(ops) else None
        if after is not None and after.base_name == "view" and after.inputs[0].id == op.output.id:
            calls[after.index] = op.call
    return calls


def _code_for(func: Any, name: str) -> Any:
    """Return the key under which torch has an operation's own code for a kind of tensor; None where it has none."""
    key = getattr(_Key, name, None)
    known = key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), name)
    return key if known else None


def _adds_scores(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `baddbmm` or `addmm` may add a mask to a product that is scores, and no bias to one with a weight.

    A learned query or key is a parameter too, and so is a learned bias of the scores: both together look like a layer.
    So does one number for each column of a single matrix, whose weight and bias may be given as plain tensors.
    """
    added, left, right = args[:3]
    if kwargs.get("beta", 1) == 0:
        return False
    if added.dim() < 2:
        return left.dim() == 3 and not (_is_parameter(added) or _is_parameter(right))
    return not (_is_parameter(added) and (_is_parameter(left) or _is_parameter(right)))


def _is_parameter(tensor: Tensor) -> bool:
    """Whether this is a parameter, or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _reason(error: Exception) -> str:
    """Why a kernel is not opened."""
    if isinstance(error, NotOpenedError):
        return str(error)
    return "no room" if is_out_of_memory(error) else first_line(error)


def _is_comparable(given: Tensor) -> bool:
    """Whether there are numbers to compare."""
    return not given.is_meta and type(given) in (Tensor, nn.Parameter) and given.numel() > 0


def _checked(check: Check) -> dict[str, Any]:
    """The check of a kernel, or why there is none."""
    try:
        return {"check": check()}
    except Exception as error:  # as on devices without float64: what was opened is opened
        return {"note": _not_compared(error)}


def _not_compared(error: Exception) -> str:
    return f"not compared: {first_line(error)}"
