"""Changes to files, drawn from a `random.Random`: to bytes, to the values in JSON, YAML, XML and YOLO rows, and to what
kind of file it is. Every change is returned with a short description."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

Change = tuple[bytes, str]  # the new content, and what was done

_MARK = "@@odd@@"
_INTEGERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**40, 2**63 - 1, 2**64 - 1)
_DEEP = 3000
_LONG = 200_000

NUMBER_TEXTS = (
    "nan", "inf", "-inf", "Infinity", "-1", "-0", "0", "1e400", "-1e400", "1e-400", "1e308", "1_0", "0x1", "0.5.5",
    "½", "０.５", "٣", "1,5", "0.5\0", "0.5\x0c", "0.5\x1c0.5", "0.5\u2028", "0.5\xa0", "\ufeff0.5", "+0.5", ".5", "5.",
    "1e0", "true", "None", "''", "", "x", "5" * 400, "5" * 5000, "0." + "3" * 400, "1e", "0.5 0.5",
    "99999999999999999999", "2",
)  # fmt: skip
JSON_TEXTS = (
    "NaN", "Infinity", "-Infinity", "1e400", "-1", "0", "-0.0", "1.5", "5" * 400, "5" * 5000, "1e-400", "true", "false",
    "null", '""', '"x"', '"\\u0000"', '"\\ud800"', '"\\udcff"', '"../../../etc/passwd"', '"/dev/zero"', '"1"', "[]",
    "{}", "[1, 2]", '{"id": 1}', "[true, true, true, true]", "[1, 2, 3, NaN]", "[1, 2, 3, " + "5" * 400 + "]", "[null]",
    "1 1",
    '"' + "x" * _LONG + '"', "[" * _DEEP + "]" * _DEEP, "[" * 90_000 + "]" * 90_000,
    '{"a":' * _DEEP + "1" + "}" * _DEEP,
    "99999999999999999999", '"a\\nb"', "'x'", "1,", "undefined", '"ü"', '"\\u0007"',
)  # fmt: skip
YAML_TEXTS = (
    ".nan", ".inf", "1e400", "-1", "0", "1.5", "5" * 400, "5" * 5000, "true", "null", "~", "''", "x", "[]", "{}", "[x]",
    "{x: 1}", "[[1]]", "&a [*a]", "&a {k: *a}", "*nowhere", "!!python/object/apply:os.system [true]", "!!binary eA==",
    "!!set {a, b}", "!!omap [a: 1]", "!!timestamp 2020-01-01", "2020-01-01", "0x10", "0o7", "1_000", "1:30", "!!int x",
    "!!float x", "!foo bar", '"\\0"', '"\\ud800"', '"\\uD83D"', "../../etc", "/dev/zero", "/", ".", "[" * 99 + "]" * 99,
    "[" * _DEEP + "]" * _DEEP, "x" * _LONG, "|\n  text\n  more", "? [a]\n: b", "@x", "%x", "\t", "ü", "<<", "{<<: [1]}",
    "{<<: {a: 1}, a: 2}", "1e-3", "!!str 5", "99999999999999999999", "[1, 2", "'", "!!null x", "no", "{[a]: b}",
    "{{}: b}",
)  # fmt: skip
ODD_KINDS = ("fifo", "folder", "loop", "dangling", "empty", "sparse", "zero", "socket", "unreadable", "full folder")


# Bytes


def change_bytes(data: bytes, rng: random.Random, others: list[bytes] = []) -> Change:  # noqa: B006 (never changed)
    """Makes one change, or a few in a row."""
    kinds = [_flip, _flip, _truncate, _insert, _zero, _delete, _repeat, _number, _number, _text]
    words = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if rng.random() < 0.02:
            data = rng.choice((b"", rng.randbytes(rng.randrange(1, 5000))))
            word = "replaced"
        elif others and rng.random() < 0.12:
            data = _splice(data, rng, rng.choice(others))
            word = "spliced"
        else:
            kind = rng.choice(kinds)
            data = kind(data, rng)
            word = kind.__name__.strip("_")
        words.append(word)
    return data, "+".join(words)


def _place(data: bytes, rng: random.Random) -> int:
    """A position, often near an end of the file, where headers and directories are."""
    size = len(data)
    if not size:
        return 0
    near = min(size, 400)
    return rng.choice((rng.randrange(size), rng.randrange(near), size - 1 - rng.randrange(near)))


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    at = _place(data, rng)
    return at, min(at + rng.choice((1, 2, 4, 16, 64, 512, max(len(data) // 3, 1))), len(data))


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
        changed[_place(data, rng)] ^= rng.choice((1 << rng.randrange(8), rng.randrange(1, 256)))
    return bytes(changed)


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: _place(data, rng)]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + rng.randbytes(rng.choice((1, 2, 3, 50, 3000))) + data[at:]


def _zero(data: bytes, rng: random.Random) -> bytes:
    first, last = _span(data, rng)
    return data[:first] + rng.choice((b"\0", b"\xff", b"\x20")) * (last - first) + data[last:]


def _delete(data: bytes, rng: random.Random) -> bytes:
    first, last = _span(data, rng)
    return data[:first] + data[last:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    first, last = _span(data, rng)
    return data[:last] + data[first:last] * rng.choice((1, 2, 20)) + data[last:]


def _number(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    order = rng.choice("<>")
    kind = rng.choice("BHIQ")
    size = struct.calcsize(kind)
    value = rng.choice(_INTEGERS) % 256**size
    return data[:at] + struct.pack(order + kind, value) + data[at + size :]


def _text(data: bytes, rng: random.Random) -> bytes:
    """Changes that editors and transfers make to text."""
    at = _place(data, rng)
    return rng.choice(
        (
            b"\xef\xbb\xbf" + data,
            data.replace(b"\n", b"\r\n"),
            data.replace(b"\n", b"\r"),
            data.decode("latin-1").encode("utf-16"),
            data.rstrip() + b" " * _LONG + b"\n",
            data + data,
            data.replace(b" ", b"\t"),
            data[:at] + rng.choice((b"\0", b"\x1a", b"\xff", "\u2028".encode(), b"\x0c", b"\x85")) + data[at:],
        )
    )


def _splice(data: bytes, rng: random.Random, other: bytes) -> bytes:
    if rng.random() < 0.5:
        return data[: _place(data, rng)] + other[_place(other, rng) :]
    first, last = _span(other, rng)
    at = _place(data, rng)
    return data[:at] + other[first:last] + data[at + last - first :]


# Values in structured text


def _paths(value: Any, path: tuple = ()) -> list[tuple]:
    """Returns the path of every value in a tree of dicts and lists, that of the tree itself first."""
    found = [path]
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    for key, child in children:
        found += _paths(child, (*path, key))
    return found


def _changed_tree(tree: Any, rng: random.Random, texts: tuple[str, ...], dump: Callable[[Any], str]) -> tuple[str, str]:
    """Returns a tree with a value or key replaced by one of ``texts``, or with one removed or doubled."""
    path = rng.choice(_paths(tree))
    kind = rng.random()
    holder = {"": copy.deepcopy(tree)}
    container = holder
    key = ""
    for step in path:
        container = container[key]
        key = step
    if path and kind < 0.1:
        del container[key]
        return dump(holder[""]), f"without {path}"
    if path and kind < 0.2:
        if isinstance(container, list):
            container.insert(key, container[key])
        else:
            container[_MARK] = container[key]
        return dump(holder[""]).replace(_MARK, str(key)), f"doubled {path}"
    if path and kind < 0.27 and isinstance(key, str):
        name = rng.choice(("id", "x", "", "bbox", "names", "\\u0000"))
        container[_MARK] = container.pop(key)
        return dump(holder[""]).replace(_MARK, name), f"renamed {path} {name!r}"
    text = rng.choice(texts)
    container[key] = _MARK
    dumped = dump(holder[""])
    quoted = next(q for q in (f'"{_MARK}"', f"'{_MARK}'", _MARK) if q in dumped)
    return dumped.replace(quoted, text), f"{path} = {text[:40]!r}"


def change_json(data: bytes, rng: random.Random) -> Change:
    text, description = _changed_tree(json.loads(data), rng, JSON_TEXTS, json.dumps)
    return text.encode("utf-8", "surrogatepass"), description


def change_yaml(data: bytes, rng: random.Random) -> Change:
    if rng.random() < 0.06:
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
        key = rng.choice(("names", "train", "backbone", "lr0", "albumentations", "path", "nc", "annotations"))
        if rng.random() < 0.5:
            nested = "x"
            for i in range(9):
                nested = f"[&b{i} {nested}{f', *b{i}' * 9}]"
            return f"{key}: {nested}\n".encode(), f"{key}: expands ten billion times"
        return ("\n".join(lines) + f"\n{key}: *a9\n").encode(), f"{key}: expands ten billion times"
    tree = yaml.safe_load(data)
    text, description = _changed_tree(tree, rng, YAML_TEXTS, lambda t: yaml.safe_dump(t, sort_keys=False))
    return text.encode("utf-8", "surrogatepass"), description


def change_xml(data: bytes, rng: random.Random) -> Change:
    root = ElementTree.fromstring(data)
    parents = {child: parent for parent in root.iter() for child in parent}
    element = rng.choice(list(root.iter()))
    kind = rng.randrange(11)
    description = f"in <{element.tag}>"
    if kind == 0 and element is not root:
        parents[element].remove(element)
        description = f"without <{element.tag}>"
    elif kind == 1 and element is not root:
        double = copy.deepcopy(element)
        if not len(double) and rng.random() < 0.7:
            double.text = rng.choice(NUMBER_TEXTS[4:13])
        parents[element].insert(rng.randrange(len(parents[element]) + 1), double)
        description = f"two <{element.tag}>"
    elif kind in (2, 3, 4):
        external = '<!ENTITY e SYSTEM "file:///etc/passwd">'
        expanding = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 10))  # a billion times
        expanding = f'<!ENTITY e0 "11111111">{expanding}<!ENTITY e "&e9;">'
        few = ('<!ENTITY e "5">', external, '<!ENTITY e "&e;">', '<!ENTITY e "<xmin>5</xmin>">', expanding, expanding)
        entities = rng.choice((*few, "", "", ""))
        deep = rng.choice((100, _DEEP, 50_000))
        element.text = _MARK
        inside = b"&e;" if entities else b"<a>" * deep + b"</a>" * deep
        head = f"<!DOCTYPE annotation [{entities}]>".encode() if entities else b""
        return head + ElementTree.tostring(root).replace(
            _MARK.encode(), inside
        ), f"{entities[:60]}{inside[:9]} {description}"
    elif kind == 5:
        coding = rng.choice(("utf-16", "latin-1", "ascii", "nonsense", "utf-7", "cp1252", "utf-8", "utf_32"))
        return f'<?xml version="1.0" encoding="{coding}"?>'.encode() + data, f"says it is {coding}"
    elif kind == 6 and len(element):
        element.tag = rng.choice(("object", "annotation", "bndbox", "size", "part"))
        description = f"a tag becomes <{element.tag}>"
    elif kind == 7 and not len(element):
        half = (element.text or "")[:1]
        element.text = half
        child = ElementTree.SubElement(element, rng.choice(("b", "xmin", "name")))
        child.tail = rng.choice(("7", "", None))
        description = f"<{child.tag}> inside <{element.tag}>"
    else:
        leaf = rng.choice([e for e in root.iter() if not len(e)])
        text = rng.choice((*NUMBER_TEXTS, "light", "dark ", " dark", "Dark", "x" * _LONG))
        leaf.text = _MARK
        escaped = text.replace("<", "&lt;").encode("utf-8", "surrogatepass")
        body = ElementTree.tostring(root, encoding="utf-8").replace(_MARK.encode(), escaped)
        return body, f"<{leaf.tag}> is {text[:40]!r}"
    return ElementTree.tostring(root), description


def change_rows(data: bytes, rng: random.Random) -> Change:
    """Changes YOLO rows."""
    rows = [line.split() for line in data.decode().splitlines()]
    at = rng.randrange(len(rows))
    field = rng.randrange(len(rows[at]))
    kind = rng.randrange(10)
    separator = " "
    end = "\n"
    description = ""
    if kind == 0:
        del rows[at][field]
        description = "a field less"
    elif kind == 1:
        rows[at].insert(field, rng.choice(("0", "0.5", "1", "x")))
        description = "a field more"
    elif kind == 2:
        points = [str(round(rng.uniform(-0.2, 1.2), 3)) for _ in range(rng.choice((4, 6, 8, 7, 200)))]
        rows[at] = [rows[at][0], *points]
        description = f"polygon of {len(points)} numbers"
    elif kind == 3:
        rows.insert(at, list(rng.choice(rows)))
        description = "a row twice"
    elif kind == 4:
        rows = rows * rng.choice((3, 500))
        description = "many rows"
    elif kind == 5:
        separator = rng.choice(("\t", ",", ";", "  ", "\xa0", "\x0b", "\x1f", "\u3000"))
        description = f"separator {separator!r}"
    elif kind == 6:
        end = rng.choice(("\r\n", "\r", "\x0c", "\u2028", "\x85", "\0", " ", "\n\n"))
        description = f"row ends {end!r}"
    else:
        text = rng.choice(NUMBER_TEXTS)
        rows[at][field] = text
        description = f"field {field} is {text[:40]!r}"
    return "".join(separator.join(row) + end for row in rows).encode("utf-8", "surrogatepass"), description


def change_safetensors(data: bytes, rng: random.Random) -> Change:
    """Changes the JSON header, usually with the correct length."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    kind = rng.randrange(4)
    if kind == 0:
        name = rng.choice([key for key in header if key != "__metadata__"])
        offsets = header[name]["data_offsets"]
        offsets[rng.randrange(2)] += rng.choice((-4, 4, 1, -(2**40), 2**40))
        text = json.dumps(header).encode()
        description = f"offsets of {name}"
    elif kind == 1 and "__metadata__" in header and "lockstep" in header["__metadata__"]:
        changed, description = change_json(header["__metadata__"]["lockstep"].encode(), rng)
        header["__metadata__"]["lockstep"] = changed.decode("utf-8", "replace")
        text = json.dumps(header).encode()
        description = f"metadata {description}"
    else:
        text, description = change_json(json.dumps(header).encode(), rng)
    length = rng.choice((len(text),) * 8 + (len(text) + 8, 2**63, 2**32, 0))
    return struct.pack("<Q", length) + text + data[8 + struct.unpack("<Q", data[:8])[0] :], description


BY_SUFFIX: dict[str, Callable[[bytes, random.Random], Change]] = {
    ".json": change_json,
    ".yaml": change_yaml,
    ".xml": change_xml,
    ".safetensors": change_safetensors,
}


def make_odd_kind(path: Path, kind: str) -> None:
    """Puts something at ``path`` that is not a regular file, or an unusual one."""
    if path.is_dir() and not path.is_symlink():
        return
    held = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    links = {"loop": path.name, "dangling": f"{path.name}.gone", "zero": "/dev/zero"}
    if kind in links:
        path.symlink_to(links[kind])
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "full folder":
        path.mkdir()
        (path / path.name).write_bytes(held)
    elif kind == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")  # the path of a socket may have 107 characters; a cache's name alone may have more
            os.rename("socket", path.name)
    else:
        path.write_bytes(held if kind == "unreadable" else b"")
        if kind == "unreadable":
            path.chmod(0)
        elif kind == "sparse":
            os.truncate(path, 2**40)
