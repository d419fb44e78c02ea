"""A printed patch computes what the right twin computes: on fresh weights and inputs, in eval and in training mode."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mha_inspect.fixes.loading import in_place_of
from mha_inspect.fixes.trial import Target, kept_of, made, outputs_of
from mha_inspect.questions.fix import Fixed, fixed
from mha_inspect.running.subject import Subject

from .every import ENTRIES
from .every_mistake import CASES, TOPICS
from .mutants import MUTANTS
from .reported import REPORTED, Reported
from .test_mutants import HEAD, named

FRESH = (11, 12)
"""Seeds of weights and inputs that the search has not used."""
Make = Callable[[int], Subject]


def redrawn(value: Any) -> Any:
    """Return arguments with other numbers; masks and tokens stay."""
    if isinstance(value, Tensor):
        is_mask = not value.is_floating_point() or bool(((value == 0) | (value == 1)).all())
        return value if is_mask else torch.randn_like(value)
    if isinstance(value, dict):
        return {name: redrawn(part) for name, part in value.items()}
    return tuple(map(redrawn, value)) if isinstance(value, tuple) else value


def of_entry(module: str, name: str, seed: int) -> Subject:
    torch.manual_seed(7 + seed)
    built = getattr(sys.modules[module], name)()
    args, kwargs = ENTRIES[name].arguments()
    if seed:
        args, kwargs = redrawn(tuple(args)), redrawn(kwargs)
    return Subject(built, args, kwargs, seed=0)


def of_case(module: str, name: str, wrong: bool, seed: int) -> Subject:
    (case,) = [case for case in sys.modules[module].CASES if case.name == name]
    torch.manual_seed(7 + seed)
    built, kwargs = case.make(wrong), case.inputs()
    dtype = next((value.dtype for value in kwargs.values() if value.is_floating_point()), torch.float32)
    return Subject(built.to(dtype), (), kwargs, seed=0)


def loaded(file: Path, source: str, head: str = HEAD) -> ModuleType:
    file.write_text(head + source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def mutant(case: tuple[str, ...], folder: Path) -> Iterator[tuple[Target, Make]]:
    """Yield a file with a mistake of one line as a target, and how to make its right twin."""
    name, mistake, right, wrong, *_ = case
    source = ENTRIES[name].source
    files = [folder / f"{name}_{mistake}.py", folder / f"{name}_{mistake}_twin.py"]
    modules = [loaded(file, code) for file, code in zip(files, (source.replace(right, wrong), source), strict=True)]
    try:
        target = Target(modules[0], partial(of_entry, files[0].stem, name), lambda: ENTRIES[name].intent)
        yield target, partial(of_entry, files[1].stem, name)
    finally:
        for module in modules:
            sys.modules.pop(module.__name__, None)


def of_report(module: str, case: Reported, seed: int) -> Subject:
    """Build the last class of a module."""
    torch.manual_seed(7 + seed)
    classes = [kind for kind in vars(sys.modules[module]).values() if isinstance(kind, type)]
    inputs = case.inputs()
    return Subject(classes[-1](), (), redrawn(inputs) if seed else inputs, seed=0)


@contextmanager
def reported(case: Reported, folder: Path) -> Iterator[tuple[Target, Make]]:
    """Yield a file with a reported mistake as a target, and how to make its right twin."""
    files = [folder / f"{case.name}.py", folder / f"{case.name}_twin.py"]
    sources = (case.source.replace(case.right, case.wrong), case.source)
    modules = [loaded(file, code, head="") for file, code in zip(files, sources, strict=True)]
    try:
        target = Target(modules[0], partial(of_report, files[0].stem, case), lambda: case.intent)
        yield target, partial(of_report, files[1].stem, case)
    finally:
        for module in modules:
            sys.modules.pop(module.__name__, None)


def assert_right(target: Target, result: Fixed, twin: Make) -> None:
    """Compare a patch with the twin, both with the twin's weights. Where the twin never drops, eval mode counts."""
    drops = result.report.problems[0].check == "repeat"
    for seed in FRESH:
        right = twin(seed)
        kept = kept_of(right)
        for training in (False,) if drops else (False, True):
            expected = outputs_of(right, training=training)
            with in_place_of(target.module, result.after):
                found = outputs_of(made(target, seed, kept), training=training)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def homes() -> list[ModuleType]:
    return [import_module(f"{__package__}.{name}") for name in ("planted", *(f"wrong_{topic}" for topic in TOPICS))]


def own_cases(home: ModuleType) -> list[str]:
    """Return the names of the mistakes that a file of the corpus has itself."""
    assert home.__file__ is not None
    with in_place_of(home, Path(home.__file__).read_bytes()) as fresh:
        return [case.name for case in fresh.CASES if case.wrong is not None]


HOMES = {name: home for home in homes() for name in own_cases(home)}
FIXED = """
    NanoGpt-mask_inverted NanoGpt-scale_times NanoGpt-mask_zero NanoGpt-mask_lost NanoGpt-att_T
    NanoGpt-state NanoGpt-batch_mean KeepMask-not_renorm KeepMask-flip KeepMask-merge23
    KeepMask-cumulative_len Fairseq-mask_order Fairseq-view_direct Fairseq-scale_k Llama-repeat_tile_v
    Llama-rope_v Llama-rope_sign Llama-cache_after_repeat Llama-cache_new_only Llama-mask_off
    Llama-rotate_after_cache Llama-scale_pre Llama-rope_before_split Llama-global_kv Cross-mask_other
    Cross-einsum_ij Cross-mem_batch0 SlidingWindow-strict SlidingWindow-float Vit-merge2 Vit-kk
    Vit-scale_both TorchBlock-mask_tril TorchBlock-mask_float TorchBlock-drop_f TorchBlock-res_B
    TorchBlock-inplace EinsumMasked-dim1 EinsumMasked-mask_sign EinsumMasked-scale_dim
    EinsumMasked-batch_sum LanguageModel-pad_q Bert-ext_raw Bert-ln_res Bert-ln_flip StaticCache-write
    StaticCache-inplace NeoX-v_view NeoX-permute_v NeoX-alpha Groups-axis Groups-times Groups-of_others
    Groups-dropped SplitByView QueriesSplitAndMergedByView MergedByReshape SoftmaxOfSoftmax MaskAfterSoftmax
    TrilAfterSoftmax CausalWithoutItself CausalForgotten WindowOneWide WindowOneNarrow PaddingTurnedRound
    PaddingOnQueries PaddingInTheOtherOrder PaddingAsBoolForFused PaddingForTorchsLayer BatchByView NoScale
    ScaledTwice Tiled TiledBehindNorm RotaryOfQueriesAlone RotaryByHead KeysCutOff DropoutWithoutFlag
    WritesIntoItsInput CacheIfAsked CacheTurnedRound LateWithPadding PaddingOnQueriesOfFoldedHeads
    InvertedForTorch InvertedByHand OverHeads OverQueries NeverTransposed NeverTransposedFused
    MergedByViewAsManyTokens QueryByView SequenceRepeated SequenceRepeatedBeforeTransposing
    EncoderOverTheBatch SimilaritiesOfMixedItems WeightsDroppedInEval ScaleOfAnotherWidth
    MeanOfItemsSubtracted TurnedByItem TurnedByItemAlone TurnedByItemBesideHeads TurnedByHead
    TurnedByNothing TurnedAsOnePosition AddsToItsInput RotationRestarts ValuesJoinedFirst
    KeysAndValuesSwapped KeysDoubled HeadsMoved OwnKeyTooLate AnglesByLength KernelTopLeft StateNotDecayed
    MaskLaidAsSquare MaskIgnoredWithCache PositionsOfPaddedCalls LlamaRestarts LlamaTopLeft
""".split()  # noqa: SIM905
"""Mistakes for which a patch is printed; the others need more than an edit of expressions, or several are as good."""


@pytest.mark.parametrize("case", MUTANTS[::12], ids=named)
def test_the_patch_of_a_line_is_the_line_as_it_was(case: tuple[str, ...], tmp_path: Path) -> None:
    with mutant(case, tmp_path) as (target, twin):
        result = fixed(target)
        assert result.report.patch or named(case) not in FIXED
        if result.report.patch:
            assert not result.report.remaining
            assert_right(target, result, twin)


@pytest.mark.parametrize("name", [*HOMES][::12])
def test_the_patch_of_a_planted_mistake_is_its_twin(name: str) -> None:
    home = HOMES[name]
    (case,) = [case for case in CASES if case.name == name]
    target = Target(home, partial(of_case, home.__name__, name, True), lambda: case.intent)
    result = fixed(target)
    assert result.report.patch or name not in FIXED
    if result.report.patch:
        assert_right(target, result, partial(of_case, home.__name__, name, False))


@pytest.mark.parametrize("case", REPORTED[::3], ids=lambda case: case.name)
def test_the_patch_of_a_reported_mistake_is_its_twin(case: Reported, tmp_path: Path) -> None:
    with reported(case, tmp_path) as (target, twin):
        result = fixed(target)
        assert result.report.patch
        assert_right(target, result, twin)


def counted() -> Iterator[tuple[str, str, str]]:
    """Yield the kind and the name of each mistake of the corpus, and whether its patch is right, wrong or missing."""
    with TemporaryDirectory() as folder:
        for case in MUTANTS:
            with mutant(case, Path(folder)) as (target, twin):
                yield "of one line", named(case), outcome(target, twin)
        for report in REPORTED:
            with reported(report, Path(folder)) as (target, twin):
                yield "reported", report.name, outcome(target, twin)
        for name, home in HOMES.items():
            (planted,) = [case for case in CASES if case.name == name]
            target = Target(home, partial(of_case, home.__name__, name, True), lambda case=planted: case.intent)
            yield "planted", name, outcome(target, partial(of_case, home.__name__, name, False))


def outcome(target: Target, twin: Make) -> str:
    """Return how a search for a patch ends."""
    result = fixed(target)
    if not result.report.patch:
        return "several" if result.report.rivals else "none"
    try:
        assert_right(target, result, twin)
    except AssertionError:
        return "wrong"
    return "right"


if __name__ == "__main__":
    # python -m tests.corpus.test_fixes prints how many mistakes of each kind get a patch, and how many are right.
    table = Counter[tuple[str, str]]()
    for kind, name, end in counted():
        table[kind, end] += 1
        print(f"{kind:12} {end:8} {name}", flush=True)
    for (kind, end), count in sorted(table.items()):
        print(f"{kind:12} {end:8} {count}")
