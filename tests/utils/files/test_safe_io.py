"""Atomic writes, and reading text."""

import csv
import errno
import re
import stat
from pathlib import Path

import pytest

from tests.helpers.messages import refused
from utils.files.safe_io import atomic_write, read_text, write_csv, write_whole


def test_an_atomic_write_leaves_only_the_complete_file(tmp_path):
    path = tmp_path / ("n\u00e4me " * 30 + ".txt")  # a temporary name can hardly be longer
    write_whole(path, "caf\udce9 \u00fc")
    assert path.read_bytes() == b"caf\\udce9 " + "\u00fc".encode()
    with atomic_write(path, durable=True) as file:
        file.write(b"second")
        assert path.read_bytes() != b"second"
    assert path.read_bytes() == b"second"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    plain = tmp_path / "plain"
    plain.write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)  # the permissions of other files


def test_spreadsheets_compute_no_text_of_a_table(tmp_path):
    """Numbers stay numbers."""
    formulas = ["=1+1", "+cmd|'/C calc'!A0", "-1+1", "@SUM(1)", "\t=1", "\r=1", "\uff1d1", "-"]
    plain = ["a=b", "'=1", "", "-0.5", "+3", "-1e-05", "dog, cat", 'a "b"', -0.25, 7, None]
    write_csv(tmp_path / "a.csv", [formulas, plain])
    with open(tmp_path / "a.csv", encoding="utf-8", newline="") as file:
        first, second = csv.reader(file)
    assert first == [f"'{text}" for text in formulas]
    assert second == ["" if cell is None else str(cell) for cell in plain]


def test_tables_have_one_writer():
    """Beside that of results.csv, whose cells are numbers."""
    root = Path(__file__).parents[3]
    modules = [path for top in ("data", "engine", "models", "tools", "utils") for path in (root / top).rglob("*.py")]
    writers = {path.name for path in modules if re.search(r"csv\.(writer\(|DictW)", path.read_text(encoding="utf-8"))}
    assert writers == {"safe_io.py", "results_csv.py"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_content_and_names_the_file(tmp_path, error):
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    with pytest.raises(type(error)) as caught, atomic_write(path) as file:  # noqa: PT012
        file.write(b"new")
        raise error
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    if isinstance(error, OSError):
        assert caught.value.filename == str(path)
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "none" / "a.txt", "x")
    assert caught.value.filename == str(tmp_path / "none" / "a.txt")


def test_text_is_read_without_a_byte_order_mark_or_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")
    assert read_text(tmp_path / "a.txt", most=10) == "caf\u00e9\r\n"
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "large.txt").write_bytes(b"123456")
    for name in ("none.txt", ".", "latin.txt", "large.txt"):
        with refused():
            read_text(tmp_path / name, most=5)
