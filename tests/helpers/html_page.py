"""Reads a page of utils/drawing/page.py."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import cv2
import numpy as np

VOID = {"meta", "link", "br", "wbr", "img"}


class HtmlPage(HTMLParser):
    """Tags with their attributes, the text of each section by title, and the cells of each table by name.

    Fails if tags are not nested correctly.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._open: list[str] = []
        self._title = ""
        self._rows: list[list[str]] | None = None
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag in VOID:
            return
        self._open.append(tag)
        if tag == "h2":
            self._title = ""
        elif tag == "table":
            self._rows = self.tables.setdefault(attributes.get("aria-label") or "", [])
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("td", "th") and self._rows is not None:
            self._rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, tag
        if tag == "h2":
            self.sections[self._title] = ""
        elif tag == "table":
            self._rows = None

    def handle_data(self, data):
        self.text += data
        if "h2" in self._open:
            self._title += data
        elif "section" in self._open and self._title in self.sections:
            self.sections[self._title] += data
            if self._rows and {"td", "th"} & set(self._open):
                self._rows[-1][-1] += data


def check_self_contained(text: str) -> HtmlPage:
    """Fails if the page has external references or scripts."""
    page = HtmlPage(text)
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "data", "action", "srcset", "xlink:href"):
                assert (value or "").startswith(("#", "data:")), (tag, name, value)
    assert not {"script", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    return page


def photos_of(page: HtmlPage) -> dict[str, np.ndarray]:
    """Returns the photos of a page by their label: uint8 (H, W, 3) RGB."""
    images = [attributes for tag, attributes in page.tags if tag == "img" and attributes["class"] == "photo"]
    return {str(image["alt"]): _decoded(str(image["src"])) for image in images}


def _decoded(uri: str) -> np.ndarray:
    content = np.frombuffer(base64.b64decode(uri.partition(",")[2]), np.uint8)
    image = cv2.imdecode(content, cv2.IMREAD_COLOR)
    assert image is not None
    return image[..., ::-1]
