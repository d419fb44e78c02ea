"""diff where a side is a target: both sides are built and called, and compared as modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError
from ..layers.registry import find_layer
from .options import Options
from .target import call_of, called, check_target, is_target, load, try_once

if TYPE_CHECKING:
    from ..reports.diff import DiffReport, SideName
    from ..sides.module_run import ModuleSide
    from ..targets.inputs import Call
    from ..targets.target import Target

Texts = Sequence[str]


def check_sides(options: Options, texts: tuple[str, str], own: tuple[Texts, Texts], *, beside_layer: bool) -> None:
    """Look at everything that can be judged before torch is imported.

    Raises `MhaInspectError` when a side is none that there is, or options contradict it.
    """
    from ..sides.settings import parse_settings as layer_settings
    from ..targets.values import parse_settings

    for flag, text, settings in zip(("--left-set", "--right-set"), texts, own, strict=True):
        if is_target(text):
            check_target(text, options, "diff", beside_layer=beside_layer)
            parse_settings(list(settings))
        else:
            find_layer(text)
            layer_settings(flag, settings)
    options.single_head_count("diff")
    options.inputs()
    options.show()
    if options.device == "meta":
        raise DeviceError("device meta has shapes and no numbers, and diff compares numbers. Try --device cpu.")


def diff_target(options: Options, texts: tuple[str, str], own: tuple[Texts, Texts]) -> DiffReport:
    """Build both sides, give them the same weights and the same input, and compare them.

    What targets print goes to stderr: stdout is for the answer.

    Raises:
        MhaInspectError: a side cannot be built or called as asked.
        TargetFailedError: the forward of a target raised.
    """
    import torch

    from ..module_difference import diff_modules
    from ..targets.importing import stdout_for_the_answer
    from ..targets.same_inputs import with_the_same

    with stdout_for_the_answer(), torch.set_grad_enabled(options.grad):
        targets = [
            load(text, options, settings) if is_target(text) else None
            for text, settings in zip(texts, own, strict=True)
        ]
        calls = [None if target is None else call_of(target, options) for target in targets]
        left, right = targets
        if left is not None and right is not None and calls[0] is not None and calls[1] is not None:
            calls[1] = with_the_same(calls[1], right.module, calls[0], left.module)
        for target, call in zip(targets, calls, strict=True):
            if target is not None and call is not None:
                try_once(target, call, options)
        report = diff_modules(*_sides(options, texts, own, targets, calls))
    said = [
        sentence
        for target, call in zip(targets, calls, strict=True)
        if target is not None and call is not None
        for sentence in (*target.notes, called(call).replace("The forward", f"{target.name}.forward", 1))
        if sentence
    ]
    return replace(report, notes=(*report.notes, *dict.fromkeys(said)))


def _sides(
    options: Options,
    texts: tuple[str, str],
    own: tuple[Texts, Texts],
    targets: Sequence[Target | None],
    calls: Sequence[Call | None],
) -> tuple[ModuleSide, ModuleSide]:
    """Both sides, a layer after the target that it takes its sizes and its input from."""
    sides: dict[int, ModuleSide] = {}
    for place, (target, call) in enumerate(zip(targets, calls, strict=True)):
        if target is not None and call is not None:
            sides[place] = _target_side(place, target, call, options, own[place])
    for place in {0, 1} - set(sides):
        target, call = targets[1 - place], calls[1 - place]
        assert target is not None
        assert call is not None
        sides[place] = _layer_side(place, texts[place], own[place], options, (target, call, sides[1 - place]))
    return sides[0], sides[1]


def _name(place: int) -> SideName:
    return "right" if place else "left"


def _target_side(place: int, target: Target, call: Call, options: Options, own: Texts) -> ModuleSide:
    from ..forward import Pass
    from ..reports.common import LayerInfo
    from ..sides.module_run import ModuleSide
    from ..targets.values import parse_settings

    settings = parse_settings(list(own))
    label = target.name + (f" with {', '.join(f'{n} {v}' for n, v in settings.items())}" if settings else "")
    return ModuleSide(
        name=_name(place),
        label=label,
        own=Pass(target.module, call.args, call.kwargs),
        layer=LayerInfo(target.name, target.passed),
        seed=options.seed,
        settings=dict(settings),
    )


def _layer_side(
    place: int, name: str, own: Texts, options: Options, beside: tuple[Target, Call, ModuleSide]
) -> ModuleSide:
    """A layer with the sizes of the target beside it, but for those that somebody gave, and the target's input."""
    from ..forward import Forward
    from ..inputs import make_inputs
    from ..layers.settings import check_settings
    from ..reports.common import LayerInfo
    from ..sides.module_run import ModuleSide
    from ..sides.settings import parse_settings
    from ..spec import AttentionSpec, InputSpec, RunSpec, plain_fields
    from ..targets.same_inputs import layer_inputs

    kind, (target, call, side) = find_layer(name), beside
    settings = parse_settings("--right-set" if place else "--left-set", own)

    def of(cls: Any) -> dict[str, Any]:
        return {f.name: settings[f.name] for f in fields(cls) if f.name in settings}

    query, key, value = layer_inputs(target.module, call)
    unbatched = query.dim() == 2
    if not unbatched and _sequence_first(query, side, options):
        query, key, value = _transposed(query, key, value)
    spec = _spec(kind.name, options, side, tuple(t.shape[-1] for t in (query, key, value)))
    spec = replace(spec, **of(AttentionSpec))
    batch, query_len = (1, query.shape[0]) if unbatched else (query.shape[0], query.shape[1])
    cross = key is not query
    asked = replace(
        options.inputs(),
        input=None,
        batch=batch,
        seq_len=query_len,
        key_len=key.shape[-2] if cross else None,
        unbatched=unbatched,
    )
    asked, run = replace(asked, **of(InputSpec)), replace(options.run(), **of(RunSpec))
    check_settings(kind, spec, asked, run)
    made = make_inputs(spec, asked, run)
    moved = {id(t): t.to(device=made.query.device, dtype=made.query.dtype) for t in (query, key, value)}
    laid = {n: (t if spec.batch_first or unbatched else t.transpose(0, 1).contiguous()) for n, t in moved.items()}
    made = replace(made, query=laid[id(query)], key=laid[id(key)], value=laid[id(value)])
    code = kind.load()
    args, kwargs = code.arguments(made, run)
    own_pass = Forward(code.build(spec, run.device), args, kwargs, layer=kind.name, spec=spec, run=run, inputs=made)
    label = kind.name + (f" with {', '.join(f'{n} {v}' for n, v in settings.items())}" if settings else "")
    plain = {n: v if isinstance(v, (bool, int, float, str)) or v is None else str(v) for n, v in settings.items()}
    info = LayerInfo(kind.name, plain_fields(spec))
    return ModuleSide(_name(place), label, own_pass, info, options.seed, plain)


def _transposed(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Batch and sequence in the other order, one tensor that serves as several staying one."""
    turned = {id(tensor): tensor.transpose(0, 1).contiguous() for tensor in (query, key, value)}
    return turned[id(query)], turned[id(key)], turned[id(value)]


def _sequence_first(query: Any, side: ModuleSide, options: Options) -> bool:
    """Whether the target takes `query batch embed`."""
    owners = (getattr(module, "batch_first", None) for module in side.own.module.modules())
    said = next((flag for flag in owners if isinstance(flag, bool)), None)
    if "batch_first" in options.given:
        said = options.batch_first
    return said is False


def _spec(name: str, options: Options, side: ModuleSide, widths: tuple[int, ...]) -> Any:
    """The sizes of the layer: the target's, but for those that somebody gave."""
    from ..layers.settings import spec_for
    from ..sides.module_run import ModuleRun

    kind = find_layer(name)
    embed_dim, kdim, vdim = widths
    opened = ModuleRun(side).opened
    sizes: dict[str, Any] = {"num_heads": options.single_head_count("diff"), "bias": options.bias}
    if opened.attentions:
        found, names = opened.attentions[0]
        if "num_heads" not in options.given:
            sizes["num_heads"] = names.num_heads
        if "bias" not in options.given and found.projections:
            sizes["bias"] = any(map(opened.graph.has_bias, found.projections.values()))
        if names.num_kv_heads != names.num_heads and "num_kv_heads" in kind.takes:
            sizes["num_kv_heads"] = names.num_kv_heads
        if names.head_dim * names.num_heads != embed_dim and "head_dim" in kind.takes:
            sizes["head_dim"] = names.head_dim
    for flag in ("num_kv_heads", "head_dim", "rope", "add_bias_kv", "add_zero_attn", "dropout"):
        if flag in options.given and flag in (*kind.takes, "dropout"):
            sizes[flag] = getattr(options, flag)
    return spec_for(
        kind,
        embed_dim=embed_dim,
        kdim=kdim if kdim != embed_dim else None,
        vdim=vdim if vdim != embed_dim else None,
        training=options.train,
        dtype=options.dtype if "dtype" in options.given else side.dtype,
        seed=options.seed,
        **sizes,
    )
