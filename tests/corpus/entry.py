"""An entry of the corpus: a module, its arguments, what is true of it, its twin, and mistakes of one line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mha_inspect import Intent
from mha_inspect.reports.trace import Cache, Position, QKNorm

E, H, D = 22, 3, 5
"""Features of a token, heads, and features of a head; E is not H * D."""

STAGES = """query key value q_proj k_proj v_proj q_heads k_heads v_heads
    scores masked_scores weights context concat output""".split()  # noqa: SIM905

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Rows = Mapping[str, str]
"""A parameter's name to whose its elements are: `q: (heads head_dim) embed`.

The letters are the matrices that it holds: of `qkv: (qkv heads head_dim) embed` the rows are those of W_q, W_k and W_v
in turn. A number is an axis that belongs to one head, `q 1: head_dim embed` is all of head 1, and what lies one behind
the other in the first dimension is parted by `|`.
"""


@dataclass(frozen=True)
class Truth:
    """What is true of one attention, whatever the program says."""

    heads: int = H
    kv_heads: int | None = None
    """None if there are as many as `heads`."""
    head_dim: int = D
    tiled: bool = False
    """Whether key heads are put side by side again for further query heads, in the place of being repeated each."""
    value_dim: int | None = None
    """Features of a value head, where they are not as many as those of a key head."""
    scale: float | None = 0.0
    """0 is the usual one, 1/√head_dim; None if it is not a single number."""
    early: float = 1.0
    """The part of the scale that `q_heads` has already, because the projection is scaled before it is split."""
    kind: tuple[str, ...] = ("self",)
    window: int | None = None
    position: Position | None = None
    qk_norm: QKNorm | None = None
    cache: Cache | None = None
    in_scores: float | None = None
    """The part of the scale that the stage `scores` has beyond `q_heads` and `k_heads`; None if that is all of it."""
    cap: float | None = None
    """The number that scores come near to: cap · tanh(scores / cap)."""
    bias: bool = False
    """Whether finite numbers are added to the scores."""
    masked: bool = False
    """Whether the stage `masked_scores` exists."""
    absent: tuple[str, ...] = ()
    """Stages that a textbook's attention has, and this one has not."""
    projected: str = "batch token (heads head_dim)"
    """Axes of `q_proj`, `k_proj`, `v_proj`: `token` is query or key."""
    split: str = "batch heads token head_dim"
    """Axes of `q_heads`, `k_heads`, `v_heads` and `context`."""
    pairs: str = "batch heads query key"
    """Axes of `scores`, `masked_scores` and `weights`."""
    axes: Mapping[str, str] = field(default_factory=dict)
    """Axes of stages that are not as the fields before say."""
    says: tuple[str, ...] = ()
    """What its notes say, a part of each."""
    formulas: Mapping[str, str] = field(default_factory=dict)
    """Formulas of stages, where they are not as a textbook has them."""
    lengths: Mapping[str, int | None] = field(default_factory=dict)
    """Sizes of named axes that are not those of the arguments; None for a name of several sizes."""
    over: str = "key"
    """The axis along which weights sum to one; empty if they do not."""
    plain: bool = True
    """Whether the context is the product of the stages `weights` and `v_heads`, and nothing happens between them."""
    joined: bool = True
    """Whether the concat is the context, with nothing done to it."""
    mixed: bool = False
    """Whether the scores or the weights of the heads are mixed, so that a head hangs on the rows of all."""
    pair: bool = False
    """Whether the method `pair` of the module gives the score of a query and a key, which is no dot product."""
    weigh: Callable[[Tensor], Tensor] | None = None
    """The weights as a function of the scores, `batch heads query key`, where they are not a plain softmax of them."""
    softmax: bool = True
    """Whether weights are the softmax of the last scores, without sinks or masks of exponentials."""

    @property
    def true_scale(self) -> float | None:
        return self.head_dim**-0.5 if self.scale == 0 else self.scale

    @property
    def scores_scale(self) -> float | None:
        """The factor of q_heads · k_headsᵀ in the stage `scores`; None if it is not a single number."""
        if self.in_scores is not None or self.true_scale is None:
            return self.in_scores
        return self.true_scale / self.early

    @property
    def is_textbook(self) -> bool:
        """Whether softmax(scale · q·kᵀ) · v of the projections alone is the context, masked or not."""
        twisted = self.position or self.qk_norm or self.bias or self.mixed or self.cache or self.lengths or self.cap
        twisted = twisted or self.value_dim or not self.joined
        twisted = twisted or self.window or self.weigh is not None
        return not twisted and self.scale == 0 and self.over == "key" and self.plain

    @property
    def true_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    def stages(self) -> dict[str, str]:
        """Return each stage with its axes, in order."""
        names = [name for name in STAGES if name not in self.absent and (self.masked or name != "masked_scores")]
        return {name: self.axes.get(name) or self._axes_of(name) for name in names}

    def _axes_of(self, stage: str) -> str:
        token = "key" if stage[0] in "kv" else "query"
        if stage in ("query", "key", "value", "output"):
            return f"batch {token} embed"
        if stage in ("scores", "masked_scores", "weights"):
            return self.pairs
        if stage.endswith("_proj"):
            axes = self.projected
        elif stage == "concat":
            axes = "batch token (heads head_dim)"
        else:
            axes = self.split
        axes = axes.replace("token", token)
        if self.value_dim is not None and stage in ("v_proj", "v_heads", "context", "concat"):
            axes = axes.replace("head_dim", "v_head_dim")
        if self.kv_heads is not None and stage in ("k_proj", "v_proj"):
            axes = axes.replace("heads", "kv_heads")
        return axes


@dataclass(frozen=True)
class Entry:
    name: str
    make: Callable[[], nn.Module]
    given: Callable[[int, int], Arguments]
    """The arguments for a batch and a length."""
    attentions: tuple[Truth, ...]
    rows: Rows | None = None
    """Whose the elements of each projection are; None if nothing is known of them."""
    partly: tuple[str, ...] = ()
    """Parameters of which a part belongs to heads, in an order that `rows` has no words for, or nothing does."""
    output: str = "o"
    """Path of the module that is given the heads side by side; empty without one."""
    twin: str = ""
    """Name of the entry that computes the same with the same parameters."""
    intent: Intent = field(default_factory=Intent)
    findings: frozenset[str] = frozenset()
    """Names of checks that are right to accuse it."""
    training: bool = False
    sizes: tuple[tuple[int, int], ...] = ((7, 12), (2, 16))
    """Batches and lengths that it takes."""
    grad: bool = True
    """Whether it is traced with gradients; some that write into a cache cannot be."""
    reads_arguments: bool = True
    """Whether the projections read the arguments as they are."""
    returns_output: bool = True
    """Whether W_o makes what it returns, the first of it if there is more."""
    ones: bool = True
    """Whether a batch and a length of one leave its axes as they are."""
    source: str = ""
    """What a mutant is made of: the text of the class `name` and what it needs."""

    def made(self) -> nn.Module:
        """Return the module, with the same parameters each time."""
        torch.manual_seed(0)
        return self.make().train(self.training)

    def arguments(self, batch: int = 0, length: int = 0) -> Arguments:
        """Return the arguments, with the same numbers each time."""
        torch.manual_seed(1)
        return self.given(*((batch, length) if batch else self.sizes[0]))


ENTRIES: dict[str, Entry] = {}
Made = TypeVar("Made", bound=type[nn.Module])


def hidden(batch: int, length: int) -> Arguments:
    """Return `batch query embed`."""
    return (torch.randn(batch, length, E),), {}


def add(entry: Entry) -> Entry:
    assert entry.name not in ENTRIES, entry.name
    ENTRIES[entry.name] = entry
    return entry


def linears(**parts: str) -> Rows:
    """Return whose the rows of linear layers are, weights with biases: `linears(q="q: (heads head_dim) embed")`."""
    rows = dict[str, str]()
    for name, axes in parts.items():
        name = name.replace("__", ".")
        rows[f"{name}.weight"] = axes
        if not axes.startswith("o"):
            rows[f"{name}.bias"] = axes.partition(" embed")[0]
    return rows


def weights(**parts: str) -> Rows:
    """Return the same of linear layers without biases."""
    return {name: axes for name, axes in linears(**parts).items() if name.endswith("weight")}


OUTPUT = linears(o="o: embed (heads head_dim)")
HEADS_IN_ROWS = OUTPUT | linears(**{part: f"{part}: (heads head_dim) embed" for part in "qkv"})
KV_HEADS_IN_ROWS = HEADS_IN_ROWS | linears(k="k: (kv_heads head_dim) embed", v="v: (kv_heads head_dim) embed")
FOLDED = {"split": "(batch heads) token head_dim", "pairs": "(batch heads) query key"}
ONE_HEAD_AT_A_TIME: dict[str, Any] = {
    "split": "batch token head_dim",
    "pairs": "batch query key",
    "says": ("The heads are computed one by one",),
}
"""Facts of a loop over heads, which shows its first."""

_OF_ENTRY = {of.name for of in fields(Entry)} - {"name", "make", "attentions"}


def register(name: str, make: Callable[[], nn.Module], times: int = 1, **facts: Any) -> None:
    """Register an entry: its facts and those of its attention, as far as they are not the usual."""
    of_entry = {fact: value for fact, value in facts.items() if fact in _OF_ENTRY}
    truth = Truth(**{fact: value for fact, value in facts.items() if fact not in _OF_ENTRY})
    rows = HEADS_IN_ROWS if truth.kv_heads is None else KV_HEADS_IN_ROWS
    add(Entry(name, make, attentions=(truth,) * times, **{"given": hidden, "rows": rows, **of_entry}))


def attends(**facts: Any) -> Callable[[Made], Made]:
    """Register a class by its name."""

    def decorate(made: Made) -> Made:
        register(made.__name__, made, **facts)
        return made

    return decorate


def idiom(
    call: Callable[[], dict[str, Any]],
    intent: dict[str, Any],
    *,
    size: tuple[int, int],
    needs: tuple[Any, ...] = (),
    times: int = 1,
    **facts: Any,
) -> Callable[[Made], Made]:
    """Register a class as people write it, whose text mutants are made of, with the functions and classes it needs."""

    def decorate(made: Made) -> Made:
        usual = {
            "given": lambda batch, length: ((), call()),
            "intent": Intent(**intent),
            "sizes": (size,),
            "ones": False,
        }
        register(made.__name__, made, times, **usual, source=source_of(*needs, made), **facts)
        return made

    return decorate


def has_none(made: Made) -> Made:
    """Register a class in which nothing attends."""
    add(Entry(made.__name__, made, hidden, (), sizes=((7, 11),)))
    return made


def source_of(*parts: Any) -> str:
    """Return the text of functions and classes without their decorators."""
    texts = [inspect.getsource(part) for part in parts]
    starts = [min(at for at in (text.find("class "), text.find("def ")) if at >= 0) for text in texts]
    return "\n\n".join(text[start:] for text, start in zip(texts, starts, strict=True))


# -- whose the elements of a parameter are -----------------------------------------------------------------------------


def owners(axes: str, shape: tuple[int, ...], truth: Truth) -> dict[tuple[str, int], Tensor]:
    """Return where a parameter belongs to which head of which matrix: `("q", 0)` to a mask of its shape.

    Example: of `qkv: (qkv heads head_dim) embed` the first rows are the first head of W_q.
    """
    parts, pattern = axes.split(": ")
    letters, _, head = parts.partition(" ")
    if "|" in pattern:
        return _behind_each_other(letters, pattern, shape, truth)
    sizes = {
        **_of_single_words(pattern, shape),
        "heads": truth.heads,
        "kv_heads": truth.true_kv_heads,
        "group": truth.heads // truth.true_kv_heads,
        "head_dim": truth.head_dim,
        "v_head_dim": truth.value_dim or truth.head_dim,
        letters: len(letters),
    }
    words = pattern.replace("(", "").replace(")", "").split()
    group = sizes["group"]
    factors = {letters: 1000, "kv_heads": group if "group" in words else 1, "heads": 1, "group": 1}
    code = torch.tensor(int(head) if head else 0)
    for place, word in enumerate(words):
        numbers = torch.arange(sizes[word]) * factors.get(word, 0)
        code = code + numbers.view(-1, *[1] * (len(words) - place - 1))
    code = code.reshape(shape)
    return {(letters[int(n) // 1000], int(n) % 1000): code == n for n in code.unique()}


def _of_single_words(pattern: str, shape: tuple[int, ...]) -> dict[str, int]:
    """Return the size of each word that has a dimension for itself."""
    return dict(zip(re.findall(r"\([^)]*\)|\S+", pattern), shape, strict=True))


def _behind_each_other(
    letters: str, pattern: str, shape: tuple[int, ...], truth: Truth
) -> dict[tuple[str, int], Tensor]:
    """Return the owners where matrices of unlike size lie behind each other: `qkv: heads head_dim | …`."""
    pieces, masks, start = [piece.strip() for piece in pattern.split("|")], dict[tuple[str, int], Tensor](), 0
    for letter, piece in zip(letters, pieces, strict=True):
        rows = truth.head_dim * (truth.true_kv_heads if "kv_heads" in piece else truth.heads)
        for owner, mask in owners(f"{letter}: ({piece})", (rows,), truth).items():
            masks[owner] = torch.zeros(shape, dtype=torch.bool)
            masks[owner][start : start + rows] = mask.view(-1, *[1] * (len(shape) - 1))
        start += rows
    return masks


def entries(*, attending: bool = True) -> list[str]:
    """Return the names of the entries that attend, or of the others."""
    return [name for name, entry in ENTRIES.items() if bool(entry.attentions) == attending]
