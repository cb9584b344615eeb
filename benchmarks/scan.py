"""Scan of a data set, cold and warm, compared with Ultralytics, and the cost of a very large index.

    python -m benchmarks.scan --data coco128.yaml --times 157 --peer PYTHON     # 20,096 images
    python -m benchmarks.scan --large                                          # 1,000,000 images, 7,000,000 boxes

The data set is a copy made of hard links, so both sides read the same files from the system's cache. Cold means that no
index is cached, warm that it is. Each scan is a separate process; the two sides alternate.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.dataset_copy import copied
from benchmarks.memory import private_mb
from benchmarks.report import Comparison, add_flags, append_log, show
from benchmarks.turns import ROOT, run_in_turns


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.scan", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="", help="data set with YOLO labels")
    parser.add_argument("--times", type=int, default=157, help="how often each of its training images is there")
    parser.add_argument("--large", action="store_true", help="a synthetic index instead")
    parser.add_argument("--images", type=int, default=1_000_000, help="of the synthetic index")
    add_flags(parser)
    options = parser.parse_args()
    if options.large:
        text = large_index(options.images)
        print(text)
        if options.log:
            append_log(text)
        return
    with copied(options.data, times=options.times) as data:
        rows = compare(options, data)
    show(f"Scan of {rows[0].what}", rows[1:], log=options.log)


def compare(options: argparse.Namespace, data: Path) -> list[Comparison]:
    """A row that names the set, then the measurements."""
    index = data.parent / "index"
    ours = [sys.executable, "-m", "benchmarks.our_side", "scan", "--data", str(data), "--cache-dir", str(index)]
    side = str(ROOT / "benchmarks" / "ultralytics_side.py")
    peer = [options.peer, side, "scan", "--images", str(data.parent / "images" / "train")]
    commands = {"ours": ours, **({"peer": peer} if options.peer else {})}
    seconds: dict[tuple[str, str], list[float]] = {}
    peaks: dict[str, list[float]] = {name: [] for name in commands}
    found = {}
    for _ in range(options.rounds):
        shutil.rmtree(index, ignore_errors=True)
        for cache in (data.parent / "labels").rglob("*.cache"):
            cache.unlink()
        for state in ("cold", "warm"):
            for name, (result,) in run_in_turns(commands, 1).items():
                seconds.setdefault((state, name), []).append(result["seconds"])
                found[name] = f"{result['images']:,.0f} images, {result['boxes']:,.0f} boxes"
                if state == "cold":
                    peaks[name].append(result["peak_mb"])
    if len(set(found.values())) > 1:
        print(f"the two do not find the same: {found}")
    goals = {"cold": 1.5, "warm": None}
    rows = [Comparison(found["ours"], "", [0])]
    for state, goal in goals.items():
        rows.append(Comparison(state, "s", seconds[state, "ours"], seconds.get((state, "peer"), []), goal=goal))
    return [*rows, Comparison("peak memory, cold", "MB", peaks["ours"], peaks.get("peer", []))]


def large_index(images: int) -> str:
    """Writes a synthetic index with 7 boxes an image, opens it in two processes, and says what that took in each.

    Two, since the pages of a file that one process alone has mapped count as its private memory. A training has several
    that map it: ranks and loader workers.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "large.index")
        writer = context.Process(target=_write_large, args=(path, images))
        writer.start()
        writer.join()
        results, meeting = context.SimpleQueue(), context.Barrier(2)
        readers = [context.Process(target=_open_large, args=(path, results, meeting)) for _ in range(2)]
        for reader in readers:
            reader.start()
        opened, ready, touched = (max(values) for values in zip(*(results.get() for _ in readers)))
        for reader in readers:
            reader.join()
        size = path.stat().st_size / 2**20
    return (
        f"Index of {images:,} images and {7 * images:,} boxes ({size:.0f} MiB): opened in {opened:.2f} s; private "
        f"memory of each of two processes {ready:+.0f} MB when open, {touched:+.0f} MB after an epoch's order and the "
        f"labels of 100,000 images."
    )


def _write_large(path: Path, images: int) -> None:
    from dataclasses import replace

    from data.index.index import write_cache
    from tests.helpers.synthetic_index import index_of

    rng = np.random.default_rng(0)
    boxes = rng.uniform(1, 200, (7 * images, 4))
    index = index_of(
        names=[f"class{i}" for i in range(80)],
        paths=[f"images/train/{i:012}.jpg" for i in range(images)],
        image_hw=np.full((images, 2), 480),
        offsets=np.arange(images + 1) * 7,
        boxes_xywh_px=boxes,
        classes=rng.integers(0, 80, 7 * images),
    )
    write_cache(path, replace(index, fingerprint="large"))


def _open_large(path: Path, results, meeting) -> None:
    from data.index.index import open_cached
    from data.sampler import EpochOrder

    before = private_mb()
    started = time.perf_counter()
    index = open_cached(path, tuple(f"class{i}" for i in range(80)), Path("/data"), "large")
    opened = time.perf_counter() - started
    meeting.wait()
    ready = private_mb() - before
    order = EpochOrder(len(index), seed=0, batch_size=16, imgsz=640, stride=32).indices(0)
    for i in order[:100_000]:
        index.labels(i)
        index.path(i)
    meeting.wait()
    results.put((opened, ready, private_mb() - before))
    meeting.wait()


if __name__ == "__main__":
    main()
