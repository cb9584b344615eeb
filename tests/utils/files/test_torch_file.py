"""Files that ask for far more memory than they have bytes are refused in one line, with little memory, and quickly."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from models.detector import build_detector
from models.weights.safe_torch_file import ForeignFile
from tests.helpers.hostile_files import greedy_programs, write_greedy_files
from tests.helpers.preloaded import python
from tests.helpers.ranks import run_ranks
from tests.helpers.repository import ROOT
from tests.helpers.run_checkpoints import checkpoint_of
from tests.helpers.same_content import assert_same_content
from tests.helpers.tiny import TINY_MODEL
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.checkpoint_file import read_checkpoint, write_checkpoint
from utils.files.pickle_program import read_program

# Reads each file with some of three readers: as weights, to resume a run from it, or to start one with its model.
READER = """
import resource, sys, time
from pathlib import Path
import torch
from engine.checkpoint.checkpoint import Checkpoint
from engine.assembly.starting_model import build_starting_model
from models.weights.load import check_shapes, load_detector
from models.weights.read import shapes_of, read_weights
from models.weights.load import model_of
from utils.errors import UserError
from utils.machine.limits import explain_limit

def resume(path):
    checkpoint = Checkpoint.read(path)
    description = checkpoint.description
    check_shapes(path, description.model_spec, description.names, shapes_of(checkpoint.state.model))

def start(path):
    model_of(read_weights(path))

load_detector(Path(sys.argv[1]))  # imports what reading needs
resume(Path(sys.argv[1]))
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (400 << 20), resource.RLIM_INFINITY))
readers = [globals()[name] for name in sys.argv[2].split(",")]
for name in sys.argv[3:]:
    for read in readers:
        started = time.process_time()
        try:
            read(Path(name))
            outcome = "was read"
        except UserError as error:
            outcome = str(error)
        except BaseException as error:
            outcome = f"raised {error!r}"
        print(f"{time.process_time() - started:.0f}", name, read.__name__, outcome, sep="\\t")
"""


def content() -> dict:
    """Returns a checkpoint from which a run can resume."""
    detector = build_detector(TINY_MODEL, 2, names=["a", "b"])
    weights = detector.state_dict()
    checkpoint = checkpoint_of(model_spec=detector.spec, names=["a", "b"], imgsz=64, model=weights, ema=weights)
    return {"format": "lockstep", "version": 1, **checkpoint.content()}


@pytest.mark.parametrize("readers", ["load_detector,resume", pytest.param("start", marks=pytest.mark.slow)])
def test_the_memory_that_a_file_requests_is_bounded_by_its_size(tmp_path, readers):
    write_checkpoint(content(), tmp_path / "sound.pt")
    paths = write_greedy_files(tmp_path, content())
    command = [python(), "-c", READER, tmp_path / "sound.pt", readers, *paths.values()]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    kinds = {str(path): kind for kind, path in paths.items()}
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(rows) == len(readers.split(",")) * len(paths)
    wrong = {
        (kinds[path], how): (seconds, outcome)
        for seconds, path, how, outcome in rows
        if not outcome.startswith(path) or int(seconds) > 20
    }
    assert not wrong


def test_no_program_makes_more_than_a_hundred_times_its_size():
    import tracemalloc

    peaks = {}
    programs = greedy_programs(10_000)
    for kind, program in programs.items():
        tracemalloc.start()
        try:
            read_program(program)
        except pickle.UnpicklingError:
            pass
        finally:
            _, peaks[kind] = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert [kind for kind, program in programs.items() if peaks[kind] >= 100 * len(program) + 100_000] == []


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_gives_the_same_content(tmp_path, protocol):
    shared = ["text", 1.5, None, True]
    stored = {"a": shared, "b": (shared, {7: -1, "x": 2**40}), "c": torch.arange(6).view(2, 3).t(), "d": set("x")}
    torch.save(stored, tmp_path / "x.pt", pickle_protocol=protocol)
    with ForeignFile(tmp_path / "x.pt") as file:
        found = file.content
        assert (found["a"], found["b"], found["d"]) == (shared, stored["b"], ["x"])
        assert found["b"][0] is found["a"]
        assert torch.equal(file.tensor(found["c"]), stored["c"])


def test_our_content_keeps_types_strides_and_what_is_shared(tmp_path):
    base = torch.arange(24, dtype=torch.float16).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    values = ["a", (1, 2.5, None, True, -(2**62)), {}]
    stored = {"x": base, "part": base[:1], "again": base, "empty": torch.zeros(0, 3), "values": values, "more": values}
    stored |= {str(dtype): torch.ones(3).to(dtype) for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.float64)}
    write_checkpoint(stored, tmp_path / "x.pt")
    found = read_checkpoint(tmp_path / "x.pt")
    expected = torch.load(tmp_path / "x.pt", weights_only=True)
    assert_same_content(found, expected)
    assert [found[key].stride() for key in ("x", "part")] == [base.stride(), base[:1].stride()]
    assert found["x"] is found["again"]
    assert found["values"] is found["more"]
    found["x"].zero_()
    assert not found["part"].any()
    assert found["empty"].shape == (0, 3)


@pytest.mark.parametrize("change", ["meta", "sparse"])
def test_tensors_without_dense_data_are_named_in_foreign_files(tmp_path, change):
    weights = {"w": torch.zeros(2, 2).to("meta") if change == "meta" else torch.zeros(2, 2).to_sparse()}
    torch.save(weights, tmp_path / "x.pt")
    with (
        ForeignFile(tmp_path / "x.pt") as file,
        pytest.raises(UserError, match=r"of a kind that no detector has .*_re"),
    ):
        file.state_dict(file.content)


def test_the_storage_of_many_views_is_read_once(tmp_path, monkeypatch):
    values = torch.arange(100_000)
    torch.save({f"w{i}": values[i : i + 1] for i in range(1000)}, tmp_path / "x.pt")
    opened = []
    with ForeignFile(tmp_path / "x.pt") as file:
        original = ZipFile.open
        monkeypatch.setattr(ZipFile, "open", lambda zip_file, entry: opened.append(entry) or original(zip_file, entry))
        found = file.state_dict(file.content)
    assert len(opened) == 1
    assert [int(found[f"w{i}"]) for i in range(1000)] == list(range(1000))


def peak_kib() -> int:
    """Returns the most memory that this process has held at once since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def kib_to_read(ctx: DistributedContext, small: Path, large: Path) -> int:
    read_checkpoint(small)  # what is imported and mapped by the first call does not count
    reset_peak()
    before = peak_kib()
    read_checkpoint(large)
    return peak_kib() - before


def test_the_memory_of_a_checkpoint_is_that_of_its_tensors(tmp_path):
    """Reading does not hold the file twice. A new process is measured: one that has trained keeps freed memory."""
    small, large = (tmp_path / f"{name}.pt" for name in ("small", "large"))
    write_checkpoint({"model": {"w": torch.zeros(10)}}, small)
    write_checkpoint({"model": {"w": torch.zeros(20_000_000)}}, large)
    (kib,) = run_ranks(1, kib_to_read, small, large)
    assert 0.5 * 80_000 < kib < 1.5 * 80_000
