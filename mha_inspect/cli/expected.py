"""The behaviour to expect that `check` and `fix` are given, and the subject that is judged by it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import MhaInspectError, SpecError
from ..text import shown
from . import subject
from .options import Options

if TYPE_CHECKING:
    from ..running.subject import Subject


def declared_by(options: Options) -> dict[str, Any]:
    """Return the fields of an intent that the options declare, and give a batch two items by default.

    Raises `SpecError` for --padding-side without a mask.
    """
    if options.padding_side is not None and options.mask is None:
        raise SpecError(f"--padding-side {options.padding_side} needs a padding mask. Add --mask NAME=keep.")
    if "batch" not in options.given and not options.unbatched:
        options.batch = 2  # one item may affect the other
    return {
        "causal": True if options.causal else None,
        "window": options.window,
        "padding_side": options.padding_side,
        "cache": options.cache,
        "scale": options.scale,
        **_meaning_of(options.mask),
    }


def _meaning_of(mask: str | None) -> dict[str, str]:
    """Return the intent that --mask declares. Raises `SpecError` if it is not NAME=keep or NAME=ignore."""
    if mask is None:
        return {}
    name, sign, means = mask.partition("=")
    if not name or (sign and means not in ("keep", "ignore")):
        raise SpecError(
            f"--mask {shown(mask)} is not NAME=keep or NAME=ignore. Say what 1 or True means, e.g. "
            "--mask attention_mask=keep."
        )
    if not means:
        return {"padding": name}
    return {"padding": name, "padding_true": means}


def loaded_for(target: str | None, options: Options, padding: str | None, means: str | None) -> Subject:
    """Return the subject to check. A target may lack a setting or mask for --causal, which declares an expectation."""
    loaded = None
    if target is not None and options.causal:
        options.causal = "causal" in options.typed
        try:
            loaded = subject.load(target, options)
        except MhaInspectError:
            options.causal = False
    if loaded is None:
        loaded = subject.load(target, options)
    shapes = options.input_shape or []
    is_given = bool(options.padding) or any(text.startswith(f"{padding}=") for text in shapes)
    if padding is not None and options.input is None and not is_given:
        loaded = _with_mask(loaded, padding, keep=means != "ignore", is_causal="causal" in options.typed)
    if options.input is not None:
        return replace(loaded, batch_first=None)  # the user made the inputs
    return loaded


def _with_mask(subject: Subject, name: str, *, keep: bool, is_causal: bool) -> Subject:
    """Return a subject called with a mask by item that keeps every key, if the forward needs one and takes it.

    It is `batch key` or `batch 1 1 key`, in the place of one that was made without knowing that it is of padding. One
    that was made for --causal stays.
    """
    import torch

    from ..checks.arguments import Arguments

    arguments = Arguments(subject)
    was_made = isinstance(arguments.values.get(name), torch.Tensor) and not is_causal
    if not was_made and not arguments.is_missing(name):
        return subject
    tensors = [value for value in arguments.values.values() if isinstance(value, torch.Tensor)]
    if not tensors or tensors[0].dim() < 2:
        return subject
    mask = torch.full(tensors[0].shape[:2], keep, device=tensors[0].device)
    for form in (mask, mask[:, None, None]):
        args, kwargs = arguments.of_call({name: form})
        masked = replace(subject, args=args, kwargs=kwargs)
        if _runs(masked):
            return masked
    return subject


def _runs(subject: Subject) -> bool:
    """Return whether a forward returns."""
    import torch

    try:
        with subject.settings(), subject.apart() as fresh, torch.no_grad():
            fresh.plain()
    except Exception:  # user code may raise anything
        return False
    return True
