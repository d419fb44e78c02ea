"""Numbers and shapes as people read them."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, isnan, sqrt


def count(number: int) -> str:
    """`1,050,624`."""
    return f"{number:,}"


def shape(sizes: tuple[int, ...]) -> str:
    """`[2, 12, 256]`."""
    return f"[{', '.join(map(str, sizes))}]"


def _scaled(number: float, step: int, units: tuple[str, ...]) -> str:
    """The number in the largest unit that leaves at least 1: `1.1 KiB`, `147 kFLOP`, and `12 B` in the smallest."""
    power = 0
    # Rounded before it is compared, so that 1023.99 KiB reads 1.0 MiB.
    while round(number / step**power, 1) >= step and power + 1 < len(units):
        power += 1
    scaled = number / step**power
    return f"{scaled:,.{1 if power and scaled < 99.95 else 0}f} {units[power]}"


def size(nbytes: int) -> str:
    """`24.0 KiB`."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def flops(number: int) -> str:
    """`6.3 MFLOP`; empty for none."""
    return _scaled(number, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")) if number else ""


def _special(number: float) -> str | None:
    if isfinite(number):
        return "0" if number == 0 else None
    return "NaN" if isnan(number) else "inf" if number > 0 else "-inf"


def small(number: float) -> str:
    """A difference: `1.2e-07`, `0.314`."""
    return _special(number) or (f"{number:.1e}" if abs(number) < 1e-3 else f"{number:.3g}")


def statistic(number: float) -> str:
    """A mean, std, min or max: four digits after the point, and powers of ten where those would say nothing."""
    return _special(number) or (f"{number:.4f}" if 1e-3 <= abs(number) < 1e5 else f"{number:.3e}")


def times(number: float) -> str:
    """A multiple: `0.5`, `17.3`, `1,302,118`."""
    return _special(number) or (f"{number:,.0f}" if number >= 100 else f"{number:.1f}")


def percent(share: float) -> str:
    """`74.9 %` for 0.749."""
    return f"{100 * share:.1f} %"


def scale(factor: float, head_dim: int) -> str:
    """`0.0625 = 1/√256` where it is that; the bare number where it is not."""
    if factor == 1:
        return "1 (not scaled)"
    # What was applied may be a product of two rounded square roots, as in torch's math path.
    usual = head_dim > 0 and abs(factor * sqrt(head_dim) - 1) < 1e-6
    return f"{factor:.6g} = 1/√{head_dim}" if usual else f"{factor:.6g}"


def span(bounds: tuple[int, int]) -> str:
    """`0–255` for Python's bounds (0, 256): both ends included, as prose has it."""
    start, stop = bounds
    return f"{start}–{stop - 1}" if stop - start > 1 else str(start) if stop > start else "none"


def spans(numbers: Iterable[int]) -> str:
    """`0–3, 7` for 0, 1, 2, 3, 7."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return ", ".join(span(run) for run in runs)


def plural(number: int, noun: str) -> str:
    """`1 head`, `8 heads`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
