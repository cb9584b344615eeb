"""Runs detect.py, and reads what it has written."""

import json

import cv2
import numpy as np

import detect

NAMES = ("disc", "box/größe")


def run(weights, source, tmp_path, *more):
    words = ["--weights", weights, "--source", source, "--device", "cpu", "--project", tmp_path / "runs"]
    detect.main([str(w) for w in [*words, "--conf-thres", "0", "--max-det", "5", *more]])
    return max((tmp_path / "runs").iterdir(), key=lambda p: p.stat().st_mtime_ns)


def names_in(folder):
    files = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return sorted(str(p.relative_to(folder)) for p in files)


def frames_of(path):
    capture = cv2.VideoCapture(str(path))
    frames = []
    while (got := capture.read())[0]:
        frames.append(got[1])
    return frames


def read_txt(path):
    return np.array([[float(v) for v in row.split()] for row in path.read_text().splitlines()])


def read(folder):
    return json.loads((folder / "predictions.json").read_text(encoding="utf-8"))
