"""Reads the Markdown files of the repository: code blocks, commands, links."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = ("sh", "python", "yaml", "diff", "text")
# An inline code span is a command if it begins with one of these words and something follows.
COMMANDS = ("python", "lockstep", "torchrun", "make", "sbatch", "yolo", "kubectl", "pip", "git", "docker", "apt")


def documents() -> list[str]:
    """Paths of all Markdown files, relative to the root; not the log of measurements, with the commands of its days."""
    paths = (path for path in ROOT.rglob("*.md") if not {"runs", "demo", "LOG.md"} & set(path.relative_to(ROOT).parts))
    return sorted(str(path.relative_to(ROOT)) for path in paths if not any(p.startswith(".") for p in path.parts))


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str
    line: int  # number of its first line of code, from 1
    language: str
    title: str  # what follows the language, such as the path of a file
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page. Raises AssertionError for a language that no test knows."""
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
    """A page without its fenced blocks; their lines are empty."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command line, without environment variables and comment."""

    page: str
    line: int
    words: tuple[str, ...]
    in_text: bool = False  # in a sentence or table, not in a block

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def commands(page: str) -> list[Command]:
    """The command lines of the ``sh`` blocks of a page, and those in its text."""
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
    """The commands of a line, joined by ``&&`` or ``;``; their redirections are left out."""
    words = shlex.split(line.replace("\\ ", " "), comments=True)
    found_commands = []
    current = []
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
    """The relative links of a page: path, relative to the root ("" is the page), and anchor."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    local = [target.partition("#") for target in targets if not re.match(r"[a-z]+:", target)]
    folder = Path(page).parent
    return [(os.path.normpath(folder / path) if path else page, anchor) for path, _, anchor in local]


def anchors(page: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-") for title in titles}
