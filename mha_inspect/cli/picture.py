"""What is asked to be drawn: the options of --picture, judged before torch is imported, and the pictures themselves."""

from __future__ import annotations

import os
import re
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..errors import SpecError
from ..render.export import Destination, ExportFormat
from ..render.screen import columns, in_color
from ..text import shown
from .options import Options, require_numbers

if TYPE_CHECKING:
    from ..answers.comparable_run import ComparableRun
    from ..pictures.grid import Picture
    from ..reports.trace import Trace
    from ..running.run import Run

_DRAWN = (".png", ".svg", ".html")
_MOST_TOKENS = 1 << 20
"""Bytes of a file of tokens."""


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
    heads = heads_of(head) if head else None
    names = () if tokens is None else tokens_of(tokens)
    if stage is None and options.ending not in (".png", ".html"):
        for flag, given in (("--head", head), ("--batch-row", batch_row), ("--tokens", tokens)):
            if given:
                raise SpecError(
                    f"{flag} {shown(given)} says what a picture shows, and none is drawn. Add --picture weights."
                )
        return None
    if options.device == "meta" and stage is None and options.ending == ".html":
        return None
    require_drawable(options)
    return Wanted(stage or "weights", heads, batch_row, names, stage is not None)


def require_drawable(options: Options, *, in_json: bool = False) -> None:
    """Let it pass where there are numbers to draw, and somewhere to draw them; `in_json` JSON has them too.

    Raises `SpecError` or `DeviceError` otherwise.
    """
    if options.format == "json" and options.ending not in _DRAWN and not in_json:
        raise SpecError(
            "--picture draws, and --format json has no pictures. Drop one of the two, or --export FILE.png."
        )
    require_numbers(options.device, "draw")


def check_text(target: str | None, options: Options) -> None:
    """Raise `SpecError` where no tokenizer can be there for --text, or something else says what the input is."""
    if target is None or not target.startswith("hf:"):
        raise SpecError("--text needs a tokenizer: name a model with one, as in mha-inspect trace hf:DIRECTORY.")
    for flag, name in (("--input", "input"), ("--seq-len", "seq_len"), ("--batch", "batch")):
        if name in options.typed:
            raise SpecError(f"--text and {flag} both say what goes in: drop one of the two.")


def with_text(text: str, target: str | None, options: Options, want: Wanted | None) -> tuple[Options, Wanted | None]:
    """Return the options with the ids of a text for the input, and what is drawn with its tokens as labels.

    Raises `InputError` where there is no tokenizer.
    """
    from ..build.hugging_face import tokenized

    ids, names = tokenized(str(target), text)
    changed = copy(options)
    changed.ids, changed.seq_len, changed.batch = ids, ids.shape[1], 1
    return changed, want if want is None or want.tokens else replace(want, tokens=names)


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


def draw(trace: Trace, run: Run, want: Wanted, export: Destination | None) -> Drawn | None:
    """Return the picture of each attention that was chosen, the first where none was, and all of them for a page.

    None where a page alone was asked for, and there is nothing to show in it. Raises `SpecError` where there is nothing
    of the kind that was asked for.
    """
    from ..naming.canonical import contents_of
    from ..pictures.stages import Attended, for_viewer
    from ..reports.trace import attention_names

    attended = [
        Attended(name, one.num_heads, one.num_kv_heads, partial(contents_of, run, *found))
        for name, one, found in zip(attention_names(trace), trace.attentions, run.attentions, strict=True)
    ]
    in_page = export is not None and export.format == "html"
    viewed: dict[str, Any] | None = None
    if in_page:
        viewed = for_viewer(
            attended,
            more=[want.stage],
            batch_row=want.batch_row,
            labels=want.tokens,
            attention=(trace.chosen or (1,))[0] - 1,
            stage=want.stage,
            head=want.heads[0] if want.heads else 0,
        )
        # A row that is not there is an error, as of any picture.
        if viewed is None and not want.asked and (not want.batch_row or for_viewer(attended) is None):
            return None
    if not attended:
        raise SpecError(f"{want.stage} cannot be drawn: no attention was found.")
    pictures = []
    if want.asked or viewed is None:
        for number in trace.chosen or (1,):
            own = attended[number - 1]
            pictures.append(own.picture(want.stage, heads=want.heads, batch_row=want.batch_row, labels=want.tokens))
        if trace.chosen is None and len(attended) > 1:
            others = "Attention 2 is" if len(attended) == 2 else f"Attentions 2 to {len(attended)} are"
            note = f"{others} drawn with --attention N or --module PATH."
            pictures[0] = replace(pictures[0], notes=(*pictures[0].notes, note))
    return Drawn(tuple(pictures), want.asked, viewed)


def keep_weights(seen: list[tuple[int, list[Picture]]], count: int, run: ComparableRun) -> None:
    """Note the weights of each attention of the run of a head count, averaged over the heads."""
    from ..pictures.stages import Attended, averaged

    several = len(run.attentions) > 1
    pictures = []
    for place in range(len(run.attentions)):
        found = {stage: run.content(place, stage) for stage in ("scores", "masked_scores", "weights")}
        held = {stage: tensor for stage, tensor in found.items() if tensor is not None}
        name = f"attention {place + 1} of {len(run.attentions)}" if several else ""
        pictures.append(averaged(Attended(name, count, count, partial(dict, held))))
    seen.append((count, pictures))


@dataclass(frozen=True)
class Drawn:
    """Pictures that go with a report."""

    pictures: tuple[Picture, ...]
    printed: bool
    """Whether they follow the report on stdout; else they are in the file of --export alone."""
    viewed: dict[str, Any] | None = None
    """What a page shows of all there is; None where that is nothing but the pictures."""

    def text(self, format: str, stream: IO[str] | None = None) -> str:
        """Return the pictures as text for a stream, or for a file where there is none."""
        from ..pictures.grid import depth_shown
        from ..pictures.terminal import draw

        width = None if stream is None else columns(stream)
        depth = "none" if stream is None or format == "plain" or not in_color(stream) else depth_shown()
        return "".join("\n" + draw(picture, width=width, depth=depth) for picture in self.pictures)

    def image(self, format: ExportFormat) -> bytes | None:
        """Return the pictures alone, where the file is one of an image; None where it is not."""
        if format == "png" or format == "svg":
            from ..pictures.plot import to_file

            return to_file(self.pictures, format)
        return None

    def added(self, text: str, format: ExportFormat) -> str:
        """Return the report as a file has it, with the pictures in it."""
        if self.viewed is not None:
            from ..pictures.viewer import with_viewer

            return with_viewer(text, self.viewed)
        if not self.printed or format not in ("plain", "html"):
            return text
        from ..render.html import with_pre

        drawn = self.text("plain")
        return text + drawn if format == "plain" else with_pre(text, drawn)
