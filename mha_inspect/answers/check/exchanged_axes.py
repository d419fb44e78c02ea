"""Try the ways out of an attention that takes the batch as positions: the same call with the two axes exchanged.

A way out is printed only if then no batch item changes another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...record.arguments import parts_of, with_parts
from .arguments import Source
from .evidence import Evidence, NotPossibleError

_BATCH_FIRST = "create the layer with batch_first=True"
_TRANSPOSED = "use transpose(0, 1) before and after the attention"


def way_out(evidence: Evidence, source: Source, token: int) -> str:
    """Return what makes batch items independent, as a sentence; empty if nothing that was tried does.

    `token` is the place of a token that changes other items.
    """
    module = evidence.subject.module
    settings = [part for part in module.modules() if getattr(part, "batch_first", None) is False]
    attentions = [attention.module for attention, _ in evidence.run.attentions]
    parts = [module.get_submodule(path) if path else module for path in dict.fromkeys(attentions)]
    ways = []
    if settings and _is_apart(evidence, source, token, lambda _: _set_batch_first(settings)):
        ways.append(_BATCH_FIRST)
    with _exchanging(parts) as exchange:
        if _is_apart(evidence, source, token, exchange):
            ways.append(_TRANSPOSED)
    sentence = ", or ".join(ways)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _set_batch_first(parts: list[nn.Module]) -> None:
    for part in parts:
        part.batch_first = True  # type: ignore[assignment]  # mypy takes attributes of a module for tensors or modules


def _is_apart(evidence: Evidence, source: Source, token: int, change: Callable[[nn.Module], object]) -> bool:
    """Return whether the changed module runs, and a token of batch item 0 changes no other item."""
    try:
        with evidence.runner.changed_by(change):
            base = evidence.output_with({})
            output = evidence.output_with(source.others(token))
            changed = evidence.differences(output, base)
    except NotPossibleError:
        return False
    return len(changed) == source.rows and bool((changed[0] > 0).any()) and not bool((changed[1:] > 0).any())


@contextmanager
def _exchanging(parts: list[nn.Module]) -> Iterator[Callable[[nn.Module], object]]:
    """Give a change of a module that exchanges the first two axes of what these parts of it take and return."""
    handles: list[Any] = []

    def exchange(_: nn.Module) -> None:
        for part in parts:
            handles.append(part.register_forward_pre_hook(_before, with_kwargs=True))
            handles.append(part.register_forward_hook(_after))

    try:
        yield exchange
    finally:
        for handle in handles:
            handle.remove()


def _before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _exchanged(args), _exchanged(kwargs)


def _after(_: nn.Module, __: Any, returned: Any) -> Any:
    if isinstance(returned, tuple):
        return (_exchanged(returned[0]), *returned[1:])
    return _exchanged(returned)


def _exchanged(value: Any) -> Any:
    """Return a value with `batch positions features` in the tensors of three dimensions, and ids, turned."""
    if isinstance(value, Tensor):
        is_of_tokens = value.dim() == 3 and value.is_floating_point()
        is_of_ids = value.dim() == 2 and value.dtype in (torch.int64, torch.int32)
        return value.transpose(0, 1) if is_of_tokens or is_of_ids else value
    parts = parts_of(value)
    return with_parts(value, [_exchanged(part) for _, part in parts]) if parts else value
