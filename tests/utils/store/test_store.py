"""Shards in an object store, through real processes: the server, and the reader of stores."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from data.image_io.decode import read_bytes
from data.index.index import DatasetIndex
from data.index.load import load_index
from data.loading.worker import init_worker
from data.open import open_data
from data.spec.dataset_spec import DataSource
from data.spec.dataset_yaml import Stores, load_dataset_spec
from tests.helpers.messages import refused
from tests.helpers.object_server import FAULTS, ObjectServer, object_server, used_store
from tests.helpers.processes import Processes
from tests.helpers.tiny import write_dataset, write_model
from tools.shard import write_set
from utils.distributed.context import DistributedContext
from utils.files.caches import LIMIT_VARIABLE
from utils.files.checkpoint import read_checkpoint
from utils.store import client, shards
from utils.store.address import MIRRORS, is_url

COUNT = 24
SMALL = ["--device", "cpu", "--threads", "1", "--workers", "1", "--amp", "off", "--noplots"]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket")
    source = write_dataset(folder / "files", train=COUNT)
    write_set(load_dataset_spec(source), folder / "set", 100_000, cache_dir=str(folder / "cache"))
    return folder


@pytest.fixture
def server(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(shards, "BLOCK", 1 << 15)  # a few images
    with used_store(bucket, monkeypatch) as server:
        yield server


def opened(cache: Path, url: str = "s3://bucket/set", split: str = "train") -> DatasetIndex:
    return load_index(load_dataset_spec(url, stores=Stores(str(cache))), split, cache_dir=str(cache), progress=False)


def contents(index: DatasetIndex) -> list[bytes]:
    return [read_bytes(index.path(i)) for i in range(len(index))]


@pytest.fixture
def expected(bucket: Path) -> list[bytes]:
    spec = load_dataset_spec(bucket / "files" / "data.yaml")
    return contents(load_index(spec, "train", cache_dir=str(bucket / "cache")))


def test_a_store_has_the_bytes_of_the_files_and_each_is_read_once(
    server: ObjectServer, tmp_path: Path, expected: list[bytes]
):
    index = opened(tmp_path)
    assert contents(index) == expected
    reads = dict(server.requests)
    assert sum(count for name, count in reads.items() if ".tar" in name) < COUNT
    assert contents(index) == expected
    assert contents(opened(tmp_path)) == expected
    asked = {name: n - reads.get(name, 0) for name, n in server.requests.items() if n > reads.get(name, 0)}
    assert asked == {f"GET set/{name}": 1 for name in ("data.yaml", "train.shards", "val.shards")}  # have they changed?


def test_injected_faults_lose_nothing(server: ObjectServer, tmp_path: Path, expected: list[bytes], monkeypatch):
    monkeypatch.setattr(client, "_PAUSE_S", 0.01)
    monkeypatch.setattr(shards, "BLOCK", 1)  # a request for each image
    index = opened(tmp_path)
    server.faults = 3 * list(FAULTS)
    assert contents(index) == expected
    assert sum(server.injected[fault] for fault in FAULTS) == 3 * len(FAULTS) >= 20


def test_forked_children_use_the_reader_of_their_parent(server: ObjectServer, tmp_path: Path, expected: list[bytes]):
    index = opened(tmp_path)
    (running,) = client._servers
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            os._exit(0 if contents(index) == expected and client._servers == [running] else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert contents(index) == expected


def test_a_killed_reader_is_replaced_and_ends_with_its_parent(
    server: ObjectServer, tmp_path: Path, expected: list[bytes]
):
    index = opened(tmp_path)
    first = client._servers[0][0]
    assert read_bytes(index.path(0)) == expected[0]
    first.kill()
    first.wait()
    assert contents(index) == expected
    (second, address) = client._servers[0]
    second.stdin.close()
    second.wait(10)
    assert not os.path.exists(os.path.dirname(address))


def test_the_cache_is_bounded_and_the_least_recently_used_goes(
    server: ObjectServer, tmp_path: Path, expected: list[bytes], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(LIMIT_VARIABLE, "0.00016")  # a part of the images: they are read one by one
    index = opened(tmp_path)
    blocks = tmp_path / "stores" / "blocks"
    for _ in range(2):
        assert contents(index) == expected
        assert sum(file.stat().st_blocks * 512 for file in blocks.rglob("*") if file.is_file()) <= 170_000
    kept = sorted(blocks.glob("*/*"), key=lambda file: file.stat().st_mtime)
    assert 0 < len(kept) < COUNT
    asked = server.requests.total()
    assert read_bytes(index.path(COUNT - 1)) == expected[-1]
    assert server.requests.total() == asked  # the last one is there
    read_bytes(index.path(0))
    assert server.requests.total() == asked + 1


def test_room_is_not_made_of_files_that_are_being_written(
    server: ObjectServer, tmp_path: Path, expected: list[bytes], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(LIMIT_VARIABLE, "0.000001")  # room is made after each image
    index = opened(tmp_path)
    with ThreadPoolExecutor(8) as readers:
        assert list(readers.map(lambda i: read_bytes(index.path(i % COUNT)), range(20 * COUNT))) == 20 * expected


def test_damage_in_the_cache_is_read_again(server: ObjectServer, tmp_path: Path, expected: list[bytes]):
    index = opened(tmp_path)
    contents(index)
    for block in (tmp_path / "stores" / "blocks").glob("*/*"):
        block.write_bytes(bytes(block.stat().st_size // 2))
    assert contents(index) == expected


def test_changed_shards_replace_those_of_an_earlier_run(server: ObjectServer, tmp_path: Path, bucket: Path):
    first = contents(opened(tmp_path))
    source = write_dataset(tmp_path / "files", train=COUNT - 1, size=96)
    write_set(load_dataset_spec(source), bucket / "new", 10**9, cache_dir=str(tmp_path / "c"))
    os.rename(bucket / "set", bucket / "old")
    os.rename(bucket / "new", bucket / "set")
    try:
        second = opened(tmp_path)
        assert len(second) == COUNT - 1
        assert not set(contents(second)) & set(first)
    finally:
        os.rename(bucket / "set", tmp_path / "gone")
        os.rename(bucket / "old", bucket / "set")


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/nothing",
        "s3://bucket/forbidden/set",
        "s3://bucket/expired/set",
        "s3://other/set",
    ],
)
def test_refusals_end_in_one_line(server: ObjectServer, tmp_path: Path, url: str):
    with refused():
        opened(tmp_path, url)


def test_an_outage_is_waited_for_and_a_longer_one_ends_in_one_line(
    server: ObjectServer, tmp_path: Path, expected: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog
):
    monkeypatch.setattr(client, "_PAUSE_S", 0.05)
    index = opened(tmp_path)
    server.is_down = True
    monkeypatch.setattr(client, "PATIENCE_S", 0.2)
    with refused():
        read_bytes(index.path(0))
    assert "waiting for up to" in caplog.text
    began = time.monotonic()
    with refused():
        opened(tmp_path / "other")
    assert time.monotonic() - began < 30
    server.is_down = False
    assert contents(index) == expected


def test_the_scheme_of_an_address_may_be_in_capitals(server: ObjectServer, tmp_path: Path):
    assert is_url("HTTP://host/set")
    paths = [client.mirrored(f"{scheme}://bucket/set/data.yaml", str(tmp_path)) for scheme in ("s3", "S3")]
    assert paths[0] == paths[1]


def test_a_split_of_a_local_yaml_may_be_in_a_store(server: ObjectServer, tmp_path: Path, expected: list[bytes]):
    path = tmp_path / "local.yaml"
    path.write_text("{train: 's3://bucket/set', val: 's3://bucket/set/val.shards', names: [light, dark]}")
    context = DistributedContext.single()
    spec = open_data(DataSource(str(path), ("train",), cache_dir=str(tmp_path / "c")), context)
    assert contents(load_index(spec, "train", cache_dir=str(tmp_path / "c"))) == expected


def test_stages_of_stores_are_refused(server: ObjectServer, tmp_path: Path):
    with refused():
        open_data(DataSource("s3://bucket/set", ("train",), stage=str(tmp_path)), DistributedContext.single())


def test_without_obstore_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with refused():
        opened(tmp_path)


def test_a_damaged_copy_of_an_index_is_read_again(server: ObjectServer, tmp_path: Path, expected: list[bytes]):
    server.faulty, server.faults = "train.shards", ["", "flip"]  # the first asks for its tag
    assert contents(opened(tmp_path / "a")) == expected
    server.faults = ["", "flip", "", "flip"]
    with refused():
        opened(tmp_path / "b")
    assert contents(opened(tmp_path / "b")) == expected


def test_a_local_folder_is_read_locally_and_not_written_to(
    server: ObjectServer, bucket: Path, tmp_path: Path, expected: list[bytes], monkeypatch: pytest.MonkeyPatch
):
    """Whatever it holds, such as the marks of a folder that mirrors a store."""
    local = tmp_path / "set"
    shutil.copytree(bucket / "set", local)
    (local / "origin.json").write_text('{"url": "s3://bucket/set"}')
    (tmp_path / "blocks" / "mine").mkdir(parents=True)
    (tmp_path / "blocks" / "mine" / "thesis.doc").write_bytes(bytes(10**5))
    monkeypatch.setenv(LIMIT_VARIABLE, "0.000001")
    before = sorted(tmp_path.rglob("*"))
    assert contents(opened(tmp_path / "c", str(local))) == expected
    assert server.requests.total() == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_room_is_made_of_blocks_only(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(LIMIT_VARIABLE, "0.000001")
    index = opened(tmp_path)
    (thesis,) = (folder / "thesis.doc" for folder in (tmp_path / "stores" / "blocks").iterdir())
    thesis.write_bytes(bytes(10**5))
    contents(index)
    assert thesis.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("place", ["lockstep", "lockstep/stores", "lockstep/stores/*", "lockstep/stores/blocks"])
def test_what_another_user_has_put_into_a_shared_cache_is_refused(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tmp_path.chmod(0o1777)
    load_index(load_dataset_spec("s3://bucket/set"), "train", progress=False)
    folder = next(path for path in tmp_path.glob(place) if path.name != "blocks" or "blocks" in place)
    shards._opened.cache_clear()
    os.chown(folder, 65534, 65534)
    with refused():
        load_index(load_dataset_spec("s3://bucket/set"), "train", progress=False)
    os.chown(folder, 0, 0)
    folder.chmod(0o775)
    if place != "lockstep":
        with refused():
            load_index(load_dataset_spec("s3://bucket/set"), "train", progress=False)


def test_a_store_does_not_decide_how_much_is_read(server: ObjectServer, tmp_path: Path):
    server.sizes = {"set/data.yaml": 10**11}
    with refused():
        opened(tmp_path)
    server.sizes = {"set/data.yaml": 10**6}  # more is promised than sent
    with refused():
        opened(tmp_path)
    server.sizes, server.faulty, server.faults = {}, "data.yaml", ["", "long"]
    with refused():
        opened(tmp_path)
    assert not list((tmp_path / "stores").rglob("*.tmp"))


def test_a_yaml_in_a_store_names_no_other_store(server: ObjectServer, bucket: Path, tmp_path: Path):
    (bucket / "far").mkdir(exist_ok=True)
    for url in ("s3://other/set", "http://169.254.169.254/set"):
        (bucket / "far" / "data.yaml").write_text(f"{{train: '{url}', names: [light, dark]}}")
        with refused():
            opened(tmp_path, "s3://bucket/far")
    (bucket / "far" / "data.yaml").write_text("{train: 's3://bucket/set', val: '', names: [light, dark]}")
    assert len(opened(tmp_path, "s3://bucket/far")) == COUNT


def test_redirects_are_followed_without_credentials_and_to_no_files(
    server: ObjectServer, bucket: Path, tmp_path: Path, expected: list[bytes]
):
    with object_server(bucket) as cdn:
        server.elsewhere = f"http://localhost:{cdn.server_port}"
        assert contents(opened(tmp_path)) == expected
        assert server.has_key
        assert cdn.requests
        assert not cdn.has_key
    server.elsewhere = f"file://{bucket}"
    with refused():
        opened(tmp_path / "other")


def test_a_silent_store_is_waited_for_with_a_line(
    server: ObjectServer, tmp_path: Path, expected: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog
):
    assert client._SILENT_S <= 15
    monkeypatch.setattr(client, "_SILENT_S", 0.05)
    server.answers.clear()
    threading.Timer(0.5, server.answers.set).start()
    assert contents(opened(tmp_path)) == expected
    assert "s3://bucket/set/data.yaml: no answer after 0.05 s; waiting for it" in caplog.messages


def test_a_reader_that_aborts_ends_in_one_line(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    (tmp_path / "obstore.py").write_text(
        "import os\nos.write(2, b'memory allocation failed\\nnote: run with\\n')\nos.abort()"
    )
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    with refused():
        opened(tmp_path / "c")
    assert list((tmp_path / "t").iterdir()) == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "url", ["s3://bucket/{}.yaml".format("x" * 300), "s3://bucket/a\0b.yaml", "s3://bucket/\n.yaml"]
)
def test_addresses_that_name_no_file_are_one_line(tmp_path: Path, url: str):
    pytest.importorskip("obstore")
    with refused():
        opened(tmp_path, url)


def test_workers_that_are_not_forked_know_the_mirrors(server: ObjectServer, tmp_path: Path, expected: list[bytes]):
    index = opened(tmp_path)
    child = os.fork()
    if child == 0:
        mirrors = dict(MIRRORS)
        MIRRORS.clear()
        shards._opened.cache_clear()
        init_worker(os.getppid(), mirrors, 0)
        os._exit(0 if contents(index) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_password_in_an_address_is_refused(tmp_path: Path):
    pytest.importorskip("obstore")
    with refused() as caught:
        opened(tmp_path, "https://me:secret@host/set")
    assert "secret" not in str(caught.value)


def test_a_relative_cache_folder_mirrors_too(
    server: ObjectServer, tmp_path: Path, expected: list[bytes], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "real" / "work").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link" / "work")
    assert contents(opened(Path("../cache"))) == expected


def test_a_copy_that_another_process_has_replaced_is_read_again(server: ObjectServer, tmp_path: Path):
    opened(tmp_path)
    (copy,) = (tmp_path / "stores").glob("*/data.yaml")
    later = copy.with_name("later")
    later.write_text(copy.read_text().replace("light", "other"))
    os.replace(later, copy)  # with the mark of the one before
    half = copy.with_name("data.yaml.01234567.tmp")
    half.write_text("of a process that was killed")
    os.utime(half, (1e9, 1e9))
    assert load_dataset_spec("s3://bucket/set", stores=Stores(str(tmp_path))).names == ("light", "dark")
    assert not half.exists()


def test_a_worker_reads_with_the_index_of_its_labels(bucket: Path, tmp_path: Path):
    shutil.copytree(bucket / "set", tmp_path / "set")
    index = opened(tmp_path / "c", str(tmp_path / "set"))
    before = contents(index)
    write_set(load_dataset_spec(write_dataset(tmp_path / "f", train=COUNT, size=96)), tmp_path / "new", 10**9,
              cache_dir=str(tmp_path / "c"))  # fmt: skip
    os.replace(tmp_path / "new" / "train.shards", tmp_path / "set" / "train.shards")
    assert contents(index) == before


@pytest.mark.slow
def test_killed_and_resumed_on_two_processes_a_run_on_a_store_ends_with_the_bits_of_the_files(
    server: ObjectServer, tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(LIMIT_VARIABLE, "0.0001")  # images are read again and again
    common = ["--model", str(write_model(tmp_path / "tiny.yaml")), "--imgsz", "64", *SMALL]
    common += ["--batch-size", "8", "--epochs", "3", "--virtual-ranks", "2"]

    def flags(data: str, name: str) -> list[str]:
        folders = ["--project", str(tmp_path), "--name", name, "--cache-dir", str(tmp_path / f"{name}.cache")]
        return ["--data", data, *folders, *common]

    with Processes(tmp_path / "files.log") as run:
        run.ranks(1, *flags(str(bucket / "files" / "data.yaml"), "files"))
        assert run.codes() == [0], run.output()
    server.faults = 3 * list(FAULTS)
    last = tmp_path / "store" / "last.pt"
    with Processes(tmp_path / "first.log", "slow:0.2") as run:
        run.ranks(1, *flags("s3://bucket/set", "store"))
        run.until(last.exists)
        run.kill_all()
        run.wait_gone(20)
    assert read_checkpoint(last)["progress"]["epoch"] < 3
    with Processes(tmp_path / "second.log") as run:
        run.ranks(2, "--resume", str(last))
        assert run.codes() == [0, 0], run.output()
        run.wait_gone(20)
    assert not server.faults
    files, store = (read_checkpoint(tmp_path / name / "last.pt") for name in ("files", "store"))
    assert files["ema"].keys() == store["ema"].keys()
    assert all(torch.equal(files["ema"][name], store["ema"][name]) for name in files["ema"])
    assert store["data"]["source"] == "s3://bucket/set"


def test_an_outage_ends_a_run_with_a_checkpoint_of_its_last_step(server: ObjectServer, tmp_path: Path):
    flags = ["--data", "s3://bucket/set", "--model", str(write_model(tmp_path / "tiny.yaml")), "--imgsz", "64", *SMALL]
    flags += ["--batch-size", "4", "--epochs", "9", "--noval", "--project", str(tmp_path)]
    flags += ["--cache-dir", str(tmp_path / "cache"), "--set", "mosaic_block=0"]  # which would keep them in memory
    steps = tmp_path / "steps"
    steps.mkdir()
    odd = f"slow:0.3;log:{steps};set:utils.store.client:PATIENCE_S:1"
    with Processes(tmp_path / "log", odd) as run:  # without a cache
        run.start([run.python, "tests/robustness/odd_train.py", *flags], **{LIMIT_VARIABLE: "0"})
        run.until(lambda: any("3: " in file.read_text() for file in steps.iterdir()))
        server.is_down = True
        assert run.codes() == [2], run.output()
        assert "cannot be read" in run.output().splitlines()[-1]
        run.wait_gone(20)
    done = max(int(line.partition(":")[0]) for file in steps.iterdir() for line in file.read_text().splitlines())
    assert read_checkpoint(tmp_path / "exp" / "last.pt")["progress"]["updates"] == done
