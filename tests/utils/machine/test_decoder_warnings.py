"""What decoders print is attributed to their image, and everything else still reaches standard error."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest

from tests.helpers.hostile_files import photo, with_middle
from utils.drawing.draw import encode_image
from utils.machine import decoder_warnings
from utils.machine.decoder_warnings import pass_on, watched


def test_decoder_warnings_are_attributed_to_the_right_thread(tmp_path, capfd):
    sound, damaged = photo(1), with_middle(photo(2), "other")

    def decode(data):
        return watched(lambda: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR))

    stop = threading.Event()

    def chatter():
        while not stop.wait(0.001):
            print("chatter", file=sys.__stderr__, flush=True)

    thread = threading.Thread(target=chatter)
    thread.start()
    wanted = [i % 7 == 3 for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(decode, [damaged if bad else sound for bad in wanted]))
    stop.set()
    thread.join()
    assert [bool(complaint) for _, complaint in found] == wanted
    assert all(image is not None for image, _ in found)
    err = capfd.readouterr().err
    # A line and its line break may be written separately, with another thread's output between them.
    assert err.replace("chatter", "").split() == []
    print("after", file=sys.__stderr__, flush=True)
    assert capfd.readouterr().err == "after\n"


def test_the_error_of_an_encoder_is_not_taken_for_damage_of_an_image_that_is_decoded_meanwhile(capfd, monkeypatch):
    printed, wide = threading.Event(), np.zeros((1, 70000, 3), np.uint8)
    true = cv2.imencode
    monkeypatch.setattr("utils.drawing.draw.cv2.imencode", lambda *given: (true(*given), printed.set())[0])
    with ThreadPoolExecutor(1) as pool:
        _, complaint = watched(lambda: (pool.submit(encode_image, wide, ".jpg", "wide.jpg"), printed.wait(20)))
    assert printed.is_set()
    assert complaint == ""
    assert "ERROR" not in capfd.readouterr().err


def test_output_printed_during_decoding_is_kept_when_the_process_ends(capfd):
    inside, goes_on = threading.Event(), threading.Event()
    decoder = threading.Thread(target=watched, args=(lambda: inside.set() or goes_on.wait(20),))
    decoder.start()
    inside.wait(20)
    os.write(2, b"Premature end of JPEG file\nerror: x\n")
    assert capfd.readouterr().err == ""
    pass_on()
    assert capfd.readouterr().err == "error: x\n"
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "later\n"
    goes_on.set()
    decoder.join()
    assert watched(lambda: os.write(2, b"Corrupt JPEG data: x\ny\n")) == (23, "Corrupt JPEG data: x")
    assert capfd.readouterr().err == "y\n"


@pytest.mark.parametrize(("name", "error"), [("pread", MemoryError()), ("dup", OSError(24, "Too many open files"))])
def test_standard_error_still_works_after_a_failed_capture(capfd, monkeypatch, name, error):
    def refuse(*_: object) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(f"utils.machine.decoder_warnings.os.{name}", refuse)
        with pytest.raises(type(error)):
            watched(lambda: os.write(2, b"x\n"))
    capfd.readouterr()
    os.write(2, b"error: y\n")
    assert capfd.readouterr().err == "error: y\n"
    assert watched(lambda: 1) == (1, "")


def test_threads_that_start_decoding_together_share_the_captured_standard_error(capfd, monkeypatch):
    """As at the beginning of a scan."""
    make, start = decoder_warnings._Watch.__init__, threading.Barrier(8)

    def slowly(self) -> None:
        time.sleep(0.05)
        make(self)

    monkeypatch.setattr(decoder_warnings._Watch, "__init__", slowly)
    monkeypatch.setattr(decoder_warnings, "_watches", {})
    files = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: (start.wait(20), watched(lambda: time.sleep(0.01))), range(8)))
    os.write(2, b"error: x\n")
    assert capfd.readouterr().err == "error: x\n"
    assert len(os.listdir("/proc/self/fd")) <= files + 1
