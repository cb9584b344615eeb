"""Atomic writes, and reading text."""

from __future__ import annotations

import csv
import errno
import io
import os
import stat
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from utils.files.results_csv import ResultsTable
from utils.files.safe_io import atomic_write, read_text, remove_half_written, write_csv, write_whole


def test_an_atomic_write_leaves_only_the_complete_file(tmp_path):
    path = tmp_path / "n\u00e4me.txt"
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
    ResultsTable.of([{"epoch": 1, "=1+1": 2.0}]).write(tmp_path / "results.csv")  # columns of a checkpoint of others
    assert (tmp_path / "results.csv").read_text() == "epoch,'=1+1\n1,2\n"


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
        assert str(caught.value) == f"[Errno {errno.ENOSPC}] No space left on device: '{path}'"
    for target in (tmp_path / "none" / "a.txt", tmp_path):
        with pytest.raises(OSError, match=f": '{target}'$"):
            write_whole(target, "x")


def test_text_is_read_without_a_byte_order_mark_or_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")
    assert read_text(tmp_path / "a.txt", max_bytes=10) == "caf\u00e9\r\n"
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "large.txt").write_bytes(b"123456")
    for name, message in (
        ("none.txt", "none.txt: no such file"),
        (".", "...: cannot be read (is a folder, not a file)"),
        ("latin.txt", "latin.txt: not UTF-8 (byte 3); save it as UTF-8"),
        ("large.txt", "large.txt: cannot be read (has 6 bytes, more than such a file can need)"),
    ):
        with refused(message):
            read_text(tmp_path / name, max_bytes=5)


def test_only_half_written_files_of_killed_processes_are_removed(tmp_path):
    """Files of other programs stay, and those that a process is just writing, such as an export next to a run."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom utils.files.safe_io import atomic_write\n"
        "context = atomic_write(Path(sys.argv[1]))\ncontext.__enter__().write(b'half')\nos._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "last.pt")], cwd=ROOT, check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".tmp")
    others = [".notes.tmp", ".0123abcd.tmp", ".report.html.swap.tmp", "last.pt.0123abcd.tmp"]
    for name in others:
        (tmp_path / name).write_text("of somebody")
    (tmp_path / "elsewhere").write_text("of somebody")
    (tmp_path / ".link.0123456789abcdef.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".folder.0123456789abcdef.tmp").mkdir()
    kept = {*os.listdir(tmp_path)} - {left.name}
    with atomic_write(tmp_path / "best.onnx") as file:
        remove_half_written(tmp_path)
        file.write(b"whole")
    assert {*os.listdir(tmp_path)} == kept | {"best.onnx"}
    assert (tmp_path / "best.onnx").read_bytes() == b"whole"


def test_columns_that_appear_later_are_empty_before(tmp_path):
    table = ResultsTable()
    table.add(1, {"time": 3.5, "train/dfl": float("nan"), "metrics/recall": float("nan")})
    table.add(2, {"time": 7.0, "train/dfl": 1 / 3, "metrics/AP": 0.2})
    path = tmp_path / "results.csv"
    ResultsTable.of(table.as_rows()).write(path)
    one, two = csv.DictReader(io.StringIO(path.read_text()))
    assert (one["epoch"], one["train/dfl"], one["metrics/AP"]) == ("1", "nan", "")
    assert float(two["metrics/AP"]) == 0.2
    again = ResultsTable.read(path)
    columns = again.as_columns()
    assert np.array_equal(columns["metrics/AP"], [np.nan, 0.2], equal_nan=True)
    assert "metrics/recall" not in columns  # columns without any value are no columns
    before = path.read_bytes()
    again.write(path)
    assert path.read_bytes() == before
