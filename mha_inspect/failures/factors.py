"""Edits of the factors of attention: queries, keys, values and weights, in a product, an einsum or a kernel.

Their layouts come before their sizes. Heads alone are repeated, and nothing is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import prod

from .. import text
from ..measure.repeats import row_of_each
from ..record.ops import Op
from .edit import SWAP, Change, Edit, Step
from .facts import HEADS, SEQUENCES, Facts, Operand, written_dims
from .meeting import Clash, called, clashes, meetings
from .reached import SDPA

SAME_BATCH = "Both tensors must have the same batch size."
SAME_SEQUENCE = "take keys and values from the same sequence"
_SAME_WIDTH = "split queries and keys into heads of the same width: the product sums over their features"


def edits_of_factors(facts: Facts) -> Iterator[Edit]:
    """Yield the edits of the factors of a call whose sizes clash."""
    if not facts.factors or not facts.sizes_clash:
        return
    yield from _heads_first(facts)
    yield from _key_turned(facts)
    yield from _in_order(facts)
    yield from _split_too(facts)
    for clash in clashes(facts):
        if not clash.left.part or not clash.right.part:
            continue
        edits = [*_of_heads(facts, clash), *of_sizes(clash)]
        if edits:
            yield from edits
            return


# -- layouts ----------------------------------------------------------------------------------------------------------


def _heads_first(facts: Facts) -> Iterator[Edit]:
    """Exchange heads and sequence of the factors that have the heads behind."""
    met = _heads_that_meet(facts)
    behind = [operand for operand in facts.factors if operand.heads_are_behind and operand not in met]
    if not behind:
        return
    were_right = all(_was_right_before(facts, operand) for operand in behind)
    if were_right and not all(_is_undone(facts, operand) for operand in behind):
        return  # its axes are in another order than that before
    what, way = _said_of_heads(facts, behind, were_right)
    changes = []
    for operand in behind:
        rows_are_features = operand.place(*HEADS) == len(operand.shape) - 1
        changes.append(Change(operand, (("transpose", 1, 2),), inside=rows_are_features))
    yield Edit("heads_not_transposed", what, changes, way, cost=2)


def _said_of_heads(facts: Facts, behind: Sequence[Operand], were_right: bool) -> tuple[str, str]:
    """Return what is wrong with operands that have the heads behind, and what to write."""
    names = list(dict.fromkeys(operand.variable for operand in behind))
    subject = f"{' and '.join(names)} {'was' if len(behind) == 1 else 'were'}"
    sides = dict.fromkeys("query" if operand.part == "query" else "key" for operand in behind)
    order = f"Heads must come before {' and '.join(sides)}."
    steps = [op for _, op in facts.reached.steps_back(behind[0].given.tensor) if op is not None]
    if were_right:
        where = _at(steps[0].source if steps else "")
        way = "remove that transpose: the heads already came before the sequence"
        return f"{subject} transposed back{where}. {order}", way
    split = next((op for op in steps if len(op.output.shape) > len(op.inputs[0].shape)), None)
    where = _at("" if split is None else split.source)
    written = text.listed([f"{name}.transpose(1, 2)" for name in names])
    way = f"use {written} after the view that splits the heads"
    return f"{subject} split but not transposed{where}. {order}", way


def _heads_that_meet(facts: Facts) -> set[Operand]:
    """Return the operands whose heads meet heads of another one already: an einsum may have them anywhere."""
    met: set[Operand] = set()
    for letter, places in meetings(facts).items():
        if facts.base != "einsum" and not letter.startswith("-"):
            continue  # keys and values meet in rows too, which are not for heads
        of_heads = [operand for operand, place in places if operand.place(*HEADS) == place]
        if len(of_heads) > 1:
            met.update(of_heads)
    return met


def _at(source: str) -> str:
    return f" ({source})" if source else ""


def _is_undone(facts: Facts, operand: Operand) -> bool:
    """Return whether the step before an operand has its heads and sequence exchanged, and nothing else."""
    before = [tensor for tensor, _ in facts.reached.steps_back(operand.given.tensor)][1]
    first, second = operand.shape[1:3]
    exchanged = (operand.shape[0], second, first, *operand.shape[3:])
    swapped = (*exchanged[:-2], exchanged[-1], exchanged[-2])
    return before.shape == exchanged or (operand.is_swapped and before.shape == swapped)


def _was_right_before(facts: Facts, operand: Operand) -> bool:
    """Return whether an earlier step had the heads before the sequence: `batch heads sequence head_dim`."""
    earlier = [tensor for tensor, _ in facts.reached.steps_back(operand.given.tensor)]
    for tensor in earlier[1:]:
        names = facts.reached.of(tensor).replace("(", "").replace(")", "").split()
        heads = [place for place, name in enumerate(names) if name in HEADS]
        sequence = [place for place, name in enumerate(names) if name in SEQUENCES]
        if heads and sequence and len(tensor.shape) >= 4 and heads[0] < sequence[0]:
            return True
    return False


def _key_turned(facts: Facts) -> Iterator[Edit]:
    """Put the features of keys before their positions, where a product needs that; the axes need no names."""
    key = None if facts.pair is None else facts.pair[1]
    if key is None or key.part != "key" or key.place(*SEQUENCES) != len(key.shape) - 2:
        return
    before_last, last = key.axis(-2), key.axis(-1)
    what = f"{key.name} ends in {before_last} and {last}; q·kᵀ needs {last} before {before_last}."
    change = Change(key, (SWAP,))
    yield Edit("key_not_transposed", what, (change,), f"multiply by {change.code}")


def _in_order(facts: Facts) -> Iterator[Edit]:
    """Put the axes of one operand, which all have names, in any other order with batch and heads first."""
    for operand in facts.operands:
        rank = len(operand.shape)
        has_names = not any(name.isdigit() for dim in operand.dims for name in dim)
        if not operand.part or not has_names or rank > 4 or not _are_different(operand):
            continue
        for order in list(permutations(range(rank)))[1:]:
            change = Change(operand, (_turn(order),))
            if not _is_usual(facts, change):
                continue
            what = f"{operand.text}; the call takes it as {written_dims(change.dims)}."
            cost = 2 + sum(place != to for place, to in enumerate(order))
            yield Edit(_cause_of_turn(facts, change), what, (change,), f"use {change.code}", cost=cost)


def _are_different(operand: Operand) -> bool:
    """Return whether each dimension has a name of its own: of `head_dim head_dim` it is unknown which is which."""
    names = [tuple(dim) for dim in operand.dims]
    return len(set(names)) == len(names)


def _turn(order: Sequence[int]) -> Step:
    """Return the step to another order of dimensions, as it is usually written."""
    moved = [place for place, to in enumerate(order) if place != to]
    if moved == [len(order) - 2, len(order) - 1]:
        return SWAP
    return ("transpose", *moved) if len(moved) == 2 else ("permute", *order)


def _is_usual(facts: Facts, change: Change) -> bool:
    """Return whether the batch then comes first, and the heads next: an equation may have them anywhere."""
    first, *rest = change.dims
    if first[0] != "batch":
        return False
    return len(rest) < 3 or facts.base == "einsum" or rest[0][0] in HEADS


def _cause_of_turn(facts: Facts, change: Change) -> str:
    if facts.pair is not None and change.operand.part == "key":
        return "key_not_transposed"
    if change.operand.part == "value" and change.steps[0] == SWAP:
        return "value_transposed"
    return "axes_out_of_order"


def _split_too(facts: Facts) -> Iterator[Edit]:
    """Split the factors `batch sequence (heads head_dim)` beside one that is split into heads."""
    of_attention = [operand for operand in facts.operands if operand.part]
    split = next((operand for operand in of_attention if operand.size(*HEADS)), None)
    if split is None or len(split.shape) < 4:
        return
    heads = split.size(*HEADS)
    changes = []
    for whole in of_attention:
        if len(whole.shape) != 3 or whole.size(*HEADS) or whole.size("head_dim"):
            continue
        width = heads * split.size("head_dim") or whole.shape[-1]
        if width in whole.shape[1:] and width % heads == 0:
            steps = (("unflatten", -1, (heads, width // heads)), ("transpose", 1, 2))
            changes.append(Change(whole, steps, inside=whole.shape[-1] != width))
    if not changes:
        return
    names = [change.operand.variable for change in changes]
    verb = "is" if len(names) == 1 else "are"
    not_split = text.listed([change.operand.name for change in changes])
    what = f"{split.name} is split into {heads} heads; {not_split} {verb} not."
    way = f"split {text.listed(names)} too: .view(batch, length, {heads}, {changes[0].steps[0][2][1]}).transpose(1, 2)"
    yield Edit("heads_not_split", what, changes, way)


# -- numbers of heads -------------------------------------------------------------------------------------------------


def _of_heads(facts: Facts, clash: Clash) -> Iterator[Edit]:
    """Repeat the heads of keys and values, where query heads may share them."""
    left, right = clash.left, clash.right
    heads, kv_heads = clash.sizes
    if facts.base != "einsum" and not clash.letter.startswith("-"):
        return  # rows and columns of a product are no heads
    if _are_folded(left, clash.left_place) and right.dims[clash.right_place][0] == "batch":
        if heads % kv_heads == 0:
            yield from _repeated(facts, clash, heads // kv_heads)
        return
    if not _counts_heads(left, clash.left_place) or not _counts_heads(right, clash.right_place):
        return
    before_rows = left.shape if facts.base == "einsum" else left.shape[:-2]
    all_heads = prod(size for place, size in enumerate(before_rows) if _counts_heads(left, place))
    once = _before_repeats(right, clash.right_place)
    if all_heads % kv_heads == 0 and len(left.shape) == len(right.shape) + 1 and facts.base != "einsum":
        yield from _with_group(left, right)
    elif all_heads != heads or len(left.shape) != len(right.shape) or heads % kv_heads:
        yield _other_heads(clash, all_heads, once)
    else:
        yield from _sequence_repeated(facts, clash, heads // kv_heads)
        yield from _repeated(facts, clash, heads // kv_heads)


def _are_folded(operand: Operand, place: int) -> bool:
    """Return whether a dimension is `(batch heads)`."""
    names = operand.dims[place]
    return len(names) == 2 and names[0] == "batch" and names[1] in HEADS


def _counts_heads(operand: Operand, place: int) -> bool:
    """Return whether a dimension counts heads, or a part of them that has no name yet: a size."""
    if not any(called(name) == "heads" for dim in operand.dims for name in dim):
        return False
    return all(called(name) == "heads" or name.isdigit() for name in operand.dims[place])


def _repeated(facts: Facts, clash: Clash, times: int) -> Iterator[Edit]:
    right, place = clash.right, clash.right_place
    heads, kv_heads = clash.sizes
    of_all = " of all batch items" if _are_folded(clash.left, clash.left_place) else ""
    what = f"{clash.left.name} has {heads} heads{of_all} and {right.name} has {kv_heads}"
    what = f"{what}, each shared by {times} query heads."
    changes = [Change(operand, (("repeat_interleave", times, place),)) for operand in _alike(facts, clash)]
    code = f"{right.variable}.repeat_interleave({times}, dim={place})"
    way = f"use {code} on keys and values before the product"
    yield Edit("heads_not_repeated", what, changes, way, cost=3)
    if facts.base == SDPA:
        yield Edit("heads_not_repeated", what, way="enable_gqa=True", kwargs={"enable_gqa": True}, cost=3)


def _alike(facts: Facts, clash: Clash) -> list[Operand]:
    """Return the keys and values that have as many heads as the right operand, in its dimension."""
    alike = []
    for operand in facts.factors:
        if operand.part == "query" or len(operand.shape) != len(clash.right.shape):
            continue
        if operand.shape[clash.right_place] == clash.sizes[1]:
            alike.append(operand)
    return alike


def _sequence_repeated(facts: Facts, clash: Clash, times: int) -> Iterator[Edit]:
    """Repeat the heads where the tokens were repeated in their place, `batch kv_heads (key 4) head_dim`."""
    right = clash.right
    place = right.place(*SEQUENCES)
    rows = None if place is None else row_of_each(right.given.value, place, times)
    if place is None or rows is None:
        return
    kind = "values" if right.part == "value" else "keys"
    counts = f"{clash.left.name} has {clash.sizes[0]} heads and {right.name} has {clash.sizes[1]}"
    what = (
        f"{counts}, with {right.shape[place]} {kind}: each of {rows.shape[place]} {kind} occurs {times} times. "
        f"The sequence was repeated {times} times instead of the heads."
    )
    changes = []
    for operand in _alike(facts, clash):
        tokens = operand.place(*SEQUENCES)
        assert tokens is not None
        once = ("narrow", tokens, 0, operand.shape[tokens] // times)
        changes.append(Change(operand, (once, ("repeat_interleave", times, clash.right_place))))
    repeat = _last_repeat(facts, right)
    where = f" at {repeat.source}" if repeat is not None and repeat.source else ""
    way = f"repeat the heads, not the sequence, of keys and values{where}"
    if repeat is not None and clash.right_place < place and _sequence_comes_first(facts, repeat):
        way = f"use .transpose(1, 2) on keys and values before the repeat{where}, so that dimension 1 is the heads"
    yield Edit("heads_not_repeated", what, changes, way, cost=2)


def _last_repeat(facts: Facts, operand: Operand) -> Op | None:
    """Return the last operation on the way to an operand that made more elements; None without one."""
    for _, op in facts.reached.steps_back(operand.given.tensor):
        if op is not None and op.inputs and op.output.numel > op.inputs[0].numel:
            return op
    return None


def _sequence_comes_first(facts: Facts, repeat: Op) -> bool:
    names = facts.reached.of(repeat.inputs[0]).split()
    heads = [place for place, name in enumerate(names) if name in HEADS]
    sequence = [place for place, name in enumerate(names) if name in SEQUENCES]
    return bool(heads) and bool(sequence) and sequence[0] < heads[0]


def _with_group(left: Operand, right: Operand) -> Iterator[Edit]:
    """Give keys a dimension for the group of queries `batch kv_heads group query head_dim`."""
    heads = right.place(*HEADS)
    if heads is None:
        return
    groups = f"{left.name} has groups of query heads, {text.shape(left.shape)}"
    what = f"{groups}; {right.name} has no dimension for the group, {text.shape(right.shape)}."
    change = Change(right, (("unsqueeze", heads + 1),))
    code = f"{right.variable}.unsqueeze({heads + 1})"
    way = f"use {code} on keys and values: one key head for each group of query heads"
    yield Edit("heads_not_repeated", what, (change,), way, cost=3)


def _other_heads(clash: Clash, heads: int, once: int) -> Edit:
    """Return what is said of two numbers of heads that no repeat makes equal: which edit is right is unknown."""
    left, right = clash.left, clash.right
    kv_heads = clash.sizes[1]
    split = [str(size) for place, size in enumerate(left.shape) if _counts_heads(left, place) and size > 1]
    parts = f" in {len(split)} dimensions ({' and '.join(split)})" if len(split) > 1 else ""
    what = f"{left.name} has {heads} heads{parts} and {right.name} has {kv_heads}"
    if once and heads % once == 0:
        way = f"make {heads // once} of each of the {once} heads of keys and values"
        return Edit("heads_not_repeated", f"{what}: {once} heads repeated {kv_heads // once} times.", way=way)
    if heads % kv_heads == 0:
        way = f"split the {heads} query heads into {kv_heads} groups of {heads // kv_heads}"
        return Edit("heads_differ", f"{what}.", way=way)
    if right.size("head_dim") == heads:
        what = f"{what}, of {heads} features: the heads and their features are exchanged."
        return Edit("heads_differ", what, way=f"split {right.variable} into {heads} heads of {kv_heads}")
    what += f". {heads} is no multiple of {kv_heads}, so query heads cannot share key heads."
    return Edit("heads_differ", what, way=f"use {heads} key heads, or a number that divides {heads}")


def _before_repeats(operand: Operand, place: int) -> int:
    """Return the number of heads before each was repeated, `(heads 2)`; 0 without a repeat."""
    names = operand.dims[place]
    if len(names) == 2 and names[0] in HEADS and names[1].isdigit():
        return operand.shape[place] // int(names[1])
    return 0


# -- sizes ------------------------------------------------------------------------------------------------------------


def of_sizes(clash: Clash) -> Iterator[Edit]:
    """Make two dimensions of one name equal: of a batch, of keys and values, of the features of a head."""
    left, right = clash.left, clash.right
    name = clash.name
    size, other = clash.sizes
    if name == "batch":
        shared, place, number = (left, clash.left_place, other) if size == 1 else (right, clash.right_place, size)
        changes = []
        if shared.shape[place] == 1:
            sizes = [-1] * len(shared.shape)
            sizes[place] = number
            changes = [Change(shared, (("expand", *sizes),))]
        way = f"use {changes[0].code} to share its one item" if changes else ""
        yield Edit("batch_differs", f"{clash.text}. {SAME_BATCH}", changes, way, cost=4)
    elif name == "key":
        what = f"{clash.text}."
        yield Edit("lengths_differ", what, (_of_size(right, clash.right_place, size),), SAME_SEQUENCE, cost=4)
    elif name == "head_dim":
        what = f"{clash.text}."
        yield Edit("head_dim_differs", what, (_of_size(right, clash.right_place, size),), _SAME_WIDTH, cost=4)


def _of_size(operand: Operand, place: int, size: int) -> Change:
    """Return the change to a tensor of another size, which another part of the forward must make."""
    return Change(operand, (("new_zeros", with_size(operand.shape, place, size)),))


def with_size(shape: Sequence[int], place: int, size: int) -> tuple[int, ...]:
    """Return a shape with another size in a dimension."""
    place %= len(shape)
    return (*shape[:place], size, *shape[place + 1 :])
