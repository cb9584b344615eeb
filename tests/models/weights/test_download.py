import hashlib
import shutil
import time
from http.server import BaseHTTPRequestHandler

import pytest
import yaml

from models.weights import catalog as catalog_module
from models.weights import download as downloads
from models.weights.catalog import CATALOG, weights_entry
from models.weights.download import fetch_weights
from models.weights.origin import origin_of, origin_of_run
from models.weights.read import StoredWeights
from tests.helpers.http_server import serve
from tests.helpers.messages import refused
from tests.helpers.ranks import run_ranks
from utils.distributed.context import DistributedContext

BODY = bytes(range(256)) * 1200
SHA = hashlib.sha256(BODY).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers with a body, with one of the listed faults in each of the first requests."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        server = self.server
        fault = server.faults.pop(0) if server.faults else ""
        server.requests += 1
        if fault.isdigit():
            self.send_error(int(fault))
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(server.body)))
        self.end_headers()
        self.wfile.write(server.body[: len(server.body) // 2] if fault else server.body)
        self.wfile.flush()
        if fault == "stall":
            time.sleep(1.0)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with serve(Handler) as server:
        server.faults = []
        server.requests = 0
        server.body = BODY
        server.url = f"http://127.0.0.1:{server.server_port}/files/tiny.pt"
        yield server


@pytest.fixture
def fetch(server, tmp_path, monkeypatch):
    monkeypatch.setattr("utils.files.url.STALL_S", 0.3)

    def run(name="tiny", *, offline=False, **entry):
        catalog = tmp_path / "weights.yaml"
        entry = {"url": server.url, "license": "MIT", "sha256": SHA, **entry}
        catalog.write_text(yaml.safe_dump({"tiny": {k: v for k, v in entry.items() if v is not None}}))
        monkeypatch.setattr(catalog_module, "CATALOG", catalog)
        ctx = DistributedContext.single()
        return fetch_weights(name, ctx=ctx, offline=offline, cache_dir=tmp_path / "cache")

    return run


def kept(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache").rglob("*") if p.is_file())


def test_a_file_is_downloaded_once_and_then_read_from_disk(fetch, server, tmp_path, caplog, monkeypatch):
    """Address and license are printed first. A path that exists needs no network."""
    monkeypatch.setattr(downloads.get_logger(), "propagate", True)
    own = tmp_path / "mine.pt"
    own.write_bytes(b"x")
    assert fetch(str(own), offline=True) == own
    assert server.requests == 0
    with caplog.at_level("INFO", logger="lockstep"):
        path = fetch()
    assert path.read_bytes() == BODY
    assert server.url in caplog.messages[0]
    assert "MIT" in caplog.messages[0]
    assert fetch("tiny.pt", offline=True) == path
    assert server.requests == 1
    assert kept(tmp_path) == ["tiny.pt"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [("cut", "(cut off after 153600 bytes);"), ("stall", "(timed out);"), ("404", "(HTTP Error 404: Not Found);")],
)
def test_a_transfer_that_fails_is_one_line_and_leaves_no_file(fetch, server, tmp_path, fault, message):
    server.faults = [fault]
    with refused(
        f"http://127.0.0.1:.../files/tiny.pt: cannot be downloaded {message} put the file at .../cache/tiny.pt"
    ):
        fetch(sha256=None)
    assert kept(tmp_path) == []
    assert fetch(sha256=None).read_bytes() == BODY


@pytest.mark.parametrize(
    ("body", "sha256", "message"),
    [
        (BODY[:-1] + b"!", SHA, "has sha256 ..., expected ..."),
        (b"\n <!DOCTYPE html><title>Log in</title>", None, "the server sent a web page, not weights"),
    ],
)
def test_wrong_content_is_refused(fetch, server, tmp_path, body, sha256, message):
    server.body = body
    with refused(f"http://127.0.0.1:.../files/tiny.pt: {message}"):
        fetch(sha256=sha256)
    assert kept(tmp_path) == []


def test_offline_and_unreachable_are_one_line(fetch, server, tmp_path):
    with refused(
        "tiny: not on this machine, and --offline is set; put http://127.0.0.1:.../files/tiny.pt at .../cache/tiny.pt"
    ):
        fetch(offline=True)
    assert server.requests == 0
    with refused(
        "http://127.0.0.1:.../x.pt: cannot be downloaded ([Errno 111] Connection refused); put the file "
        "at .../cache/tiny.pt"
    ):
        fetch(url="http://127.0.0.1:9/x.pt")
    for name, message in (
        ("tinny.pt", "tinny.pt: neither a file nor the name of public weights (did you mean 'tiny'?)"),
        (str(tmp_path), "...: is a folder; name a file in it, such as best.pt"),
    ):
        with refused(message):
            fetch(name)


def test_urls_with_equal_file_names_do_not_collide(fetch, server):
    one = fetch(server.url)
    two = fetch(server.url + "?v=2")
    assert one.name == two.name == "tiny.pt"
    assert one != two


def test_the_shipped_catalog_is_well_formed(tmp_path):
    names = yaml.safe_load(CATALOG.read_text())
    for name in names:
        entry = weights_entry(name)
        assert entry == weights_entry(f"{name}.pt")
        assert entry.url.startswith("https://github.com/")
        assert entry.url.endswith((".pt", ".pth"))
        assert entry.license in ("AGPL-3.0", "GPL-3.0", "Apache-2.0", "MIT")
        assert not entry.sha256 or len(bytes.fromhex(entry.sha256)) == 32
        assert origin_of({}, tmp_path / f"{name}.pt").license.split(",")[0] not in ("", "unknown")
    assert len({weights_entry(name).url for name in names}) == len(names)


def test_shipped_checksums_match_the_public_files(shared):
    for path in (shared / "weights").glob("*.pt"):
        entry = weights_entry(path.name)
        assert entry.size == path.stat().st_size
        assert entry.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def _fetch_on_a_rank(ctx, catalog, cache):
    catalog_module.CATALOG = catalog  # of this process, which ends here
    return fetch_weights("tiny", ctx=ctx, offline=False, cache_dir=cache).read_bytes() == BODY


def test_only_the_first_process_downloads(server, tmp_path):
    catalog = tmp_path / "weights.yaml"
    catalog.write_text(yaml.safe_dump({"tiny": {"url": server.url, "sha256": SHA}}))
    assert run_ranks(2, _fetch_on_a_rank, catalog, tmp_path / "cache") == [True, True]
    assert server.requests == 1


@pytest.fixture
def public(tmp_path, monkeypatch):
    """A file that the catalog lists with its checksum as tiny, and another, plain, without one."""
    file = tmp_path / "tiny.pt"
    url = "https://example.com/a.pt"
    file.write_bytes(BODY)
    catalog = tmp_path / "weights.yaml"
    known = {"url": url, "license": "MIT", "sha256": SHA}
    catalog.write_text(yaml.safe_dump({"tiny": known, "plain": {"url": url, "license": "Apache-2.0"}}))
    monkeypatch.setattr(catalog_module, "CATALOG", catalog)
    return file


def stored(path, **content):
    return StoredWeights(path, {}, None, {"format": "foreign"} | content)


def test_public_files_are_known_by_checksum_or_name(public, tmp_path):
    for path in (public, shutil.copy(public, tmp_path / "mine.pt")):
        assert origin_of({"format": "foreign"}, path) == ("tiny (public file)", "MIT")
        assert origin_of_run(stored(path)) == ("tiny (public file)", "MIT")
    plain = tmp_path / "plain.pt"
    other = tmp_path / "other.pt"
    for path in (plain, other):
        path.write_bytes(b"others")
    assert origin_of({}, plain) == ("plain.pt", "Apache-2.0, if it was the public file of this name")
    assert origin_of({}, other) == ("other.pt (unknown origin)", "unknown")
    public.write_bytes(b"replaced")
    assert origin_of({}, public) == ("tiny.pt (unknown origin)", "unknown")


def test_checkpoints_pass_on_the_origin_that_they_store(public, tmp_path):
    first = origin_of_run(stored(public))
    second = origin_of_run(stored(tmp_path / "a.pt", format="lockstep", origin=first._asdict(), config={"epochs": 3}))
    assert second == ("a.pt, trained from tiny (public file)", "MIT")
    assert origin_of({"origin": second._asdict()}, tmp_path / "b.pt") == second
    assert origin_of({"origin": {"weights": "x"}}, tmp_path / "b.pt") == ("x", "unknown")
    assert origin_of({"origin": ["x"]}, public) == ("tiny (public file)", "MIT")  # of a hostile file
