"""What tests start in place of the real commands, and callbacks that processes can import."""

from __future__ import annotations

SMALL = {"imgsz": 64, "batch": 4, "device": "cpu", "workers": 0, "amp": "off", "plots": False}

BEGINNING = """
import os, pathlib, signal, sys, time
from utils.process.child import claim_result_file, write_result
claim_result_file()
"""
PRINT_SETTINGS = "import json; print(json.dumps([sys.argv[1], json.loads(pathlib.Path(sys.argv[2][1:]).read_text())]))"


class Hooks:
    def on_end(self, run):
        (run.folder / "done.txt").touch()


def on_end(run):
    (run.folder / "done.txt").touch()
