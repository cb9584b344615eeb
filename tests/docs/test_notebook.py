"""examples/quickstart.ipynb runs."""

from __future__ import annotations

import ast
import json
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.helpers.documents import ROOT
from tests.helpers.tiny import write_dataset

FILE = ROOT / "examples" / "quickstart.ipynb"
CELLS = [cell for cell in json.loads(FILE.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell and returns the value of the expression that ends it, as notebooks do; None without one."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, FILE.name, "exec"), names)
    return eval(compile(last, FILE.name, "eval"), names) if last else None


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch, capfd):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    # A model of one step finds nothing that could be compared.
    sources = ("".join(cell["source"]).replace('format="onnx"', 'format="onnx", check=False') for cell in CELLS)
    settings, *cells = sources
    run_cell(settings, names)
    assert names["data"] == "demo"
    names |= {"data": write_dataset(tmp_path / "set", train=6, val=4), "epochs": 1, "imgsz": 64}
    values = [value for source in cells if (value := run_cell(source, names)) is not None]
    run, history, detections = values
    assert "<th>AP50</th>" in run._repr_html_()
    assert 'src="data:image/png;base64,' in run._repr_html_()
    HTMLParser().feed(run._repr_html_())
    assert len(history) == 1
    assert detections._repr_png_().startswith(b"\x89PNG")
    assert names["files"] == [run.folder / "best.onnx"]
    assert "best.onnx" in capfd.readouterr().out.splitlines()[-1]
