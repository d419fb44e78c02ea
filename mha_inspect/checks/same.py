"""Faults found by comparing outputs that should be equal: repeated runs, train, a reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..compare.comparable_run import ComparableRun, Comparison
from ..compare.pair import Where, Why
from ..compare.shared_weights import copy_all, with_drawn_constants
from ..compare.why import first_difference, why
from ..errors import MhaInspectError
from ..record.arguments import with_copies
from ..record.ops import Op
from ..reports.check import Finding
from ..running.subject import Subject
from ..running.without_dropout import WithoutDropout
from ..text import first_line
from .cache_loop import continues
from .evidence import OTHER_SIZES, Evidence
from .factors import first_key
from .lab import NotPossibleError, RaisedError, UndeclaredError

_OTHER_KERNELS = 20.0
"""Train may use other kernels than eval, which round differently: its tolerance is this many times larger."""
_SEEDS = 6
"""The seeds to try of a run that draws numbers."""
_SAME_SIZES = "Give a reference with the same names and shapes of parameters"


def repeat(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if two runs give different outputs."""
    again = evidence.returned(more_seed=1) if evidence.again is None else evidence.again
    if not evidence.apart(evidence.output_of(again)):
        yield from _of_further_seeds(evidence)
        return
    by_seed = evidence.apart(evidence.output_of(evidence.returned(more_seed=1)))
    by_state = evidence.apart(evidence.output_of(evidence.returned(go_on=True)))
    if by_state:
        yield _of_state(evidence, by_state)
    elif by_seed:
        yield _of_seed(evidence, by_seed)


def _of_further_seeds(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if a run that draws numbers differs with one of some further seeds: few items may all be kept."""
    if not any(draws(op) for op in evidence.run.recording.ops):
        return
    for more in range(2, _SEEDS):
        apart = evidence.apart(evidence.output_of(evidence.returned(more_seed=more)))
        if apart:
            yield _of_seed(evidence, apart)
            return


def _of_state(evidence: Evidence, apart: float) -> Finding:
    """Return the fault of a run that changes the next one. Raise `NotPossibleError` if it continues from a cache."""
    # Keys before that of the first query are of a cache.
    if any(first_key(evidence, *attention) for attention in evidence.run.attentions) or continues(evidence):
        raise NotPossibleError("each run continues from the cache of the run before it")
    buffers = {named.tensor.storage for named in evidence.run.recording.buffers}
    return Finding(
        "repeat",
        "A run changes the output of the next run: the module keeps state between calls.",
        f"Two runs in a row on the same input, with the same seed, differ by {apart:.3g}.",
        sure=not any(op.inputs[0].storage in buffers for op in evidence.writes),
    )


def _of_seed(evidence: Evidence, apart: float) -> Finding:
    """Return the fault of a run that draws random numbers, at the first operation that does."""
    drawing = [op for op in evidence.run.recording.ops if draws(op)]
    dropouts = [op for op in drawing if "dropout" in op.base_name or "bernoulli" in op.base_name]
    proof = f"Two runs on the same input, with different seeds, differ by {apart:.3g}."
    if dropouts:
        return Finding(
            "repeat",
            "Dropout is on in eval: two runs give different outputs.",
            proof,
            source=dropouts[0].source,
            module=dropouts[0].module,
            fix="Pass training=self.training to F.dropout (dropout_p=self.p if self.training else 0.0).",
        )
    return Finding(
        "repeat",
        "The forward draws random numbers in eval: two runs give different outputs.",
        proof,
        sure=False,
        source=drawing[0].source if drawing else "",
        module=drawing[0].module if drawing else "",
    )


def draws(op: Op) -> bool:
    """Return whether an operation draws random numbers. A fused dropout has an argument that says it does not."""
    is_off = op.base_name == "native_dropout" and op.args[2:3] == (False,)
    return op.does("draws") and not is_off


def training(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if train and eval give different outputs although no dropout drops anything."""
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in evidence.subject.module.modules()):
        raise NotPossibleError("batch norm uses different statistics in train")
    with evidence.lab.changed_by(nn.Module.train), WithoutDropout() as mode:
        try:
            output = evidence.output_with({})
        except RaisedError as error:
            yield _raises_in_training(error)
            return
        apart = evidence.apart(output, times=_OTHER_KERNELS)
        if not apart:
            evidence.notes.extend(_of_padded_outputs(evidence, output))
            return
        if mode.has_drawn or evidence.apart(output, evidence.output_of(evidence.returned(more_seed=1))):
            raise NotPossibleError("the forward draws random numbers in train by other functions than dropout")
    yield _of_modes(evidence, apart)


def _raises_in_training(error: RaisedError) -> Finding:
    """Return the suspicion that a forward cannot be trained: it may need what is given in training alone."""
    return Finding(
        "training",
        "The forward raises in training mode, and not in eval mode, with the same input.",
        " ".join(str(error).split()),
        sure=False,
    )


def _of_modes(evidence: Evidence, apart: float) -> Finding:
    """Return the fault of two modes that differ: the first stage that does, and why."""
    sentence = f"With dropout off, train and eval differ by {apart:.3g}."
    proof = "Both modes had the same input and seed, and nothing was dropped."
    with suppress(Exception):  # a module may not be copyable, and user code may raise anything
        first = _first_stage(evidence, _in_training(evidence.subject), Where("in eval", "in train"))
        if first is not None:
            sentence = f"{sentence[:-1]}; the first difference is in {first.name}."
            return Finding(
                "training",
                " ".join([sentence, *(reason.sentence for reason in first.why)]),
                f"{proof} Their stages were compared in canonical axes.",
                source=first.line,
                module=first.module,
            )
    return Finding("training", sentence, proof)


def _in_training(subject: Subject) -> Subject:
    """Return a copy of a subject in train mode, in which no dropout drops anything."""
    return replace(subject, module=copy.deepcopy(subject.module).train(), drops=False, without_ones=None)


@dataclass(frozen=True)
class _FirstStage:
    """The first stage in which two sides with the same weights differ."""

    name: str
    """`weights of attention 1`."""
    line: str
    module: str
    why: tuple[Why, ...]


def _first_stage(evidence: Evidence, compared: Subject, where: Where) -> _FirstStage | None:
    """Return the first stage in which another subject differs from the checked one, and why; None if none does."""
    left, right = ComparableRun(evidence.subject), ComparableRun(compared)
    if len(left.attentions) != len(right.attentions):
        return None
    row = first_difference(list(Comparison(left, right).rows()))
    if row is None:
        return None
    attention, _ = evidence.run.attentions[row.place]
    return _FirstStage(
        name=f"{row.name} of attention {row.place + 1}",
        line=evidence.line_of(attention.stages[row.name]),
        module=attention.module,
        why=why(left, right, where),
    )


def _of_padded_outputs(evidence: Evidence, output: Tensor) -> Iterator[str]:
    """Yield a sentence if the outputs of padded tokens differ in train, although those of real tokens are equal."""
    padded = evidence.padded
    if padded is None or not bool(evidence.differences_with_padding(output, times=_OTHER_KERNELS).any()):
        return
    outputs = evidence.output.movedim(evidence.source.axes, (0, 1)).cpu()
    if bool((outputs[padded] == 0).all()):
        yield "Outputs of padded tokens are 0 in eval and not in train; those of real tokens are equal."
    else:
        yield "Outputs of padded tokens differ in train and eval; those of real tokens are equal."


def reference(evidence: Evidence) -> Iterator[Finding]:
    """Yield the first stage that differs from a trusted module with the weights of the checked module.

    They are copied by name; only where names differ, by their role: that hides a swapped query and key. The reference
    is left as it was.
    """
    trusted = evidence.intent.reference
    if trusted is None:
        raise UndeclaredError("--reference TARGET")
    args, kwargs = evidence.arguments.of_call({})
    label = f"the reference {type(trusted).__name__}"
    compared = replace(evidence.subject, module=trusted, args=args, kwargs=kwargs, label=label, without_ones=None)
    weights = (*trusted.parameters(), *evidence.subject.module.parameters())
    before = [(tensor, tensor.detach().clone()) for tensor in weights]
    with compared.replaying(compared.state()):
        trusted.eval()
        try:
            findings = list(_against(evidence, compared))
        finally:
            with torch.no_grad():
                for tensor, numbers in before:
                    tensor.copy_(numbers)
    yield from findings


def _output_of_reference(evidence: Evidence, trusted: Subject) -> Tensor:
    # The reference may write into its arguments.
    args, kwargs = with_copies((trusted.args, trusted.kwargs))
    try:
        returned = replace(trusted, args=args, kwargs=kwargs).plain()
    except Exception as error:  # user code may raise anything
        why = _unlike_shapes(evidence.subject.module, trusted.module)
        if not why:
            why = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        raise NotPossibleError(f"the reference raises on these arguments: {why}", give=_SAME_SIZES) from error
    return evidence.output_of(returned)


def _unlike_shapes(module: nn.Module, trusted: nn.Module) -> str:
    """Return the shapes of the first parameter that has another one in the reference; empty if there is none."""
    in_reference = dict(trusted.named_parameters())
    for name, parameter in module.named_parameters():
        if name in in_reference and in_reference[name].shape != parameter.shape:
            return f"{name} is {list(parameter.shape)}, and {list(in_reference[name].shape)} in the reference"
    return ""


def _of_constants(evidence: Evidence, left: ComparableRun, right: ComparableRun) -> Iterator[Finding]:
    """Yield a difference that zeros and ones hide: a bias of zeros has no effect, whatever the code does."""
    drawn = with_drawn_constants(left, right)
    if not drawn:
        return
    ours, theirs = (_output_of_reference(evidence, side.subject) for side in (left, right))
    apart = evidence.apart(theirs, ours, times=OTHER_SIZES)
    if apart:
        yield Finding(
            "reference",
            f"The output differs from the reference by {apart:.3g} once its zeros and ones are other numbers.",
            f"Both modules ran on the same arguments with the same weights.{drawn}",
        )


def _of_other_outputs(left: ComparableRun, right: ComparableRun) -> Iterator[Finding]:
    """Yield the first of the other returned tensors that differs from that of the reference."""
    with suppress(MhaInspectError):  # a module may not be copyable, or not run in float64
        for difference in Comparison(left, right).further():
            if difference.verdict == "differs" and difference.max_abs_difference is not None:
                apart = f"{difference.max_abs_difference:.3g}"
                yield Finding(
                    "reference",
                    f"Output {difference.name} differs from the reference by {apart}; the first output is the same.",
                    "Both modules ran on the same arguments with the same weights.",
                )
                return


def _against(evidence: Evidence, compared: Subject) -> Iterator[Finding]:
    theirs = _output_of_reference(evidence, compared)
    if theirs.shape != evidence.output.shape:
        sentence = (
            f"Expected output shape {list(theirs.shape)}, as the reference has; got {list(evidence.output.shape)}."
        )
        yield Finding("reference", sentence, "Both modules ran on the same arguments.")
        return
    left, right = ComparableRun(evidence.subject), ComparableRun(compared)
    try:
        reason = copy_all(left, right)
    except MhaInspectError as error:
        reason = str(error)
    if reason:
        raise NotPossibleError(
            f"the weights could not be copied into the reference: {reason.rstrip('.')}",
            give=_SAME_SIZES,
        )
    apart = evidence.apart(_output_of_reference(evidence, compared), times=OTHER_SIZES)
    if not apart:
        others = list(_of_other_outputs(left, right))
        yield from others or _of_constants(evidence, left, right)
        return
    first = _FirstStage("the output", "", "", ())
    with suppress(MhaInspectError):  # a module may not be copyable, or not run in float64
        called = Where("here", "in the reference")
        first = _first_stage(evidence, compared, called) or first
    sentences = [f"The output differs from the reference by {apart:.3g}; the first difference is in {first.name}."]
    sentences += [reason.sentence for reason in first.why]
    yield Finding(
        "reference",
        " ".join(sentences),
        "Both modules ran on the same arguments with the same weights. Their stages were compared in canonical axes.",
        source=first.line,
        module=first.module,
    )
