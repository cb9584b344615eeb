"""Writes a page: one HTML file from plain data (`Content`), drawn by page.html.

The file contains its styles and pictures, and its content security policy forbids requests and scripts. The template
escapes all text, because class names and paths can contain anything.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from utils.drawing.draw import encode_image, tile_images, write_image
from utils.files.safe_io import write_whole

if TYPE_CHECKING:
    from jinja2 import Template

JPEG_QUALITY = 80
SHEET_COLUMNS = 4  # columns of figures in a PNG file
# Control characters except tabs and line feeds, and those that change the text direction; file names can contain any.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LONG_WORD = re.compile(r"\S{17,}")


class Facts(NamedTuple):
    """Names with their values."""

    pairs: Sequence[tuple[str, str]]


class Bullets(NamedTuple):
    """A list below its title: sentences, each with the command line that does what it says; "" if none does."""

    title: str
    points: Sequence[tuple[str, str]]


class Table(NamedTuple):
    """A table, folded if it is long. Cells are text, or numbers, which may be unknown (None, nan)."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | int | None]]


class Picture(NamedTuple):
    """A figure or a photo, uint8 (H, W, 3) RGB, with a description for screen readers."""

    label: str
    pixels: np.ndarray
    is_photo: bool = False
    density: float = 1.3  # pixels of the picture per pixel of the page


class Row(NamedTuple):
    """Cells side by side, or stacked on a narrow page."""

    cells: Sequence[Sequence[Block]]


class Card(NamedTuple):
    """Photos side by side, each below its title. In place of a photo, a text says why there is none."""

    photos: Sequence[tuple[str, Picture | str]]
    text: str
    note: str


class Gallery(NamedTuple):
    """Cards below their title, and what the colors of boxes mean."""

    title: str
    legend: Mapping[str, str]  # CSS colors
    cards: Sequence[Card]


Block = str | Facts | Bullets | Table | Picture | Row | Gallery  # a text is a paragraph; an empty block is left out


class Section(NamedTuple):
    """A part of a page, which its table of contents names."""

    title: str
    blocks: Sequence[Block]


class Content(NamedTuple):
    """A page. ``files``: the figures that are also written beside it, as sheets, by the names of PNG files without
    suffix, uint8 (H, W, 3) RGB; none is written for an empty sheet."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    files: Mapping[str, Sequence[np.ndarray]]


def write_page(path: Path, content: Content) -> None:
    """Replaces ``path``, and the files of `Content.files` beside it, each atomically. A control character in a name is
    shown as a replacement character."""
    for name, pictures in content.files.items():
        if pictures:
            write_image(path.with_name(f"{name}.png"), tile_images(pictures, SHEET_COLUMNS))
    page = _CONTROL.sub("\ufffd", _template().render(content._asdict()))
    write_whole(path, page.encode("utf-8", "backslashreplace"))


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # imported here because most runs write no page

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "breakable": breakable, "embed": embed}
    return environment.get_template("page.html")


def embed(picture: Picture) -> Markup:
    """Returns an HTML element that contains the picture, a photo as JPEG and a figure as PNG."""
    kind, style = ("jpeg", "photo") if picture.is_photo else ("png", "figure")
    file = encode_image(picture.pixels, f".{kind}", picture.label, quality=JPEG_QUALITY)
    uri = f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
    width = picture.pixels.shape[1] / picture.density
    return Markup('<img class="{}" alt="{}" width="{:.0f}" src="{}">').format(style, picture.label, width, uri)


def number(value: float | None, digits: int = 3) -> str:
    """Formats a number with thousands separators, a float with ``digits`` decimals; "–" if it is unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def breakable(text: str) -> Markup:
    """Allows line breaks after the slashes of a long path and the underscores of a long name."""
    return Markup(_LONG_WORD.sub(lambda word: re.sub("([/_])", r"\1<wbr>", word[0]), str(escape(text))))


def now() -> str:
    """Returns the local time, to the minute."""
    return datetime.now().astimezone().isoformat(" ", "minutes")
