"""Reads the Markdown files of the repository: code blocks, commands, links."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from tests.helpers.repository import ROOT

LANGUAGES = ("sh", "python", "yaml", "diff", "text")
# An inline code span is a command if it begins with one of these words and something follows.
COMMANDS = ("python", "lockstep", "torchrun", "make", "sbatch", "yolo", "kubectl", "pip", "git", "docker", "apt")


def documents() -> list[str]:
    """Returns the paths of all Markdown files, relative to the root, except those in other hidden folders than .github,
    and the log of measurements, whose commands are historical."""
    paths = [path.relative_to(ROOT) for path in ROOT.rglob("*.md")]
    hidden = {part for path in paths for part in path.parts if part.startswith(".")} - {".github"}
    left_out = {"runs", "demo", "LOG.md"} | hidden
    return sorted(str(path) for path in paths if not left_out & set(path.parts))


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str
    line: int  # number of its first line of code, from 1
    language: str
    title: str  # the text after the language, such as a file path
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """Returns the fenced blocks of a page. Raises AssertionError for a language that no test covers."""
    found_blocks = []
    start = None
    info = ""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start = number
            info = line.strip().removeprefix("```")
            continue
        language, _, title = info.partition(" ")
        assert language in LANGUAGES, f"{page}:{start}: a block of code needs one of the languages {LANGUAGES}"
        found_blocks.append(Block(page, start + 1, language, title, "\n".join(lines[start : number - 1]) + "\n"))
        start = None
    assert start is None, f"{page}:{start}: a block of code without an end"
    return found_blocks


def prose(page: str) -> str:
    """Returns a page with the lines of its fenced blocks emptied."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command line without environment variables and comments."""

    page: str
    line: int
    words: tuple[str, ...]
    in_text: bool = False  # in a sentence or table, not in a block

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def commands(page: str) -> list[Command]:
    """Returns the command lines in a page's ``sh`` blocks and in its text."""
    found_commands = []
    for block in blocks(page):
        if block.language == "sh":
            text = re.sub(r"\\\n", lambda _: "\\ ", block.text)  # a continued line keeps the number of its first
            for offset, line in enumerate(text.splitlines()):
                found_commands += _split(page, block.line + offset, line)
    for number, line in enumerate(prose(page).splitlines(), 1):
        for span in re.findall(r"`([^`]+)`", line):
            if re.match(rf"({'|'.join(COMMANDS)}) +\S", span):
                found_commands += [replace(command, in_text=True) for command in _split(page, number, span)]
    return found_commands


def _split(page: str, number: int, line: str) -> list[Command]:
    """Splits a line at ``&&`` and ``;`` into commands, without their redirections."""
    words = shlex.split(line.replace("\\ ", " "), comments=True)
    found_commands = []
    current: list[str] = []
    for word in [*words, "&&"]:
        if word in ("&&", ";", "||", "|"):
            if current:
                found_commands.append(Command(page, number, tuple(_without_environment(current))))
            current = []
        else:
            current.append(word)
    return found_commands


def _without_environment(words: list[str]) -> list[str]:
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words[: words.index(">")] if ">" in words else words


def links(page: str) -> list[tuple[str, str]]:
    """Returns the path, relative to the root ("" is the page), and the anchor of each relative link of a page."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    local = [target.partition("#") for target in targets if not re.match(r"[a-z]+:", target)]
    folder = Path(page).parent
    return [(os.path.normpath(folder / path) if path else page, anchor) for path, _, anchor in local]


def anchors(page: str) -> set[str]:
    """Returns the anchors that GitHub generates from a page's headings."""
    titles = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-") for title in titles}
