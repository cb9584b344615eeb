"""Writes a self-contained HTML page from a Jinja2 template, which is next to the module that fills it in.

The file contains its styles and pictures, and its content security policy forbids requests and scripts. Templates
escape all text except `Markup`, because class names and paths can contain anything.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape

from utils.drawing.figures import DPI, WIDTH, Picture
from utils.files.safe_io import write_whole
from utils.program_folders import PROJECT
from utils.strings import counted

if TYPE_CHECKING:
    from jinja2 import Environment

UNKNOWN = "not known"
FIGURE_PX = 460  # width of a chart in a wide page
# Control characters except tabs and line feeds, and those that change the text direction; file names can contain any.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LONG_WORD = re.compile(r"\S{17,}")


class HtmlTable(NamedTuple):
    """A table. The ``caption`` is also read by screen readers. Cells are text, or numbers, which may be unknown."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | int | None]]
    caption: str


class LegendEntry(NamedTuple):
    """The meaning of a color in the pictures of a gallery."""

    text: str
    color: str  # CSS color


class CardPicture(NamedTuple):
    """A picture on a card."""

    title: str
    picture: Markup


class Card(NamedTuple):
    """Pictures side by side, each with its title, in a gallery; cards of the same ``kind`` are shown together."""

    pictures: Sequence[CardPicture]
    text: str
    note: str | Markup = ""
    kind: str = ""


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # imported here because most runs write no page

    environment = Environment(
        loader=FileSystemLoader(PROJECT),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "counted": counted, "breakable": breakable, "figure": embed_figure}
    return environment


def render(template: str, title: str, subtitle: str = "", **values: Any) -> str:
    """Renders the page with the sections of ``template``, a path below the root of the program, and a table of
    contents. A control character in a name is shown as a replacement character."""
    environment = _environment()
    sections: list[str] = []  # titles: filled in by the macro `section`
    body = environment.get_template(template).render(values, sections=sections)
    layout = environment.get_template("utils/drawing/page.html")
    page = layout.render(title=title, subtitle=subtitle, sections=sections, body=Markup(body))
    return _CONTROL.sub("\ufffd", page)


def write_page(path: str | Path, template: str, title: str, subtitle: str = "", **values: Any) -> None:
    """Replaces ``path`` atomically. Arguments: see `render`."""
    write_whole(path, render(template, title, subtitle, **values).encode("utf-8", "backslashreplace"))


def embed_image(content: bytes, kind: str, label: str, style: str, width: float) -> Markup:
    """Embeds a PNG or JPEG file (``kind``) in the page. ``style`` is a class of the style sheet, ``width`` in
    pixels."""
    uri = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return Markup('<img class="{}" alt="{}" width="{:.0f}" src="{}">').format(style, label, width, uri)


def embed_figure(picture: Picture, label: str) -> Markup:
    """Embeds a figure, scaled to `FIGURE_PX` for a chart of the usual width."""
    return embed_image(picture.png, "png", label, "figure", picture.pixels.shape[1] * FIGURE_PX / (WIDTH * DPI))


def number(value: float | None, digits: int = 3) -> str:
    """Formats a number with thousands separators, a float with ``digits`` decimals; "–" if it is unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def breakable(text: str) -> Markup:
    """Allows line breaks after the slashes of a long path and the underscores of a long name. Returns `Markup`
    unchanged."""
    if isinstance(text, Markup):
        return text
    return Markup(_LONG_WORD.sub(lambda word: re.sub("([/_])", r"\1<wbr>", word[0]), str(escape(text))))


def now() -> str:
    """Returns the local time, to the minute."""
    return datetime.now().astimezone().isoformat(" ", "minutes")


def code(text: str) -> Markup:
    """Marks text as code."""
    return Markup("<code>{}</code>").format(text)
