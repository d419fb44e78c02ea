"""What the shared options ask for, as the specs that the rest of the program takes."""

from __future__ import annotations

from ..errors import SpecError
from ..layers.registry import LAYERS
from ..layers.settings import spec_for
from ..targets.aliases import Flags
from ..targets.spec import AttentionSpec, InputSpec, RunSpec, Show
from .options import Options
from .values import counts

_SEEDS = range(0, 2**64)


def head_counts(options: Options) -> tuple[int, ...]:
    """The numbers of --num-heads: one, or several.

    Raises `SpecError` when there is none, or one that is not a whole number.
    """
    typed = counts("num_heads", options.num_heads)
    if not typed:
        raise SpecError("num_heads is empty: give the number of attention heads, as in --num-heads 8.")
    return typed


def single_head_count(options: Options, command: str) -> int:
    """The one number of --num-heads.

    Raises `SpecError` that names the commands which take a list, when it is a list.
    """
    first, *more = head_counts(options)
    if more:
        raise SpecError(
            f"num_heads {options.num_heads} is a list, and {command} takes one number, as in --num-heads {first}. "
            f"Several: `mha-inspect params --num-heads {options.num_heads}`, `mha-inspect compare-heads --heads "
            f"{options.num_heads}`."
        )
    return first


def attention(options: Options, num_heads: int) -> AttentionSpec:
    """The layer that was asked for, with this head count.

    Raises `SpecError` when its sizes contradict each other.
    """
    return spec_for(
        LAYERS[options.layer],
        embed_dim=options.embed_dim,
        num_heads=num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        rope=options.rope,
        kdim=options.kdim,
        vdim=options.vdim,
        bias=options.bias,
        add_bias_kv=options.add_bias_kv,
        add_zero_attn=options.add_zero_attn,
        dropout=options.dropout,
        batch_first=options.batch_first,
        training=options.train,
        dtype=options.dtype,
        seed=seed(options),
    )


def seed(options: Options) -> int:
    """The seed of parameters and inputs. Raises `SpecError` for one that no generator takes."""
    if options.seed not in _SEEDS:
        raise SpecError(f"seed {options.seed} is out of range: it must be 0 to 2**64 - 1. Try --seed 0.")
    return options.seed


def inputs(options: Options) -> InputSpec:
    """What goes into the layer.

    Raises `SpecError` when its sizes contradict each other.
    """
    return InputSpec(
        batch=options.batch,
        seq_len=options.seq_len,
        key_len=options.key_len,
        unbatched=options.unbatched,
        causal=options.causal,
        padding=counts("padding", options.padding),
        attn_mask=options.attn_mask,
        input=options.input,
    )


def run(options: Options) -> RunSpec:
    """How the layer is run."""
    return RunSpec(
        device=options.device,
        grad=options.grad,
        need_weights=options.need_weights,
        average_weights=options.average_weights,
    )


def show(options: Options) -> Show:
    """What the report holds beyond names, shapes and axes.

    Raises `SpecError` for a precision or a number of edge items that cannot be.
    """
    if not 0 <= options.precision <= 17:
        raise SpecError(
            f"precision {options.precision} is not a number of digits: it must be 0 to 17. Try --precision 4."
        )
    if options.edge_items < 1:
        raise SpecError(f"edge_items {options.edge_items} shows nothing: it must be 1 or more. Try --edge-items 3.")
    for_a_machine = options.format == "json" or (
        options.export is not None and options.export.suffix.lower() == ".json"
    )
    return Show(
        ops=options.ops,
        stats=options.stats,
        values=options.values,
        full_values=options.values and for_a_machine,
        precision=options.precision,
        edge_items=options.edge_items,
    )


def flags(options: Options) -> Flags:
    """What is set, and by whom, for a target whose constructor may take some of it.

    Raises `SpecError` when --num-heads is a list.
    """
    named = ["embed_dim", "num_kv_heads", "head_dim", "rope", "kdim", "vdim", "bias", "add_bias_kv"]
    named += ["add_zero_attn", "dropout", "batch_first"]
    values = {name: getattr(options, name) for name in named}
    values |= {
        "num_heads": single_head_count(options, "a target"),
        "causal": options.causal,
        "seq_len": options.seq_len,
    }
    values |= {"need_weights": options.need_weights, "average_weights": options.average_weights}
    return Flags(values, options.given, options.typed)
