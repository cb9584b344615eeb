"""The documents: their links and the files that they name exist, the reference of settings and the table of models are
current, YAML is what the program's own readers take, and Python code runs."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import yaml

from benchmarks import models as model_table
from data.read_spec import load_dataset_spec
from models.detector import build_on_meta
from models.spec import load_spec
from tests.helpers import settings_page
from tests.helpers.documents import ROOT, Block, anchors, blocks, documents, links
from tests.helpers.scripts import training, write_inputs
from tests.helpers.tiny import write_weights
from tools.search import read_ranges
from utils.config import tool_settings
from utils.config.flags import flag_name
from utils.config.recipes import hyperparameters_from
from utils.config.settings import ON_RESUME
from utils.files.torch_file import read_checkpoint, write_checkpoint
from utils.process.child import write_result

PAGES = documents()
BLOCKS = [block for page in PAGES for block in blocks(page)]
FOLDERS = "assets|benchmarks|configs|data|docs|engine|examples|launch|lockstep|models|packaging|tests|tools|utils"
SUFFIXES = "css|html|ipynb|jpg|md|png|py|sbatch|sh|yaml"
OPTIONAL = ("onnxruntime", "pandas", "supervision", "sahi")


def of_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    for path, anchor in links(page):
        assert (ROOT / path).exists(), f"{page}: {path}"
        assert not anchor or anchor in anchors(path), f"{page}: {path}#{anchor}"


@pytest.mark.parametrize("rule", ["machine", "extends", "again"])
def test_the_table_of_resume_names_the_settings_that_a_command_may_give_again(rule: str):
    rows = [line.split("|")[1] for line in (ROOT / "docs/training.md").read_text().splitlines() if line.startswith("|")]
    flags = {flag_name(name) for name in ON_RESUME[rule]}
    assert flags in [set(re.findall("`(--[a-z-]+)`", row)) for row in rows]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str):
    """They are named in text and blocks; a capital NAME stands for any."""
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = set(re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w/.-]*\w\.(?:{SUFFIXES})\b", text))
    paths |= set(re.findall(r"(?<![\w/.])tests/[\w/]+\b(?!\.)", text))  # folders of tests
    created = {block.title for block in blocks(page)}
    absent = [n for n in sorted(paths) if "NAME" not in n and n not in created and not (ROOT / n).exists()]
    assert not absent, f"{page} names {absent}"


def test_the_index_for_language_models_lists_every_page_once():
    paths = [path for path, _ in links("llms.txt")]
    pages = {page for page in PAGES if page.startswith("docs/")} | {"README.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert sorted(paths) == sorted(pages | {"CHANGELOG.md"})


def test_the_reference_of_settings_is_current():
    stored = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert stored == "\n".join(settings_page.page()), "python -m tests.helpers.settings_page > docs/settings.md"


def rows_of_models() -> dict[str, str]:
    """The rows of the table of sizes, by name."""
    cells = r"([\w.]+) \| ([\d.]+ M) \| ([\d.]+ G)"
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    return {name: f"| {name} | {parameters} | {flops} |" for name, parameters, flops in re.findall(cells, text)}


@pytest.mark.parametrize(
    "names", [["yolov5n", "yolo26n"], pytest.param(sorted(rows_of_models()), marks=pytest.mark.slow, id="all")]
)
def test_the_table_of_models_is_measured(names: list[str]):
    """All models are in it."""
    assert sorted(rows_of_models()) == sorted(model_table.names())
    assert [model_table.row(name) for name in names] == [rows_of_models()[name] for name in names]


@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_yaml_is_read_by_the_program(block: Block, tmp_path: Path):
    path = tmp_path / "block.yaml"
    path.write_text(block.text, encoding="utf-8")
    content = yaml.safe_load(block.text)
    if block.title == "search ranges":
        pytest.importorskip("optuna")
        assert read_ranges(tool_settings.SearchConfig(data="demo", hyp=str(path)))[1]
    elif "backbone" in content:
        build_on_meta(load_spec(path), 2)
    elif {"train", "val"} & set(content):
        (tmp_path / "voc_annotations").mkdir()
        (tmp_path / "annotations").mkdir()
        (tmp_path / "annotations" / "instances_train.json").write_text('{"images": [], "annotations": []}')
        for name in ("cars", "people"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames: [{name}]\n")
        assert set(load_dataset_spec(path).splits) <= {"train", "val", "test"}
    else:
        hyperparameters_from(str(path))


@pytest.fixture(scope="module")
def folder_of_examples(tmp_path_factory) -> Path:
    """A folder with the files that the examples name: weights, images, a video, and an exported file."""
    folder = tmp_path_factory.mktemp("examples")
    weights = write_weights(folder / "best.pt", ["cat", "dog"])
    for kind in ("train", "val"):
        (folder / "runs" / kind / "exp").mkdir(parents=True)
    scored = {**read_checkpoint(weights), "metrics": {"metrics/AP": 0.5}}
    write_checkpoint(scored, folder / "runs" / "train" / "exp" / "best.pt")
    (folder / "runs" / "val" / "exp" / "results.json").write_text(
        '{"ap50": 0.5, "classes": [{"class": "cat", "AP": 0.5}]}'
    )
    (folder / "runs" / "train" / "exp" / "results.csv").write_text("epoch,metrics/AP\n1,0.5\n2,\n")
    rng = np.random.default_rng(0)
    for name in ("a.jpg", "b.jpg", "image.jpg"):
        cv2.imwrite(str(folder / name), rng.integers(0, 256, (48, 64, 3), dtype=np.uint8))
    cv2.imwrite(str(folder / "odd.jpg"), rng.integers(0, 256, (75, 131, 3), dtype=np.uint8))
    video = cv2.VideoWriter(str(folder / "clip.mp4"), cv2.VideoWriter_fourcc(*"mp4v"), 5, (64, 48))
    for _ in range(3):
        video.write(cv2.imread(str(folder / "a.jpg")))
    video.release()
    return folder


def runnable_code() -> list:
    """The Python blocks that are no files."""
    parameters = []
    for block in of_language("python"):
        if not block.title:
            marks = pytest.mark.slow if "best.onnx" in block.text else ()  # an export takes ten seconds
            parameters.append(pytest.param(block, marks=marks, id=str(block)))
    return parameters


SAME_BOXES = """
import lockstep

boxes, scores, _ = detect("odd.jpg", confidence=0.0)
order = np.argsort(-scores, kind="stable")
ours = lockstep.load("best.onnx", box_voting=False)("odd.jpg", conf=0.0)[0].boxes
assert len(ours) == len(boxes) > 0
np.testing.assert_allclose(ours.xyxy, boxes[order], atol=1e-3)
"""


def stand_in(folder: str) -> Callable[[Any], None]:
    """Returns a command that does nothing but name a run's folder."""

    def command(_: Any) -> None:
        write_result(folder=folder)

    return command


@pytest.mark.parametrize("block", runnable_code())
def test_python_code_runs(block: Block, folder_of_examples: Path, monkeypatch: pytest.MonkeyPatch):
    for package in OPTIONAL:
        if re.search(rf"^import {package}|^from {package}", block.text, re.MULTILINE):
            pytest.importorskip(package)
    if ".track(" in block.text:
        pytest.importorskip("trackers")
    text = block.text.replace('"path/of/this/folder"', repr(str(ROOT)))
    if "best.onnx" in text:
        if importlib.util.find_spec("onnxscript") is None:
            pytest.skip("needs onnxscript")
        import export

        arguments = ["--weights", str(folder_of_examples / "best.pt"), "--imgsz", "64", "--no-check"]
        export.main([*arguments, "--format", "onnx"])
        text += SAME_BOXES
    monkeypatch.chdir(folder_of_examples)
    monkeypatch.setattr("engine.commands.start.train", stand_in("runs/train/exp"))
    monkeypatch.setattr("engine.commands.start.validate", stand_in("runs/val/exp"))
    monkeypatch.setattr("tools.check.__main__.check", lambda config: {"issues": []})
    exported = SimpleNamespace(is_stopped=False, check=lambda: None, values={"files": []})
    child = contextlib.nullcontext(SimpleNamespace(wait=lambda: exported))
    monkeypatch.setattr("lockstep.api.start_child", lambda *_, **__: child)
    exec(compile(text, str(block), "exec"), {"__name__": "__main__"})


def test_a_run_calls_the_callbacks_of_a_page_and_writes_the_files_of_another(tmp_path, monkeypatch):
    import train

    (block,) = [block for block in blocks("docs/tracking.md") if block.text.startswith("class Hooks")]
    (tmp_path / "hooks.py").write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    inputs = write_inputs(tmp_path, train=4, val=2)
    train.main(training(inputs, tmp_path, "--plots", "--epochs", 1, "--callbacks", "hooks:Hooks"))
    assert "metrics/AP" in (tmp_path / "exp" / "done.txt").read_text()
    section = (ROOT / "docs" / "training.md").read_text().split("## What a run writes")[1].split("\n## ")[0]
    cells = " ".join(re.findall(r"^\| (.+?) \|", section, re.MULTILINE))
    files = [name for name in re.findall(r"`([^`]+)`", cells) if "*" not in name]
    assert {"report.html", "best.pt", "settings.yaml"} <= set(files)
    assert not [name for name in files if not (tmp_path / "exp" / name).exists()]
