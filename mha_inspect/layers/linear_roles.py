"""What the parameters of plain Linears are for: the roles that most of the layers declare. No torch here."""

from __future__ import annotations

from ..targets.spec import AttentionSpec
from .roles import Part, Role


def projection(name: str, letter: str, axis: str, width: int, heads: int, head_dim: int) -> dict[str, Role]:
    """One Linear for all heads, their rows one after the other: W_q, W_k or W_v by `letter`, from `axis` of `width`."""
    rows = (0, heads * head_dim)
    return {
        f"{name}.weight": Role(
            f"(heads head_dim) {axis}",
            f"W_{letter}: its rows are the heads one above the other, {head_dim} each",
            (Part(f"W_{letter}", rows, (0, width), heads=heads),),
        ),
        f"{name}.bias": Role("(heads head_dim)", f"b_{letter}", (Part(f"b_{letter}", rows, heads=heads),)),
    }


def axis_of_width(axis: str, width: int, embed_dim: int) -> str:
    """`kdim` or `vdim` where it is a width of its own, else `embed`: the same number bears the same name."""
    return "embed" if width == embed_dim else axis


def one_head(
    name: str, letter: str, head: int, width: int, head_dim: int, axes: str, reads: str = ""
) -> dict[str, Role]:
    """A Linear of one head's own."""
    rows = (0, head_dim)
    return {
        f"{name}.weight": Role(
            axes,
            f"W_{letter} of head {head}{reads}",
            (Part(f"W_{letter}", rows, (0, width), first_head=head),),
        ),
        f"{name}.bias": Role("head_dim", f"b_{letter} of head {head}", (Part(f"b_{letter}", rows, first_head=head),)),
    }


def output_projection(name: str, embed_dim: int, heads: int, head_dim: int) -> dict[str, Role]:
    """One Linear over the heads side by side."""
    rows, columns = (0, embed_dim), (0, heads * head_dim)
    return {
        f"{name}.weight": Role(
            "embed (heads head_dim)",
            f"W_o: its columns are the heads side by side, {head_dim} each",
            (Part("W_o", rows, columns, split="columns", heads=heads),),
        ),
        f"{name}.bias": Role("embed", "b_o: added once, it belongs to no head", (Part("b_o", rows, split=None),)),
    }


def formula_of_widths(spec: AttentionSpec) -> str:
    """W_q and W_o are E², W_k is EK and W_v EV, and each projection has a bias of E."""
    squares = 2 + (spec.key_width == spec.embed_dim) + (spec.value_width == spec.embed_dim)
    terms = [f"{squares}E²"]
    terms += ["EK"] * (spec.key_width != spec.embed_dim)
    terms += ["EV"] * (spec.value_width != spec.embed_dim)
    terms += ["4E"] * spec.bias
    return " + ".join(terms)
