"""What is asked to be drawn: the options of --picture, judged before torch is imported, and the pictures themselves."""

# No `from __future__ import annotations` here: Typer reads the annotations of the options at run time.

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import DeviceError, SpecError
from ..naming.stages import STAGES
from .options import Options, option, size
from .screen import columns, in_color
from .values import shown

if TYPE_CHECKING:
    from ..pictures.colour import Depth
    from ..pictures.grid import Picture
    from ..record.subject import Run
    from ..reports.trace import Trace

PANEL = "Picture"
_DRAWN = (".png", ".svg", ".html")
_MOST_TOKENS = 1 << 20
"""Bytes of a file of tokens."""

StageOption = Annotated[
    str | None,
    option(
        "--picture",
        PANEL,
        "Draw this stage, a heat map for each head: weights, scores or any other.",
        known=STAGES,
        metavar="STAGE",
        show_default="none",
    ),
]
HeadOption = Annotated[
    str, option("--head", PANEL, "The heads to draw, as in 0,3-5.", metavar="N,N-N", show_default="all")
]
RowOption = Annotated[int, size("--batch-row", PANEL, "The row of the batch to draw.")]
TokensOption = Annotated[
    str | None,
    option(
        "--tokens",
        PANEL,
        "What stands at each place, to label the axes: a file with one a line, or a comma list.",
        metavar="FILE|A,B,...",
        show_default="numbers",
    ),
]


@dataclass(frozen=True)
class Wanted:
    """Which pictures were asked for, and where they go."""

    stage: str
    heads: tuple[int, ...] | None
    """All where it is None."""
    batch_row: int
    tokens: tuple[str, ...]
    asked: bool
    """Whether they are printed; else they go into a file alone."""


def wanted(
    options: Options, stage: str | None, head: str = "", batch_row: int = 0, tokens: str | None = None
) -> Wanted | None:
    """Return what is to be drawn; None where nothing is.

    Raises `SpecError` where an option has nothing to draw, or cannot be read, and `DeviceError` where there are no
    numbers.
    """
    ending = "" if options.export is None else options.export.suffix.lower()
    heads = heads_of(head) if head else None
    names = () if tokens is None else tokens_of(tokens)
    if stage is None and ending not in (".png", ".html"):
        for flag, given in (("--head", head), ("--batch-row", batch_row), ("--tokens", tokens)):
            if given:
                raise SpecError(
                    f"{flag} {shown(given)} says what a picture shows, and none is drawn. Add --picture weights."
                )
        return None
    if stage is not None and options.format == "json" and ending not in _DRAWN:
        raise SpecError(
            "--picture draws, and --format json has no pictures. Drop one of the two, or --export FILE.png."
        )
    if options.device == "meta":
        if stage is None and ending == ".html":
            return None
        raise DeviceError("device meta has shapes and no numbers to draw. Try --device cpu.")
    return Wanted(stage or "weights", heads, batch_row, names, stage is not None)


def heads_of(typed: str) -> tuple[int, ...]:
    """Return the heads that `0,3-5` names, each once. Raises `SpecError` where it names none."""
    heads: list[int] = []
    for part in typed.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise SpecError(
                f"head {shown(typed)} is no list of heads: write numbers and spans of them, as in --head 0,3-5."
            )
        heads += range(first, last + 1)
    return tuple(dict.fromkeys(heads))


def tokens_of(typed: str) -> tuple[str, ...]:
    """Return the labels in a file, one a line, or of a comma list. Raises `SpecError` where the file cannot be read."""
    path = Path(typed)
    if not path.is_file():
        if "," in typed or not (path.suffix or os.sep in typed):
            return tuple(part.strip() for part in typed.split(","))
        raise SpecError(f"tokens {shown(typed)}: there is no such file. Name one with a token a line, or write a,b,c.")
    try:
        with path.open("rb") as file:
            return tuple(file.read(_MOST_TOKENS).decode("utf-8", "replace").splitlines())
    except OSError as error:
        raise SpecError(f"tokens {shown(typed)} could not be read: {error.strerror}. Name another file.") from None


def pictures_of(trace: "Trace", run: "Run", want: Wanted) -> "tuple[Picture, ...]":
    """Return the picture of each attention that was chosen, the first where none was.

    Raises `SpecError` where there is nothing of the kind that was asked for.
    """
    from ..naming.canonical import contents_of
    from ..pictures.stages import stage_picture

    if not trace.attentions:
        raise SpecError(f"{want.stage} cannot be drawn: no attention was found.")
    pictures = []
    for place in [number - 1 for number in trace.chosen or (1,)]:
        found, names = run.attentions[place]
        attention = trace.attentions[place]
        which = f"attention {place + 1} of {len(trace.attentions)}" if len(trace.attentions) > 1 else ""
        where = f" in {attention.module}" if attention.module and which else ""
        kv = want.stage in ("k_proj", "v_proj")
        pictures.append(
            stage_picture(
                contents_of(run, found, names),
                want.stage,
                attention.num_kv_heads if kv else attention.num_heads,
                heads=want.heads,
                batch_row=want.batch_row,
                labels=want.tokens,
                title=f"{want.stage} of {which}{where}" if which else want.stage,
            )
        )
    if trace.chosen is None and len(trace.attentions) > 1:
        note = f"Attentions 2 to {len(trace.attentions)} are drawn with --attention N or --module PATH."
        pictures[0] = replace(pictures[0], notes=(*pictures[0].notes, note))
    return tuple(pictures)


def text_of(pictures: "Sequence[Picture]", format: str | None, stream: Any = None) -> str:
    """Return pictures as text for a stream, or for a file of text where there is none."""
    from ..pictures.terminal import draw

    width = None if stream is None else columns(stream)
    depth: Depth = "none" if stream is None or format == "plain" or not in_color(stream) else colours()
    return "\n".join(draw(picture, width=width, depth=depth) for picture in pictures)


def colours() -> "Depth":
    """Return how many colours a terminal shows that shows any, as far as it says."""
    terminal = os.environ.get("TERM", "")
    many = os.environ.get("COLORTERM", "").casefold() in ("truecolor", "24bit") or terminal.endswith("-direct")
    many = many or os.environ.get("FORCE_COLOR") == "3" or "WT_SESSION" in os.environ
    return "true" if many else "256"
