"""Read, check and build the two sides of a diff, each with settings of its own."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

from ..errors import NoMaskError, SpecError
from ..layers.catalog import OPTIONAL, LayerKind, find_layer
from ..layers.spec import AttentionSpec, InputSpec, RunSpec
from ..making.vocabulary import typed_as
from ..text import did_you_mean, shown
from . import subject
from .options import Options, is_target, require_numbers

if TYPE_CHECKING:
    from ..call.call import Call
    from ..compare.diff import Side
    from ..layers.spec import DtypeName
    from ..making.target import Target
    from ..reports.diff import SideName
    from ..running.subject import Subject


USUAL = ("torch", "per-head")
"""The default sides: projections split into heads, and one matrix for each head."""
_FINEST = ("float64", "float32", "float16", "bfloat16")
SETTINGS = tuple(name.name for spec in (AttentionSpec, InputSpec, RunSpec) for name in fields(spec))
"""Every setting that may be set for one side."""
_OF_RUN = ("dtype", "device", "training", "causal", "padding", "attn_mask", "grad")
"""Settings that apply to a target as they do to a layer."""
_OF_BOTH = ("seed", "batch", "seq_len", "key_len", "unbatched", "input")
"""Settings of the weights and the input, which are the same on both sides."""
_SHAPES = " For shapes: `mha-inspect trace --device meta`."


@dataclass(frozen=True)
class AskedSide:
    """One side, as on the command line."""

    name: SideName
    text: str
    settings: list[str]
    path: str | None
    """The module of the target to compare; None for the whole target."""

    @property
    def flag(self) -> str:
        """The flag of this side's settings."""
        return f"--{self.name}-set"

    @property
    def is_target(self) -> bool:
        """Whether it is a target rather than a layer of the catalog."""
        return is_target(self.text)

    @property
    def kind(self) -> LayerKind:
        """The layer of the catalog. Raises `SpecError` for an unknown layer, or for a module of a layer."""
        if self.path is not None:
            raise SpecError(
                f"--{self.name}-module {shown(self.path)} needs a target, but the {self.name} side is a layer. Drop it."
            )
        return find_layer(self.text)

    @property
    def by_name(self) -> dict[str, str]:
        """Its settings as texts, by the names of the specs for those that are no argument of a target."""
        from ..making.settings import parse_settings

        by_name: dict[str, str] = {}
        for key, text in parse_settings(self.settings, self.flag).items():
            name = key.replace("-", "_").lower()
            name = "training" if name == "train" else name
            is_of_run = name in _OF_RUN or not self.is_target
            by_name[name if is_of_run else key] = text
        return by_name

    @property
    def of_constructor(self) -> dict[str, str]:
        """The settings that are arguments of a target, rather than of its run."""
        return {name: text for name, text in self.by_name.items() if self.is_target and name not in _OF_RUN}

    def options(self, options: Options) -> Options:
        """Return the options with the other settings of this side. Keys may have hyphens for underscores."""
        of_run: dict[str, str] = {}
        for name, text in self.by_name.items():
            if name not in self.of_constructor:
                self._require_setting(name)
                of_run["train" if name == "training" else name] = text
        return options.with_settings(of_run, self.flag)

    def _require_setting(self, name: str) -> None:
        """Raise `SpecError` for a name that is no setting of one side."""
        if name not in SETTINGS:
            raise SpecError(
                f"{self.flag} {shown(name)} is not a setting. Settings: {', '.join(SETTINGS)}."
                f"{did_you_mean(name, SETTINGS)}"
            )
        if name in _OF_BOTH:
            raise SpecError(
                f"{self.flag} {name} affects both sides, which have the same weights and the same input. Use "
                f"{typed_as(name)} instead."
            )


@dataclass(frozen=True)
class PlannedLayer:
    """A layer as one side of a diff: how it is built, its inputs, and how it is run."""

    kind: LayerKind
    spec: AttentionSpec
    inputs: InputSpec
    run: RunSpec
    settings: dict[str, Any]
    """The settings of this side only."""


def planned_layer(options: Options, asked: AskedSide) -> PlannedLayer:
    """Return a layer with the settings of its side. Raises `SpecError` for a setting that it does not take."""
    kind = asked.kind
    names = list(asked.by_name)
    changed = asked.options(options)
    changed.layer = kind.name
    try:
        spec = changed.attention_spec(changed.single_head_count("diff"))
        inputs, run = changed.input_spec(), changed.run_spec()
        kind.check(spec, inputs, run)
    except SpecError as error:
        raise SpecError(f"{asked.name} side: {error}" if names else str(error)) from None
    values: dict[str, Any] = {}
    for part in (spec, inputs, run):
        values.update({name: getattr(part, name) for name in part.__dataclass_fields__})
    return PlannedLayer(kind, spec, inputs, run, settings={name: values[name] for name in names})


def checked_sides(options: Options, left: AskedSide, right: AskedSide) -> tuple[AskedSide, AskedSide]:
    """Return both sides, checked as far as possible before torch is imported.

    A side that is not named is --layer. Otherwise the right side is the left one with other settings, or per-head for
    a layer (torch if per-head is on the left).
    """

    has_target = left.is_target or right.is_target
    both_named = bool(left.text and right.text)
    if not has_target:
        options.take_settings("diff")
    if both_named and not has_target and options.layer not in ("torch", left.text, right.text):
        raise SpecError(
            f"layer {options.layer} is a third layer beside {left.text} and {right.text}, but diff compares two. "
            "Drop --layer."
        )
    first = left.text or options.layer
    second = right.text or _unnamed_side(options, left, right)
    sides = replace(left, text=first), replace(right, text=second)
    for side in sides:
        if side.is_target:
            subject.check_target(side.text, options, "diff", beside_layer=not both_named)
        else:
            _ = side.kind
        changed = side.options(options)
        require_numbers(changed.device, "compare", _SHAPES)
        changed.input_spec()
    options.single_head_count("diff")
    if not has_target:
        _require_same_rows(planned_layer(options, sides[0]), planned_layer(options, sides[1]))
    return sides


def _require_same_rows(left: PlannedLayer, right: PlannedLayer) -> None:
    """Raise `SpecError` if the sizes of their heads keep both sides from having the same weights."""
    if left.spec.embed_dim != right.spec.embed_dim:
        return
    left_dim, right_dim = int(left.spec.head_dim), int(right.spec.head_dim)
    left_rows = left.spec.num_heads * left_dim
    right_rows = right.spec.num_heads * right_dim
    if left_rows != right_rows:
        raise SpecError(
            f"head_dim is {left_dim} on the left and {right_dim} on the right: W_q would have {left_rows} rows and "
            f"{right_rows}. "
            f"Both sides need the same weights. Try --set head_dim={min(left_dim, right_dim)}."
        )


def _unnamed_side(options: Options, left: AskedSide, right: AskedSide) -> str:
    """Return the text of the right side where the user named none."""
    first = left.text or options.layer
    if "layer" in options.typed and options.layer != first:
        return options.layer
    if left.settings or right.settings or right.path:
        return first
    if left.is_target:
        return options.layer
    per_head_or_torch = [name for name in reversed(USUAL) if name != first]
    return per_head_or_torch[0]


def runs(options: Options, left: AskedSide, right: AskedSide) -> tuple[Side, Side]:
    """Build both sides, and run the targets. The side built second gets the inputs of the first.

    A module of a model is built first: it determines the other side's sizes and arguments. A layer is built last. Of
    two layers it is the one of lower precision: its input and weights are those of the other, rounded.
    """
    first, second = left, right
    if left.path is None and right.path is not None:
        first, second = right, left
    if _rank(second, options) < _rank(first, options):
        first, second = second, first
    first_built = _built(options, first, second)
    second_built = _built(options, second, first, beside=first_built)
    if first is left:
        return first_built.side, second_built.side
    return second_built.side, first_built.side


def _rank(side: AskedSide, options: Options) -> int:
    """Return when a side is built: a target first, then layers from the highest precision to the lowest."""
    return -1 if side.is_target else _FINEST.index(side.options(options).dtype)


@dataclass(frozen=True)
class _BuiltSide:
    """A side of a diff, and the arguments of its forward."""

    side: Side
    call: Call


@dataclass(frozen=True)
class _Draft:
    """A target or a layer of the catalog that will be one side, with arguments of its own."""

    subject: Subject
    call: Call
    settings: dict[str, Any]
    """The settings of this side only."""
    target: Target | None = None
    """None for a layer, which has no notes on its inputs."""
    plan: PlannedLayer | None = None
    """How the layer is built; None for a target."""

    def called(self, call: Call) -> Subject:
        """Return the subject with these arguments."""
        from ..call.load import subject_of

        if self.target is None:
            return replace(self.subject, args=call.args, kwargs=call.kwargs)
        return subject_of(self.target, call, self.subject.seed or 0, self.subject.grad)

    def finer(self, call: Call, dtype: str) -> Subject:
        """Return the subject with these arguments; a layer with weights in this dtype, if it is not empty."""
        finer = self.called(call)
        if self.plan is None or dtype in ("", self.plan.spec.dtype):
            return finer
        spec = replace(self.plan.spec, dtype=cast("DtypeName", dtype))
        return replace(finer, module=self.plan.kind.build(spec, self.plan.run.device))


def _built(options: Options, asked: AskedSide, opposite: AskedSide, beside: _BuiltSide | None = None) -> _BuiltSide:
    """Build a side, with the forward's arguments of the side `beside` it, if there is one."""
    from ..call.call import explaining
    from ..call.part import with_the_same
    from ..compare.diff import Side

    if asked.is_target:
        draft = _drafted_target(options, asked, opposite, beside)
    else:
        draft = _drafted_layer(options, asked, opposite, beside)
    call = draft.call
    finer: Subject | None = None
    if beside is not None:
        module = draft.subject.module
        shared = beside.call, beside.side.subject.module
        unrounded = with_the_same(draft.call, module, *shared, rounded=False)
        call = with_the_same(draft.call, module, *shared)
        # Beside a target a layer has the target's weights, as they are.
        dtype = "" if opposite.is_target else beside.side.dtype
        finer = draft.finer(unrounded, dtype)
    side = Side(asked.name, draft.called(call), draft.settings, finer)
    # An error of the user's code is explained as one of this side; a file may have tensors that a layer rejects.
    if asked.is_target or options.input is not None:
        with explaining(side.subject):
            _ = side.run
    return _BuiltSide(side, call)


def _drafted_target(options: Options, asked: AskedSide, opposite: AskedSide, beside: _BuiltSide | None) -> _Draft:
    """Load a target, or a module of it, and make its arguments."""
    from ..call.load import subject_of
    from ..call.part import part_of, with_arguments_of
    from ..compare.diff import sizes_of

    set_options = asked.options(options)
    # Beside a module of a model, a whole target gets the sizes and arguments of that module.
    part = beside if opposite.path is not None and asked.path is None else None
    sizes = {} if part is None else sizes_of(part.side)
    elsewhere = _settings_taken_by(opposite)
    target = subject.load_target(asked.text, set_options, asked.of_constructor, sizes, elsewhere, asked.flag)
    if part is not None:
        target = with_arguments_of(target, part.call)
    try:
        call = subject.call_of(target, set_options)
    except NoMaskError as error:
        if not options.causal:
            raise
        raise SpecError(f"{error} For the other side only: --{opposite.name}-set causal=true.") from None
    if asked.path is not None:
        target, call = part_of(target, call, asked.path)
    made = subject_of(target, call, options.seed, set_options.grad)
    return _Draft(made, call, asked.by_name, target=target)


def _settings_taken_by(opposite: AskedSide) -> frozenset[str]:
    """Return the settings of a constructor that the other side has, if it is a layer: this side may lack them."""
    if opposite.is_target:
        return frozenset()
    return frozenset({"embed_dim", "num_heads", "bias"}) | opposite.kind.takes


def _drafted_layer(options: Options, asked: AskedSide, opposite: AskedSide, beside: _BuiltSide | None) -> _Draft:
    """Build a layer of the catalog, and make its inputs."""
    from ..call.load import load_layer
    from ..call.part import call_with

    if beside is not None and opposite.is_target:
        options = _sized_like(options, asked.kind, beside)
    plan = planned_layer(options, asked)
    layer = load_layer(plan.spec, plan.inputs, plan.run, plan.kind.name)
    origin = "" if beside is None else beside.call.origin
    call = call_with(layer.module, layer.args, layer.kwargs, origin)
    return _Draft(layer, call, plan.settings, plan=plan)


def _sized_like(options: Options, kind: LayerKind, beside: _BuiltSide) -> Options:
    """Return the options of a layer with the sizes of the target beside it, except for sizes that the user set."""
    from ..call.part import layer_inputs

    query, key, value = layer_inputs(beside.side.subject.module, beside.call)
    width = query.shape[-1]
    # An environment variable is for all commands: another width in it is not a contradiction.
    if "embed_dim" in options.typed and options.embed_dim != width:
        module = beside.side.subject.label
        raise SpecError(
            f"embed_dim {options.embed_dim} contradicts {module}, which takes {width} features: both sides get "
            f"the same input. Drop --embed-dim, or give {module} another size: --{beside.side.name}-set NAME=VALUE."
        )
    sized = copy(options)
    fitting = _fitting(kind, beside.side, width)
    for name, size in fitting.items():
        is_of_this_layer = name not in OPTIONAL or name in kind.takes
        if name not in options.given or not is_of_this_layer:
            setattr(sized, name, size)
    is_sequence_first = query.dim() == 3 and not beside.call.batch_first
    is_unbatched = query.dim() == 2
    length_axis = 0 if is_sequence_first or is_unbatched else 1
    sized.unbatched = is_unbatched
    sized.batch_first = True
    sized.input = None
    sized.batch = 1 if is_unbatched else query.shape[1 - length_axis]
    sized.seq_len = query.shape[length_axis]
    sized.key_len = None if key is query else key.shape[length_axis]
    sized.embed_dim = width
    sized.kdim = None if key.shape[-1] == width else key.shape[-1]
    sized.vdim = None if value.shape[-1] == width else value.shape[-1]
    return sized


def _fitting(kind: LayerKind, beside: Side, width: int) -> dict[str, Any]:
    """Return the settings of a layer that computes as the target beside it, with inputs of this width."""
    from ..compare.diff import sizes_of

    usual = Options()
    sizes = {"num_heads": int(usual.num_heads), "bias": True, **sizes_of(beside)}
    heads = sizes["num_heads"]
    fitting: dict[str, Any] = {"num_heads": str(heads), "bias": sizes["bias"]}
    for name in OPTIONAL:
        fitting[name] = getattr(usual, name)
    if "num_kv_heads" in kind.takes and sizes.get("num_kv_heads", heads) != heads:
        fitting["num_kv_heads"] = sizes["num_kv_heads"]
    if "head_dim" in kind.takes and sizes.get("head_dim", 0) * heads not in (0, width):
        fitting["head_dim"] = sizes["head_dim"]
    if "dtype" not in beside.settings:  # set for that side only
        fitting["dtype"] = beside.dtype
    return fitting
