"""Runs the entry scripts in this process, which saves a second of start-up each."""

from __future__ import annotations

import pytest

from utils.entrypoint import run_main

SMALL = ["--imgsz", "64", "--batch-size", "4", "--device", "cpu", "--workers", "0", "--amp", "off", "--noplots"]


def error_of(capsys: pytest.CaptureFixture, main, *argv: str, code: int = 2) -> str:
    """The line with which ``main(argv)`` ends, with exit status ``code``."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run_main(main, [str(a) for a in argv])
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == code, lines
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]
