"""SECURITY.md: files and servers of others."""

from __future__ import annotations

import os
import pickle
import tempfile
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import pytest
import torch

from engine.train.compile import check_compiler
from models.weights import download
from models.weights.download import fetch_weights
from models.weights.read import read_weights
from tests.helpers.hostile_files import tensor_program, zip_around
from tests.helpers.http_server import serve_folder
from tests.helpers.messages import refused
from utils.distributed.context import DistributedContext
from utils.files.results_csv import ResultsTable
from utils.files.torch_file import read_checkpoint
from utils.files.url import _RedirectHandler


def test_a_tensor_that_repeats_one_element_is_one_line(tmp_path):
    """SECURITY.md, "Code": a few bytes are read as they are, not as terabytes."""
    path = zip_around(tensor_program((2**40,), (0,), 1), tmp_path / "a.pt", **{"0": bytes(4)})
    with refused(f"{path}: damaged checkpoint (w has more elements than the file)"):
        read_weights(path)


@pytest.mark.parametrize("read", [read_weights, read_checkpoint])
@pytest.mark.parametrize("size", [(0, 2**40, 2**40), (2**62, 2**62), (-1,), (2**70,)])
def test_a_shape_that_no_tensor_can_have_is_one_line(tmp_path, read, size):
    path = zip_around(tensor_program(size, (1,) * len(size), 1), tmp_path / "a.pt", **{"0": bytes(4)})
    with refused(f"{path}: ..."):
        read(path)


def test_a_module_that_contains_itself_is_one_line(tmp_path):
    module = torch.nn.Module()
    program = pickle.dumps({"model": module}, 2)
    module.__dict__["_modules"] = {"again": module}
    program = pickle.dumps({"model": module}, 2)
    path = zip_around(program, tmp_path / "a.pt")
    with refused(f"{path}: damaged checkpoint (a module contains itself)"):
        read_weights(path)


def test_the_columns_of_a_stored_table_are_no_formulas(tmp_path):
    table = ResultsTable.of([{"epoch": 1, "=cmd|'/C calc'!A0": 2.0}])
    table.write(tmp_path / "results.csv")
    table = ResultsTable.read(tmp_path / "results.csv")
    table.write(tmp_path / "results.csv")
    assert (tmp_path / "results.csv").read_text() == "epoch,'=cmd|'/C calc'!A0\n1,2\n"


def test_a_redirect_to_an_unencrypted_address_is_refused():
    """SECURITY.md, "Secrets"."""
    request = urllib.request.Request("https://a/x.pt")
    for url in ("http://a/x.pt", "ftp://a/x.pt"):
        with pytest.raises(urllib.error.URLError, match="unencrypted"):
            _RedirectHandler().redirect_request(request, None, 302, "Found", Message(), url)  # type: ignore[arg-type]
    found = _RedirectHandler().redirect_request(request, None, 302, "Found", Message(), "https://b/x.pt")  # type: ignore[arg-type]
    assert found is not None


def test_weights_of_a_folder_in_which_others_can_write_are_not_used(tmp_path):
    """SECURITY.md, "Folders"."""
    tmp_path.chmod(0o777)
    (tmp_path / "yolov8n.pt").write_bytes(b"of somebody else")
    with refused(f"{tmp_path}: others may write there..."):
        fetch_weights("yolov8n", ctx=DistributedContext.single(), offline=False, cache_dir=tmp_path)


def test_compiled_code_of_a_folder_in_which_others_can_write_is_not_run(tmp_path, monkeypatch):
    """SECURITY.md, "Folders"."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"lockstep-inductor-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with refused(f"{folder}: others may write there..."):
        check_compiler(torch.device("cpu"))


def test_a_download_has_a_limit_of_size(tmp_path, monkeypatch):
    """SECURITY.md, "Secrets"."""
    (tmp_path / "page.pt").write_bytes(bytes(1000))
    monkeypatch.setattr(download, "MAX_BYTES", 999)
    with serve_folder(tmp_path, monkeypatch) as url, refused("http://127.0.0.1:.../page.pt: is larger than 999 bytes"):
        fetch_weights(f"{url}/page.pt", ctx=DistributedContext.single(), offline=False, cache_dir=Path(tmp_path, "c"))
