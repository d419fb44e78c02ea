"""Record one run with its fused kernels opened: each is computed in steps where it runs, on the tensors it was given.

What a kernel gave flows on, untouched; what its steps give is compared with it and forgotten. So a run with the x-ray
computes what it computes without it, bit for bit, gradients and random numbers included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from .kernels import FEW, PARTS, AttentionCall, Do, NotOpenedError, attention, bound, described, read_attention
from .kernels import run as compute
from .ops import Kernel, Op, Recording
from .recorder import LINK, Entry, Recorder
from .rounding import STEP, Rounding, max_difference, rounding_error
from .schema import About, about
from .sight import Sight, sight_of, sight_of_kernel
from .site import put_on, take_off
from .tensors import Shelf

_A, _Key = torch.ops.aten, torch._C.DispatchKey
BUDGET = 1 << 30
"""Bytes of scores up to which they are made; beyond, a kernel's steps have shapes alone."""
_COPIED = 1 << 20
"""Bytes of keys and values that are copied to be looked at when the run is over; more are looked at right away."""


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


@dataclass(frozen=True)
class _Later:
    """A kernel whose steps are described when the run is over, and that is one operation until then."""

    place: int
    """Of the kernel in the recording."""
    given: Callable[[], Any]
    """Returns what it was given, with tensors on meta for those of the run: none of these is held."""
    steps: Callable[[Do, Any], Sequence[Tensor]]
    """Does the steps, and returns what comes last of them."""
    sight: Callable[[Any], Sight | None]
    """Returns who sees whom in the weights."""
    check: Callable[[], Rounding] | None
    """Returns how far the steps are from what the kernel gave; None where that is known, or cannot be."""


class XRay(Recorder):
    """The recorder that opens fused kernels."""

    def __init__(self, root: nn.Module | None = None, *, keep: bool = False, budget: int = BUDGET) -> None:
        super().__init__(root, keep=keep)
        self._budget = budget
        self._kernels: list[Kernel] = []
        self._within: int | None = None
        """Place of the kernel that runs now."""
        self._composite = False
        """Whether a composite operation inside a kernel is being taken apart: all of it is one call."""
        self._later: dict[int, _Later] = {}
        """By the number of the operation."""
        self._shelf = Shelf()
        self._sight: Sight | None = None
        """Who sees whom in the weights of steps that have no numbers."""

    def finish(self, returned: Any = None) -> Recording:
        """Return the recording up to here, with the names of what was returned."""
        recording = super().finish(returned)
        watched = {
            at for at, kernel in enumerate(self._kernels) if (known := fused(kernel.op)) and known.way == "reopen"
        }
        _join_products([op for op in recording.ops if op.kernel in watched] if watched else [])
        return replace(recording, kernels=tuple(self._kernels))

    def _look_into(
        self, known: About, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        asking, composite = self._asking, self._composite
        self._asking = asking or frame
        try:
            if known.fused and (known.way != "adding" or _adds_scores(args, kwargs)):
                return self._open(known.fused, _Call(known, func, args, kwargs))
            if not self._inside:
                return NotImplemented
            if not composite:
                # Inside a kernel Python stands still: what tells calls apart is that C++ makes them one by one.
                self._new_call = True
            if known.composite:
                self._composite = True
                return self._take_apart(func, args, kwargs, frame)
            return self._run_out(known, func, args, kwargs) if known.name.endswith("out") else NotImplemented
        finally:
            self._asking, self._composite = asking, composite

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

    # -- the two ways -------------------------------------------------------------------------------------------------

    def _open(self, hiding: Fused, call: _Call) -> Any:
        place, was = len(self._kernels), (self._within, self._kernel, self._inside)
        kernel = partial(Kernel, call.known.name, hiding.title, hiding.hides, within=self._within)
        self._kernels.append(kernel(opened=False, note="it raised"))
        self._within, self._inside = place, False
        self._kernel = place if self._kernel is None else self._kernel
        self._new_call = True
        try:
            result, changes = self._reopen(call) if hiding.way == "reopen" else self._rebuild(call)
        finally:
            self._within, self._kernel, self._inside = was
        self._kernels[place] = kernel(**changes)
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
            result = code(*call.args, **call.kwargs)
        self._new_call = True
        return result, {}

    def _rebuild(self, call: _Call) -> tuple[Any, dict[str, Any]]:
        """Run a leaf, and beside it its steps. Where these fail it is recorded as the one operation that it is."""
        unbatched = self._has_put_on_a_batch()
        result = call.run()
        start = len(self._entries), len(self._kernels)
        try:
            with self._beside():
                if call.known.way == "reopen":
                    return result, self._pad(call, result)
                with self._in_one_call(new=not unbatched):
                    if call.known.way == "attention":
                        return result, self._attend(call, result, unbatched)
                    return result, self._take_part(call, result)
        except Exception as error:  # whatever a step may raise on somebody's tensors: the run goes on
            reason = _reason(error)
        del self._entries[start[0] :], self._kernels[start[1] :]
        self._log(call.known, call.args, call.kwargs, result)
        return result, {"opened": False, "note": reason}

    def _attend(self, call: _Call, result: Any, unbatched: bool) -> dict[str, Any]:
        """Compute an attention step by step beside its kernel."""
        asked, rows_first = read_attention(call.func, call.args, call.kwargs)
        given = result[0] if isinstance(result, tuple) else result
        shapes_only, runs = self._way_of_steps(given, 4 * prod(asked.scores_shape))

        dtype = given.dtype  # what is described later holds no tensor of the run

        def laid_out(do: Do, asked: AttentionCall) -> AttentionCall:
            asked = asked.heads_first(do) if rows_first else asked
            return asked.without_batch(do) if unbatched else asked

        def steps(do: Do, asked: AttentionCall) -> list[Tensor]:
            made = attention(do, laid_out(do, asked), described=not runs)
            made = made if made.dtype == dtype else do(_A._to_copy.default, made, dtype=dtype)
            made = do(_A.unsqueeze.default, made, 0) if unbatched else made
            return [do(_A.transpose.int, made, -3, -2) if rows_first else made]

        changes: dict[str, Any] = {"shapes_only": shapes_only}
        made = self._run_steps(call, result, steps, asked) if runs else None
        check: Callable[[], Rounding] | None = None
        if asked.dropout > 0:
            changes |= {"drops": True, "note": "it draws its dropout itself, and its steps drop nothing: not compared"}
        elif _is_comparable(given):
            whole = asked.heads_first(compute) if rows_first else asked
            pair = [given, *(made or [])]
            pair = [tensor.transpose(-3, -2) for tensor in pair] if rows_first else pair
            check = few_rows(whole, *pair, turn=len(self._kernels), shelf=self._shelf)
        if runs:
            return changes | (_checked(check) if check is not None else {})
        at_once = asked.bias is not None or asked.starts is not None
        seen = sight_of_kernel(laid_out(compute, asked)) if at_once else None
        self._log(call.known, call.args, call.kwargs, result)
        makers = asked.with_tensors(self._tensors.stand_in)  # type: ignore[arg-type]  # each in the place of its tensor
        self._later[self._entries[-1].number] = _Later(
            len(self._kernels) - 1,
            lambda: makers.with_tensors(lambda make: make()),  # type: ignore[operator]
            steps,
            lambda asked: seen if at_once else sight_of_kernel(laid_out(compute, asked)),
            check,
        )
        return changes

    def _has_put_on_a_batch(self) -> bool:
        """Return whether the call to a kernel itself made a batch of one of what has none, as newer torches do."""
        last = self._entries[-3:]
        return (
            len(last) == 3
            and all(entry.known.base_name == "unsqueeze" and entry.call == self._call for entry in last)
            and self._site_of(self._asking)[0] == self._site
        )

    def _take_part(self, call: _Call, result: Any) -> dict[str, Any]:
        """Compute a part of an attention step by step beside its kernel."""
        if call.known.name not in PARTS:
            raise NotOpenedError("no steps are known of it")
        if any(tensor.is_nested for _, tensor in tensors_in(call.args)):
            raise NotOpenedError("its rows have different lengths (nested tensors)")
        steps, few = PARTS[call.known.name]
        given = result if isinstance(result, tuple) else (result,)
        shapes_only, runs = self._way_of_steps(given[0], 4 * given[0].numel())
        kwargs = call.kwargs

        def all_steps(do: Do, args: Sequence[Any]) -> Sequence[Tensor]:
            return steps(do, *args, **kwargs)

        made = self._run_steps(call, result, all_steps, call.args) if runs else None
        if not runs:
            seen = sight_of(None, result, -1) if call.known.base_name == "_masked_softmax" else None
            self._log(call.known, call.args, call.kwargs, result)
            makers = [
                self._tensors.stand_in(arg) if isinstance(arg, Tensor) else partial(_cast, arg, None)
                for arg in call.args
            ]
            self._later[self._entries[-1].number] = _Later(
                len(self._kernels) - 1, lambda: [make() for make in makers], all_steps, lambda _: seen, None
            )
        if not _is_comparable(given[0]):
            return {"shapes_only": shapes_only}

        def check() -> Rounding:
            args = few(*call.args)

            def computed(dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
                return steps(compute, *(_cast(arg, dtype) for arg in args), **call.kwargs)

            rows = computed()
            pairs = zip(given, made, strict=True) if made else zip((t[:FEW] for t in given), rows, strict=True)
            return _beside_rounding(max(max_difference(*pair) for pair in pairs), rows, computed)

        return {"shapes_only": shapes_only} | _checked(check)

    def _pad(self, call: _Call, result: Any) -> dict[str, Any]:
        """Open the fast path on padded rows and a mask, beside it on rows of different lengths."""
        given = bound(call.func, call.args, call.kwargs)
        rows = given["query"]
        lengths = rows._nested_tensor_size()[:, 0].to(rows.device)
        padded = self._step(_A.to_padded_tensor.default, rows, 0.0)
        masked = torch.arange(padded.shape[1], device=padded.device)[None] >= lengths[:, None]
        given |= {"query": padded, "key": padded, "value": padded, "mask": masked, "mask_type": 1}
        key = _code_for(call.func, padded.device.type.upper())
        if key is None:
            raise NotOpenedError(f"torch has no code of it for {padded.device.type}")
        with self._watching():
            made = call.func._op_dk(key, *(given[argument.name] for argument in call.func._schema.arguments))[0]
        self._new_call = True
        self._link(call, made, result)
        pairs = [(one[: len(row)], row) for one, row in zip(made, result[0].unbind(), strict=True)]
        apart = max((max_difference(one, row) for one, row in pairs), default=0.0)
        return {"note": f"it ran on rows of different lengths, its steps on padded ones, {apart:.1e} apart"}

    # -- what goes into the recording ---------------------------------------------------------------------------------

    def _way_of_steps(self, given: Tensor, size: int) -> tuple[bool, bool]:
        """Return whether steps are too large for numbers, and whether they are run.

        They are described alone where nobody keeps what comes of them, or it is too much.
        """
        shapes_only = size > self._budget and not given.is_meta
        return shapes_only, (self._keeps and not shapes_only) or given.is_meta

    def _run_steps(
        self, call: _Call, result: Any, steps: Callable[[Do, Any], Sequence[Tensor]], given: Any
    ) -> Sequence[Tensor]:
        """Run the steps of a kernel, and lead from what comes last to what the kernel itself has made."""
        made = steps(self._step, given)
        for last, output in zip(made, [result] if len(made) == 1 else result, strict=True):
            self._link(call, last, output)
        return made

    def _opened(self, entries: Iterable[Entry]) -> Iterable[Entry]:
        for entry in entries:
            later = self._later.pop(entry.number, None)
            if later is None:
                yield entry
            else:
                with self._beside():
                    yield from self._described(later, entry)

    def _described(self, later: _Later, whole: Entry) -> list[Entry]:
        """Return the steps of a kernel that is one operation until now, which it stays where they fail."""
        state = self._entries, self._site, self._call, self._kernel
        self._entries, self._site, self._call, self._kernel = [], whole.site, whole.call, whole.kernel
        kernel = self._kernels[later.place]
        self._tensors.described = True
        try:
            given = later.given()
            self._sight = later.sight(given)
            made = later.steps(self._describe, given)
            results = [whole.outputs] if len(made) == 1 else [[output] for output in whole.outputs]
            for last, outputs in zip(made, results, strict=True):
                self._number += 1
                # What else is made of that memory is known by the number of the whole.
                number = whole.number if outputs is results[-1] else self._number
                self._tensors.producers.update((output.id, number) for output in outputs)
                read = [self._tensors.read(last)]
                link = whole._replace(number=number, known=LINK, args=tuple(read), inputs=read, outputs=outputs)
                self._entries.append(link._replace(kwargs={"kernel": whole.known.name}, kind="copy"))
            steps = self._entries
        except Exception as error:  # whatever may be asked of a step
            self._kernels[later.place] = replace(kernel, opened=False, note=_reason(error))
            return [whole]
        finally:
            self._tensors.described = False
            self._entries, self._site, self._call, self._kernel = state
        if later.check is not None:
            self._kernels[later.place] = replace(kernel, **_checked(later.check))
        return steps

    def _step(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step and write it down."""
        result = func(*args, **kwargs)
        self._log(about(func), args, kwargs, result)
        return result

    def _describe(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Write down one step without running it."""
        result = described(func, *args, **kwargs)
        self._note(about(func), args, kwargs, result, sight=self._sight)
        return result

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


# -- a kernel beside its steps ----------------------------------------------------------------------------------------


def few_rows(
    asked: AttentionCall, given: Tensor, made: Tensor | None = None, *, turn: int, shelf: Shelf
) -> Callable[[], Rounding]:
    """Return what compares a kernel's result with its steps', `... heads query head_dim`, beside measured rounding.

    Rounding is measured against float64, in a few rows of one head, the one where the two are farthest apart among
    them. Without `made` (steps that are described alone) these rows are compared, of another head at each `turn`. What
    is returned may then be called when the run is over: it holds no tensor of the run.
    """
    count = given.shape[-2]
    *head, row = (*_place(turn % prod(given.shape[:-2]), given.shape[:-2]), count - 1)
    if made is not None:
        apart = (given - made).abs().masked_fill(given == made, 0.0).nan_to_num(nan=math.inf)
        apart = apart.masked_fill(given.isnan() & made.isnan(), 0.0)
        *head, row, _ = _place(int(apart.argmax()), apart.shape)
    step = max(1, count // FEW)
    queries = range(row % step, count, step)
    few, rows = asked.of_head(tuple(head), queries), given[tuple(head)][queries.start :: step]
    if made is not None:
        difference = max_difference(given, made)
        return lambda: _judged(few, rows, difference)
    if 2 * few.key.numel() * few.key.element_size() > _COPIED:
        rounding = _judged(few, rows)
        return lambda: rounding
    # A closure for each tensor stands in its place until it is wanted.
    copied, result = few.with_tensors(shelf.put), shelf.put(rows)  # type: ignore[arg-type]
    return lambda: _judged(copied.with_tensors(lambda get: get()), result())  # type: ignore[operator]


def _judged(few: AttentionCall, given: Tensor, difference: float | None = None) -> Rounding:
    """Judge a difference, by default that of these rows from what a kernel gave for them."""

    def computed(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (attention(compute, few, dtype),)

    # Computed anew also where the steps were run: where these are wrong, their error is no rounding.
    steps = computed(torch.float64 if given.dtype == torch.float64 else torch.float32)[0].to(given.dtype)
    difference = max_difference(given, steps[0]) if difference is None else difference
    return _beside_rounding(difference, (steps,), computed)


def _beside_rounding(
    difference: float, steps: tuple[Tensor, ...], computed: Callable[[torch.dtype], tuple[Tensor, ...]]
) -> Rounding:
    """Judge a difference beside the rounding of `steps`, which `computed` gives in another dtype."""
    exact = computed(torch.float64)
    if steps[0].dtype == torch.float64:
        return Rounding.of(difference, max(map(rounding_error, computed(torch.float32), exact)) * STEP)
    return Rounding.of(difference, max(map(_error, steps, exact)))


def _error(output: Tensor, exact: Tensor) -> float:
    """Return the largest rounding error, which to store the largest number alone may make half a step."""
    largest = exact.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max()
    return max(rounding_error(output, exact), float(largest) * torch.finfo(output.dtype).eps / 2)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if dtype and isinstance(value, Tensor) and value.is_floating_point() else value


def _place(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices of an element by its number."""
    place = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        place.append(at)
    return tuple(reversed(place))


def _checked(check: Callable[[], Rounding]) -> dict[str, Any]:
    """Return the check of a kernel, or why there is none."""
    try:
        return {"check": check()}
    except Exception as error:  # as on devices without float64: what was opened is opened
        return {"note": f"not compared: {first_line(error)}"}


def _is_comparable(given: Tensor) -> bool:
    """Return whether there are numbers to compare."""
    return not given.is_meta and type(given) in (Tensor, nn.Parameter) and given.numel() > 0


# -- what kernels are -------------------------------------------------------------------------------------------------


def _join_products(ops: list[Op]) -> None:
    """Count each view that C++ made for a product, and the one that it made of its result, as of the product's call."""
    for place, op in enumerate(ops):
        if op.base_name != "bmm":
            continue
        before = place - 1
        while before >= 0 and ops[before].kind == "view":
            ops[before].call = op.call
            before -= 1
        after = ops[place + 1] if place + 1 < len(ops) else None
        if after is not None and after.base_name == "view" and after.inputs[0].id == op.output.id:
            after.call = op.call


def _code_for(func: Any, name: str) -> Any:
    """Return the key under which torch has an operation's own code for a kind of tensor; None where it has none."""
    key = getattr(_Key, name, None)
    known = key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), name)
    return key if known else None


def _adds_scores(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `baddbmm` or `addmm` may add a mask to a product that is scores, and no bias to one with a weight.

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
    """Return whether this is a parameter, or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _reason(error: Exception) -> str:
    """Return why a kernel is not opened."""
    if isinstance(error, NotOpenedError):
        return str(error)
    return "no room" if is_out_of_memory(error) else first_line(error)
