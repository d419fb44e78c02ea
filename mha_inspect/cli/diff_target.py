"""diff where a side is a target: both sides are built and called, and compared as modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError, SpecError
from ..layers.catalog import find_layer
from ..text import shown
from . import subject
from .options import Options, is_target
from .subject import call_of, check_target, load_target

if TYPE_CHECKING:
    from ..answers.sides.module_run import ModuleSide
    from ..reports.diff import DiffReport, SideName
    from ..targets.call import Call
    from ..targets.target import Target

Texts = Sequence[str]
CalledTarget = tuple["Target", "Call"]
"""A target, and what its forward gets."""


def check_sides(
    options: Options,
    texts: tuple[str, str],
    own: tuple[Texts, Texts],
    paths: tuple[str | None, str | None],
    *,
    beside_layer: bool,
) -> None:
    """Look at everything that can be judged before torch is imported.

    Raises `MhaInspectError` when a side is none that there is, or options contradict it.
    """
    from ..answers.sides.settings import parse_settings as layer_settings
    from ..targets.values import parse_settings

    for flag, text, settings in zip(("--left-set", "--right-set"), texts, own, strict=True):
        if is_target(text):
            check_target(text, options, "diff", beside_layer=beside_layer)
            parse_settings(list(settings), flag)
        else:
            find_layer(text)
            layer_settings(flag, settings)
    for flag, text, path in zip(("--left-module", "--right-module"), texts, paths, strict=True):
        if path is not None and not is_target(text):
            raise SpecError(
                f"{flag} {shown(path)} names a module of a target, and that side is the layer {text}. Drop it."
            )
    subject.single_head_count(options, "diff")
    subject.inputs(options)
    subject.show(options)
    if options.device == "meta":
        raise DeviceError("device meta has shapes and no numbers, and diff compares numbers. Try --device cpu.")


def diff_target(
    options: Options, texts: tuple[str, str], own: tuple[Texts, Texts], paths: tuple[str | None, str | None]
) -> DiffReport:
    """Build both sides, give them the same weights and the same input, and compare them.

    Where `paths` names a module of a target, that is the side, called as the target calls it.

    What targets print goes to stderr: stdout is for the answer.

    Raises:
        MhaInspectError: a side cannot be built or called as asked.
        TargetFailedError: the forward of a target raised.
    """
    import torch

    from ..answers.module_diff import diff_modules
    from ..targets.call import try_once
    from ..targets.importing import stdout_for_the_answer
    from ..targets.load import subject_of

    with stdout_for_the_answer(), torch.set_grad_enabled(options.grad):
        called_targets = _called_targets(options, texts, own, paths)
        for target, call in filter(None, called_targets):
            try_once(subject_of(target, call, options.seed))
        report = diff_modules(*_sides(options, texts, own, called_targets))
    said = [
        sentence
        for target, call in filter(None, called_targets)
        for sentence in (*target.notes, call.told.replace("The forward", f"{target.name}.forward", 1))
        if sentence
    ]
    return replace(report, notes=(*report.notes, *dict.fromkeys(said)))


def _called_targets(
    options: Options, texts: tuple[str, str], own: tuple[Texts, Texts], paths: tuple[str | None, str | None]
) -> list[CalledTarget | None]:
    """Each side that is a target, with what its forward gets; None for a side that is a layer.

    One that is a part of a model says what the other gets: its sizes, and its arguments.
    """
    from ..targets.pairing import with_the_same
    from ..targets.room import Room
    from ..targets.submodule import part_of, with_arguments_of

    made: dict[int, CalledTarget] = {}
    # Of a part it is not known before what its run takes.
    room = Room(kept=True, exact=True)
    for place in sorted((0, 1), key=lambda place: paths[place] is None):
        path, beside = paths[place], made.get(1 - place)
        if not is_target(texts[place]):
            continue
        if path is not None:
            target = load_target(texts[place], options, own[place])
            made[place] = part_of(target, call_of(target, options), path)
        elif beside is not None and paths[1 - place] is not None:
            target = load_target(
                texts[place], options, own[place], sizes=_sizes(_target_side(1 - place, *beside, options, ()))
            )
            target = with_arguments_of(target, beside[1])
            made[place] = (target, call_of(target, options, room))
        else:
            target = load_target(texts[place], options, own[place])
            made[place] = (target, call_of(target, options, room))
    if len(made) == 2:
        # What a part is called with is at hand for the other one; what is drawn, for the right one.
        first, second = (1, 0) if paths[0] is None and paths[1] is not None else (0, 1)
        (target, call), (other, other_call) = made[second], made[first]
        made[second] = (target, with_the_same(call, target.module, other_call, other.module))
    return [made.get(0), made.get(1)]


def _sides(
    options: Options, texts: tuple[str, str], own: tuple[Texts, Texts], targets: Sequence[CalledTarget | None]
) -> tuple[ModuleSide, ModuleSide]:
    """Both sides, a layer after the target that it takes its sizes and its input from."""
    sides: dict[int, ModuleSide] = {}
    for place, made in enumerate(targets):
        if made is not None:
            sides[place] = _target_side(place, *made, options, own[place])
    for place in {0, 1} - set(sides):
        made = targets[1 - place]
        assert made is not None
        sides[place] = _layer_side(place, texts[place], own[place], options, (*made, sides[1 - place]))
    return sides[0], sides[1]


def _name(place: int) -> SideName:
    return "right" if place else "left"


def _target_side(place: int, target: Target, call: Call, options: Options, own: Texts) -> ModuleSide:
    from ..answers.sides.module_run import ModuleSide
    from ..reports.common import LayerInfo
    from ..targets.values import parse_settings

    settings = parse_settings(list(own))
    label = target.name + (f" with {', '.join(f'{n} {v}' for n, v in settings.items())}" if settings else "")
    return ModuleSide(
        name=_name(place),
        label=label,
        own=call.of(target.module),
        layer=LayerInfo(target.name, target.passed),
        seed=options.seed,
        settings=dict(settings),
    )


def _layer_side(
    place: int, name: str, own: Texts, options: Options, beside: tuple[Target, Call, ModuleSide]
) -> ModuleSide:
    """A layer with the sizes of the target beside it, but for those that somebody gave, and the target's input."""
    from ..answers.sides.module_run import ModuleSide
    from ..answers.sides.settings import parse_settings
    from ..layers.settings import check_settings
    from ..reports.common import LayerInfo
    from ..targets.layer_inputs import make_inputs
    from ..targets.load import called_with
    from ..targets.pairing import layer_inputs
    from ..targets.spec import AttentionSpec, InputSpec, RunSpec, plain_fields

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
        subject.inputs(options),
        input=None,
        batch=batch,
        seq_len=query_len,
        key_len=key.shape[-2] if cross else None,
        unbatched=unbatched,
    )
    asked, run = replace(asked, **of(InputSpec)), replace(subject.run(options), **of(RunSpec))
    check_settings(kind, spec, asked, run)
    made = make_inputs(spec, asked, run)
    moved = {id(t): t.to(device=made.query.device, dtype=made.query.dtype) for t in (query, key, value)}
    laid = {n: (t if spec.batch_first or unbatched else t.transpose(0, 1).contiguous()) for n, t in moved.items()}
    made = replace(made, query=laid[id(query)], key=laid[id(key)], value=laid[id(value)])
    own_pass = called_with(kind.load().build(spec, run.device), spec, run, made, kind.name)
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

    kind = find_layer(name)
    embed_dim, kdim, vdim = widths
    found = _sizes(side)
    sizes: dict[str, Any] = {"num_heads": subject.single_head_count(options, "diff"), "bias": options.bias}
    sizes |= {flag: found[flag] for flag in sizes if flag in found and flag not in options.given}
    if "num_heads" in found:
        if found["num_kv_heads"] != found["num_heads"] and "num_kv_heads" in kind.takes:
            sizes["num_kv_heads"] = found["num_kv_heads"]
        if found["head_dim"] * found["num_heads"] != embed_dim and "head_dim" in kind.takes:
            sizes["head_dim"] = found["head_dim"]
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


def _sizes(side: ModuleSide) -> dict[str, Any]:
    """The sizes of the first attention of a target by the names of our flags: those that show when it runs."""
    from ..answers.sides.module_run import ModuleRun

    opened = ModuleRun(side).opened
    if not opened.attentions:
        return {}
    found, names = opened.attentions[0]
    sizes: dict[str, Any] = {
        "num_heads": names.num_heads,
        "num_kv_heads": names.num_kv_heads,
        "head_dim": names.head_dim,
    }
    if "query" in found.stages:
        sizes["embed_dim"] = found.stages["query"].shape[-1]
    if found.projections:
        sizes["bias"] = any(map(opened.graph.has_bias, found.projections.values()))
    return sizes
