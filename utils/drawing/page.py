"""Builds a self-contained HTML page: sections, tables, figures, folds and a gallery with filters.

The page loads nothing: styles, the script and pictures are in the file, and its content security policy forbids
requests. Text is escaped, as class names and paths may contain anything; only `Markup` is taken as it is.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup, escape

from utils.drawing.page_assets import SCRIPT, STYLE
from utils.files.safe_io import write_whole

Content = str | Markup
UNKNOWN = "not known"


@dataclass(frozen=True)
class Card:
    """A picture of a gallery.

    ``tags``: for each filter of the gallery, in their order, the chosen values that show this card. A card with several
    tags is shown if one of them fits all filters.
    """

    body: Markup
    caption: Content
    tags: tuple[tuple[str, ...], ...] = ()


class Page:
    """Collects sections, and writes them with a table of contents."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title, self._subtitle = title, subtitle
        self._sections: list[tuple[str, Markup]] = []
        self._pictures: dict[str, tuple[str, float, float]] = {}

    def section(self, title: str, *parts: Content) -> None:
        """Adds a section; plain text becomes a paragraph."""
        self._sections.append((title, Markup("\n").join(map(_block, parts))))

    def picture(self, name: str, jpeg: bytes, width: float, height: float) -> Markup:
        """Stores a JPEG file once under ``name`` (letters and digits), to be drawn ``width`` x ``height`` user units
        large. Returns an element that draws it inside an SVG, which several figures may use."""
        self._pictures[name] = (data_uri(jpeg, "image/jpeg"), width, height)
        return Markup('<use href="#{}"/>').format(name)

    def render(self) -> str:
        script_hash = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
        policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'"
        links = Markup("").join(
            Markup('<a href="#s{}">{}</a>\n').format(number, title) for number, (title, _) in enumerate(self._sections)
        )
        sections = Markup("\n").join(
            Markup('<section id="s{}" aria-labelledby="h{}">\n<h2 id="h{}">{}</h2>\n{}\n</section>').format(
                number, number, number, title, body
            )
            for number, (title, body) in enumerate(self._sections)
        )
        pictures = Markup("").join(
            Markup('<image id="{}" href="{}" width="{}" height="{}"/>\n').format(name, *picture)
            for name, picture in self._pictures.items()
        )
        text = _LAYOUT.format(
            policy=policy,
            title=self._title,
            subtitle=self._subtitle,
            style=Markup(STYLE),
            links=links,
            sections=sections,
            pictures=pictures,
            script=Markup(SCRIPT),
        )
        return str(text)  # not `Markup`, with which the caller's text would be escaped

    def write(self, path: str | Path) -> None:
        """Replaces ``path`` atomically."""
        write_whole(path, self.render().encode("utf-8", "backslashreplace"))


_LAYOUT = Markup("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p class="muted">{subtitle}</p></header>
<nav aria-label="Sections">
{links}</nav>
<main>
{sections}
</main>
<svg width="0" height="0" class="store" aria-hidden="true"><defs>
{pictures}</defs></svg>
<script>{script}</script>
</body>
</html>
""")


def data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def number(value: float | None, digits: int = 3) -> str:
    """A number for a reader: at most ``digits`` decimals, thousands separated; "–" if it is not known."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def _block(part: Content) -> Markup:
    return part if isinstance(part, Markup) else paragraph(part)


def paragraph(text: Content, kind: str = "") -> Markup:
    """``kind``: "", "muted" or "warning"."""
    return Markup('<p class="{}">{}</p>').format(kind, text) if kind else Markup("<p>{}</p>").format(text)


def heading(text: Content) -> Markup:
    """Of a part of a section."""
    return Markup("<h3>{}</h3>").format(text)


def bullets(items: Iterable[Content]) -> Markup:
    return Markup("<ul>{}</ul>").format(Markup("").join(Markup("<li>{}</li>").format(item) for item in items))


def fold(summary: Content, *parts: Content, is_open: bool = False) -> Markup:
    """Content that a click on ``summary`` shows."""
    body = Markup("\n").join(map(_block, parts))
    return Markup("<details{}><summary>{}</summary>\n{}\n</details>").format(
        Markup(" open") if is_open else "", summary, body
    )


def row_of(*parts: Content) -> Markup:
    """Parts side by side, below each other where the page is narrow."""
    cells = Markup("").join(Markup("<div>{}</div>").format(_block(part)) for part in parts)
    return Markup('<div class="row">{}</div>').format(cells)


def facts(pairs: Iterable[tuple[Content, Content]]) -> Markup:
    """Names and their values."""
    rows = Markup("").join(Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(*pair) for pair in pairs)
    return Markup('<dl class="facts">{}</dl>').format(rows)


def figure(body: Markup, caption: Content, legend: Markup | str = "") -> Markup:
    return Markup("<figure><figcaption>{}</figcaption>{}{}</figure>").format(caption, body, legend)


def table(columns: Sequence[Content], rows: Iterable[Sequence[Content | float | int | None]], caption: str) -> Markup:
    """A table whose columns are sorted by a click on their name. Numbers are aligned right; it scrolls inside its box.

    Args:
        caption: what the table shows, for screen readers too.
    """
    head = Markup("").join(Markup('<th scope="col"><button type="button">{}</button></th>').format(c) for c in columns)
    body = Markup("\n").join(Markup("<tr>{}</tr>").format(Markup("").join(map(_cell, row))) for row in rows)
    return _scrolling("sortable", caption, Markup("<thead><tr>{}</tr></thead><tbody>\n{}\n</tbody>").format(head, body))


def _scrolling(kind: str, caption: str, body: Markup) -> Markup:
    """A table that scrolls inside its box, below its caption, which does not."""
    return Markup(
        '<figure><figcaption>{}</figcaption><div class="scroll" tabindex="0" role="region" aria-label="{}">'
        '<table class="{}" aria-label="{}">{}</table></div></figure>'
    ).format(caption, caption, kind, caption, body)


def _cell(value: Content | float | int | None) -> Markup:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return Markup('<td class="number" data-value="">–</td>')
    if isinstance(value, str):
        return Markup("<td>{}</td>").format(value)
    return Markup('<td class="number" data-value="{}">{}</td>').format(repr(float(value)), number(value))


def bars(rows: Sequence[tuple[str, float, str]], caption: str) -> Markup:
    """Horizontal bars from 0: name, value, and the value as text. Values below 0 have no bar.

    Args:
        caption: names the unit.
    """
    top = max((value for _, value, _ in rows if math.isfinite(value)), default=0.0)
    lines = [
        Markup(
            '<tr><th scope="row">{}</th><td class="bar"><div style="width:{:.1f}%"></div></td><td>{}</td></tr>'
        ).format(name, 100 * max(value, 0.0) / top if top > 0 and math.isfinite(value) else 0.0, text)
        for name, value, text in rows
    ]
    return _scrolling("bars", caption, Markup("<tbody>{}</tbody>").format(Markup("\n").join(lines)))


def grouped_bars(rows: Sequence[tuple[str, Sequence[float], str]], caption: str) -> Markup:
    """Horizontal bars from 0, one for each series, in the colors s0, s1, ... of the style sheet: name, values, and the
    values as text.

    Args:
        caption: names the unit.
    """
    top = max((value for _, values, _ in rows for value in values), default=0.0) or 1.0
    bar = Markup('<div class="s{}" style="width:{:.1f}%"></div>')
    lines = [
        Markup('<tr><th scope="row">{}</th><td class="bar group">{}</td><td>{}</td></tr>').format(
            name, Markup("").join(bar.format(i, 100 * value / top) for i, value in enumerate(values)), text
        )
        for name, values, text in rows
    ]
    return _scrolling("bars", caption, Markup("<tbody>{}</tbody>").format(Markup("\n").join(lines)))


def matrix(values: Sequence[Sequence[int]], shades: Sequence[Sequence[float]], names: Sequence[str],
           caption: str, rows_are: str, columns_are: str) -> Markup:  # fmt: skip
    """A square table of counts, shaded by ``shades`` in [0, 1]."""
    head = Markup("").join(Markup('<th scope="col"><span>{}</span></th>').format(name) for name in names)
    lines = [
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            name,
            Markup("").join(
                Markup('<td style="--shade:{:.2f}">{}</td>').format(shade, f"{value:,}" if value else "")
                for value, shade in zip(row, shade_row)
            ),
        )
        for name, row, shade_row in zip(names, values, shades)
    ]
    corner = Markup("{} ↓ &nbsp; {} →").format(rows_are, columns_are)
    body = Markup("<thead><tr><td>{}</td>{}</tr></thead><tbody>{}</tbody>").format(
        corner, head, Markup("\n").join(lines)
    )
    return _scrolling("matrix", caption, body)


def gallery(
    cards: Sequence[Card],
    filters: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    label: str,
    *,
    card_px: int = 560,
) -> Markup:
    """Cards, with a menu for each filter.

    Args:
        filters: a name, and its choices: value and text. "All" is added.
        label: what the cards are, for screen readers.
        card_px: least width of a card, if the page is wide enough.
    """
    menus = Markup("").join(
        Markup('<label>{} <select><option value="">all</option>{}</select></label>').format(
            name, Markup("").join(Markup('<option value="{}">{}</option>').format(*choice) for choice in choices)
        )
        for name, choices in filters
    )
    count = Markup('<span class="muted" role="status">{} of {} shown</span>').format(len(cards), len(cards))
    shown = Markup("\n").join(
        Markup('<figure class="card" data-tags="{}">{}<figcaption>{}</figcaption></figure>').format(
            json.dumps(card.tags, separators=(",", ":")), card.body, card.caption
        )
        for card in cards
    )
    bar = Markup('<div class="filters">{}{}</div>').format(menus, count) if filters else ""
    body = Markup('<div class="cards" style="--card:{}px">\n{}\n</div>').format(card_px, shown)
    return Markup('<div class="gallery" role="group" aria-label="{}">{}{}</div>').format(label, bar, body)


def side_by_side(*pictures: tuple[str, Markup]) -> Markup:
    """Two or three pictures of a card, each with its title."""
    cells = Markup("").join(Markup("<div>{}{}</div>").format(*picture) for picture in pictures)
    return Markup('<div class="{}">{}</div>').format("pair" if len(pictures) == 2 else "triple", cells)


def with_note(text: Content, note: Content) -> Markup:
    """A text, and below it a note in a muted color."""
    return Markup("{}<br><span class='muted'>{}</span>").format(text, note)


def code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(escape(text))
