"""SECURITY.md: files and servers of others."""

from __future__ import annotations

import os
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
from tests.helpers.http_server import serve_folder
from tests.helpers.messages import refused
from utils.distributed.context import DistributedContext
from utils.files.url import _RedirectHandler


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
