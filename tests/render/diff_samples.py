"""Reports of `diff` and `layers` made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

from mha_inspect.reports.common import Difference, LayerArgument, LayersReport, ListedLayer
from mha_inspect.reports.diff import DiffReport, DiffSide, NoiseSource, SharedWeights, StageRow, StageSide
from mha_inspect.reports.trace import OpRef, Path

from .trace_samples import ENVIRONMENT, layer

FAST = Path("aten._native_multi_head_attention (the fast path)", None, ("aten._native_multi_head_attention",))
SLOW = Path("separate operations: bmm, softmax, bmm", "training is enabled", ())


def _side(label: str, path: Path, **changes: object) -> DiffSide:
    side = DiffSide(label, ENVIRONMENT, layer(), {}, path, 1050624, (1, 12, 512), 6.1e-07)
    return replace(side, **changes)


def _stage(shape: tuple[int, ...], axes: str, op: OpRef | None = None, **changes: object) -> StageSide:
    return replace(StageSide(shape, axes, "float32", False, op), **changes)


QUERY = _stage((1, 12, 512), "batch query embed")
Q_PROJ = _stage(
    (12, 1, 512),
    "query batch (heads head_dim)",
    OpRef(4, "aten.select.int", "torch/nn/functional.py:6239"),
    opened=True,
)
Q_PROJ_OF_HEAD = _stage(
    (1, 12, 256), "batch query head_dim", OpRef(7, "aten.add.Tensor", "mha_inspect/layers/narrow.py:56"), count=2
)
OUTPUT = _stage((1, 12, 512), "batch query embed", OpRef(30, "aten.addmm.default", "a.py:9"))
LOST = "narrow gives head 0 the features 0–255 of the embedding and no others: the rest is left out."


def _row(name: str, left: StageSide | None, right: StageSide | None, *numbers: object, note: str = "") -> StageRow:
    return StageRow(*numbers, name=name, left=left, right=right, compared="batch query embed", note=note)


SAME_ROW = (0.0, 0.0, None, 0.0, "same")
NOT_COMPARED = (None, None, None, None, None)

DIFF = DiffReport(
    left=_side("torch", FAST),
    right=_side("narrow", SLOW, numel=526336),
    weights=SharedWeights(
        False,
        "as far as both have a place for them.",
        (LOST,),
    ),
    noise=NoiseSource("float32", ("left", "right")),
    stages=(
        _row("query", QUERY, QUERY, *SAME_ROW),
        _row("q_proj", Q_PROJ, Q_PROJ_OF_HEAD, 3.28, 0.908, 5.7e-07, 5762932.4, "differs"),
        _row("output", OUTPUT, OUTPUT, 1.2e-06, 3.4e-07, 2.4e-07, 5.0, "inconclusive"),
    ),
    first_differing_stage="q_proj",
    output=Difference(1.67, 0.714, 6.1e-07, 2750113.0, "differs"),
    outcome="differs",
    notes=("narrow has no use for kdim 7, and is left as it is.",),
    answer=("Not the same: they part at q_proj.", "Splitting the input is not what torch does."),
)

MASKED_DIFF = replace(
    DIFF,
    right=_side("torch with dtype bfloat16", FAST, settings={"dtype": "bfloat16", "padding": [12, 0]}),
    weights=SharedWeights(True, "every number of the one is in the other.", ()),
    noise=NoiseSource("bfloat16", ("right",)),
    stages=(
        _row("scores", None, QUERY, *NOT_COMPARED, note="torch adds the mask inside the product"),
        _row("k_heads", QUERY, QUERY, None, None, None, None, "differs", note="shapes differ: [2, 3] and [2, 5]"),
        _row("weights", Q_PROJ, Q_PROJ, math.inf, math.inf, 0.0, math.inf, "differs"),
    ),
    first_differing_stage="k_heads",
    output=Difference(math.inf, math.inf, 1e-3, math.inf, "differs"),
    notes=(),
)

SAME_DIFF = replace(
    MASKED_DIFF,
    stages=(_row("query", QUERY, QUERY, *SAME_ROW),),
    first_differing_stage=None,
    output=Difference(0.0, 0.0, None, 0.0, "same"),
    outcome="same",
    answer=("The same, bit for bit.",),
)

LAYERS = LayersReport(
    layers=(
        ListedLayer("torch", "one packed projection", "4E² + 4E", "(heads head_dim) -> heads head_dim", "PyTorch", ()),
        ListedLayer(
            "grouped-query",
            "fewer key and value heads",
            "2EHD + 2EGD",
            "repeated",
            "LLaMA",
            (LayerArgument("rope", "true or false", "false", "Rotate."),),
        ),
    ),
    letters={"E": "embed_dim", "H": "num_heads", "G": "num_kv_heads", "D": "head_dim"},
)
