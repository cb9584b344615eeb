"""SECURITY.md, "Secrets": no login and no query of an address is shown or stored."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

import detect
import export
import lockstep
import train
import val
from tests.helpers.http_server import serve, serve_folder
from tests.helpers.scripts import PLAIN, call, error_of, training, write_inputs
from tests.helpers.tiny import write_dataset, write_weights
from tools.check.__main__ import main as check_main
from utils.address import Address, with_short_addresses
from utils.files.torch_file import read_checkpoint

TOKEN = "t0ken"
SECRETS = (b"s%20cret", b"s cret", base64.b64encode(b"me:s cret"), TOKEN.encode())


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[str]:
    """The URL of weights and an image, with a login."""
    folder = tmp_path / "served"
    folder.mkdir()
    write_weights(folder / "w.pt", ["light", "dark"])
    cv2.imwrite(str(folder / "image.png"), np.full((64, 64, 3), 128, np.uint8))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serve_folder(folder, monkeypatch) as url:
        yield url


def assert_no_secret(folder: Path, *outputs: str) -> None:
    """Looks in the contents and names of all files below ``folder`` but the served ones, and in what was printed."""
    texts = [output.encode() for output in outputs]
    for path in folder.rglob("*"):
        texts.append(str(path.relative_to(folder)).encode())
        if path.is_file() and "served" not in path.parts:
            texts.append(path.read_bytes())
    found = [text for text in texts if any(secret in text for secret in SECRETS)]
    assert not found, found[0][:2000]


def test_a_training_shows_and_stores_no_secret_and_resumes_with_its_addresses_given_again(tmp_path, server, capfd):
    teacher = f"{server}/w.pt?key={TOKEN}"
    given = training(write_inputs(tmp_path, train=4, val=2), tmp_path / "runs", "--plots")
    call(train.main, *given, "--weights", f"{server}/w.pt?token={TOKEN}", "--teacher", teacher, "--epochs", "1")
    run = tmp_path / "runs" / "exp"
    config = read_checkpoint(run / "last.pt")["config"]
    assert config["weights"] == config["teacher"]
    assert config["teacher"].endswith("/w.pt")
    shutil.rmtree(tmp_path / "cache" / "weights", ignore_errors=True)
    call(train.main, "--resume", run, "--teacher", teacher, "--epochs", "2", "--noplots")
    out = capfd.readouterr()
    assert len((run / "results.csv").read_text().splitlines()) == 3
    assert_no_secret(tmp_path, out.out, out.err)
    assert b"/w.pt" in (run / "settings.yaml").read_bytes()


def test_the_other_commands_show_and_store_no_secret(tmp_path, server, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = f"{server}/w.pt?token={TOKEN}"
    project = ["--project", tmp_path / "runs"]
    source = f"{server}/image.png?token={TOKEN}"
    files = ["--save-txt", "--save-json", "--save-crop", "--conf-thres", "0.001"]
    call(detect.main, "--weights", weights, "--source", source, "--device", "cpu", *files, *project)
    data = write_dataset(tmp_path / "set", train=1, val=2)
    call(val.main, "--weights", weights, "--data", data, *PLAIN[:-1], *project)
    model = lockstep.load(weights)
    results = list(model.stream(source))
    out = capfd.readouterr()
    assert_no_secret(tmp_path, out.out, out.err, repr(model), str(results), str(results[0].path))
    assert (tmp_path / "runs" / "exp" / "predictions.json").exists()


@pytest.mark.parametrize(
    ("main", "flags"),
    [
        (export.main, ["--weights", "{}/none.pt?token=t0ken"]),
        (export.main, ["--weights", "{}/w.pt?token=t0ken", "--offline"]),
        (export.main, ["--weights", "http://me:s cret@127.0.0.1:t0ken/w.pt"]),
        (train.main, ["--data", "{}/data.yaml?token=t0ken"]),
        (val.main, ["--weights", "http://me:s%20cret/t0ken@127.0.0.1/w.pt"]),
        (detect.main, ["--weights", "yolov8n", "--source", "rtsp://me:s%20cret@127.0.0.1:1/a?t0ken"]),
        (detect.main, ["--weights", "yolov8n", "--sauce=http://me:it's cret@127.0.0.1/none.png"]),
        (detect.main, ["http://me:it's cret@127.0.0.1/none.png"]),
        (detect.main, ["--weights", "yolov8n", "--source", "list.txt"]),
        (export.main, ["--weights", "{}/moved.pt"]),
    ],
)
def test_an_error_shows_no_secret(tmp_path, server, capsys, monkeypatch, main, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yolov8n.pt").write_bytes((tmp_path / "served" / "w.pt").read_bytes())
    (tmp_path / "list.txt").write_text("s3://me:s%20cret@bucket/image.png?t0ken\n")
    flags = [flag.replace("{}", server).replace("yolov8n", "yolov8n.pt") for flag in flags]
    line = error_of(capsys, main, *flags)
    assert not any(secret.decode() in line for secret in SECRETS), line


@pytest.mark.parametrize("place", ["train", "path", "list"])
def test_an_address_in_a_data_set_is_shown_and_stored_without_secrets(tmp_path, capfd, monkeypatch, place):
    """Also in the path that is made of it, which has one slash less."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_dataset(tmp_path / "set", train=2, val=1)
    inputs = tmp_path / "served"
    inputs.mkdir()
    address = f"http://me:s%20cret@127.0.0.1/set?{TOKEN}"
    rows = [*map(str, (tmp_path / "set" / "images" / "train").iterdir()), f"{address}/a.jpg"]
    (inputs / "list.txt").write_text("\n".join(rows))
    content = {"path": str(tmp_path / "set"), "train": "images/train", "val": "images/val", "names": ["light", "dark"]}
    content |= {"train": str(inputs / "list.txt")} if place == "list" else {place: address}
    (inputs / "data.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit):
        call(check_main, "--data", inputs / "data.yaml", "--out", tmp_path / "out")
    out = capfd.readouterr()
    assert "127.0.0.1/set" in out.out + out.err
    assert_no_secret(tmp_path, out.out, out.err)


def test_a_process_that_is_started_has_no_secret_in_its_command_line(monkeypatch):
    """Other users can read it; who calls from Python has typed none."""
    started: list[list[str]] = []

    def note(words: list[str], **_: object) -> None:
        started.append(words)
        raise InterruptedError

    monkeypatch.setattr("utils.process.child.subprocess.Popen", note)
    with pytest.raises(InterruptedError):
        lockstep.export(f"http://me:s%20cret@127.0.0.1/w.pt?{TOKEN}")
    (words,) = started
    assert not any(secret.decode() in " ".join(words) for secret in SECRETS), words


def test_an_address_keeps_the_url_through_processes():
    """Those of ``--spawn`` get it pickled."""
    for url, text in (
        ("https://me:pw@host:80/a/b.pt?sig=1#x", "https://host:80/a/b.pt"),
        ("http://[::1]:8000/a", "http://[::1]:8000/a"),
        ("rtsp://me:p@s@cam/1", "rtsp://cam/1"),
        ("rtsp://me:p/s@cam/1", "rtsp://..."),
        ("rtsp://me:p#s@cam/1", "rtsp://..."),
        ("rtsp://me:p s@cam/1", "rtsp://cam/1"),
        ("rtsp://me:12 s@cam/1", "rtsp://cam/1"),
        ("rtsp://me: s@cam/1", "rtsp://cam/1"),
        ("https://me:12/34@host/x", "https://..."),
        ("https://me:1#2/3?4@host/x", "https://..."),
        ("sqlite:////a/mlflow.db", "sqlite:////a/mlflow.db"),
    ):
        address = pickle.loads(pickle.dumps(Address(url)))
        assert (str(address), address.full) == (text, url)
        assert with_short_addresses(f"no answer ('{url}')") == f"no answer ('{text}')"
        assert with_short_addresses(str(Path(url))).replace("://", ":/") == str(Path(text))
    assert with_short_addresses("no answer (http://me:it's<1>@host/a, 2)") == "no answer (http://host/a, 2)"
    for url in ("http:///me:pw@host/a", "http:///me:p w@host/a", "http://:80/me:pw@host"):  # no host
        assert str(Address(url)) == with_short_addresses(url) == "http://..."
    for text in ("see http://host and mail me@x.org", "see http://host:80 and port 80"):
        assert with_short_addresses(text) == text


def test_mlflow_shows_no_login(tmp_path, monkeypatch, capfd):
    """At the end of a run it prints the address of the server, unless it is told not to."""
    pytest.importorskip("mlflow")
    requests: list[str] = []

    class Server(BaseHTTPRequestHandler):
        """Answers as a server with one experiment and one run."""

        def log_message(self, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            requests.append(f"{self.path} {self.headers.get('Authorization')}")
            info = {"run_id": "r", "run_uuid": "r", "run_name": "exp", "experiment_id": "1", "status": "RUNNING"}
            info |= {"artifact_uri": (tmp_path / "artifacts").as_uri(), "lifecycle_stage": "active", "start_time": 1}
            content = {"experiment": {"experiment_id": "1", "name": "lockstep", "lifecycle_stage": "active"}}
            content |= {"run": {"info": info, "data": {}}, "run_info": info, "metrics": []}
            data = json.dumps({} if "search" in self.path else content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

    with serve(Server) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:s%20cret@127.0.0.1:{server.server_port}")
        inputs = write_inputs(tmp_path, train=4, val=2)
        call(train.main, *training(inputs, tmp_path / "runs", "--epochs", 1, "--tracker", "mlflow"))
    out = capfd.readouterr()
    assert any("runs/update" in line and base64.b64encode(b"me:s cret").decode() in line for line in requests)
    assert_no_secret(tmp_path, out.out, out.err)
