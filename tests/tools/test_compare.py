"""`python -m tools.compare`: what it says of equal runs, of different runs, and of runs that cannot be compared."""

import json
import os
import shutil
import socket
import subprocess

import numpy as np
import pytest
import torch
import yaml

import export
import train
import val
from tests.helpers.html_page import check_self_contained
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.processes import LAUNCHED, ROOT
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_dataset, write_model, write_weights
from tools import compare
from tools.bootstrap import draw_images
from tools.compare import Difference, differences, differing_settings, entries_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    data, model = write_dataset(root / "set", train=12, val=9), write_model(root / "tiny.yaml")
    common = ["--data", str(data), "--model", str(model), *SMALL, "--project", str(root), "--cache-dir", str(root)]
    train.main([*common, "--name", "a", "--epochs", "1"])
    train.main([*common, "--name", "b", "--epochs", "2", "--seed", "3", "--set", "mosaic=0"])
    assert not list(root.rglob("report.html"))  # --noplots
    return root


def compared(root, *paths, name="exp"):
    flags = ["--device", "cpu", "--workers", "0", "--project", str(root / "out"), "--name", name, "--exist-ok"]
    compare.main([*map(str, paths), *flags, "--cache-dir", str(root), "--draws", "200"])
    folder = root / "out" / name
    return json.loads((folder / "comparison.json").read_text(encoding="utf-8")), folder


@pytest.fixture(scope="module")
def comparison(runs):
    return compared(runs, runs / "a", runs / "b")


def test_settings_and_scores_are_those_of_the_runs(runs, comparison):
    content, folder = comparison
    assert content["settings"] == {
        "epochs": [1, 2],
        "seed": [0, 3],
        "override": [[], ["mosaic=0"]],
        "mosaic": [1.0, 0.0],
    }
    assert content["images"] == 9
    assert content["runs"] == [str(runs / "a"), str(runs / "b")]
    (row,) = content["differences"]
    for part in row["classes"].values():
        if part["ap"] is not None:
            assert part["low"] <= part["high"]
    assert (folder / "curves.png").stat().st_size > 10_000
    page = check_self_contained((folder / "comparison.html").read_text())
    assert ["mosaic", "1.0", "0.0"] in page.tables["Settings that differ"]
    (table,) = [table for title, table in page.tables.items() if title.startswith(f"AP of {runs / 'b'} against ")]
    ap = f"{content['baseline']['all']:.3f}"
    assert table[1][:2] == ["all", ap]
    assert [tag for tag, _ in page.tags].count("svg") > 10


def test_a_run_does_not_differ_from_itself(runs):
    """Its copy lost its epochs, so there is one curve."""
    shutil.copytree(runs / "b", runs / "again", dirs_exist_ok=True)
    (runs / "again" / "results.csv").write_text("epoch\n")
    content, folder = compared(runs, runs / "b", runs / "again", name="same")
    assert (folder / "curves.png").is_file()
    assert content["settings"] == {}
    (row,) = content["differences"]
    for part in row["classes"].values():
        assert part["change"] in (0, None)
        assert part["low"] in (0, None)
        assert part["high"] in (0, None)


def test_a_class_called_all_is_not_the_mean(runs, tmp_path):
    """The weights of the runs are good for any two classes."""
    names = ("all", "dark")
    data = yaml.safe_load((runs / "set" / "data.yaml").read_text()) | {"path": str(runs / "set"), "names": list(names)}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(data))
    files = [write_weights(tmp_path / f"{seed}.pt", names, seed=seed) for seed in (1, 2)]
    content, _ = compared(runs, *files, "--data", tmp_path / "data.yaml", name="named")
    assert list(content["baseline"]) == ["all", "all (class 0)", "dark"]
    assert list(content["differences"][0]["classes"]) == ["all", "all (class 0)", "dark"]


def test_too_few_images_have_no_interval(runs, tmp_path, capsys):
    images = [str(runs / "set" / "images" / "val" / f"00{i}.png") for i in (0, 1)]
    (tmp_path / "two.txt").write_text("\n".join(images))
    data = {"train": "two.txt", "val": "two.txt", "names": ["light", "dark"]}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(data))
    compared(runs, runs / "a", runs / "b", "--data", tmp_path / "data.yaml", name="few")
    out = capsys.readouterr().out
    assert "nan" not in out
    assert out.count("not known: too few images") >= 2


def test_runs_of_one_class_and_with_bad_images_can_be_compared(runs, tmp_path):
    shutil.copytree(runs / "set", tmp_path / "set")
    (tmp_path / "set" / "images" / "val" / "000.png").write_bytes(b"not an image")
    files = [write_weights(tmp_path / f"{seed}.pt", ["object"], seed=seed) for seed in (1, 2)]
    data = tmp_path / "set" / "data.yaml"
    content, _ = compared(runs, *files, "--data", data, "--single-cls", "--max-bad", "0.5", name="one class")
    assert content["images"] == 8
    assert len(content["baseline"]) == 2


@pytest.mark.slow
def test_an_exported_file_is_compared_on_its_canvas(runs, tmp_path):
    """Otherwise the checkpoint would get other padding, and the difference would be that of the canvases."""
    flags = ["--data", runs / "set" / "data.yaml", "--model", runs / "tiny.yaml", *SMALL, "--cache-dir", runs]
    train.main([*map(str, flags), "--project", str(tmp_path), "--name", "c", "--epochs", "50", "--val-every", "0"])
    weights = tmp_path / "c" / "best.pt"
    export.main(["--weights", str(weights), "--format", "torchscript", "--imgsz", "64", "--no-check"])
    content, _ = compared(runs, tmp_path / "c", weights.with_suffix(".torchscript"), name="exported")
    changes = content["differences"][0]["classes"]
    assert content["baseline"]["all"] > 0
    for part in changes.values():
        assert part["change"] == pytest.approx(0, abs=1e-6)


def test_two_processes_share_the_images_and_one_reports(runs, comparison):
    flags = ["--device", "cpu", "--workers", "0", "--project", runs / "out", "--cache-dir", runs, "--draws", "200"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "tools.compare"]
    command = [python(), *launcher, runs / "a", runs / "b", *flags, "--name", "two"]
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHED} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results are in") == 1
    assert not (runs / "out" / "two2").exists()
    single, _ = comparison
    found = json.loads((runs / "out" / "two" / "comparison.json").read_text(encoding="utf-8"))
    assert found.keys() == single.keys()
    assert (found["images"], found["settings"]) == (9, single["settings"])
    for name, ap in single["baseline"].items():
        assert found["baseline"][name] == pytest.approx(ap, abs=1e-6)


@pytest.mark.parametrize("gone", ["data.yaml", "images"])
def test_a_data_set_that_is_gone_is_named_with_the_checkpoint_that_stores_its_path(runs, capsys, gone):
    last, of_b = (str(runs / name / "last.pt") for name in "ab")
    (runs / "set" / gone).rename(runs / "set" / "moved")
    commands = (
        (train.main, "--resume", last, "--epochs", "3"),
        (val.main, "--weights", last, "--device", "cpu"),
        (export.main, "--weights", last, "--format", "torchscript"),
        (compare.main, last, of_b, "--device", "cpu"),
    )
    try:
        lines = [error_of(capsys, *command) for command in commands]
        staged = error_of(capsys, *commands[0], "--stage", str(runs / "stage"))
    finally:
        (runs / "set" / "moved").rename(runs / "set" / gone)
    for line in (*lines, staged):
        assert f"{runs}/set/{gone}" in line
        assert line.endswith(f"({last} stores the path of this data set; --data names another)")
        assert "--data " + str(runs) not in line


@pytest.mark.parametrize("named", ["address", "yaml"])
def test_an_address_that_a_file_names_is_not_read(runs, tmp_path, capsys, named):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "data.yaml").write_text(f"{{train: {url}/set, val: {url}/set, names: [light, dark]}}")
        content = torch.load(runs / "a" / "last.pt", weights_only=True)
        content["data"] = {"source": f"{url}/data.yaml" if named == "address" else str(tmp_path / "data.yaml")}
        last = tmp_path / "last.pt"
        torch.save(content, last)
        for command in (
            (val.main, "--weights", last, "--device", "cpu"),
            (export.main, "--weights", last, "--format", "torchscript"),
            (compare.main, last, runs / "b" / "last.pt", "--device", "cpu"),
        ):
            line = error_of(capsys, *command)
            assert "an address is read only if you name it with --data" in line or "with --data, or in a YAML" in line
            assert str(last) in line
        with pytest.raises(BlockingIOError):
            server.accept()


def test_differences_pair_the_draws():
    """What both runs lose on the same images cancels: a constant gain has an interval of no width."""
    images = draw_images(20, 100)
    hard = images[:, :5].sum(1) / 20
    first = np.stack([0.5 - hard, 0.4 - hard], 1)
    (row,) = differences([np.array([0.5, 0.4]), np.array([0.6, 0.4])], [first, np.add(first, [0.1, 0.0])], 20)
    assert [d.is_certain for d in row] == [True, False]
    np.testing.assert_allclose(row[0], Difference(0.6, 0.1, 0.1, 0.1), atol=1e-12)


def test_settings_that_only_one_run_has_differ():
    assert differing_settings([{"lr0": 1, "name": "x"}, {"lr0": 1, "name": "y", "new": 2}]) == {"new": [None, 2]}


def test_runs_that_cannot_be_compared_are_one_line(runs, tmp_path, capsys):
    assert "has no best.pt" in error_of(capsys, compare.main, str(runs / "a"), str(tmp_path))
    assert "at least two runs" in error_of(capsys, compare.main, str(runs / "a"))
    assert "is named twice" in error_of(capsys, compare.main, str(runs / "a"), str(runs / "a"))
    assert "is named twice" in error_of(capsys, compare.main, runs / "a", runs / "b" / ".." / "a")
    with refused():
        entries_of([str(runs / "a"), str(runs / "a" / "best.pt")])


def test_a_folder_that_cannot_be_made_is_found_before_the_scoring(runs, tmp_path, capsys):
    (tmp_path / "file").touch()
    flags = ["--device", "cpu", "--workers", "0", "--project", tmp_path / "file", "--cache-dir", runs]
    with refused():
        compare.main([*map(str, (runs / "a", runs / "b", *flags))])
    assert "settings that differ" not in capsys.readouterr().out
