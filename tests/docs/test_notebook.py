"""examples/quickstart.ipynb runs, and is stored with the outputs of a run."""

from __future__ import annotations

import ast
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from engine.evaluation.metrics import METRICS
from engine.inference.drawing import describe_counts
from tests.helpers.documents import ROOT
from tests.helpers.tiny import write_dataset

FILE = ROOT / "examples" / "quickstart.ipynb"
CELLS = [cell for cell in json.loads(FILE.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
MAX_BYTES = 450_000


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell and returns the value of the expression that ends it, as notebooks do; None without one."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, FILE.name, "exec"), names)
    return eval(compile(last, FILE.name, "eval"), names) if last else None


def test_it_is_stored_with_the_outputs_of_one_run():
    assert FILE.stat().st_size < MAX_BYTES
    assert [cell["execution_count"] for cell in CELLS] == [*range(1, len(CELLS) + 1)]
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}
    shown = {kind for output in outputs for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= shown


def printed_by_cells() -> list[str]:
    """Returns the stored lines that the cells printed."""
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    return "".join("".join(output.get("text", "")) for output in outputs).splitlines()


def test_its_stored_lines_are_those_that_the_program_prints_today():
    lines = printed_by_cells()
    epochs = [line for line in lines if re.match(r"epoch \d+:", line)]
    assert epochs
    for line in epochs:
        columns = re.findall(r"(\S+) \d\.\d{4}", line)  # of the day when it was executed: a new metric is missing
        scores = "  ".join(rf"{metric.column} \d\.\d{{4}}" for metric in METRICS if metric.column in columns)
        assert re.fullmatch(rf"epoch \d+: {scores}", line)
    detections = [line for line in lines if re.match(r"\S+\.(jpg|onnx) ", line)]
    assert len(detections) == 5  # in four images, and of the exported file
    for line in detections:
        counts = [(name, int(count)) for name, count in re.findall(r"(\S+) (\d+)", line.split(" ", 1)[1])]
        names = [name for name, _ in counts]
        assert line.split(" ", 1)[1] == describe_counts(dict(enumerate(count for _, count in counts)), names)


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
