"""Does the number of heads change the output? The same weights and the same input through several head counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import SpecError
from ..layers.building import blank
from ..layers.catalog import find_layer
from ..layers.settings import check_settings, own_spec, spec_for
from ..measure.stage_difference import size_of
from ..record.subject import Subject
from ..reports.common import Environment, LayerInfo
from ..reports.compare_heads import CompareHeadsReport, HeadCount, HeadPair
from ..targets.device import resolve
from ..targets.flag_inputs import Inputs
from ..targets.load import Layer, called_with, load_layer, plan_layer
from ..targets.room import Room
from ..targets.spec import AttentionSpec, InputSpec, RunSpec, plain_fields
from .head_counts.focus import compare_focus, layer_weights
from .head_counts.gradients import compare_gradients
from .head_counts.learner import layer_learner
from .head_counts.must_be_equal import claims, confirmed, masked_note
from .head_counts.rows import count_row, overall, pair_rows
from .head_counts.runs import HeadRun, Noise, walk
from .head_counts.sentences import answer, reason
from .head_counts.sight import sight_of_inputs
from .head_counts.training import compare_training
from .head_counts.weights import Carried, carry, copy_parameters

_EXTRAS = ("pairwise", "gradients", "steps", "focus")
USUAL_COUNTS = (1, 2, 4, 8)


def compare_heads(heads: Sequence[int] = USUAL_COUNTS, *, layer: str = "torch", **settings: Any) -> CompareHeadsReport:
    """The same weights and the same input through several head counts, the first being the baseline.

    Settings are those of `AttentionSpec`, `InputSpec` and `RunSpec`, and of `compare_heads_spec`, by name:
    `compare_heads((1, 2, 4), embed_dim=64, seq_len=7, causal=True)`.

    Raises:
        SpecError: a head count does not fit, or the settings contradict each other.
        TypeError: a setting is none that there is.
    """
    if not heads:
        raise SpecError("no head counts were given: give two or more, as in compare_heads((1, 2, 4)).")
    parts = {cls: {f.name for f in fields(cls)} & settings.keys() for cls in (InputSpec, RunSpec)}
    inputs = InputSpec(**{name: settings.pop(name) for name in parts[InputSpec]})
    run = RunSpec(**{name: settings.pop(name) for name in parts[RunSpec]})
    asked = {name: settings.pop(name) for name in _EXTRAS if name in settings}
    spec = spec_for(find_layer(layer), num_heads=heads[0], **settings)
    return compare_heads_spec(spec, tuple(heads), inputs, run, layer=layer, **asked)


def compare_heads_spec(
    spec: AttentionSpec,
    counts: Sequence[int],
    inputs: InputSpec,
    run: RunSpec,
    *,
    layer: str = "torch",
    pairwise: bool = False,
    gradients: bool = False,
    steps: int = 0,
    focus: bool = False,
    see: Callable[[int, Subject], None] | None = None,
) -> CompareHeadsReport:
    """The same weights and the same input through several head counts.

    Args:
        spec: the layer's other sizes and settings; its num_heads is not used.
        counts: head counts, the first being the baseline. One that is given again is run once.
        inputs: what goes in.
        run: device, and whether gradients are recorded.
        layer: name in the catalog of layers.
        pairwise: whether every pair is compared as well.
        gradients: whether the gradient of every parameter is compared.
        steps: how many steps each head count is trained for, to compare what it has learned; 0 for none.
        focus: whether to measure what each head looks at.
        see: is called with each head count and the subject that was compared.

    Raises:
        SpecError: the layer is unknown, a head count does not fit, or there would be nothing to compare.
        InputError: a file or a mask does not fit.
        DeviceError: the device is not there, or cannot run spec.dtype.
        DoesNotFitError: it needs more memory than there is.
    """
    spec = own_spec(find_layer(layer), spec)
    specs = _specs(spec, counts)
    check_settings(find_layer(layer), specs[0], inputs, run)
    _require_numbers(spec, run)
    widest = max(specs, key=lambda one: one.num_heads * int(one.head_dim) + one.num_heads)
    Room(exact=True).require(plan_layer(widest, inputs, run, layer))
    comparison = _Comparison(specs, inputs, run, layer)
    rows = comparison.rows
    if see is not None:
        for forward in comparison.forwards:
            see(forward.spec.num_heads, forward)
    learners = [layer_learner(forward) for forward in comparison.forwards] if gradients or steps else []
    return CompareHeadsReport(
        environment=Environment(torch=torch.__version__, device=run.device, dtype=spec.dtype, seed=spec.seed),
        layer=LayerInfo(layer, plain_fields(specs[0])),
        baseline=specs[0].num_heads,
        counts=tuple(rows),
        verdict=overall([row.verdict for row in rows[1:]]),
        equalities=comparison.equalities(),
        answer=answer(rows, comparison.carried, all_nan=comparison.all_nan()),
        pairs=comparison.pairs() if pairwise else None,
        gradients=compare_gradients(learners, comparison.cause()) if gradients else None,
        training=compare_training(learners, steps, comparison.cause()) if steps else None,
        focus=compare_focus(map(layer_weights, comparison.forwards)) if focus else None,
    )


def _specs(spec: AttentionSpec, counts: Sequence[int]) -> list[AttentionSpec]:
    unique = tuple(dict.fromkeys(counts))
    if not unique:
        raise SpecError("no head counts were given: give two or more, the first being the baseline.")
    return [replace(spec, num_heads=count) for count in unique]


def _require_numbers(spec: AttentionSpec, run: RunSpec) -> None:
    if resolve(run.device, spec.dtype).type == "meta":
        raise SpecError(
            "device meta has shapes and no numbers, and compare-heads compares numbers. Take --device cpu, or "
            "see the shapes side by side with `mha-inspect params --num-heads 1,2,4 --device meta`."
        )
    if spec.training and spec.dropout:
        raise SpecError(
            f"dropout {spec.dropout:g} in training mode drops other weights for every head count: the outputs would "
            "differ whatever the heads do. Take --eval or --dropout 0."
        )


class _Comparison:
    """Every head count run once, and compared with the first."""

    def __init__(self, specs: Sequence[AttentionSpec], inputs: InputSpec, run: RunSpec, layer: str) -> None:
        self._specs = specs
        forward = load_layer(specs[0], inputs, run, layer)
        self._inputs: Inputs = forward.inputs
        self._baseline = HeadRun(forward)
        self._noise = Noise(self._baseline)
        self._claims = claims(sight_of_inputs(specs[0], self._inputs, *_sources(specs[0], self._inputs)))
        self._runs = [self._baseline]
        self.carried = [Carried(True, (), ())]
        for spec in specs[1:]:
            other = _with_heads(forward, spec, inputs)
            self.carried.append(carry(forward.module, other.module))
            self._runs.append(HeadRun(other, self._baseline))
        # All are run first: what is small and often used stays in the processor's caches after that.
        self._returned = [one.output for one in self._runs]
        self._size = size_of(self._baseline.output)
        self.rows = [self._row(run, carried) for run, carried in zip(self._runs, self.carried, strict=True)]

    def _row(self, one: HeadRun, carried: Carried) -> HeadCount:
        spec = one.forward.spec
        outputs = (self._baseline.output, one.output)
        row = count_row(spec, one.forward.module, outputs, self._noise.of_output, carried, self._size)
        if one is not self._baseline:
            found = walk(self._baseline, one, self._noise, to_the_end=row.verdict != "differs")
            one.forget()
            why = reason(self._specs[0], spec, found, row, carried, self._claimed() if carried.same else "")
            row = replace(row, first_differing_stage=found.first, reason=why)
        return row

    @property
    def forwards(self) -> list[Layer]:
        """The layer of each head count, the baseline first."""
        return [run.forward for run in self._runs]

    def cause(self) -> str:
        """Why every output must be equal, where one thing is the cause for all rows."""
        return self._claimed() if all(one.same for one in self.carried) else ""

    def _claimed(self) -> str:
        return next((claim.short for claim in self._claims if bool(claim.rows.all())), "")

    @property
    def _outputs(self) -> list[Tensor]:
        """`batch query embed` of each head count, the baseline first."""
        return [run.batch_first for run in self._runs]

    def all_nan(self) -> bool:
        """Whether there is no number in any output."""
        apart = any(row.max_abs_difference for row in self.rows)  # NaN beside NaN is no difference
        return not apart and all(bool(output.isnan().all()) for output in self._returned)

    def equalities(self) -> tuple[str, ...]:
        """Where outputs must be equal, why, and what was measured there."""
        said = []
        if all(one.same for one in self.carried) and len(self._outputs) > 1:
            said = [confirmed(claim, self._outputs, self._noise.of_output) for claim in self._claims]
        masked = self._inputs.fully_masked_rows(self._specs[0].num_heads)
        return (*said, masked_note(masked, self._outputs)) if masked else tuple(said)

    def pairs(self) -> tuple[HeadPair, ...]:
        """Every head count against every other."""
        return pair_rows([(run.num_heads, run.output) for run in self._runs], self._noise.of_output)


def _with_heads(forward: Layer, spec: AttentionSpec, inputs: InputSpec) -> Layer:
    """The same inputs into a layer with another head count."""
    if forward.inputs.attn_mask is not None and forward.inputs.attn_mask.dim() == 3:
        # A mask for each head: the file has to fit this count of them.
        return load_layer(spec, inputs, forward.run, forward.layer)
    code = find_layer(forward.layer).load()
    with blank():
        module = code.build(spec, forward.run.device)
    if not copy_parameters(forward.module, module):
        module = code.build(spec, forward.run.device)
    return called_with(module, spec, forward.run, forward.inputs, forward.layer)


def _sources(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Key and value as `batch key width`."""
    if inputs.unbatched:
        return inputs.key[None], inputs.value[None]
    if spec.batch_first:
        return inputs.key, inputs.value
    return inputs.key.transpose(0, 1), inputs.value.transpose(0, 1)
