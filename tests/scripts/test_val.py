"""val.py from end to end on a tiny rendered set, in one process and in several."""

import json
import os
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml
from torch import nn

import export
import train
import val
from data.index.index_settings import IndexSettings
from data.index.load import load_index
from data.labels.coco_classes import COCO_IDS
from data.source.dataset_spec import SINGLE_CLASS_NAME
from data.source.dataset_yaml import load_dataset_spec
from engine.evaluation.analysis import KINDS
from engine.evaluation.tables import write_predictions
from engine.formats.runtimes import quiet
from engine.inference.predictor import load
from models.detector import build_detector
from tests.helpers.exports import calibrated_detector
from tests.helpers.messages import refused
from tests.helpers.processes import Processes
from tests.helpers.same_content import read_csv
from tests.helpers.scoring import coco_evaluate, make_ground_truth, make_table
from tests.helpers.scripts import PLAIN, SMALL, call, error_of, run_python
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_detector, write_model, write_weights
from utils.files.checkpoint_file import read_checkpoint
from utils.program_folders import CONFIGS

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
            kind = int(rng.integers(2))
            half = int(rng.integers(4, 10))
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
    return data, write_detector(folder / "best.pt", model, data={"source": str(data)})


def flags(tiny, tmp_path, *more):
    base = {"--weights": tiny[1], "--device": "cpu", "--batch-size": 2, "--workers": 0, "--project": tmp_path / "runs"}
    base |= {"--cache-dir": tmp_path / "cache"}
    return [str(word) for pair in base.items() for word in pair] + list(map(str, more))


def read(folder, name="predictions"):
    return json.loads((folder / f"{name}.json").read_text())


def test_val_scores_a_checkpoint_as_pycocotools_does_and_writes_all_files(tiny, tmp_path, capsys):
    val.main(flags(tiny, tmp_path))
    folder = tmp_path / "runs/exp"
    printed = capsys.readouterr().out
    for word in ("class", "all", *NAMES, "AP by size", "ms per image"):
        assert word in printed
    results = read(folder, "results")
    assert results["images"] == 7
    assert [c["instances"] for c in results["classes"]] == [sum(c) for c in zip(*results["confusion"]["counts"])][:2]
    assert results["confusion"]["confidence"] == results["best_confidence"] or not results["f1"]
    assert results["settings"]["imgsz"] == SIZE
    rows = read_csv(folder / "classes.csv")
    assert [r["class"] for r in rows] == ["all", *NAMES]
    assert float(rows[0]["AP"]) == results["ap"]
    figures = [f"{name}.png" for name in ("PR_curve", "F1_curve", "P_curve", "R_curve", "confusion_matrix", "errors")]
    assert all(cv2.imread(str(folder / name)) is not None for name in (*figures, "predictions.jpg"))
    assert len(read_csv(folder / "sizes.csv")) == len(results["sizes"]["rows"]) == 4 * (1 + len(NAMES))
    index = load_index(
        load_dataset_spec(tiny[0]), "val", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False)
    )
    stats, _ = coco_evaluate(index.ground_truth(), folder / "predictions.json")
    np.testing.assert_allclose([results[k] for k in ("ap", "ap50", "ap75")], stats[:3], atol=1e-4)


class OneBox(nn.Module):
    """An exported program of other people, which finds a disc in the middle of each image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[[30.0], [20.0], [12.0], [12.0], [0.9], [0.0]]])


def test_a_foreign_file_may_take_images_whose_sides_are_no_multiples_of_the_stride(tiny, tmp_path, capsys):
    height, width = 40, 60
    metadata = {"names": dict(enumerate(NAMES)), "imgsz": [height, width]}
    with quiet():
        program = torch.jit.trace(OneBox(), torch.zeros(1, 3, height, width))
        torch.jit.save(program, tmp_path / "a.torchscript", _extra_files={"config.txt": json.dumps(metadata)})
    given = ["--weights", tmp_path / "a.torchscript", "--trust", "--data", tiny[0], "--noplots", "--save-json"]
    val.main(flags(tiny, tmp_path, *given))
    boxes = {row["image_id"]: row["bbox"] for row in read(tmp_path / "runs/exp")}
    assert len(boxes) == 7
    side = 12 * 48 / height  # of the box, in an image that is 64 wide and 48 high
    assert boxes[0] == pytest.approx([32 - side / 2, 24 - side / 2, side, side], abs=0.5)
    assert "takes 40x60 pixels" in error_of(capsys, val.main, *flags(tiny, tmp_path, *given, "--imgsz", "64"))


def test_exist_ok_says_what_it_replaces_and_leaves_nothing_of_it(tiny, tmp_path, capsys):
    other = render_set(tmp_path / "other", images=5)
    fixed = ["--name", "fixed", "--exist-ok"]
    call(val.main, *flags(tiny, tmp_path, *fixed))
    folder = tmp_path / "runs" / "fixed"
    (folder / "notes.txt").write_text("mine")
    before = {path.name for path in folder.iterdir()}
    assert {"predictions.json", "predictions.jpg", "report.html", "results.json"} <= before
    capsys.readouterr()
    call(val.main, *flags(tiny, tmp_path, *fixed, "--data", other, "--noplots", "--no-save-json"))
    line = f"warning: {folder}: has results on other data, {tiny[0]}; they are replaced (--exist-ok)"
    assert line in capsys.readouterr().out
    names = {path.name for path in folder.iterdir()}
    assert names == {"classes.csv", "sizes.csv", "results.json", "notes.txt", ".written"}
    call(val.main, *flags(tiny, tmp_path, *fixed, "--data", other, "--noplots"))
    assert "warning" not in capsys.readouterr().out


def test_half_on_a_cpu_and_nms_for_a_model_with_one_branch_do_nothing(tiny, tmp_path, capsys):
    for name, more in {"plain": [], "half": ["--half"], "nms": ["--nms"]}.items():
        val.main(flags(tiny, tmp_path, "--noplots", "--name", name, *more))
    printed = capsys.readouterr().out
    assert (
        printed.count("\nwarning: float16 (--half, --amp fp16) is not supported on CPUs; computing in float32\n") == 1
    )
    assert printed.count("best.pt: --nms does nothing: the model has one branch") == 1
    plain, *others = (read(tmp_path / "runs" / name) for name in ("plain", "half", "nms"))
    assert others == [plain, plain]


def test_spreadsheets_compute_no_class_name(tmp_path):
    data = render_set(tmp_path / "set")
    names = ["=1+1", "@box"]
    data.write_text(yaml.safe_dump(yaml.safe_load(data.read_text()) | {"names": names}))
    weights = write_weights(tmp_path / "best.pt", names)
    val.main(flags((data, weights), tmp_path, "--data", data, "--noplots"))
    for table in ("classes.csv", "sizes.csv"):
        rows = read_csv(tmp_path / "runs/exp" / table)
        assert [*dict.fromkeys(row["class"] for row in rows)] == ["all", "'=1+1", "'@box"]
        assert all(not cell.startswith("'") for row in rows for column, cell in row.items() if column != "class")


def lasting(folder):
    """results.json without times and the machine, which differ between runs."""
    results = read(folder, "results")
    for key in ("project", "name", "spawn"):
        del results["settings"][key]
    return {**results, "extras": None}


@pytest.mark.slow
def test_results_with_tta_are_equal_on_1_2_and_3_processes(tiny, tmp_path, capsys):
    more = ["--tta", "--conf-thres", "0.0001"]
    val.main(flags(tiny, tmp_path, "--name", "1", *more))
    printed = capsys.readouterr().out
    assert "does nothing" not in printed  # TTA needs NMS, but nobody asked for it
    for words in ("error at IoU 0.5", *KINDS, "all false positives"):
        assert words in printed
    one = tmp_path / "runs" / "1"
    for world in ("2", "3")[: len(os.sched_getaffinity(0)) - 1]:
        ended = run_python("val.py", *flags(tiny, tmp_path, "--name", world, *more), torchrun=int(world))
        assert ended.stdout.count("AP by size") == ended.stdout.count("error at IoU 0.5") == 1
        other = tmp_path / "runs" / world
        assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
        assert lasting(one) == lasting(other)
        for name in ("predictions.json", "classes.csv", "sizes.csv"):
            assert (one / name).read_bytes() == (other / name).read_bytes()
    assert lasting(one)["errors"]["kinds"]["missed"]["count"] <= 18


def test_tta_finds_what_one_view_does_and_more(tiny, tmp_path):
    more = ["--noplots", "--conf-thres", "0.0001", "--iou-thres", "1", "--max-det", "3000"]
    for name, flag in (("one", []), ("many", ["--augment"])):
        val.main(flags(tiny, tmp_path, "--name", name, *more, *flag))
    one, many = (read(tmp_path / "runs" / name) for name in ("one", "many"))
    keys = {(r["image_id"], r["category_id"], *r["bbox"], r["score"]) for r in many}
    assert {(r["image_id"], r["category_id"], *r["bbox"], r["score"]) for r in one} <= keys
    assert len(many) > len(one) > 0


def test_box_voting_moves_boxes_and_raises_scores(tiny, tmp_path, monkeypatch):
    """Without the votes' weight in scores, it moves boxes only."""
    for module in ("suppression", "box_voting"):
        monkeypatch.setattr(f"models.postprocess.{module}.MIN_VOTING_SCORE", 0.0)  # the model is hardly trained

    def found(name, voting):
        more = ["--name", name, "--noplots", "--conf-thres", "0", "--iou-thres", "0.5"]
        val.main(flags(tiny, tmp_path, *more, voting))
        return read(tmp_path / "runs" / name)

    voted = found("on", "--box-voting")
    plain = found("off", "--no-box-voting")
    raised = np.sort([row["score"] for row in voted]) - np.sort([row["score"] for row in plain])
    assert raised.min() >= 0
    assert raised.max() > 0
    monkeypatch.setattr("models.postprocess.box_voting.INDEPENDENCE", 0.0)
    voted = found("moved", "--box-voting")
    assert [row | {"bbox": None} for row in voted] == [row | {"bbox": None} for row in plain]
    distance = np.abs(np.array([row["bbox"] for row in voted]) - [row["bbox"] for row in plain]).max(1)
    assert 0.001 < distance.max() < SIZE / 2


def test_single_cls_merges_labels_and_scores(tiny, tmp_path):
    val.main(flags(tiny, tmp_path, "--single-cls", "--noplots", "--no-save-json"))
    results = read(tmp_path / "runs/exp", "results")
    assert len(results["classes"]) == 1
    assert results["classes"][0]["instances"] == 18
    assert not (tmp_path / "runs/exp/predictions.json").exists()


def test_a_model_of_merged_classes_is_scored_so_without_a_flag(tiny, tmp_path, capsys):
    """An exported file of the model is scored in the same way."""
    model = calibrated_detector(TINY_MODEL, (SINGLE_CLASS_NAME,))
    weights = write_detector(tmp_path / "one.pt", model, data={"source": str(tiny[0])}, config={"single_cls": True})
    call(export.main, "--weights", weights, "--format", "torchscript", "--no-check")
    for path in (weights, weights.with_suffix(".torchscript")):
        name = path.suffix[1:]
        call(val.main, *flags((tiny[0], path), tmp_path, "--noplots", "--trust", "--name", name))
        assert f"{path}: was trained with --single-cls; all classes count as one" in capsys.readouterr().out
        results = read(tmp_path / "runs" / name, "results")
        assert [(row["class"], row["instances"]) for row in results["classes"]] == [(SINGLE_CLASS_NAME, 18)]


def test_some_classes_are_scored_as_among_all(tmp_path):
    names = ["disc", "box"]
    data = render_set(tmp_path / "set")
    weights = write_detector(tmp_path / "lively.pt", calibrated_detector(TINY_MODEL, tuple(names)))

    def scored(name: str, *chosen: str) -> tuple[dict[str, str], list[dict]]:
        more = ["--data", str(data), "--max-det", "5000", "--imgsz", "256", "--name", name, "--noplots", *chosen]
        val.main(flags((data, weights), tmp_path, *more))
        folder = tmp_path / "runs" / name
        rows = {
            row["class"]: [row[name] for name in ("AP", "AP50", "AP75")] for row in read_csv(folder / "classes.csv")
        }
        return rows, read(folder)

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
    with refused("lively.pt: has no class fly, only disc, box; choose others with --classes"):
        scored("none", "--classes", "fly")


def test_classes_that_differ_from_the_models_are_refused(tiny, tmp_path):
    for names, message in (
        (
            ["disc", "ball"],
            "best.pt and .../other.yaml do not have the same classes (class 1 is 'box' against 'ball'); name "
            "its own data set with --data (val.py: or score common --classes, or all classes as one with "
            "--single-cls)",
        ),
        (
            ["disc"],
            "best.pt and .../other.yaml do not have the same classes (2 classes against 1); name its own data "
            "set with --data (val.py: or score common --classes, or all classes as one with --single-cls)",
        ),
    ):
        other = tmp_path / "other.yaml"
        other.write_text(yaml.safe_dump({"path": str(tiny[0].parent), "val": "images/val", "names": names}))
        with refused(message):
            val.main(flags(tiny, tmp_path, "--data", str(other)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--imgsz", "65"], "--imgsz 65: not a multiple of the model's stride 32; use 64 or 96"),
        (
            ["--weights", "absent.pt"],
            "absent.pt: neither a file nor the name of public weights; public weights: yolox_nano, "
            "yolox_tiny, yolox_s, yolox_m, yolox_l, yolox_x, yolov9t, yolov9s, yolov9m, yolov9c, yolov5n, "
            "yolov5s, yolov5m, yolov5l, yolov5x, yolov5n6, yolov5s6, yolov5m6, yolov5l6, yolov5x6, yolov8n, "
            "yolov8s, yolov8m, yolov8l, yolov8x, yolo11n, yolo11s, yolo11m, yolo11l, yolo11x, yolo26n, "
            "yolo26s, yolo26m, yolo26l, yolo26x",
        ),
        (
            ["--data", "absent.yaml"],
            "data set absent.yaml: no such file; known by name: demo, bccd, coco, coco128, coco8",
        ),
        (
            ["--task", "test"],
            "data.yaml: has no 'test' split, only val; add 'test: <folder>' (.../best.pt stores the path of "
            "this data set; --data names another)",
        ),
        (["--conf", "2"], "--conf-thres: must be at most 1, got 2"),
        (
            ["--weights", "a.onnx", "--tta"],
            "a.onnx: --tta: only checkpoints are evaluated with several views; leave it out",
        ),
        (["--weights", "a.onnx", "--amp", "bf16"], "a.onnx: cannot be opened (...)"),  # before the file is opened
    ],
)
def test_mistakes_are_user_errors(tiny, tmp_path, more, message):
    (tmp_path / "a.onnx").touch()
    with refused(message):
        val.main(flags(tiny, tmp_path, *more))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        pytest.param(["--imgsz", "65"], "error: --imgsz 65", marks=pytest.mark.slow),
        (["--project", "/proc/runs"], "error: /proc/runs/exp: cannot be created"),
    ],
    ids=["both processes fail", "only the first fails"],
)
def test_two_processes_print_an_error_once_and_exit_with_2(tiny, tmp_path, more, line):
    ended = run_python("val.py", *flags(tiny, tmp_path, *more, "--spawn", "2"), code=2)
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("error: ") == ended.stderr.count(line) == 1


def test_predictions_keep_the_ids_of_the_ground_truth(tmp_path):
    none = np.zeros(0, int)
    gt = make_ground_truth(none, classes=none, area=none, image=none, num_images=2, num_classes=2, ids=(42, 'na"me'))
    gt = replace(gt, category_ids=(7, 90))
    table = make_table([0, 1], [[1.00004, 2, 4, 8], [0, 0, 5, 5.5]], [0.1234567, 1], [1, 0])
    write_predictions(tmp_path / "predictions.json", table, gt)
    assert read(tmp_path) == [
        {"image_id": 42, "category_id": 90, "bbox": [1.00004, 2.0, 2.99996, 6.0], "score": 0.1234567},
        {"image_id": 'na"me', "category_id": 7, "bbox": [0.0, 0.0, 5.0, 5.5], "score": 1.0},
    ]
    write_predictions(tmp_path / "predictions.json", make_table([], [], [], []), gt)
    assert read(tmp_path) == []


@pytest.mark.parametrize("labels", ["YOLO", "COCO JSON", "other names"])
def test_predictions_have_cocos_category_ids_if_yolo_labels_are_of_its_classes(tmp_path, labels, capsys):
    """pycocotools then finds val.py's AP with COCO's annotations; a COCO JSON has ids of its own."""
    names = list(load_dataset_spec(CONFIGS / "data" / "coco.yaml").names)
    names = [f"class {number}" for number in range(80)] if labels == "other names" else names
    yolo = render_set(tmp_path / "set")
    content = {"path": ".", "val": "images/val", "names": names}
    if labels == "COCO JSON":
        truth = load_index(load_dataset_spec(yolo), "val", IndexSettings(progress=False)).ground_truth()
        images = [
            {"id": i, "file_name": f"{i:03}.png", "width": w, "height": h}
            for i, (h, w) in enumerate(truth.image_hw.tolist())
        ]
        images_of_boxes = np.repeat(np.arange(truth.num_images), np.diff(truth.offsets)).tolist()
        rows = zip(images_of_boxes, truth.classes.tolist(), truth.boxes_xywh_px.tolist())
        annotations = [{"id": n, "image_id": i, "category_id": 500 + c, "bbox": b} for n, (i, c, b) in enumerate(rows)]
        categories = [{"id": 500 + number, "name": name} for number, name in enumerate(names)]
        coco = {"images": images, "annotations": annotations, "categories": categories}
        (tmp_path / "set" / "val.json").write_text(json.dumps(coco))
        content |= {"annotations": {"val": "val.json"}}
    yolo.write_text(yaml.safe_dump(content))
    model = build_detector(TINY_MODEL, 80, names=names, seed=1)
    weights = write_detector(tmp_path / "best.pt", model, data={"source": str(yolo)})
    call(val.main, *flags((yolo, weights), tmp_path, "--noplots", "--conf-thres", "0"))
    published = {"YOLO": COCO_IDS, "COCO JSON": range(500, 580), "other names": range(80)}[labels]
    found = {row["category_id"] for row in read(tmp_path / "runs/exp")}
    assert len(found) > 10
    assert found <= set(published)
    index = load_index(load_dataset_spec(yolo), "val", IndexSettings(cache_dir=str(tmp_path / "cache"), progress=False))
    gt = replace(index.ground_truth(), category_ids=tuple(published))
    stats, _ = coco_evaluate(gt, tmp_path / "runs/exp/predictions.json")
    assert read(tmp_path / "runs/exp", "results")["ap"] == pytest.approx(stats[0], abs=1e-6)
    line = "predictions.json has COCO's category ids, because the classes are COCO's"
    assert (line in capsys.readouterr().out) == (labels == "YOLO")


@pytest.mark.slow
def test_tiles_score_the_same_on_1_and_2_processes(tmp_path):
    """Images larger and smaller than a tile. Enlarged weights make the detections of an untrained model vary."""
    data = write_dataset(tmp_path / "set", val=5, size=150)
    cv2.imwrite(str(tmp_path / "set/images/val/small.png"), np.full((40, 90, 3), 120, np.uint8))
    model = build_detector(TINY_MODEL, 2, names=("light", "dark"), seed=1)
    enlarged = {key: t * (4 if t.ndim == 4 and len(t) > 1 else 1) for key, t in model.state_dict().items()}
    weights = write_detector(tmp_path / "best.pt", model, ema=enlarged)
    given = flags((data, weights), tmp_path, "--data", data, "--tile", "64", "--conf-thres", "0.0001")
    val.main([*given, "--name", "1"])
    run_python("val.py", *given, "--name", "2", "--spawn", "2")
    one, two = (tmp_path / "runs" / name for name in "12")
    assert lasting(one) == lasting(two)
    assert lasting(one)["images"] == 6
    for name in ("predictions.json", "classes.csv"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    boxes = np.array([r["bbox"] for r in read(one)])
    assert (boxes >= 0).all()
    assert len(boxes) > 100
    assert (boxes[:, 2:] > 64).any()  # joined


def test_an_image_of_one_tile_scores_as_without_tiles(tmp_path):
    data = write_dataset(tmp_path / "set", val=5, size=SIZE)
    weights = write_weights(tmp_path / "best.pt", ("light", "dark"), imgsz=96)
    given = [*flags((data, weights), tmp_path, "--data", data, "--noplots"), "--batch-size", "1"]
    val.main([*given, "--name", "tiles", "--tile", str(SIZE)])
    val.main([*given, "--name", "plain", "--imgsz", str(SIZE), "--no-rect"])
    assert read(tmp_path / "runs/tiles") == read(tmp_path / "runs/plain")
    with refused("--tile 70: not a multiple of the model's stride 32; use 64 or 96"):
        val.main([*given, "--tile", "70"])


def test_val_fraction_holds_out_the_same_images_everywhere(tmp_path):
    """With another seed, on two processes and staged; when the run resumes with more images; in val.py, also of an
    exported file."""
    root = tmp_path / "set"
    runs = tmp_path / "runs"
    cache = ["--cache-dir", tmp_path / "cache"]
    data = write_dataset(root, train=12, val=1)
    data.write_text(yaml.safe_dump({"train": "images/train", "names": ["light", "dark"]}))
    command = ["--data", data, "--model", write_model(tmp_path / "tiny.yaml"), "--project", runs, *SMALL, *cache]
    command += ["--epochs", "1", "--val-fraction", "0.25"]
    call(train.main, *command, "--name", "one")
    with Processes(tmp_path / "log.txt") as two:
        two.ranks(2, *map(str, [*command, "--name", "two", "--seed", "4", "--stage", tmp_path / "stage"]))
        assert two.codes() == [0, 0], two.output()
    last, best = (runs / "one" / name for name in ("last.pt", "best.pt"))
    one, two = (read_checkpoint(runs / name / "last.pt") for name in ("one", "two"))
    assert one["val_images"] == two["val_images"] == read_checkpoint(best)["val_images"]
    assert len(one["val_images"]) == 3
    assert one["identity"] == two["identity"]
    for i in range(20, 29):
        for folder, suffix in (("images", ".png"), ("labels", ".txt")):
            name = (root / folder / "train" / "000").with_suffix(suffix)
            name.with_name(f"{i:03}{suffix}").write_bytes(name.read_bytes())
    call(train.main, "--resume", last, "--epochs", "2")
    assert read_checkpoint(last)["val_images"] == one["val_images"]
    with refused("--val-fraction 0.5: the run being resumed has 0.25; leave it out, or start a new run with --weights"):
        train.main(["--resume", str(last), "--epochs", "3", "--val-fraction", "0.5"])
    call(export.main, "--weights", best, "--format", "torchscript", "--no-check")
    stems = {int(Path(name).stem) for name in one["val_images"]}
    files = (best, []), (best, ["--stage", tmp_path / "stage"]), (best.with_suffix(".torchscript"), ["--trust"])
    for number, (weights, extra) in enumerate(files):
        call(val.main, "--weights", weights, *PLAIN, *extra, *cache, "--project", tmp_path / "val", "--name", number)
        assert read(tmp_path / "val" / str(number), "results")["images"] == 3
        assert {row["image_id"] for row in read(tmp_path / "val" / str(number))} == stems


def test_a_run_of_some_classes_is_scored_on_them_without_a_flag(tmp_path, capsys):
    """This also holds after resuming, and for an exported file."""
    runs = tmp_path / "runs"
    data = write_dataset(tmp_path / "set", train=8, val=4)
    cache = tmp_path / "cache"
    command = ["--data", data, "--model", write_model(tmp_path / "tiny.yaml"), "--project", runs, *SMALL]
    call(train.main, *command, "--cache-dir", cache, "--epochs", "1", "--name", "some", "--classes", "1")
    assert "1 of 2 classes used: dark; boxes of other classes are left out" in capsys.readouterr().out
    last, best = (runs / "some" / name for name in ("last.pt", "best.pt"))
    call(train.main, "--resume", last, "--epochs", "2")
    content = read_checkpoint(last)
    assert content["names"] == content["used_classes"] == ["dark"]
    call(export.main, "--weights", best, "--format", "torchscript", "--no-check")
    for weights in (best, best.with_suffix(".torchscript")):
        more = ["--cache-dir", cache, "--trust", "--project", tmp_path / "val", "--name", weights.suffix[1:]]
        call(val.main, "--weights", weights, *PLAIN, *more)
        results = read(tmp_path / "val" / weights.suffix[1:], "results")
        assert [row["class"] for row in results["classes"]] == ["dark"]
    exported = load(best.with_suffix(".torchscript"), device="cpu", trust=True)
    assert exported.model.trained_classes == ["dark"]


@pytest.mark.slow
def test_training_in_bfloat16_validates_in_float32_as_val_py_does(tmp_path):
    data = write_dataset(tmp_path / "set", train=40, val=40)  # enough for the type to change the AP
    model = write_model(tmp_path / "tiny.yaml")
    given = ["--data", data, "--model", model, *SMALL, "--batch-size", "8", "--epochs", "60", "--val-every", "0"]
    call(train.main, *given, "--amp", "bf16", "--set", "close_mosaic=20", "--project", tmp_path / "runs")
    run = tmp_path / "runs" / "exp"
    scored = {}
    trained = read_checkpoint(run / "last.pt")["progress"]["best_fitness"]
    for amp in ("bf16", "off"):
        more = ["--amp", amp, "--project", tmp_path / "val", "--name", amp]
        call(val.main, "--weights", run / "best.pt", *PLAIN, *more)
        scored[amp] = read(tmp_path / "val" / amp, "results")["ap"]
    assert trained > 0.3
    assert scored["off"] == pytest.approx(trained, abs=1e-5)
    assert scored["bf16"] != pytest.approx(trained, abs=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of one epoch, in that of its data set."""
    root = tmp_path_factory.mktemp("trained")
    data = write_dataset(root / "set", train=4, val=2)
    model = write_model(root / "tiny.yaml")
    given = ["--data", data, "--model", model, *SMALL, "--project", root, "--cache-dir", root]
    call(train.main, *given, "--name", "run", "--epochs", "1")
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
