"""Scores of validation, detection and exported files on a GPU, which must be those of the CPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.run_script import ScriptRunner, run_script
from benchmarks.processes import end_of
from benchmarks.speed.training_step import context_of

SAME_SCORE = 0.01  # AP over few images changes if a single box falls on the other side of a threshold
SUFFIXES = {"onnx": ".onnx", "torchscript": ".torchscript", "pt2": ".pt2"}  # suffixes of exported files, by format
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def validate(options: argparse.Namespace, *, run: ScriptRunner = run_script) -> Iterator[str]:
    """Yields val.py's scores in float32, with ``--variants`` also in the type of ``--amp auto`` and with test-time
    augmentation. Raises SystemExit if a GPU's scores differ from the CPU's, or if the AP is below ``--at-least``."""
    on_device = scores(options, options.weights, run=run)
    yield f"val.py: {describe_scores(on_device)}"
    if options.variants:
        yield f"val.py --amp auto: {describe_scores(scores(options, options.weights, '--amp', 'auto', run=run))}"
        yield f"val.py --tta: {describe_scores(scores(options, options.weights, '--tta', run=run))}"
    if options.device != "cpu":
        expected = scores(options, options.weights, device="cpu", run=run)
        yield f"val.py on the CPU: {describe_scores(expected)}"
        if any(abs(on_device[name] - expected[name]) > SAME_SCORE for name in ("ap50", "ap")):
            sys.exit(f"scores differ by more than {SAME_SCORE} from the CPU's")
    if on_device["ap"] < options.at_least:
        sys.exit(f"AP {on_device['ap']:.4f} after training on the device, at least {options.at_least} expected")


def detect(options: argparse.Namespace) -> Iterator[str]:
    """Yields the number of validation images in which detect.py finds objects."""
    source = Path(options.data).parent / "images" / "val"
    project = options.folder / "detect"
    command = ["detect.py", "--weights", str(options.weights), "--source", str(source), "--conf-thres", "0.01"]
    run_script(options, *command, "--save-txt", "--project", str(project), "--name", "exp", "--exist-ok")
    yield f"detections in {len(list(project.rglob('exp/labels/*.txt')))} of {len(list(source.iterdir()))} images"


def exported(options: argparse.Namespace, *, run: ScriptRunner = run_script) -> Iterator[str]:
    """Exports a trained model on the CPU and yields the AP of each file on the device. Raises SystemExit if an AP
    differs from the checkpoint's, or if the latter is below ``--at-least``: equal scores would then prove nothing."""
    formats = list(SUFFIXES)
    absent = [package for package in ONNX_PACKAGES if importlib.util.find_spec(package) is None]
    if absent:
        formats.remove("onnx")
        yield f"no ONNX file: {', '.join(absent)} not installed"
    run(options, "export.py", "--weights", str(options.weights), "--format", *formats, "--no-check", device="cpu")
    expected = scores(options, options.weights, run=run)["ap"]
    yield f"checkpoint: AP {expected:.4f}"
    problems = []
    if expected < options.at_least:
        problems.append(f"the checkpoint's AP is {expected:.4f}, at least {options.at_least} expected")
    for name in formats:
        try:
            ap = scores(options, options.weights.with_suffix(SUFFIXES[name]), "--trust", run=run)["ap"]
        except SystemExit as error:  # the other files are still worth scoring
            problems.append(f"{name}: {end_of(error)}")
            continue
        yield f"{name}: AP {ap:.4f}"
        if abs(ap - expected) > SAME_SCORE:
            problems.append(f"{name}: AP {ap:.4f}, the checkpoint's is {expected:.4f}")
    if problems:
        sys.exit("; ".join(problems))


def score_of_weights(options: argparse.Namespace) -> Iterator[str]:
    """Yields how well trained weights find the training objects, which determines ``lr_mult``. Raises SystemExit if the
    device's score differs from the CPU's, or is below ``--at-least``."""
    from benchmarks.gpu.batches import open_loader
    from engine.train.lr_probe import MAX_PROBE_IMAGES, score_on_objects
    from models.weights.load import load_detector

    score_by_device = {}
    for device in dict.fromkeys((options.device, "cpu")):
        ctx = context_of(device)
        detector = load_detector(options.weights)[0].eval().fuse().to(ctx.device)
        loader = open_loader(options, ctx)
        started = time.monotonic()
        scores = score_on_objects(detector, loader.samples, MAX_PROBE_IMAGES, ctx)
        score_by_device[device] = scores.mean
        objects = len(scores.objects)
        yield f"device {device}: {scores.mean:.5f} of {objects} objects, {time.monotonic() - started:.1f} s"
        loader.close()
    if abs(score_by_device[options.device] - score_by_device["cpu"]) > SAME_SCORE:
        sys.exit("the scores differ")
    if score_by_device["cpu"] < options.at_least:
        sys.exit(f"the score is {score_by_device['cpu']:.5f}, at least {options.at_least} expected of trained weights")


def scores(
    options: argparse.Namespace, weights: Path, *flags: str, device: str = "", run: ScriptRunner = run_script
) -> dict:
    """Returns the content of val.py's results.json."""
    project = options.folder / "val"
    run(options, "val.py", "--weights", str(weights), "--project", str(project), "--name", "exp", "--exist-ok",
        "--noplots", *flags, device=device)  # fmt: skip
    return json.loads((project / "exp" / "results.json").read_text())


def describe_scores(found: dict) -> str:
    """Returns the scores of a results.json; the precision of a model that detects nothing is undefined (null)."""
    scores = {name: found[name] for name in ("precision", "recall", "ap50", "ap")}
    return ", ".join(f"{name} {'undefined' if score is None else f'{score:.4f}'}" for name, score in scores.items())
