"""Heads cut over simulated ranks: each rank's stages are its part of the whole, and wrong plans are found."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mha_inspect.errors import InputError
from mha_inspect.layers.bert import BertSelfAttention
from mha_inspect.layers.grouped_query import GroupedQueryAttention
from mha_inspect.layers.per_head import PerHeadAttention
from mha_inspect.layers.spec import Show
from mha_inspect.layers.split_heads import SplitHeadsAttention
from mha_inspect.questions.params import params
from mha_inspect.questions.shard_plan import Plan, folded, plan_from
from mha_inspect.questions.sharding import cut_parameters, process_group, sharded
from mha_inspect.record.ranks import wait
from mha_inspect.running.subject import Subject

from .ranks import (
    GOOD,
    Attention,
    ChangesItsInput,
    Last,
    Mapped,
    NormedOverHeads,
    Packed,
    Transposed,
    WithLayer,
    by_hand,
    computed,
    with_one_weight,
)

pytest.importorskip("torch.distributed._local_tensor")


def subject(module: nn.Module, *args: Tensor) -> Subject:
    torch.manual_seed(0)
    return Subject(module.eval(), args or (torch.randn(2, 5, 24),), {})


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_plan_is_proved_and_each_stage_is_a_part_of_the_whole(ranks: int) -> None:
    made = subject(Attention())
    trace, run = sharded(made, Show(), ranks)
    assert trace.plan == GOOD
    assert trace.proof.of == "ranks"
    assert trace.proof.agrees
    assert trace.proof.noise_floor
    (attention,) = trace.attentions
    assert attention.num_heads == 8 // ranks
    shapes = {stage.name: (stage.shape, stage.whole) for stage in attention.stages}
    assert shapes["scores"] == ((2, 8 // ranks, 5, 5), (2, 8, 5, 5))
    assert shapes["output"] == ((2, 5, 24), None)
    weights = run.recording.values[run.attentions[0][0].stages["weights"].id]
    module, (x,) = made.module, made.args
    assert isinstance(module, Attention)
    with torch.no_grad():
        q, k = (p(x).unflatten(-1, (-1, 3)).transpose(1, 2) for p in (module.q, module.k))
        expected = (q @ k.mT / 3**0.5).softmax(-1)
    torch.testing.assert_close(weights, expected[:, : 8 // ranks])


def test_ranks_say_their_rows_and_share_the_work() -> None:
    trace, _ = sharded(subject(Attention()), Show(), 4)
    assert trace.ranks is not None
    assert [rank.rows["W_q"] for rank in trace.ranks] == [(0, 6), (6, 12), (12, 18), (18, 24)]
    assert [rank.rows["W_o"] for rank in trace.ranks] == [(0, 6), (6, 12), (12, 18), (18, 24)]
    whole = 4 * (24 * 24 + 24) * 4
    assert all(rank.bytes == whole // 4 + 24 * 4 * 3 // 4 for rank in trace.ranks)  # the bias of W_o is on every rank
    assert all(rank.heads == 2 and not rank.kv_copied and rank.exchanged == 2 * 5 * 24 * 4 for rank in trace.ranks)


def test_nothing_of_the_module_changes_and_no_process_group_stays() -> None:
    made = subject(Attention())
    before = {name: parameter.clone() for name, parameter in made.module.named_parameters()}
    sharded(made, Show(), 2)
    after = dict(made.module.named_parameters())
    assert all(type(parameter) is nn.Parameter and parameter.equal(before[name]) for name, parameter in after.items())
    assert not torch.distributed.is_initialized()


def test_heads_without_an_output_projection_are_joined() -> None:
    trace, _ = sharded(subject(BertSelfAttention(24, 8)), Show(), 4)
    assert trace.plan == {"query": "colwise", "key": "colwise", "value": "colwise"}
    assert trace.proof.agrees
    assert trace.attentions[0].num_heads == 2


def test_grouped_keys_are_cut_or_copied() -> None:
    cut, _ = sharded(subject(GroupedQueryAttention(24, 8, 4, 3)), Show(), 4)
    assert cut.ranks is not None
    assert {(rank.heads, rank.kv_heads, rank.kv_copied) for rank in cut.ranks} == {(2, 1, False)}
    copied, _ = sharded(subject(GroupedQueryAttention(24, 8, 2, 3)), Show(), 4)
    assert copied.plan == {"q_proj": "colwise", "k_proj": "replicate", "v_proj": "replicate", "o_proj": "rowwise"}
    assert copied.proof.agrees
    alone, _ = sharded(subject(GroupedQueryAttention(24, 8, 2, 3), torch.randn(1, 5, 24)), Show(), 4)
    assert alone.ranks is not None
    assert [rank.rows["W_k"] for rank in alone.ranks] == [(0, 3), (0, 3), (3, 6), (3, 6)]
    assert {(rank.heads, rank.kv_heads, rank.kv_copied) for rank in alone.ranks} == {(2, 1, True)}
    assert "Every rank computes all heads." not in alone.notes
    axes = {stage.name: stage.axes for stage in alone.attentions[0].stages}
    assert axes["k_heads"] == "heads head_dim key"  # of a piece of the copied heads, which the simulation takes


def test_the_printed_code_runs_as_it_is() -> None:
    class OneArgument(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = SplitHeadsAttention(24, 8)

        def forward(self, *_: object) -> Any:
            returned.append(self.layer(x, x, x))
            return returned[-1]

    x, returned = torch.randn(2, 5, 24), list[Any]()
    model = OneArgument()
    trace, _ = sharded(subject(model), Show(), 2)
    assert trace.plan_code is not None
    with process_group(2, "cpu") as mesh:
        exec(trace.plan_code, {"model": model, "mesh": mesh})
        wait(returned[-1])
        assert tuple(model.layer.wq.weight.to_local().shape) == (12, 24)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("module", "ranks", "reason"),
    [
        (Attention(), 3, "8 heads do not divide among 3 ranks. Use --ranks 2, 4 and 8."),
        (Packed(), 2, "qkv has W_q, W_k and W_v in its 72 rows"),
        (NormedOverHeads(), 2, "normed over all heads"),
        (nn.MultiheadAttention(24, 8, batch_first=True), 2, "W_q is rows 0–23 of in_proj_weight of MultiheadAttention"),
        (Transposed(), 2, "W_v is columns 48–71 of qkv of Transposed, but parallelize_module shards nn.Linear."),
        (PerHeadAttention(24, 8), 2, "W_q is 8 matrices (W_q.0.weight, W_q.1.weight and 6 more)"),
        (with_one_weight("q", "o"), 2, "o has the weight of q"),
        (computed(parametrizations.spectral_norm), 2, "q computes its weight in each forward"),
        (nn.Linear(24, 24), 2, "no attention was found"),
    ],
)
def test_what_cannot_be_cut_is_said_with_the_reason(module: nn.Module, ranks: int, reason: str) -> None:
    made = subject(module)
    if isinstance(module, (nn.MultiheadAttention, PerHeadAttention)):
        made = subject(module, *made.args * 3)
    with pytest.raises(InputError) as refused:
        sharded(made, Show(), ranks)
    assert reason in str(refused.value)


def test_a_group_that_could_not_be_made_breaks_no_later_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a name, so that the next group has another; torch caches results with the group of an earlier mesh."""
    monkeypatch.delenv("RANK", raising=False)
    assert sharded(subject(Attention()), Show(), 2)[0].proof.agrees
    with pytest.raises(ValueError, match="RANK"):
        torch.distributed.init_process_group("gloo")
    trace, _ = sharded(subject(Attention()), Show(), 2)
    assert trace.proof.agrees
    assert "use_local_output" not in str(trace.plan_code)


def test_a_module_that_cannot_be_copied_is_not_cut_itself() -> None:
    module = Attention()
    module.lock = threading.Lock()
    with pytest.raises(InputError, match="Attention cannot be copied"):
        sharded(subject(module), Show(), 2)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


def test_zeros_hide_no_sum() -> None:
    """A new model has biases of zeros: added twice they are zeros."""
    made = subject(Attention())
    nn.init.zeros_(made.module.get_parameter("o.bias"))
    trace, _ = sharded(made, Show(), 4, Plan(code=by_hand(reduces=True, bias_everywhere=True)))
    assert trace.proof.agrees is False
    assert "random numbers were added to o.bias." in " ".join(trace.notes)
    assert not made.module.get_parameter("o.bias").any()


def test_styles_whose_forward_raises_name_the_module_once_for_all_layers() -> None:
    layers = nn.Sequential(*(WithLayer() for _ in range(2)))
    styles: Any = {f"*.{name}": style for name, style in GOOD.items()}
    with pytest.raises(InputError, match=r"raises in 0\.extra: "):
        sharded(subject(layers), Show(), 2, Plan(styles | {"0.extra": "rowwise"}))
    with pytest.raises(InputError) as failed:
        sharded(subject(nn.Sequential(nn.Identity(), layers)), Show(), 2, Plan({"1.*.o": "colwise"}))
    assert str(failed.value) == (
        "over 2 ranks 1.*.o is W_o and is sharded colwise; expected rowwise: its columns belong to heads."
    )


def test_code_that_raises_is_no_failing_forward() -> None:
    with pytest.raises(InputError, match=r"over 2 ranks the plan raises: .*zero"):
        sharded(subject(Attention()), Show(), 2, Plan(code=lambda module, mesh: 1 // 0))


def test_each_parameter_is_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the time grows with the square of the number of ranks."""
    calls, chunk = [], torch.chunk
    monkeypatch.setattr(torch, "chunk", lambda *args, **kwargs: calls.append(args) or chunk(*args, **kwargs))
    sharded(subject(Attention()), Show(), 8)
    assert len(calls) == 7  # four matrices and three biases


IMPORTED = getattr(torch.distributed, "get_rank", None)


@pytest.mark.parametrize("asks", ["get_rank", "get_local_rank", "the imported get_rank"])
def test_a_plan_that_asks_for_its_rank_is_refused(asks: str) -> None:
    """Every simulated rank gets the same answer, so a right plan would be called wrong."""

    def cut(module: Attention, mesh: Any) -> None:
        ways = {"get_rank": lambda: torch.distributed.get_rank(), "get_local_rank": mesh.get_local_rank}
        rank = ways.get(asks, IMPORTED)()
        module.q.weight = nn.Parameter(module.q.weight.detach().chunk(2)[rank])

    with pytest.raises(InputError, match="asks for its rank"):
        sharded(subject(Attention()), Show(), 2, Plan(code=cut))


def test_every_result_is_compared() -> None:
    made = subject(Mapped())
    assert sharded(made, Show(), 2)[0].proof.agrees

    trace, _ = sharded(made, Show(), 2, Plan(code=by_hand(reduces=True, bias_everywhere=True)))
    assert trace.proof.agrees is False
    assert isinstance(made.module, Mapped)
    # The mean over keys is 1 / keys, whatever the weights are; the bias was added twice.
    assert trace.proof.max_abs_difference == pytest.approx(float(made.module.o.bias.detach().abs().max()), rel=1e-3)


def test_a_module_that_changes_its_input_gets_the_same_input_in_each_run() -> None:
    made = subject(ChangesItsInput())
    given = made.args[0].clone()
    proof = sharded(made, Show(), 2)[0].proof
    assert proof.agrees
    assert proof.noise_floor < 1e-5
    assert made.args[0].equal(given)


@pytest.mark.parametrize(
    ("styles", "ranks", "reason"),
    [
        (GOOD | {"Q": "colwise"}, 2, "the plan names Q, which is not a module. Did you mean q?"),
        (GOOD | {"q": "rowwise"}, 2, "q is W_q and is sharded rowwise; expected colwise"),
        (GOOD | {"o": "colwise"}, 2, "o is W_o and is sharded colwise; expected rowwise"),
        (GOOD, 3, "q has 8 heads, and sharding its 24 rows into 3 would cut through a head."),
    ],
)
def test_a_users_plan_that_does_not_cut_heads_says_why(styles: Any, ranks: int, reason: str) -> None:
    try:
        trace, _ = sharded(subject(Attention()), Show(), ranks, Plan(styles))
        said = " ".join((trace.proof.note, *trace.notes))
        assert trace.proof.agrees is False or reason in said
    except InputError as error:
        said = str(error)
    assert reason in said


def test_a_plan_is_read_from_json_from_a_report_and_from_python(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for content in (GOOD, {"plan": GOOD, "proof": {}}):
        file.write_text(json.dumps(content))
        assert plan_from(str(file)).styles == GOOD
    code = tmp_path / "sharding_of_mine.py"
    code.write_text("def cut(module, mesh):\n    return module\n")
    assert callable(plan_from(f"{code}:cut").code)
    for wrong in ('{"q": "columns"}', "[]", "{}", "not JSON"):
        file.write_text(wrong)
        with pytest.raises(InputError, match=r"Write e\.g\."):
            plan_from(str(file))
    with pytest.raises(InputError, match=r"Write .*sharding_of_mine\.py:NAME\."):
        plan_from(str(code))


def test_on_meta_there_are_shapes_and_no_proof() -> None:
    made = subject(Attention().to("meta"), torch.empty(2, 5, 24, device="meta"))
    trace, _ = sharded(made, Show(), 4)
    assert trace.proof.agrees is None
    assert trace.attentions[0].num_heads == 2
    assert trace.ranks is not None
    assert len(trace.ranks) == 4


def test_paths_are_folded_only_where_all_are_alike() -> None:
    alike: Any = {"layers.0.q": "colwise", "layers.1.q": "colwise"}
    assert folded(alike) == {"layers.*.q": "colwise"}
    mixed: Any = {"layers.0.q": "colwise", "layers.1.q": "rowwise"}
    assert folded(mixed) == mixed


def test_parameters_show_the_part_of_rank_0() -> None:
    made = subject(Attention())
    with cut_parameters(made, 4) as (cut, ranks):
        report = params(made, cut=cut, ranks=ranks)
    rows = {row.name: row for row in report.parameters}
    assert report.ranks == sharded(made, Show(), 4)[0].ranks
    assert (rows["q.weight"].shape, rows["q.weight"].whole) == ((6, 24), (24, 24))
    assert rows["q.weight"].role.endswith("rows 0–5 of 24: heads 0–1")
    assert rows["o.weight"].role.endswith("columns 0–5 of 24: heads 0–1")
    assert rows["o.bias"].whole is None


def test_one_head_of_one_feature_has_no_whole_shape() -> None:
    """The axis of the only head and that of its only feature look alike."""
    trace, _ = sharded(subject(Attention(4, 1), torch.randn(2, 5, 4)), Show(), 4)
    assert trace.proof.agrees
    assert [stage.whole for stage in trace.attentions[0].stages if stage.whole is not None] == []


def test_dtensors_do_not_hide_that_a_plan_is_wrong() -> None:
    """A rank averages the features that it has; as DTensors the features of all ranks are averaged."""
    trace, _ = sharded(subject(Last()), Show(), 2, Plan(GOOD | {"after": "colwise"}))
    assert trace.proof.agrees is False


def test_a_plan_names_what_the_forward_does_not_call() -> None:
    trace, _ = sharded(subject(Last()), Show(), 2, Plan(GOOD | {"unused": "colwise"}))
    assert trace.proof.agrees
    assert "The plan has unused, which the forward does not call." in trace.notes


def test_a_users_plan_may_cut_weights_that_are_tied() -> None:
    tied = Attention()
    tied.k.weight = tied.q.weight
    assert sharded(subject(tied), Show(), 2, Plan(GOOD))[0].proof.agrees
    with pytest.raises(InputError, match="k has the weight of q"):
        sharded(subject(tied), Show(), 2)


def test_a_replicated_key_is_a_copy_and_right() -> None:
    styles: Any = GOOD | {"k": "replicate", "v": "replicate"}
    assert sharded(subject(Attention()), Show(), 2, Plan(styles))[0].proof.agrees
