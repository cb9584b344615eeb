"""What decoders print is attributed to their image, and everything else still reaches standard error."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np

from tests.helpers.damaged_jpegs import make_jpeg, replace_middle
from utils.process.decoder_warnings import capture_warning, flush_captured


def test_decoder_warnings_are_attributed_to_the_right_thread(tmp_path, capfd):
    sound = make_jpeg(1)
    damaged = replace_middle(make_jpeg(2), "other")

    def decode(data):
        return capture_warning(lambda: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR))

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


def test_output_printed_during_decoding_is_kept_when_the_process_ends(capfd):
    inside = threading.Event()
    goes_on = threading.Event()
    decoder = threading.Thread(target=capture_warning, args=(lambda: inside.set() or goes_on.wait(20),))
    decoder.start()
    inside.wait(20)
    os.write(2, b"Premature end of JPEG file\nerror: x\n")
    assert capfd.readouterr().err == ""
    flush_captured()
    assert capfd.readouterr().err == "error: x\n"
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "later\n"
    goes_on.set()
    decoder.join()
    assert capture_warning(lambda: os.write(2, b"Corrupt JPEG data: x\ny\n")) == (23, "Corrupt JPEG data: x")
    assert capfd.readouterr().err == "y\ny\n"  # decoded twice


def test_a_message_of_several_lines_is_captured_whole(capfd):
    """OpenCV's checks print the compared values on lines that begin with ">"."""
    message = (
        b"[ERROR:0@0.111] global loadsave.cpp:1355 imdecode_ can't read header\n> Unsupported:\n>     'bits' is 5\n\n"
    )
    _, warning = capture_warning(lambda: os.write(2, message + b"other\n"))
    assert warning == "imdecode_ can't read header"
    assert capfd.readouterr().err == "other\nother\n"  # decoded twice
