"""Every test draws the same numbers, alone and among others, and what is asked of a case is asked in one process."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of one case beside each other: what they share, a run or a report, is then made once."""
    places: dict[str, int] = {}
    keys = []
    for place, item in enumerate(items):
        case = case_of(item)
        keys.append(places.setdefault(case, place) if case else place)
    order = sorted(range(len(items)), key=keys.__getitem__)
    items[:] = [items[place] for place in order]


def case_of(item: pytest.Item) -> str:
    """Return the name of the case that a test of the corpus asks about; empty without one."""
    params = getattr(item, "callspec", None)
    if params is None or item.path.parent.name != "corpus":
        return ""
    case = params.params.get("name", params.params.get("case", params.params.get("pair")))
    return str(getattr(case, "name", case if isinstance(case, str) else ""))
