"""Record one run with its fused kernels opened: the steps of each kernel stand in the recording, in its place.

They are computed, on the kernel's own arguments, only where the numbers of the run are kept.

The run continues with the kernel's own result; the result of the steps is only compared with it. So a run with the
x-ray computes the same bits as a run without it, including gradients and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from mmap import mmap
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import is_out_of_memory
from ..text import first_line
from .arguments import cast_tensors, tensors_in
from .catalog import MULTI_HEAD, About, Fused, about, adds_scores, fused
from .kernels import (
    STEPS,
    AttentionCall,
    KernelCall,
    NotOpenedError,
    PartCall,
    Stages,
    bound,
    read_attention,
    read_part,
    summed_in,
)
from .ops import KERNEL, RESULT_LINK, Kernel, Kind, Op, Recording, TensorRef
from .recorder import Entry, Recorder
from .rounding import STEP, Rounding, max_difference, rounding_error
from .sight import Sight, hides_by_scores, sight_of, sight_of_kernel
from .site import numbers_of_site, place_of_site, put_on, take_off
from .tensors import is_with_tensor, strides_of

_Key = torch._C.DispatchKey
LINK = About(None, None, RESULT_LINK, "result")
BUDGET = 1 << 30
"""If the scores have more bytes than this, a kernel's steps have shapes and no numbers."""
_COPIED = 1 << 20
"""Keys and values up to this many bytes are copied and compared after the run; larger ones are compared at once."""


_CHEAP = 1 << 24
"""Steps of a part with fewer bytes are computed even if nothing keeps them."""
_STEPS = 3
"""Steps of an attention that are as large as its scores: the product, the mask and the softmax."""


_SCORES, _MASK, _CONTEXT = (f"{KERNEL}{name}.default" for name in STEPS)


class _Opening(NamedTuple):
    """The notes on an attention kernel that has run, from which its steps are added later."""

    place: int
    """Index of the kernel in the recording."""
    call: AttentionCall
    """The call, with the look of each operand in place of the tensor."""
    shapes_only: bool
    """Whether its steps are too large for numbers."""
    nbytes: int
    """The bytes of its largest step."""
    sight: Sight | None
    """Which query sees which key in its weights; None if not known."""
    check: Callable[[], Rounding] | None
    """Returns the difference of a few rows from their steps; None if they are not compared."""


class XRay(Recorder):
    """A recorder that opens fused kernels."""

    def __init__(
        self,
        root: nn.Module | None = None,
        *,
        keep: bool = False,
        room: int | None = None,
        tables: bool = False,
        budget: int = BUDGET,
    ) -> None:
        super().__init__(root, keep=keep, room=room, tables=tables)
        self._budget = budget
        self._kernels: list[Kernel] = []
        self._within: int | None = None
        """Index of the running kernel; None outside a kernel."""
        self._composite = False
        """Whether a composite operation inside a kernel is being decomposed: all its parts are one call."""
        self._shelf = _Shelf()
        self._sights_of_masks: dict[Any, Sight | None] = {}

    def finish(self, returned: Any = None) -> Recording:
        """Return the recording so far, with `returned` as its named outputs, and its kernels."""
        recording = super().finish(returned)
        reopened = set()
        for place, kernel in enumerate(self._kernels):
            hiding = fused(kernel.op)
            if hiding is not None and hiding.way == "reopen":
                reopened.add(place)
        if reopened:
            _join_products([op for op in recording.ops if op.kernel in reopened])
        return replace(recording, kernels=tuple(self._kernels))

    # -- while the run goes on ----------------------------------------------------------------------------------------

    def _look_into(
        self, operator: About, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        asking, composite = self._asking, self._composite
        self._asking = asking or frame
        try:
            if operator.fused and (operator.fused.way != "adding" or adds_scores(args, kwargs)):
                return self._run_kernel(operator, operator.fused, func, args, kwargs)
            if not self._inside:
                return NotImplemented
            if not composite:
                # Inside a kernel the site never changes: each operation is a call of its own.
                self._callers.is_new_call = True
            if operator.composite:
                self._composite = True
                return self._decompose(func, args, kwargs, frame)
            if operator.name.endswith("out"):
                return self._run_out(operator, func, args, kwargs)
            return NotImplemented
        finally:
            self._asking, self._composite = asking, composite

    def _run_kernel(self, operator: About, hiding: Fused, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a kernel and return its result: a `reopen` kernel with its code recorded, any other as it is."""
        place, before = len(self._kernels), (self._within, self._kernel, self._inside)
        kernel = Kernel(operator.name, hiding.title, hiding.hides, opened=False, note="it failed", within=self._within)
        self._kernels.append(kernel)
        self._within, self._inside = place, False
        if self._kernel is None:
            self._kernel = place
        self._callers.is_new_call = True
        try:
            if hiding.way in ("part", "adding"):
                return self._run_part(place, operator, func, args, kwargs)
            if hiding.way != "reopen":
                return self._run_leaf(place, operator, func, args, kwargs)
            tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
            nested = any(tensor.is_nested for tensor in tensors)
            if nested and operator.name.startswith(MULTI_HEAD):
                return self._run_padded(place, operator, func, args, kwargs)
            device = tensors[0].device.type
            code = _code_of(func, device, "NestedTensor" if nested else "")
            if code is None:
                result = self._run_leaf(place, operator, func, args, kwargs)
                self._kernels[place] = replace(kernel, opened=False, note=f"torch has no code for {device}")
            else:
                result = self._record_code(code, *args, **kwargs)
                self._kernels[place] = replace(kernel, opened=True, note="")
            return result
        finally:
            self._within, self._kernel, self._inside = before
            self._callers.is_new_call = True

    def _record_code(self, code: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a kernel's own code, record the operations that it dispatches, and return its result."""
        before, self._inside = self._inside, True
        put_on(self)
        try:
            return code(*args, **kwargs)
        finally:
            take_off(self)
            self._inside, self._callers.is_new_call = before, True

    def _run_padded(self, place: int, operator: About, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the fast path on rows of different lengths, and record it on padded rows with a mask."""
        result = func(*args, **kwargs)
        num_entries, num_kernels = len(self._entries), len(self._kernels)
        try:
            with self._unrecorded():
                steps = self._record_padded(operator, func, args, kwargs, result)
                difference = _difference_of_rows(steps, result[0])
            reason = f"shown on padded rows; differs by {difference:.1e} from the run on rows of different lengths"
            self._kernels[place] = replace(self._kernels[place], opened=True, note=reason)
        except Exception as error:  # whatever the steps raise, the run goes on
            del self._entries[num_entries:], self._kernels[num_kernels:]
            self._kernels[place] = replace(self._kernels[place], note=_reason(error))
            self._note(operator, [self._tensors.note(value) for value in args], {}, result)
        return result

    def _record_padded(self, operator: About, func: Any, args: Any, kwargs: Any, result: Any) -> Tensor:
        """Record a kernel's code on padded rows, with a link to its result, and return the padded result."""
        note = self._tensors.note
        arguments = bound(func, args, kwargs)
        rows = arguments["query"]
        padded = torch.ops.aten.to_padded_tensor.default(rows, 0.0)
        lengths = rows._nested_tensor_size()[:, 0].to(padded.device)
        masked = torch.arange(padded.shape[1], device=padded.device)[None] >= lengths[:, None]
        self._callers.note(self._asking)
        self._note(about(torch.ops.aten.to_padded_tensor.default), [note(rows), 0.0], {}, padded)
        arguments |= {"query": padded, "key": padded, "value": padded, "mask": masked, "mask_type": 1}
        code = _code_of(func, padded.device.type)
        if code is None:
            raise NotOpenedError(f"torch has no code for {padded.device.type}")
        steps: Tensor = self._record_code(code, *arguments.values())[0]
        self._callers.note(self._asking)
        self._note(LINK, [note(steps)], {"kernel": operator.name}, result, kind="copy")
        return steps

    def _run_leaf(self, place: int, operator: About, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a kernel as it is, note what its steps will need later, and return its result."""
        note = self._tensors.note
        noted = [note(value) for value in args]
        named = {name: note(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        self._callers.note(self._asking)
        results = result if isinstance(result, tuple) else (result,)
        opening = None
        with self._unrecorded():
            try:
                opening = self._opening(place, read_attention(func, args, kwargs), results)
            except Exception as error:
                self._kernels[place] = replace(self._kernels[place], note=_reason(error))
        self._note(operator, noted, named, result, opening=opening)
        return result

    def _opening(self, place: int, call: AttentionCall, results: Sequence[Tensor]) -> _Opening:
        """Return the notes on the call of an attention kernel that has these results."""
        nbytes = call.size(results)
        shapes_only = not results[0].is_meta and nbytes > self._budget
        sight, check = None, None
        with suppress(Exception):  # unusual tensors may raise anything: keep what succeeded
            sight = self._sight_of_call(call, results)
            # Where only tables are kept, nobody asks how exact the steps are.
            if _is_comparable(results[0]) and not self._tensors.keeps_tables:
                few, rows = call.of_few(results, place + 1)
                # A kernel whose tensors may be kept is opened at once, any other after the run.
                check = partial(_judged, few, rows) if self._tensors.keep else self._later(few, rows)
        noted = call.with_operands(self._tensors.note)
        return _Opening(place, noted, shapes_only, nbytes, sight, check)

    def _run_part(self, place: int, operator: About, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a kernel that computes a part of an attention, record its steps beside it, and return its result."""
        num_entries, num_ops = len(self._entries), len(self._ops)
        note = self._tensors.note
        noted = [note(value) for value in args]
        named = {name: note(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        self._callers.note(self._asking)
        results = result if isinstance(result, tuple) else (result,)
        try:
            with self._unrecorded():
                changes = self._record_part(operator, read_part(func, args, kwargs), results, place + 1)
            self._kernels[place] = replace(self._kernels[place], **changes)
        except Exception as error:  # whatever the steps raise, the kernel stays one operation
            del self._entries[num_entries:], self._ops[num_ops:]
            self._kernels[place] = replace(self._kernels[place], note=_reason(error))
            self._note(operator, noted, named, result)
        return result

    def _record_part(self, operator: About, call: PartCall, results: Sequence[Tensor], turn: int) -> dict[str, Any]:
        """Record the steps of a part, and a link from each last step to a result; return the kernel's changes."""
        note, nbytes = self._tensors.note, call.size(results)
        shapes_only = not results[0].is_meta and nbytes > self._budget
        has_use = self._tensors.keep and self._tensors.has_room_for(_STEPS * nbytes)
        # The first operation on meta makes torch import for a second: few numbers are computed in less.
        is_computed = not shapes_only and (has_use or nbytes < _CHEAP)

        def do(func: Any, *args: Any, **kwargs: Any) -> Any:
            noted = [note(value) for value in args]
            named = {name: note(value) for name, value in kwargs.items()}
            given = args if is_computed else cast_tensors(args, None, "meta")
            step, about_step = func(*given, **kwargs), about(func)
            sight = self._sight_of(about_step, given, step) if about_step.weighs else None
            self._note(about_step, noted, named, step, sight=sight)
            return step

        keep = self._tensors.keep
        self._tensors.keep = keep and is_computed
        try:
            steps = call.steps(do=do)
        finally:
            self._tensors.keep = keep
        for step, result in zip(steps, results, strict=True):
            self._note(LINK, [note(step)], {"kernel": operator.name}, result, kind="copy")
        self._callers.whole.add(self._callers.call)
        changes: dict[str, Any] = {"opened": True, "note": "", "shapes_only": shapes_only}
        if not _is_comparable(results[0]) or self._tensors.keeps_tables:
            return changes
        return changes | _checked(_check_of_kept(call, results, turn, steps if is_computed else None))

    def _sight_of_call(self, call: AttentionCall, results: Sequence[Tensor]) -> Sight | None:
        """Return which query sees which key in a kernel's weights; None if not known. Cached without tensors."""
        if hides_by_scores(call):
            if call.size(results) > self._budget:
                return None
            made = call.made()
            return sight_of(made.masked, made.weights, -1)
        if call.bias is not None or call.starts is not None:
            return sight_of_kernel(call)
        key = (call.scores_shape, call.causal, call.from_end, call.window)
        if key not in self._sights_of_masks:
            self._sights_of_masks[key] = sight_of_kernel(call)
        return self._sights_of_masks[key]

    def _later(self, few: AttentionCall, rows: Sequence[Tensor]) -> Callable[[], Rounding]:
        """Return a function that compares a few rows after the run, without a reference to the run's tensors."""
        if few.key.nbytes + few.value.nbytes > _COPIED:
            rounding = _judged(few, rows)
            return lambda: rounding
        copies = few.with_operands(self._shelf.put)
        result = self._shelf.put(rows[0])

        def check() -> Rounding:
            return _judged(copies.with_operands(lambda copied: copied()), (result(),))

        return check

    def _run_out(self, operator: About, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `bmm.out(a, b, out=c)`, record it as `bmm(a, b)` with the result c, and return that."""
        written = self._about_to_write(operator, args, kwargs)
        note = self._tensors.note
        noted = [note(value) for value in args]
        rest = {name: note(value) for name, value in kwargs.items() if name != "out"}
        result = func(*args, **kwargs)
        self._callers.note(self._asking)
        plain = replace(operator, name=operator.name.removesuffix("out") + "default")
        self._note(plain, noted, rest, result, written, kind="compute")
        return result

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def _open(self, entry: Entry) -> None:
        opening, start = entry[-1], len(self._ops)
        kernel = self._kernels[opening.place]
        try:
            with self._unrecorded():
                changes = {"opened": True, "note": ""} | self._add_steps(entry, opening)
        except Exception as error:  # whatever the steps raise, the kernel stays one operation
            del self._ops[start:]
            changes = {"note": _reason(error)}
            self._add(entry)
        self._kernels[opening.place] = replace(kernel, **changes)

    def _add_steps(self, entry: Entry, opening: _Opening) -> dict[str, Any]:
        """Add the steps of an attention kernel, with their numbers if tensors are kept; return the kernel's changes."""
        tensors, results, number = self._tensors, entry[3], entry[6]
        is_kept = tensors.keep and all(map(is_with_tensor, results))
        # Steps that cannot be kept with the run have no use for their numbers.
        has_room = tensors.has_room_for(_STEPS * opening.nbytes)
        call, made = None, None
        if is_kept:
            call = opening.call.with_operands(lambda look: look[6])
            made = call.made() if has_room and not opening.shapes_only else None
        self._write_steps(entry, opening, made)
        self._callers.whole.add(number)
        changes: dict[str, Any] = {"shapes_only": opening.shapes_only}
        if opening.call.dropout > 0:
            reason = "not compared: the kernel applies dropout, and its steps do not"
            return changes | {"drops": True, "note": reason}
        check = opening.check
        whole: list[Any] = [look[6] for look in results] if is_kept else []
        if call is not None and _is_comparable(whole[0]):
            check = _check_of_kept(call, whole, opening.place + 1, None if made is None else (made.result,))
        return changes if check is None else changes | _checked(check)

    def _write_steps(self, entry: Entry, opening: _Opening, made: Stages | None) -> None:
        """Add the operations that stand for an attention kernel, with what they made if that is kept."""
        operator, *_, results = entry[:4]
        read = opening.call.with_operands(self._tensors.read)
        # As arguments these are tensors, and what is recorded of them are references.
        call: Any = read.heads_first(partial(self._swapped, entry))
        look: Any = opening.call.query
        dtype = summed_in(look[4])
        shape = call.scores_shape

        def step(stage: str, name: str, args: Any, settings: dict[str, Any], shape: Any = shape) -> TensorRef:
            value = None if made is None else getattr(made, stage)
            output = self._tensors.made(shape, dtype, len(self._ops), value)
            self._add_step(entry, name, args, settings, (output,))
            return output

        scores = masked = step("scores", _SCORES, (call.query, call.key), {"scale": call.scale})
        if call.is_masked:
            args = (scores,) if call.bias is None else (scores, call.bias)
            masked = step("masked", _MASK, args, call.places.given())
        if call.is_safe:
            weights = step("weights", "aten._safe_softmax.default", (masked, -1), {})
        else:
            weights = step("weights", "aten._softmax.default", (masked, -1, False), {})
        # What the mask says is true for any scores; a bias that may hide keys has been looked at with these scores.
        sight = opening.sight
        if sight is None and made is not None:
            with suppress(Exception):  # other kinds of tensors may raise anything
                sight = sight_of(made.masked, made.weights, -1)
        if sight is not None:
            self._sights[weights.id] = sight
        of_values = (*shape[:-1], call.value.shape[-1])
        context = step("context", _CONTEXT, (weights, call.value), {}, of_values)
        if read.rows_first:
            context = self._swapped(entry, context)
        outputs = [self._tensors.write(look, len(self._ops), (context,), False, True) for look in results]
        self._add_step(entry, RESULT_LINK, (context,), {"kernel": operator.name}, tuple(outputs), "copy")

    def _swapped(self, entry: Entry, tensor: TensorRef) -> TensorRef:
        """Add a view of a tensor with its rows and heads swapped, `... rows heads head_dim`, and return it."""
        view = self._tensors.swapped(tensor, len(self._ops))
        self._add_step(entry, "aten.transpose.int", (tensor, -3, -2), {}, (view,), "view")
        return view

    def _add_step(
        self,
        entry: Entry,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[TensorRef, ...],
        kind: Kind = "compute",
    ) -> None:
        """Add an operation that torch never ran, which stands for a step of an attention kernel."""
        *_, site, call, kernel, _, _, _ = entry
        read = tuple([value for value in (*args, *kwargs.values()) if type(value) is TensorRef])
        op = Op(
            len(self._ops),
            name,
            args,
            kwargs,
            args if read == args else read,
            outputs,
            kind,
            name == _MASK,
            *place_of_site(site),
            call,
            kernel,
            numbers_of_site(site),
        )
        self._ops.append(op)


# -- a kernel beside its steps ----------------------------------------------------------------------------------------


class _Shelf:
    """Copies of the few numbers of each kernel that are compared after the run, packed in pages of their own.

    Small allocations that stay between the large blocks of a forward would fragment memory.
    """

    def __init__(self) -> None:
        self._page, self._used = torch.empty(0), 0

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Copy a tensor, on the device that it is on, and return a function that returns the copy."""
        if tensor.device.type != "cpu":
            return partial(Tensor.detach, tensor.clone())
        count, shape = tensor.numel(), tensor.shape
        if self._page.dtype != tensor.dtype or self._used + count > len(self._page):
            self._page, self._used = torch.frombuffer(mmap(-1, _COPIED), dtype=tensor.dtype), 0
        get = partial(torch.as_strided, self._page, shape, strides_of(shape), self._used)
        get().copy_(tensor)
        self._used += count
        return get


def _difference_of_rows(padded: Tensor, rows: Tensor) -> float:
    """Return the largest difference of rows of different lengths, `batch (row) feature`, from padded ones."""
    largest = 0.0
    for padded_row, row in zip(padded, rows.unbind(), strict=True):
        largest = max(largest, max_difference(padded_row[: len(row)], row))
    return largest


def _check_of_kept(
    call: KernelCall, results: Sequence[Tensor], turn: int, steps: Sequence[Tensor] | None
) -> Callable[[], Rounding]:
    """Return a function that compares kept results with the steps; with a few rows if the steps have no numbers."""
    few, rows = call.of_few(results, turn, steps)
    difference = None if steps is None else max(map(max_difference, results, steps))
    return partial(_judged, few, rows, difference)


def _judged(few: KernelCall, results: Sequence[Tensor], difference: float | None = None) -> Rounding:
    """Return a difference judged by the rounding error of the steps; by default that of the results from the steps.

    The steps are computed again, in the dtype of the results: a fault in the recorded steps is not rounding.
    """
    steps = few.steps(results[0].dtype)
    exact = few.steps(torch.float64)
    if difference is None:
        difference = max(map(max_difference, results, steps))
    if steps[0].dtype == torch.float64:
        coarse = few.steps(torch.float32)
        return Rounding.of(difference, max(map(rounding_error, coarse, exact)) * STEP)
    return Rounding.of(difference, max(map(_error, steps, exact)))


def _error(output: Tensor, exact: Tensor) -> float:
    """Return the largest rounding error; at least half a unit in the last place of the largest number."""
    largest = exact.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max()
    half_a_unit = torch.finfo(output.dtype).eps / 2
    return max(rounding_error(output, exact), float(largest) * half_a_unit)


def _checked(check: Callable[[], Rounding]) -> dict[str, Any]:
    """Return the check of a kernel, or a note why it failed."""
    try:
        return {"check": check()}
    except Exception as error:  # e.g. on a device without float64: the kernel is opened all the same
        return {"note": f"not compared: {first_line(error)}"}


def _is_comparable(given: Tensor) -> bool:
    """Return whether a tensor has numbers to compare."""
    if given.is_meta or type(given) not in (Tensor, nn.Parameter):
        return False
    return given.numel() > 0


# -- what kernels are -------------------------------------------------------------------------------------------------


def _join_products(ops: list[Op]) -> None:
    """Give the views before a product, and the view of its result, the call number of the product: C++ made them."""
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


def _code_of(func: Any, device: str, kind: str = "") -> Callable[..., Any] | None:
    """Return a kernel's own code for tensors of a kind on a device; None if torch has none."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        code: Callable[..., Any] = func.py_kernels[_Key.CompositeExplicitAutograd]
        return code
    name = kind + device.upper()
    key = getattr(_Key, name, None)
    if key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), name):
        return None
    return partial(func._op_dk, key)


def _reason(error: Exception) -> str:
    """Return why a kernel is not opened."""
    if isinstance(error, NotOpenedError):
        return str(error)
    return "not enough memory" if is_out_of_memory(error) else first_line(error)
