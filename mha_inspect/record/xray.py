"""Record one run with its fused kernels opened: each kernel is computed again in steps, on its own arguments.

The run continues with the kernel's own result; the result of the steps is only compared with it. So a run with the
x-ray computes the same bits as a run without it, including gradients and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from mmap import mmap
from operator import mul
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import is_out_of_memory
from ..text import first_line
from .arguments import tensors_in
from .catalog import MULTI_HEAD, About, Fused, about, adds_scores, fused
from .kernels import OPERANDS, AttentionCall, KernelCall, NotOpenedError, PartCall, bound, read_kernel
from .kernels import run as compute
from .ops import RESULT_LINK, Kernel, Kind, Op, Recording
from .recorder import Entry, Recorder
from .repeated_steps import RecordedSteps, layout_of, looks_in
from .rounding import STEP, Rounding, max_difference, rounding_error
from .sight import Sight, hides_by_scores, sight_of, sight_of_kernel
from .site import place_of_site, put_on, take_off
from .tensors import Look, Tensors, is_with_tensor
from .without_numbers import described

_Key = torch._C.DispatchKey
LINK = About(None, None, RESULT_LINK, "result")
BUDGET = 1 << 30
"""If the scores have more bytes than this, a kernel's steps have shapes and no numbers."""
_COPIED = 1 << 20
"""Keys and values up to this many bytes are copied and compared after the run; larger ones are compared at once."""


_STEPS = 4
"""Steps of a kernel that are as large as its scores: the product, its scale, the mask and the softmax."""


class _Opening(NamedTuple):
    """The notes on a kernel that has run, from which its steps are added later."""

    place: int
    """Index of the kernel in the recording."""
    func: Any
    shapes_only: bool
    """Whether its steps are too large for numbers."""
    nbytes: int
    """The bytes of its largest step."""
    sight: Sight | None
    """Which query sees which key in its weights; None if not known."""
    drops: bool
    """Whether it applies dropout to the weights."""
    check: Callable[[], Rounding] | None
    """Returns the difference of a few rows from their steps; None if tensors are kept, or cannot be compared."""


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
        self._recorded_steps: dict[Any, RecordedSteps] = {}
        """The steps without numbers of each kind of call, by the layout of its operands."""

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
        # Tensors that are kept only while there is room may be gone when the kernel is opened.
        is_kept = self._tensors.keep and self._tensors.room is None and not self._tensors.keeps_tables
        noted = [note(value) for value in args]
        named = {name: note(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        self._callers.note(self._asking)
        results = result if isinstance(result, tuple) else (result,)
        opening, sight, check = None, None, None
        with self._unrecorded():
            try:
                call = read_kernel(func, args, kwargs)
                nbytes = call.size(results)
                shapes_only = not results[0].is_meta and nbytes > self._budget
                with suppress(Exception):  # unusual tensors may raise anything: keep what succeeded
                    sight = self._sight_of_call(call, results)
                    if not is_kept and _is_comparable(results[0]):
                        check = self._later(*call.of_few(results, place + 1))
                opening = _Opening(place, func, shapes_only, nbytes, sight, call.dropout > 0, check)
            except Exception as error:
                self._kernels[place] = replace(self._kernels[place], note=_reason(error))
        self._note(operator, noted, named, result, opening=opening)
        return result

    def _sight_of_call(self, call: KernelCall, results: Sequence[Tensor]) -> Sight | None:
        """Return which query sees which key in a kernel's weights; None if not known. Cached without tensors."""
        if isinstance(call, PartCall):
            return sight_of(None, results[0], -1) if "softmax" in call.name else None
        if hides_by_scores(call):
            return self._sight_of_steps(call) if call.size(results) <= self._budget else None
        if call.bias is not None or call.starts is not None:
            return sight_of_kernel(call.heads_first(compute))
        key = (call.scores_shape, call.causal, call.from_end, call.window, call.rows_first)
        if key not in self._sights_of_masks:
            self._sights_of_masks[key] = sight_of_kernel(call.heads_first(compute))
        return self._sights_of_masks[key]

    def _sight_of_steps(self, call: AttentionCall) -> Sight | None:
        """Return which query sees which key in the weights of a kernel's steps; None if there are no weights."""
        sights: list[Sight | None] = []

        def do(func: Any, *args: Any, **kwargs: Any) -> Any:
            step, operator = func(*args, **kwargs), about(func)
            if operator.weighs:
                sights.append(self._sight_of(operator, args, step))
            return step

        call.steps(do)
        return sights[-1] if sights else None

    def _later(self, few: KernelCall, rows: Sequence[Tensor]) -> Callable[[], Rounding]:
        """Return a function that compares a few rows after the run, without a reference to the run's tensors."""
        if isinstance(few, PartCall) or few.key.nbytes + few.value.nbytes > _COPIED:
            rounding = _judged(few, rows)
            return lambda: rounding
        copies: list[Callable[[], Any]] = []
        for name in OPERANDS:
            operand = getattr(few, name)
            copies.append(_nothing if operand is None else self._shelf.put(operand))
        result = self._shelf.put(rows[0])
        settings = few[len(OPERANDS) :]

        def check() -> Rounding:
            operands = [copied() for copied in copies]
            return _judged(AttentionCall(*operands, *settings), (result(),))

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
        """Add the steps of a kernel and a link from the last step to the kernel's result; return the kernel's changes.

        If tensors are kept the steps are computed; else they get shapes only, from tensors on meta.
        """
        _, args, kwargs, results, _, _, number, *_ = entry
        is_kept = self._tensors.keep and all(is_with_tensor(look) for look in results)
        # Steps that cannot be kept with the run have no use for their numbers.
        has_room = self._tensors.has_room_for(_STEPS * opening.nbytes)
        computed = is_kept and not opening.shapes_only and has_room
        has_tensors = any(map(is_with_tensor, looks_in([args, kwargs])))
        kind = None if has_tensors else _kind_of_call(entry, opening)
        call, steps = None, None
        if kind in self._recorded_steps:
            self._repeat_steps(self._recorded_steps[kind], entry, opening)
        else:
            start = len(self._ops)
            call, steps = self._record_steps(entry, opening, computed=computed)
            if kind is not None:
                operands = tuple(map(self._tensors.read, looks_in([args, kwargs])))
                self._recorded_steps[kind] = RecordedSteps(tuple(self._ops[start:]), operands)
        self._callers.whole.add(number)
        if opening.drops:
            reason = "not compared: the kernel applies dropout, and its steps do not"
            return {"drops": True, "note": reason, "shapes_only": opening.shapes_only}
        check = opening.check
        whole: list[Any] = [look[6] for look in results] if is_kept else []
        if call is not None and whole and _is_comparable(whole[0]):
            check = _check_of_kept(call, whole, opening.place + 1, steps if computed else None)
        changes = {"shapes_only": opening.shapes_only}
        return changes if check is None else changes | _checked(check)

    def _record_steps(
        self, entry: Entry, opening: _Opening, *, computed: bool
    ) -> tuple[KernelCall, tuple[Tensor, ...]]:
        """Run the steps of a kernel, with numbers if `computed`, and add them; return the call, and the last steps."""
        tensors, keep = self._tensors, self._tensors.keep
        operator, args, kwargs, results, _, site, number, place, *_ = entry
        call = read_kernel(opening.func, _given(tensors, args), _given(tensors, kwargs))
        note = tensors.note

        def add(operator: About, args: Any, kwargs: Any, outputs: Any, kind: Kind | None, sight: Sight | None) -> None:
            noted = [note(arg) for arg in args]
            named = {name: note(arg) for name, arg in kwargs.items()}
            self._add((operator, noted, named, outputs, None, site, number, place, kind, sight, None))

        def do(func: Any, *args: Any, **kwargs: Any) -> Any:
            step = func(*args, **kwargs) if computed else described(func, *args, **kwargs)
            outputs = (step,) if isinstance(step, Tensor) else step
            looks = [tensors.look(tensor, False) for tensor in outputs]
            operator = about(func)
            sight: Sight | None = None
            if operator.weighs:
                sight = self._sight_of(operator, args, step) if computed else opening.sight
            add(operator, args, kwargs, looks, None, sight)
            return step

        tensors.keep = computed
        try:
            steps = call.steps(do, described=not computed)
            for last, outputs in zip(steps, _of_links(results, len(steps)), strict=True):
                add(LINK, (last,), {"kernel": operator.name}, outputs, "copy", None)
        finally:
            tensors.keep = keep
        return call, steps

    def _repeat_steps(self, like: RecordedSteps, entry: Entry, opening: _Opening) -> None:
        """Add the steps of a kernel as those of an equal call before."""
        _, _, _, results, _, site, *_ = entry
        num_links = sum(op.makes_result for op in like.ops)
        links = _of_links(results, num_links)
        place = place_of_site(site)
        repeated = [*like.again(self._tensors, entry, place, links, len(self._ops))]
        self._ops += repeated
        for step, op in zip(like.ops, repeated, strict=True):
            if opening.sight is not None and step.outputs[0].id in self._sights:
                self._sights[op.outputs[0].id] = opening.sight


def _of_links(results: Sequence[Look], links: int) -> list[Sequence[Look]]:
    """Return which results of a kernel each link has: a single one has all of them."""
    if links == 1:
        return [results]
    return [[look] for look in results]


def _kind_of_call(entry: Entry, opening: _Opening) -> Any:
    """Return a key that is equal for calls of one kernel with equal settings, on operands of equal layouts."""
    _, args, kwargs, *_ = entry
    memory: dict[Any, int] = {}
    described = layout_of(args, memory), layout_of(kwargs, memory)
    return opening.func, described, opening.shapes_only, opening.sight is None


def _given(tensors: Tensors, value: Any) -> Any:
    """Return noted arguments with the kept tensors, or with meta tensors that are identified with them."""
    if isinstance(value, tuple):
        return tensors.stand_in(value)
    if isinstance(value, list):
        return [_given(tensors, part) for part in value]
    if isinstance(value, dict):
        return {name: _given(tensors, part) for name, part in value.items()}
    return value


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
        get = partial(torch.as_strided, self._page, shape, _strides_of(shape), self._used)
        get().copy_(tensor)
        self._used += count
        return get


def _strides_of(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape: 12, 4, 1 for 2, 3, 4."""
    from_last = accumulate(shape[:0:-1], mul, initial=1)
    return [*from_last][::-1]


def _nothing() -> None:
    """Return None, as a copy of an operand that a call does not have."""


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
    steps = few.steps(compute, results[0].dtype)
    exact = few.steps(compute, torch.float64)
    if difference is None:
        difference = max(map(max_difference, results, steps))
    if steps[0].dtype == torch.float64:
        coarse = few.steps(compute, torch.float32)
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
