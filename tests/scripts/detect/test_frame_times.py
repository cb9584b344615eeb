"""Results have the times of their source, also if its frame rate varies (darknet#896, opencv#24000, #21006)."""

import shutil
import subprocess

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.scripts.detect.detection import frames_of, read, run


def duration_s(path):
    capture = cv2.VideoCapture(str(path))
    return capture.get(cv2.CAP_PROP_FRAME_COUNT) / capture.get(cv2.CAP_PROP_FPS)


def write_gif(path, durations_ms):
    """Writes frames of rising brightness: 20 times their number."""
    frames = [Image.new("RGB", (64, 48), (20 * number,) * 3) for number in range(len(durations_ms))]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations_ms)
    return path


def test_each_frame_of_a_gif_is_shown_at_its_time(weights, tmp_path, capsys):
    durations_ms = [50, 500] * 5
    starts_s = np.cumsum([0, *durations_ms[:-1]]) / 1000
    source = write_gif(tmp_path / "varying.gif", durations_ms)
    folder = run(weights, source, tmp_path, "--save-json", "--hide-labels", "--conf", "1", "--vid-stride", 2)
    shown = [round(frame.mean() / 20) for frame in frames_of(folder / "varying.mp4")]
    fps = cv2.VideoCapture(str(folder / "varying.mp4")).get(cv2.CAP_PROP_FPS)
    taken = range(0, 10, 2)
    assert [next(i for i, number in enumerate(shown) if number == n) / fps for n in taken] == pytest.approx(
        starts_s[::2], abs=0.5 / fps
    )
    assert len(shown) / fps == pytest.approx(2.75, abs=0.1)
    assert "damaged" not in capsys.readouterr().out

    folder = run(weights, source, tmp_path, "--save-json", "--nosave", "--vid-stride", 2)
    times = {record["frame"]: record["time"] for record in read(folder)}
    assert times == pytest.approx(dict(zip(taken, starts_s[::2])))


def test_frames_that_come_faster_than_a_video_begins_do_not_delay_it(weights, tmp_path):
    source = write_gif(tmp_path / "faster.gif", [100] * 310 + [20] * 100)
    folder = run(weights, source, tmp_path)
    assert duration_s(folder / "faster.mp4") == pytest.approx(33, rel=0.02)


def test_only_a_video_that_ends_early_is_damaged(weights, tmp_path, capsys):
    """OpenCV does not tell how long the last frame is shown, here 2 of 2.45 s."""
    run(weights, write_gif(tmp_path / "pause.gif", [50] * 9 + [2000]), tmp_path)
    assert "damaged" not in capsys.readouterr().out
    path = tmp_path / "cut.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (64, 48))
    for pixels in np.random.default_rng(0).integers(0, 255, (20, 48, 64, 3), np.uint8):
        writer.write(pixels)
    writer.release()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    run(weights, path, tmp_path)
    assert "damaged" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg")
@pytest.mark.parametrize(("suffix", "stride"), [(".mp4", 1), (".mkv", 4)])
def test_results_last_as_long_as_a_source_of_variable_frame_rate(weights, tmp_path, capsys, suffix, stride):
    source = tmp_path / f"clip{suffix}"
    varying = ["-vf", "select='lt(n,40)+not(mod(n,3))'", "-fps_mode", "vfr"]
    command = ["ffmpeg", "-loglevel", "error", "-f", "lavfi", "-i", "testsrc=r=30:d=5:s=64x48", *varying, str(source)]
    subprocess.run(command, check=True)
    folder = run(weights, source, tmp_path, "--save-json", "--vid-stride", stride)
    assert duration_s(folder / "clip.mp4") == pytest.approx(4.93, abs=0.07)
    newest = max(read(folder), key=lambda record: record["frame"])
    assert (newest["frame"], newest["time"]) == pytest.approx((75, 4.9) if stride == 1 else (72, 4.6), abs=0.01)
    assert "damaged" not in capsys.readouterr().out
