"""Digests of what training reads: the index of each split, and the batches of one epoch, as JSON.

    python -m benchmarks.data_digests ../shared/datasets > digests.json

The sets in the folder are read as they are, and parts of three of them in every other form that a data set has. Two
checkouts read the same if their outputs are equal, so this file finds the code of either.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.entrypoint import run_benchmark
from utils.config.recipes import hyperparameters_from
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext

FORM_IMAGES = 48  # of each split of a form
IMGSZ = 64
ARRAYS = ("image_hw", "incomplete", "offsets", "boxes_xywh_px", "classes", "crowd", "area_px", "repeated", "row_number")


def found(name: str, *modules: str) -> Any:
    """Returns ``name`` of the first of the modules that exists."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise SystemExit(f"no {name} in {', '.join(modules)}")


DataSource = found("DataSource", "data.dataset.spec", "data.source.dataset_spec")
open_data: Callable = found("open_data", "data.open", "data.source.open")
IndexSettings = found("IndexSettings", "data.index.index", "data.index.index_settings", "data.index.load")
load_index: Callable = found("load_index", "data.index.load", "data.index.store")
open_train_samples: Callable = found("open_train_samples", "data.loading.build")
build_train_loader: Callable = found("build_train_loader", "data.loading.build")
write_shards: Callable = found("main", "tools.shard.__main__", "tools.shard")


def digest(*values: Any) -> str:
    """Returns 16 hex digits of arrays, tensors, and plain values."""
    result = hashlib.blake2b(digest_size=8)
    for value in values:
        value = value.numpy() if hasattr(value, "numpy") else value
        result.update(value.tobytes() if hasattr(value, "tobytes") else json.dumps(value).encode())
    return result.hexdigest()


def index_digests(spec: Any, split: str, cache: str, **options: Any) -> dict[str, Any]:
    index = load_index(spec, split, IndexSettings(cache_dir=cache, progress=False, **options))
    truth = index.ground_truth()
    report = index.report
    ledger = getattr(report, "ledger", report)
    numbers = index.counts() if hasattr(index, "counts") else report.totals
    return {
        "images": len(index),
        "boxes": len(index.classes),
        "names": list(index.names),
        "paths": digest(list(index.paths)),
        **{name: digest(getattr(index, name)) for name in ARRAYS},
        "image_ids": digest(list(truth.image_ids)),
        "category_ids": list(truth.category_ids),
        "ledger": [ledger.used_images, ledger.used_objects, ledger.lost_images, ledger.lost_objects],
        "backgrounds": numbers["backgrounds"],
        "crowd regions": numbers["crowd"],
    }


def epoch_digests(spec: Any, cache: str, **settings: Any) -> dict[str, Any]:
    """Returns digests of all batches of an epoch, with mosaic, mixup, and all other augmentations."""
    ctx = DistributedContext.single()
    config = TrainConfig(imgsz=IMGSZ, batch_size=16, epochs=1, workers=0, cache_dir=cache, **settings)
    hyp = hyperparameters_from("", ["mixup=0.2", "flipud=0.5"])
    samples = open_train_samples(ctx, config, hyp, spec, stride=32)
    loader = build_train_loader(ctx, config, hyp, samples, stride=32)
    pixels = []
    targets = []
    for batch in itertools.islice(iter(loader), len(loader)):
        regions = batch.targets.ignore
        pixels.append(digest(batch.images))
        targets.append(digest(batch.targets.rows, list(batch.targets.counts), [] if regions is None else regions))
    return {"batches": len(pixels), "pixels": digest(pixels), "targets": digest(targets)}


def digests(data: Path, **chosen: Any) -> dict[str, Any]:
    """Returns digests of all splits of a data set. ``chosen``: settings of `DataSource` and, ``single_cls``, of the
    index."""
    single_cls = chosen.pop("single_cls", False)
    with tempfile.TemporaryDirectory() as cache:
        spec = open_data(DataSource(str(data), cache_dir=cache, **chosen), DistributedContext.single())
        result: dict[str, Any] = {
            split: index_digests(spec, split, cache, single_cls=single_cls) for split in spec.splits
        }
        return result | {"epoch": epoch_digests(spec, cache, single_cls=single_cls)}


def copy_part(source: Path, root: Path, splits: Sequence[str] = ("train", "val")) -> None:
    """Copies the first images of a set, with all labels that it has of them."""
    for split in splits:
        for image in sorted((source / "images" / split).iterdir())[:FORM_IMAGES]:
            labels = (f"labels/{split}/{image.stem}.txt", f"voc_annotations/{image.stem}.xml")
            for name in (f"images/{split}/{image.name}", *labels):
                if (source / name).exists():
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source / name, root / name)


def coco_part(source: Path, split: str, root: Path) -> dict[str, Any]:
    """Returns the part of a COCO JSON that is about the images in ``root``."""
    content = json.loads((source / "annotations" / f"instances_{split}.json").read_text())
    names = set(os.listdir(root / "images" / split))
    content["images"] = [image for image in content["images"] if Path(image["file_name"]).name in names]
    ids = {image["id"] for image in content["images"]}
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] in ids]
    return content


def write_yaml(root: Path, name: str = "data.yaml", **content: Any) -> Path:
    path = root / name
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def write_json(path: Path, content: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return str(path)


def form_digests(sets: Path, folder: Path) -> dict[str, Any]:
    """Returns digests of each form, made in ``folder`` from the first images of bccd, coco128, and raccoon."""
    parts = {"bccd": ("train", "val"), "coco128": ("train2017",), "raccoon": ("train", "val")}
    bccd, coco, raccoon = (folder / name for name in parts)
    names = {name: yaml.safe_load((sets / name / f"{name}.yaml").read_text())["names"] for name in parts}
    for name, splits in parts.items():
        copy_part(sets / name, folder / name, splits)
    both = {"train": "images/train", "val": "images/val"}
    yolo = write_yaml(bccd, **both, names=names["bccd"])
    results = {"yolo": digests(yolo), "one class": digests(yolo, single_cls=True)}
    results["chosen classes"] = digests(yolo, classes=("WBC", "2"))
    merged = {"WBC": "cell", "RBC": "cell", "Platelets": "ignore"}
    results["merged"] = digests(write_yaml(bccd, "merged.yaml", **both, names=names["bccd"], classes=merged))
    results["tiles"] = digests(write_yaml(bccd, "tiles.yaml", **both, names=names["bccd"], tile=256))
    results["gray"] = digests(write_yaml(bccd, "gray.yaml", **both, names=names["bccd"], channels=1))

    voc = write_yaml(bccd, "voc.yaml", **both, names=names["bccd"], annotations=dict.fromkeys(both, "voc_annotations"))
    results["voc"] = digests(voc)
    jsons = {split: write_json(bccd / f"{split}.json", coco_part(sets / "bccd", split, bccd)) for split in both}
    results["coco"] = digests(write_yaml(bccd, "coco.yaml", **both, annotations=jsons))
    united = united_json([json.loads(Path(path).read_text()) for path in jsons.values()])
    one = write_json(bccd / "all.json", united)
    results["one coco"] = digests(write_yaml(bccd, "one.yaml", **both, annotations=dict.fromkeys(both, one)))
    crowds = write_json(coco / "crowds.json", coco_part(sets / "coco128", "train2017", coco))
    one_folder = {"train": "images/train2017", "val": "images/train2017"}
    crowd_yaml = write_yaml(coco, **one_folder, names=names["coco128"], annotations=dict.fromkeys(one_folder, crowds))
    results["crowds"] = digests(crowd_yaml)

    rows = {split: sorted(os.listdir(bccd / "images" / split)) for split in both}
    for style, row in (("from root", "images/{}/{}"), ("absolute", f"{bccd}/images/{{}}/{{}}"), ("dot", "./{}/{}")):
        for split in both:
            place = bccd / ("images" if style == "dot" else ".") / f"{split}-{style}.txt"
            place.write_text("".join(f"{row.format(split, name)}\n" for name in reversed(rows[split])))
        lists = {split: f"{'images/' if style == 'dot' else ''}{split}-{style}.txt" for split in both}
        results[f"lists {style}"] = digests(write_yaml(bccd, "lists.yaml", **lists, names=names["bccd"]))

    joined = {split: ["bccd/data.yaml", "raccoon/data.yaml"] for split in both}
    write_yaml(raccoon, **both, names=names["raccoon"])
    results["joined"] = digests(write_yaml(folder, "joined.yaml", **joined))
    results["staged yolo"] = digests(yolo, splits=("train", "val"), stage=str(folder / "stage"))
    results["staged voc"] = digests(voc, splits=("train", "val"), stage=str(folder / "stage"))
    write_shards([str(yolo), str(folder / "shards"), "--megabytes", "1"])
    results["shards"] = digests(folder / "shards")
    return results | export_digests(raccoon, bccd, folder, names)


def united_json(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins the JSONs of several splits under new image ids."""
    united: dict[str, Any] = {"images": [], "annotations": [], "categories": contents[0]["categories"]}
    for content in contents:
        new_ids = {image["id"]: len(united["images"]) + k for k, image in enumerate(content["images"])}
        united["images"] += [image | {"id": new_ids[image["id"]]} for image in content["images"]]
        start = len(united["annotations"])
        united["annotations"] += [
            a | {"id": start + k, "image_id": new_ids[a["image_id"]]} for k, a in enumerate(content["annotations"])
        ]
    return united


def export_digests(raccoon: Path, bccd: Path, folder: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Returns digests of the folders that annotation tools export."""
    results = {}
    export = folder / "roboflow"
    for split, name in (("train", "train"), ("val", "valid")):
        for kind in ("images", "labels"):
            shutil.copytree(raccoon / kind / split, export / name / kind)
    write_yaml(export, train="../train/images", val="../valid/images", nc=1, names=names["raccoon"])
    results["roboflow yolo"] = digests(export)

    export = folder / "roboflow-coco"
    for split, name in (("train", "train"), ("val", "valid")):
        shutil.copytree(bccd / "images" / split, export / name)
        content = json.loads((bccd / f"{split}.json").read_text())
        root = {"id": 0, "name": "cells", "supercategory": "none"}
        content["categories"] = [root] + [
            c | {"id": c["id"] + 1, "supercategory": "cells"} for c in content["categories"]
        ]
        content["annotations"] = [a | {"category_id": a["category_id"] + 1} for a in content["annotations"]]
        write_json(export / name / "_annotations.coco.json", content)
    results["roboflow coco"] = digests(export)

    export = folder / "labelimg"
    shutil.copytree(raccoon / "images" / "train", export)
    shutil.copytree(raccoon / "labels" / "train", export, dirs_exist_ok=True)
    (export / "classes.txt").write_text("raccoon\n")
    results["labelimg"] = digests(export)

    export = folder / "voc"
    for split in ("train", "val"):
        shutil.copytree(bccd / "images" / split, export / split)
        for image in os.listdir(export / split):
            shutil.copy2(bccd / "voc_annotations" / f"{Path(image).stem}.xml", export / split)
    results["voc beside the images"] = digests(export)
    return results


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.data_digests", description=__doc__.split("\n")[0])
    parser.add_argument("sets", type=Path, help="folder of the data sets, each with NAME/NAME.yaml")
    sets = parser.parse_args().sets.absolute()
    with contextlib.redirect_stdout(sys.stderr):  # where the log goes
        results = {data.stem: digests(data) for data in sorted(sets.glob("*/*.yaml")) if data.stem == data.parent.name}
        with tempfile.TemporaryDirectory(prefix="lockstep-digests-") as folder:
            results["forms"] = form_digests(sets, Path(folder))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
