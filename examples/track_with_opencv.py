"""Tracks objects in the frames that OpenCV reads, draws them, and counts what crosses the middle of the image.

python examples/track_with_opencv.py best.pt clip.mp4 out.mp4        (after: pip install ".[track]")

This is a program of its own: it reads the video itself, so that it can do whatever it likes with each frame.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import cv2
import numpy as np

import lockstep


def frames_of(capture: cv2.VideoCapture) -> Iterator[np.ndarray]:
    """Yields the frames of a video, BGR."""
    while True:
        is_read, frame = capture.read()
        if not is_read:
            return
        yield frame


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", help="checkpoint or exported file")
    parser.add_argument("video", help="file that is read")
    parser.add_argument("output", help="video with boxes that is written")
    parser.add_argument("--conf", type=float, help="confidence above which tracks begin; default: the checkpoint's")
    arguments = parser.parse_args()
    try:
        track_video(arguments.weights, arguments.video, arguments.output, arguments.conf)
    except (lockstep.Error, OSError) as error:  # the message of lockstep.Error is one line
        parser.error(str(error))


def track_video(weights: str, video: str, output: str, conf: float | None) -> None:
    """Tracks the objects of a video, and writes a video with their boxes. Raises lockstep.Error or OSError."""
    model = lockstep.load(weights, color="bgr", conf=conf)
    capture = cv2.VideoCapture(video)
    if not capture.isOpened():
        raise OSError(f"{video}: cannot be opened as a video")
    width = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH))
    height = int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
    fps = capture.get(cv2.CAP_PROP_FPS)
    writer = cv2.VideoWriter(output, cv2.VideoWriter_fourcc(*"mp4v"), fps, (width, height))
    if not writer.isOpened():
        raise OSError(f"{output}: cannot be written as a video of {width}x{height} pixels at {fps:g} frames/s")

    last_x: dict[int, float] = {}  # by id, pixels
    crossings = 0
    for result in model.track(frames_of(capture)):
        boxes = result.boxes.numpy()
        for track, x in zip(boxes.id.astype(int).tolist(), boxes.xywh[:, 0].tolist()):
            if track in last_x and (last_x[track] < width / 2) != (x < width / 2):
                crossings += 1
            last_x[track] = x
        drawn = result.plot()
        cv2.putText(drawn, f"crossings: {crossings}", (10, 25), cv2.FONT_HERSHEY_SIMPLEX, 0.7, (255, 255, 255), 2)
        writer.write(drawn)
    writer.release()
    capture.release()
    print(f"{len(last_x)} tracks, {crossings} crossings")


if __name__ == "__main__":
    main()
