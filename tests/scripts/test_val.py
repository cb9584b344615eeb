"""val.py from end to end on a tiny rendered set, in one process and in several."""

import contextlib
import csv
import io
import json
import shutil
import subprocess
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

import export
import train
import val
from data.index.load import load_index
from data.spec.dataset_yaml import load_dataset_spec
from engine.evaluation.analysis import KINDS
from engine.evaluation.tables import write_predictions
from models.detector import build_detector
from tests.helpers.exports import lively
from tests.helpers.exports import write_weights as lively_weights
from tests.helpers.messages import refused
from tests.helpers.preloaded import python
from tests.helpers.processes import Processes
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_model, write_weights
from utils.files.checkpoint import read_checkpoint, write_checkpoint
from utils.structures import DetectionTable, GroundTruth

ROOT = Path(__file__).parents[2]
NAMES = ("disc", "box")
SIZE = 64


def render_set(folder, images=7):
    """Images of several aspect ratios, each with a few shapes; the last has none."""
    rng = np.random.default_rng(0)
    (folder / "images/val").mkdir(parents=True)
    (folder / "labels/val").mkdir(parents=True)
    for i in range(images):
        height, width = ((48, 64), (64, 48), (64, 64))[i % 3]
        picture = rng.integers(0, 60, (height, width, 3)).astype(np.uint8)
        lines = []
        for _ in range(3 if i < images - 1 else 0):
            kind, half = int(rng.integers(2)), int(rng.integers(4, 10))
            x, y = (int(rng.integers(half, side - half)) for side in (width, height))
            if kind:
                cv2.rectangle(picture, (x - half, y - half), (x + half, y + half), (200, 220, 240), -1)
            else:
                cv2.circle(picture, (x, y), half, (240, 120, 90), -1)
            lines.append(f"{kind} {x / width} {y / height} {2 * half / width} {2 * half / height}")
        cv2.imwrite(str(folder / f"images/val/{i:03}.png"), picture)
        (folder / f"labels/val/{i:03}.txt").write_text("\n".join(lines))
    (folder / "data.yaml").write_text(yaml.safe_dump({"path": ".", "val": "images/val", "names": list(NAMES)}))
    return folder / "data.yaml"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A data set YAML and a checkpoint of a tiny untrained model."""
    folder = tmp_path_factory.mktemp("tiny")
    data = render_set(folder)
    model = build_detector(TINY_MODEL, len(NAMES), names=NAMES, seed=1)
    checkpoint = folder / "best.pt"
    content = {"model_spec": model.spec, "names": list(NAMES), "imgsz": SIZE, "data": {"source": str(data)}}
    write_checkpoint({**content, "ema": model.state_dict(), "config": {}, "hyp": {}}, checkpoint)
    return data, checkpoint


def flags(tiny, tmp_path, *more):
    base = {"--weights": tiny[1], "--device": "cpu", "--batch-size": 2, "--workers": 0, "--project": tmp_path / "runs"}
    base |= {"--cache-dir": tmp_path / "cache"}
    return [str(word) for pair in base.items() for word in pair] + list(more)


def test_val_scores_a_checkpoint_and_writes_all_files(tiny, tmp_path, capsys):
    val.main(flags(tiny, tmp_path))
    folder = tmp_path / "runs/exp"
    printed = capsys.readouterr().out
    for word in ("class", "all", *NAMES, "AP by size", "ms per image"):
        assert word in printed
    results = json.loads((folder / "results.json").read_text())
    assert results["images"] == 7
    assert [c["instances"] for c in results["classes"]] == [sum(c) for c in zip(*results["confusion"]["counts"])][:2]
    assert results["confusion"]["confidence"] == results["best_confidence"] or not results["f1"]
    assert results["settings"]["imgsz"] == SIZE
    with open(folder / "classes.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["class"] for r in rows] == ["all", *NAMES]
    assert float(rows[0]["AP"]) == results["ap"]
    for name in ("PR_curve.png", "F1_curve.png", "P_curve.png", "R_curve.png"):
        assert (folder / name).stat().st_size > 0
    assert cv2.imread(str(folder / "confusion_matrix.png")) is not None
    assert cv2.imread(str(folder / "predictions.jpg")) is not None
    assert cv2.imread(str(folder / "errors.png")) is not None
    with open(folder / "sizes.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(results["sizes"]["rows"]) == 4 * (1 + len(NAMES))


def test_half_on_a_cpu_computes_in_float32(tiny, tmp_path, capsys):
    for name, more in {"plain": [], "half": ["--half"]}.items():
        val.main(flags(tiny, tmp_path, "--noplots", "--name", name, *more))
    lines = capsys.readouterr().out.splitlines()
    assert "warning: float16 (--half, --amp fp16) is not supported on CPUs; computing in float32" in lines
    plain, half = ((tmp_path / "runs" / name / "predictions.json").read_bytes() for name in ("plain", "half"))
    assert plain == half


def test_spreadsheets_compute_no_class_name(tmp_path):
    data, names = render_set(tmp_path / "set"), ["=1+1", "@box"]
    data.write_text(yaml.safe_dump(yaml.safe_load(data.read_text()) | {"names": names}))
    weights = write_weights(tmp_path / "best.pt", names)
    val.main(flags((data, weights), tmp_path, "--data", str(data), "--noplots"))
    for table in ("classes.csv", "sizes.csv"):
        with open(tmp_path / "runs/exp" / table, newline="") as file:
            rows = list(csv.DictReader(file))
        assert [*dict.fromkeys(row["class"] for row in rows)] == ["all", "'=1+1", "'@box"]
        assert all(not cell.startswith("'") for row in rows for column, cell in row.items() if column != "class")


def test_the_written_predictions_score_the_same_with_pycocotools(tiny, tmp_path):
    coco = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    val.main(flags(tiny, tmp_path, "--noplots"))
    folder = tmp_path / "runs/exp"
    index = load_index(load_dataset_spec(tiny[0]), "val", cache_dir=str(tmp_path / "cache"), progress=False)
    gt = index.ground_truth()
    image = np.repeat(np.arange(gt.num_images), np.diff(gt.offsets))
    ids = [int(Path(path).stem) for path in index.paths]
    with contextlib.redirect_stdout(io.StringIO()):
        reference = coco.COCO()
        reference.dataset = {
            "info": {},
            "images": [{"id": i} for i in ids],
            "categories": [{"id": c} for c in gt.category_ids],
            "annotations": [
                {"id": n + 1, "image_id": ids[image[n]], "category_id": gt.category_ids[gt.classes[n]],
                 "bbox": gt.boxes_xywh_px[n].tolist(), "area": gt.area_px[n], "iscrowd": 0}
                for n in range(len(image))
            ],
        }  # fmt: skip
        reference.createIndex()
        evaluation = cocoeval.COCOeval(reference, reference.loadRes(str(folder / "predictions.json")), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    results = json.loads((folder / "results.json").read_text())
    ours = [results[k] for k in ("ap", "ap50", "ap75")]
    np.testing.assert_allclose(ours, evaluation.stats[:3], atol=1e-4)


def lasting(folder):
    """results.json without times and the machine, which differ between runs."""
    results = json.loads((folder / "results.json").read_text())
    for key in ("project", "name", "spawn"):
        del results["settings"][key]
    return {**results, "extras": None}


@pytest.mark.slow
def test_results_with_tta_are_equal_on_1_2_and_3_processes(tiny, tmp_path, capsys):
    more = ["--tta", "--conf-thres", "0.0001"]
    val.main(flags(tiny, tmp_path, "--name", "1", *more))
    printed = capsys.readouterr().out
    for words in ("error at IoU 0.5", *KINDS, "all false positives"):
        assert words in printed
    for world in ("2", "3"):
        command = [python(), "val.py", *flags(tiny, tmp_path, "--name", world, "--spawn", world, *more)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("AP by size") == ended.stdout.count("error at IoU 0.5") == 1
    one, two, three = (tmp_path / "runs" / name for name in "123")
    for other in (two, three):
        assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
        assert lasting(one) == lasting(other)
        for name in ("predictions.json", "classes.csv", "sizes.csv"):
            assert (one / name).read_bytes() == (other / name).read_bytes()
    assert lasting(one)["errors"]["kinds"]["missed"]["count"] <= 18


def test_tta_finds_what_one_view_does_and_more(tiny, tmp_path):
    more = ["--noplots", "--conf-thres", "0.0001", "--iou-thres", "1", "--max-det", "3000"]
    for name, flag in (("one", []), ("many", ["--augment"])):
        val.main(flags(tiny, tmp_path, "--name", name, *more, *flag))
    one, many = (json.loads((tmp_path / "runs" / name / "predictions.json").read_text()) for name in ("one", "many"))
    keys = {(r["image_id"], r["category_id"], *r["bbox"], r["score"]) for r in many}
    assert {(r["image_id"], r["category_id"], *r["bbox"], r["score"]) for r in one} <= keys
    assert len(many) > len(one) > 0


def test_box_voting_moves_boxes_and_raises_scores(tiny, tmp_path, monkeypatch):
    """Without the votes' weight in scores, it moves boxes only."""
    for module in ("detections", "box_voting"):
        monkeypatch.setattr(f"models.postprocess.{module}.LEAST_VOTE", 0.0)  # the model is hardly trained

    def found(name, voting):
        more = ["--name", name, "--noplots", "--conf-thres", "0", "--iou-thres", "0.5"]
        val.main(flags(tiny, tmp_path, *more, voting))
        return json.loads((tmp_path / "runs" / name / "predictions.json").read_text())

    voted, plain = found("on", "--box-voting"), found("off", "--no-box-voting")
    raised = np.sort([row["score"] for row in voted]) - np.sort([row["score"] for row in plain])
    assert raised.min() >= 0
    assert raised.max() > 0
    monkeypatch.setattr("models.postprocess.box_voting.INDEPENDENCE", 0.0)
    voted = found("moved", "--box-voting")
    assert [row | {"bbox": None} for row in voted] == [row | {"bbox": None} for row in plain]
    distance = np.abs(np.array([row["bbox"] for row in voted]) - [row["bbox"] for row in plain]).max(1)
    assert 0.01 < distance.max() < SIZE / 2


def test_nms_for_a_model_with_one_branch_is_said_to_do_nothing(tiny, tmp_path, capsys):
    line = "best.pt: --nms does nothing: the model has one branch"
    val.main(flags(tiny, tmp_path, "--noplots", "--nms"))
    assert capsys.readouterr().out.count(line) == 1
    val.main(flags(tiny, tmp_path, "--noplots", "--tta"))  # which needs NMS, but nobody asked for it
    assert "does nothing" not in capsys.readouterr().out


def test_single_cls_merges_labels_and_scores(tiny, tmp_path):
    val.main(flags(tiny, tmp_path, "--single-cls", "--noplots", "--no-save-json"))
    results = json.loads((tmp_path / "runs/exp/results.json").read_text())
    assert len(results["classes"]) == 1
    assert results["classes"][0]["instances"] == 18
    assert not (tmp_path / "runs/exp/predictions.json").exists()


def test_some_classes_are_scored_as_among_all(tmp_path):
    names = ["disc", "box"]
    data, weights = render_set(tmp_path / "set"), tmp_path / "lively.pt"
    lively_weights(weights, lively(TINY_MODEL, tuple(names)))

    def scored(name: str, *chosen: str) -> tuple[dict[str, str], list[dict]]:
        more = ["--data", str(data), "--max-det", "5000", "--imgsz", "256", "--name", name, "--noplots", *chosen]
        val.main(flags((data, weights), tmp_path, *more))
        folder = tmp_path / "runs" / name
        with open(folder / "classes.csv", newline="") as file:
            rows = {row["class"]: [row[name] for name in ("AP", "AP50", "AP75")] for row in csv.DictReader(file)}
        return rows, json.loads((folder / "predictions.json").read_text())

    rows, found = scored("all")
    assert len({row["category_id"] for row in found}) == 2
    some_rows, some_found = scored("some", "--classes", "box")
    assert list(some_rows) == ["all", "box"]
    assert some_rows["box"] == rows["box"]
    assert some_found == [row for row in found if row["category_id"] == 1]
    data.write_text(yaml.safe_dump({"path": ".", "val": "images/val", "names": ["disc", "box", "fly"]}))
    both_rows, both_found = scored("both", "--classes", "1", "disc")  # which are all of the model
    assert both_found == found
    assert both_rows == rows
    with refused():
        scored("none", "--classes", "fly")


def test_classes_that_differ_from_the_models_are_refused(tiny, tmp_path):
    for names in (["disc", "ball"], ["disc"]):
        other = tmp_path / "other.yaml"
        other.write_text(yaml.safe_dump({"path": str(tiny[0].parent), "val": "images/val", "names": names}))
        with refused():
            val.main(flags(tiny, tmp_path, "--data", str(other)))


@pytest.mark.parametrize(
    "more",
    [["--imgsz", "65"], ["--weights", "absent.pt"], ["--data", "absent.yaml"], ["--task", "test"], ["--conf", "2"]],
)
def test_mistakes_are_user_errors(tiny, tmp_path, more):
    with refused():
        val.main(flags(tiny, tmp_path, *more))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--imgsz", "65", "--spawn", "2"], "error: --imgsz 65"),  # both processes fail
        (["--project", "/proc/runs", "--spawn", "2"], "error: /proc/runs/exp: cannot be created"),  # only the first
    ],
)
def test_the_script_prints_an_error_once_and_exits_with_2(tiny, tmp_path, more, line):
    command = [python(), "val.py", *flags(tiny, tmp_path, *more)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("error: ") == ended.stderr.count(line) == 1


def test_predictions_file_without_detections_is_a_list(tmp_path):
    nothing = np.zeros(0, dtype=np.int64)
    gt = GroundTruth(
        np.zeros(1, np.int64), np.zeros((0, 4)), nothing, nothing > 0, np.zeros(0), np.zeros((0, 2), np.int32), (), (1,)
    )
    table = DetectionTable(nothing, np.zeros((0, 4)), np.zeros(0), nothing)
    write_predictions(tmp_path / "p.json", table, gt)
    assert json.loads((tmp_path / "p.json").read_text()) == []


def test_predictions_keep_the_ids_of_the_ground_truth(tmp_path):
    gt = GroundTruth(
        np.zeros(3, np.int64), np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0),
        np.full((2, 2), 50, np.int32), (42, 'na"me'), (7, 90),
    )  # fmt: skip
    table = DetectionTable(
        np.array([0, 1]), np.array([[1.00004, 2, 4, 8], [0, 0, 5, 5.5]]), np.array([0.1234567, 1]), np.array([1, 0])
    )
    write_predictions(tmp_path / "p.json", table, gt)
    assert json.loads((tmp_path / "p.json").read_text()) == [
        {"image_id": 42, "category_id": 90, "bbox": [1.00004, 2.0, 2.99996, 6.0], "score": 0.1234567},
        {"image_id": 'na"me', "category_id": 7, "bbox": [0.0, 0.0, 5.0, 5.5], "score": 1.0},
    ]


@pytest.mark.slow
def test_tiles_score_the_same_on_1_and_2_processes(tmp_path):
    """Images larger and smaller than a tile. Enlarged weights make the detections of an untrained model vary."""
    data = write_dataset(tmp_path / "set", val=5, size=150)
    cv2.imwrite(str(tmp_path / "set/images/val/small.png"), np.full((40, 90, 3), 120, np.uint8))
    model = build_detector(TINY_MODEL, 2, names=("light", "dark"), seed=1)
    content = {"model_spec": model.spec, "names": ["light", "dark"], "imgsz": SIZE, "config": {}, "hyp": {}}
    weights = {key: t * (4 if t.ndim == 4 and len(t) > 1 else 1) for key, t in model.state_dict().items()}
    write_checkpoint({**content, "ema": weights}, tmp_path / "best.pt")
    given = flags((data, tmp_path / "best.pt"), tmp_path, "--data", str(data), "--tile", "64", "--conf-thres", "0.0001")
    val.main([*given, "--name", "1"])
    command = [python(), "val.py", *given, "--name", "2", "--spawn", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (tmp_path / "runs" / name for name in "12")
    assert lasting(one) == lasting(two)
    assert lasting(one)["images"] == 6
    for name in ("predictions.json", "classes.csv"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    boxes = np.array([r["bbox"] for r in json.loads((one / "predictions.json").read_text())])
    assert (boxes >= 0).all()
    assert len(boxes) > 100
    assert (boxes[:, 2:] > 64).any()  # joined


def test_an_image_of_one_tile_scores_as_without_tiles(tmp_path):
    data = write_dataset(tmp_path / "set", val=5, size=SIZE)
    model = build_detector(TINY_MODEL, 2, names=("light", "dark"), seed=1)
    content = {"model_spec": model.spec, "names": ["light", "dark"], "imgsz": 96, "config": {}, "hyp": {}}
    write_checkpoint({**content, "ema": model.state_dict()}, tmp_path / "best.pt")
    given = [*flags((data, tmp_path / "best.pt"), tmp_path, "--data", str(data), "--noplots"), "--batch-size", "1"]
    val.main([*given, "--name", "tiles", "--tile", str(SIZE)])
    val.main([*given, "--name", "plain", "--imgsz", str(SIZE), "--no-rect"])
    tiles, plain = ((tmp_path / "runs" / name / "predictions.json").read_bytes() for name in ("tiles", "plain"))
    assert tiles == plain
    with refused():
        val.main([*given, "--tile", "70"])


def test_val_fraction_holds_out_the_same_images_everywhere(tmp_path):
    """With another seed, on two processes and staged; when the run resumes with more images; in val.py, also of an
    exported file."""
    root, runs = tmp_path / "set", tmp_path / "runs"
    data = write_dataset(root, train=12, val=1)
    data.write_text(yaml.safe_dump({"train": "images/train", "names": ["light", "dark"]}))
    command = ["--data", data, "--model", write_model(tmp_path / "tiny.yaml"), "--project", runs, *SMALL]
    command += ["--cache-dir", tmp_path / "cache", "--epochs", "1", "--val-fraction", "0.25"]
    train.main([str(word) for word in [*command, "--name", "one"]])
    with Processes(tmp_path / "log.txt") as two:
        two.ranks(2, *map(str, [*command, "--name", "two", "--seed", "4", "--stage", tmp_path / "stage"]))
        assert two.codes() == [0, 0], two.output()
    one, two = (read_checkpoint(runs / name / "last.pt") for name in ("one", "two"))
    assert one["val_images"] == two["val_images"] == read_checkpoint(runs / "one" / "best.pt")["val_images"]
    assert len(one["val_images"]) == 3
    assert one["data"]["fingerprint"] == two["data"]["fingerprint"]
    for i in range(20, 29):
        for folder, suffix in (("images", ".png"), ("labels", ".txt")):
            name = (root / folder / "train" / "000").with_suffix(suffix)
            name.with_name(f"{i:03}{suffix}").write_bytes(name.read_bytes())
    train.main(["--resume", str(runs / "one" / "last.pt"), "--epochs", "2"])
    assert read_checkpoint(runs / "one" / "last.pt")["val_images"] == one["val_images"]
    with refused():
        train.main(["--resume", str(runs / "one" / "last.pt"), "--epochs", "3", "--val-fraction", "0.5"])
    export.main(["--weights", str(runs / "one" / "best.pt"), "--format", "torchscript", "--no-check"])
    stems = {int(Path(name).stem) for name in one["val_images"]}
    for name, extra in (
        ("best.pt", []),
        ("best.pt", ["--stage", str(tmp_path / "stage")]),
        ("best.torchscript", ["--trust"]),
    ):
        val.main(
            ["--weights", str(runs / "one" / name), "--device", "cpu", "--workers", "0", "--noplots", *extra,
             "--cache-dir", str(tmp_path / "cache"), "--project", str(tmp_path / "val"), "--exist-ok", "--save-json"]
        )  # fmt: skip
        folder = tmp_path / "val" / "exp"
        assert json.loads((folder / "results.json").read_text())["images"] == 3
        assert {row["image_id"] for row in json.loads((folder / "predictions.json").read_text())} == stems
        shutil.rmtree(folder)


def test_a_run_of_some_classes_is_scored_on_them_without_a_flag(tmp_path, capsys):
    """Also when it resumes, and as an exported file."""
    runs, data = tmp_path / "runs", write_dataset(tmp_path / "set", train=8, val=4)
    command = ["--data", data, "--model", write_model(tmp_path / "tiny.yaml"), "--project", runs, *SMALL]
    command = [str(word) for word in [*command, "--cache-dir", tmp_path / "cache", "--epochs", "1"]]
    train.main([*command, "--name", "some", "--classes", "dark"])
    assert "1 of 2 classes used: dark; boxes of other classes are left out" in capsys.readouterr().out
    last, best = (runs / "some" / name for name in ("last.pt", "best.pt"))
    train.main(["--resume", str(last), "--epochs", "2"])
    assert read_checkpoint(last)["names"] == ["dark"]
    export.main(["--weights", str(best), "--format", "torchscript", "--no-check"])
    base = ["--device", "cpu", "--workers", "0", "--noplots", "--cache-dir", str(tmp_path / "cache"), "--trust"]
    for weights in (best, best.with_suffix(".torchscript")):
        val.main(["--weights", str(weights), *base, "--project", str(tmp_path / "val"), "--name", weights.suffix[1:]])
        results = json.loads((tmp_path / "val" / weights.suffix[1:] / "results.json").read_text())
        assert [row["class"] for row in results["classes"]] == ["dark"]


@pytest.mark.slow
def test_val_in_the_autocast_type_of_training_gives_trainings_ap(tmp_path, capsys):
    """As the README says, training in bfloat16 validates in it, and val.py uses float32 by default."""
    data, model = write_dataset(tmp_path / "set", train=40), write_model(tmp_path / "tiny.yaml")
    given = ["--data", data, "--model", model, *SMALL, "--batch-size", "8", "--epochs", "60", "--val-every", "0"]
    train.main([str(g) for g in [*given, "--amp", "bf16", "--set", "close_mosaic=20", "--project", tmp_path / "runs"]])
    run = tmp_path / "runs" / "exp"
    trained = read_checkpoint(run / "last.pt")["progress"]["best_fitness"]
    scored = {}
    for amp in ("bf16", "off"):
        asked = ["--weights", run / "best.pt", "--device", "cpu", "--workers", "0", "--noplots"]
        val.main([str(a) for a in [*asked, "--amp", amp, "--project", tmp_path / "val", "--name", amp]])
        scored[amp] = json.loads((tmp_path / "val" / amp / "results.json").read_text())["ap"]
    assert trained > 0.3
    assert scored["bf16"] == trained
    assert scored["off"] != trained


@pytest.mark.parametrize("flag", [["--tta"], ["--amp", "bf16"]])
def test_flags_that_an_exported_file_cannot_follow_are_named(tiny, tmp_path, flag):
    """Before the file is opened."""
    (tmp_path / "a.onnx").touch()
    with refused():
        val.main(flags(tiny, tmp_path, "--weights", str(tmp_path / "a.onnx"), *flag))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of one epoch, in that of its data set."""
    root = tmp_path_factory.mktemp("trained")
    data, model = write_dataset(root / "set", train=4, val=2), write_model(root / "tiny.yaml")
    given = ["--data", data, "--model", model, *SMALL, "--project", root, "--cache-dir", root]
    train.main([*map(str, given), "--name", "run", "--epochs", "1"])
    return root


@pytest.mark.parametrize("gone", ["data.yaml", "images"])
def test_a_data_set_that_is_gone_is_named_with_the_checkpoint_that_stores_its_path(trained, capsys, gone):
    last = str(trained / "run" / "last.pt")
    (trained / "set" / gone).rename(trained / "set" / "moved")
    commands = (
        (train.main, "--resume", last, "--epochs", "3"),
        (val.main, "--weights", last, "--device", "cpu"),
        (export.main, "--weights", last, "--format", "torchscript"),
    )
    try:
        lines = [error_of(capsys, *command) for command in commands]
        staged = error_of(capsys, *commands[0], "--stage", str(trained / "stage"))
    finally:
        (trained / "set" / "moved").rename(trained / "set" / gone)
    for line in (*lines, staged):
        assert f"{trained}/set/{gone}" in line
        assert line.endswith(f"({last} stores the path of this data set; --data names another)")
        assert "--data " + str(trained) not in line
