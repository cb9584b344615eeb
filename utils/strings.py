"""Text for messages: counts, lists, tables, durations and ranks; and numbers in text."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """Formats a count with its noun: ``1 image``, ``2,000 images``, ``2 boxes``, ``2 entries``. ``noun`` may include
    adjectives."""
    if count == 1:
        return f"{count:,} {noun}"
    if noun.endswith("y") and not noun.endswith(("ay", "ey", "oy", "uy")):
        return f"{count:,} {noun[:-1]}ies"
    plural = "es" if noun.endswith(("s", "x", "sh", "tch")) else "s"
    return f"{count:,} {noun}{plural}"


def format_bytes(size: float) -> str:
    """Formats a number of bytes with a decimal unit up to GB."""
    for unit, digits in (("B", 0), ("kB", 0), ("MB", 1)):
        if size < 999.5:
            return f"{size:.{digits}f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def listed(items: Sequence[str], max_items: int = 8) -> str:
    """Joins items for a message: ``a, b and 3 more``."""
    more = f" and {len(items) - max_items} more" if len(items) > max_items else ""
    return ", ".join(items[:max_items]) + more


def aligned(rows: Sequence[Sequence[str]], *, left: bool = False) -> list[str]:
    """Formats a table as lines with right-aligned, or ``left``-aligned, columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    pad = str.ljust if left else str.rjust
    return ["  ".join(map(pad, row, widths)).rstrip() for row in rows]


def format_duration(seconds: float) -> str:
    """Formats seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def rank_list(ranks: Sequence[int]) -> str:
    """Lists ranks for a message: "rank 3", "ranks 0, 1 and 7 more"."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {listed(list(map(str, ranks)))}"


def is_plain_number_text(text: str) -> bool:
    """Returns whether a text is free of numbers that only Python's float accepts, such as 1_0 or non-ASCII digits."""
    return text.isascii() and "_" not in text
