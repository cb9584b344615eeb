"""benchmarks/gpu.sh: its checks can fail, and one table names every part."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import checks, compiled, equal, overflow, profile, scores, syncs, threads, trainings
from benchmarks.gpu.calls import CALLS, candidates, with_providers
from benchmarks.gpu.parts import DRY, Part, Parts, Sizes, flags
from benchmarks.gpu.runner import GRACE_S, Outcome, Runner, chosen_by_call, chosen_parts, judged, run_for
from benchmarks.speed import report, step
from benchmarks.speed.training_step import build_step, loss_pass, make_batches
from engine.eval_ranks.messages import FAILED
from engine.eval_ranks.service import ValidationService
from engine.train.step import TrainStep
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_weights
from utils.config.parser import parse_config
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.distributed.rendezvous import evaluation_store
from utils.process.identity import this_process

pytestmark = pytest.mark.benchmarks
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# Packages that a GPU machine with nothing but torch's own requirements and OpenCV lacks.
ABSENT = (
    "albumentations", "albucore", "imagecodecs", "lmdb", "openvino", "optuna", "polars", "pycocotools", "pytest",
    "scipy", "tifffile", "tqdm",
)  # fmt: skip
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""
MAX_EXPECTED_S = {"first": 500, "again": 215}  # which leaves time for a slow start


def outcome(code: str, limit_s: float = 30.0) -> Outcome:
    part = Part("a part", 10, [sys.executable, "-c", code])
    return judged(part, *run_for(part, limit_s), 1.0)


def test_figures_tables_and_the_last_output_of_a_failure_are_kept():
    table = "print('| what | ours | peer |'); print('| --- | --- | --- |'); print('| step [s] | 0.1 |  |')"
    found = outcome(f"print('noise'); print('figure: 3 ms')\n{table}")
    assert (found.verdict, found.lines) == ("PASS", ["3 ms", "step [s]: ours 0.1"])
    assert outcome("print('noise'); print('done: 2 epochs')").lines == ["done: 2 epochs"]
    found = outcome("import sys; print('figure: 3 ms'); print('why'); sys.exit('it differs')")
    assert (found.verdict, found.lines) == ("FAIL", ["3 ms", "! exit code 1", "! why", "! it differs"])
    assert all(row.count("|") == 5 for row in found.rows())


def all_parts(*, peer: str = "python") -> Parts:
    return Parts(Sizes(), Path("folder"), peer)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_fits_its_time(call: str):
    """This includes the peer and the data sets, and leaves time for a part that takes longer than expected."""
    parts = all_parts()
    expected_s = sum(part.expected_s for part in with_providers(CALLS[call].choose(parts), parts))
    assert expected_s <= MAX_EXPECTED_S.get(call, 460)
    assert expected_s < CALLS[call].budget_s


def test_the_first_calls_end_in_time_whatever_happens():
    """The last part may have to be killed."""
    for call, seconds in (("first", 540), ("again", 240)):
        assert CALLS[call].budget_s + 2 * GRACE_S < seconds


def test_the_first_call_has_the_order_of_its_priorities():
    parts = all_parts()
    names = [part.name for part in CALLS["first"].choose(parts)]
    assert names == [
        "environment",
        "trains with one GPU",
        "float32 steps equal to the CPU's",
        "no host sync in the step",
        "steps alone, bf16 and fp16",
        "scores of val.py equal to the CPU's",
        "end to end, yolov8n",
        "the costliest kernels of a step",
        "exported files score as the checkpoint",
        "torchrun by the loopback interface",
        "stopped and resumed: the same bits",
        "detects",
        "DataParallel, twice on one device",
        "compiled steps, batch 16",
    ]


def test_again_runs_any_part_of_the_first_call_by_its_name():
    """Each name selects one part, and everything that the part needs is made for it."""
    parts = all_parts()
    everything = candidates("again", parts)
    for call in ("first", "again"):
        for part in CALLS[call].choose(parts):
            assert [found.name for found in chosen_parts("again", part.name, parts)] == [part.name]
    assert [part.name for part in CALLS["again"].choose(parts)] == [
        part.name for part in chosen_parts("again", "", parts)
    ]
    assert len({part.name for part in everything}) == len(everything)
    exported = chosen_parts("again", "exported files", parts)
    made = [part.name for part in with_providers(exported, parts)]
    assert made == ["data set, small", "trains with one GPU", "exported files score as the checkpoint"]


@pytest.mark.parametrize(("pattern", "message"), [("no such part", "matches no part of first"), ("(", "not a regular")])
def test_a_pattern_without_parts_is_refused(pattern: str, message: str):
    with pytest.raises(SystemExit, match=message):
        chosen_by_call(["first"], pattern, all_parts())


class Accepted(Exception):
    """The command line has been parsed."""


@pytest.mark.parametrize("call", CALLS)
def test_every_command_is_accepted_by_its_program(call: str, monkeypatch: pytest.MonkeyPatch):
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, args=None, namespace=None):
        parse_args(parser, args, namespace)
        raise Accepted

    parts = all_parts()
    for part in with_providers(CALLS[call].choose(parts), parts):
        if "train.py" in part.command:
            parse_config(TrainConfig, part.command[part.command.index("train.py") + 1 :])
            continue
        module, *arguments = part.command[2:]
        program = {"benchmarks.gpu.checks": checks, "benchmarks.speed.step": step}[module]
        with monkeypatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
            patch.setattr(sys, "argv", [module, *arguments])
            with pytest.raises(Accepted):
                program.main()


def test_every_named_check_exists():
    for where in checks.PARTS.values():
        module, function = where.split(":")
        assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)), where


def test_settings_become_flags():
    assert flags(batch_size=[16, 64], imgsz=320, data=Path("a/b"), variants=True, compile=False, peer="", rate=0.0) == [
        "--batch-size", "16", "64", "--imgsz", "320", "--data", "a/b", "--variants", "--rate", "0.0",
    ]  # fmt: skip


def test_a_part_without_what_it_needs_fails_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An intermediate result is made once, not for each part that needs it."""
    monkeypatch.setenv("BUDGET_S", "60")
    parts = Parts(DRY, tmp_path)
    works = [sys.executable, "-c", ""]
    monkeypatch.setattr(parts, "provider", lambda product: Part("makes nothing", 1, works, product="weights"))
    runner = Runner(parts, tmp_path / "out")
    runner.run_call(
        "first", [Part("one", 1, works, ["weights"]), Part("two", 1, works, ["weights"]), Part("b", 1, works)]
    )
    verdicts = [(outcome.name, outcome.verdict) for outcome in runner.outcomes]
    assert verdicts == [("makes nothing", "PASS"), ("one", "FAIL"), ("two", "FAIL"), ("b", "PASS")]
    assert runner.outcomes[1].lines == ["! missing: weights (by: makes nothing)"]


@pytest.mark.parametrize(("expected_s", "verdict"), [(100, "SKIP"), (0, "FAIL")])
def test_a_part_that_the_end_of_its_call_stops_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected_s: int, verdict: str
):
    """It has failed only if it has taken longer than expected."""
    monkeypatch.setenv("BUDGET_S", "6")
    sleeps = [sys.executable, "-c", "import time; print('figure: begun', flush=True); time.sleep(60)"]
    runner = Runner(Parts(DRY, tmp_path), tmp_path / "out")
    runner.run_call("first", [Part("sleeps", expected_s, sleeps), Part("too late", 1, sleeps)])
    first, second = runner.outcomes
    assert (first.verdict, first.lines[:2]) == (verdict, ["begun", "! stopped after 6 s"])
    assert (second.verdict, second.lines) == ("SKIP", ["the time is used up"])


def test_a_later_call_uses_what_an_earlier_one_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BUDGET_S", "60")
    parts = Parts(DRY, tmp_path)
    works = [sys.executable, "-c", ""]
    parts.path_of("small").parent.mkdir()
    parts.path_of("small").touch()
    runner = Runner(parts, tmp_path / "out")
    runner.run_call("first", [Part("one", 1, works, ["small"])])
    assert [outcome.name for outcome in runner.outcomes] == ["one"]


def without_git(folder: Path) -> Path:
    """A folder with all programs of PATH but git."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if not program.name.startswith("git") and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return folder


def gpu_script(tmp_path: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs gpu.sh as on a bare machine: without `ABSENT` packages and without git."""
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "sitecustomize.py").write_text(WITHOUT.format(absent=ABSENT))
    variables = {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "PEER": "", "PYTHONPATH": str(absent)}
    variables |= {"SLOWDOWN": "4", "PATH": str(without_git(tmp_path / "bin"))}
    return subprocess.run(
        ["bash", "benchmarks/gpu.sh", *flags],
        cwd=ROOT,
        env=os.environ | variables | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_environment_is_shown_on_a_bare_machine(tmp_path: Path):
    done = gpu_script(tmp_path, "--dry", ONLY="first", PARTS="environment")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [row.split("|")[4].strip() for row in done.stdout.splitlines() if row.startswith("| ")][2:]
    assert lines[0].startswith("OpenCV ")
    assert lines[1].startswith("torch ")
    assert lines[-1] == "commit unknown"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "parts"), [*((call, "") for call in CALLS), ("again", "detects"), ("compiled", "renderer")]
)
def test_a_dry_run_passes_and_its_table_names_every_part(tmp_path: Path, call: str, parts: str):
    """Parts whose packages are missing are skipped."""
    done = gpu_script(tmp_path, "--dry", ONLY=call, PARTS=parts)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "out" / "gpu.txt").read_text()
    assert table.strip() in done.stdout
    named = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")]
    catalog = Parts(DRY, tmp_path)
    wanted = list(with_providers(chosen_parts(call, parts, catalog), catalog))
    assert {part.name for part in wanted} <= set(named)
    log = (tmp_path / "out" / "gpu.log").read_text()
    assert all(f"===== {part.name}: " in log for part in wanted if not catalog.leaves_out(part))


@pytest.mark.parametrize(
    "timed",
    [
        lambda options, build: profile.kernels_of(options, TINY_MODEL, 2, "SGD", build=build),
        lambda options, build: profile.first_steps(options, build=build),
        lambda options, build: profile.loss_shares(options, build=build),
        lambda options, build: compiled.time_steps(options, False, build=build),
    ],
    ids=["kernels", "first steps", "loss", "compiled or not"],
)
def test_timed_models_are_built_for_their_batch_size(timed: Callable):
    """Otherwise cuDNN would not search for the fastest kernels, as it does in a long training."""
    searched = []

    def building(*args, **settings) -> TrainStep:
        step = build_step(*args, classes=3, **settings)
        searched.append(step.settings.benchmark_images)
        return step

    options = {"model": TINY_MODEL, "models": [TINY_MODEL], "boxes": [3], "batch_size": 2, "imgsz": 64}
    list(timed(Namespace(**options, device="cpu", compile=False), building))
    assert searched == [2]


def test_the_measured_loss_equals_the_loss_of_the_step():
    """The reference is the criterion's value for the maps of that batch. The model is left without a gradient."""
    take_step = build_step(TINY_MODEL, classes=3, amp="off")
    (batch,) = make_batches(1, 2, 64, CPU, 3, like_coco=True)
    totals = []
    take_step.criterion.register_forward_hook(lambda _module, _args, out: totals.append(float(out.total.detach())))
    loss = loss_pass(take_step, batch)
    loss()
    loss()
    assert totals[0] == totals[1] == totals[2]
    assert all(parameter.grad is None for parameter in take_step.model.parameters())


@pytest.mark.parametrize("optimizer", ["SGD", "Muon"])
def test_a_wrong_gradient_on_the_device_is_found(optimizer: str):
    """The channels of one layer's gradient are in the wrong order, on the "device" only."""
    options = Namespace(models=[TINY_MODEL], optimizers=[optimizer], device="cpu", batch_size=2, imgsz=64)
    assert len(list(equal.compare_steps(options))) == 1
    built = []

    def wrong_on_device(*args, **kwargs) -> TrainStep:
        take_step = build_step(*args, **kwargs)
        built.append(take_step)
        if len(built) == 2:  # the first one is the CPU's
            weight = max(take_step.model.parameters(), key=torch.Tensor.numel)
            weight.register_hook(lambda gradient: gradient.flip(0))
        return take_step

    with pytest.raises(SystemExit, match="worst tensor"):
        list(equal.compare_steps(options, build=wrong_on_device))


def test_a_host_sync_in_the_step_is_found_with_its_line(monkeypatch: pytest.MonkeyPatch):
    options = Namespace(models=["yolov8n"], optimizers=["SGD"], device="cpu", batch_size=1, imgsz=64)
    assert list(syncs.waits_of_steps(options)) == ["yolov8n SGD: 0 reads of values a step"]
    from models.heads.base import DetectionHead

    build = DetectionHead.build_loss

    def read(_module, _arguments, out):
        out.total.item()  # READ

    def build_reading(*arguments, **settings):
        criterion = build(*arguments, **settings)
        criterion.register_forward_hook(read)
        return criterion

    monkeypatch.setattr(DetectionHead, "build_loss", build_reading)
    lines = []
    with pytest.raises(SystemExit, match="the host waits: yolov8n SGD"):
        lines.extend(syncs.waits_of_steps(options))
    # (extend keeps what came before the exception)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# READ" in text)
    assert lines[0] == "yolov8n SGD: 1 reads of values a step"
    place = f"tests/benchmarks/test_gpu.py:{line}"
    assert lines[1].startswith(f"yolov8n SGD: 1 a step: _local_scalar_dense at {place} from ")
    values = torch.arange(4.0)
    with syncs.WaitingOperations(on_gpu=False) as watcher:
        values[values > 1]  # by a mask
        values[torch.tensor([0, 1])]
    assert watcher.places.total() == 1


def test_an_overflow_skips_the_step():
    take_step = build_step(TINY_MODEL, classes=3, amp="off")
    (batch,) = make_batches(1, 2, 64, CPU)
    with overflow.overflowing(take_step):
        take_step([batch], [2], 1)
    take_step([batch], [2], 2)
    assert [values.finite for values in take_step.reader.pop(leave=0)] == [False, True]


class Scripts:
    """Stands in for the scripts that checks run: each prints ``output``, and val.py finds ``aps``, by the weights'
    suffix."""

    def __init__(self, aps: dict[str, float], output: str = "") -> None:
        self.aps = aps
        self.output = output
        self.commands: list[tuple[str, ...]] = []

    def run(self, options: Namespace, *command: str, device: str = "") -> str:
        self.commands.append((*command, device or options.device))
        if command[0] == "val.py":
            ap = self.aps[Path(command[command.index("--weights") + 1]).suffix]
            folder = options.folder / "val" / "exp"
            folder.mkdir(parents=True, exist_ok=True)
            found = dict.fromkeys(("precision", "recall", "ap50", "ap"), ap)
            (folder / "results.json").write_text(json.dumps(found))
        return self.output


def lines_and_failure(figures: Iterator[str]) -> tuple[list[str], str]:
    """Returns the lines of a check, and the reason if it fails, else an empty string."""
    lines = []
    try:
        for line in figures:
            lines.append(line)
    except SystemExit as failure:
        return lines, str(failure)
    return lines, ""


@pytest.mark.parametrize(
    ("aps", "failure"),
    [
        ({".onnx": 0.8, ".torchscript": 0.801, ".pt2": 0.799, ".pt": 0.8}, ""),
        (
            {".onnx": 0.8, ".torchscript": 0.0, ".pt2": 0.8, ".pt": 0.8},
            "torchscript: AP 0.0000, the checkpoint's is 0.8000",
        ),
        (dict.fromkeys((".onnx", ".torchscript", ".pt2", ".pt"), 0.0), "the checkpoint's AP is 0.0000, at least 0.5"),
    ],
    ids=["equal", "a file returns zeros", "all return zeros"],
)
def test_exported_files_have_to_find_objects(tmp_path: Path, aps: dict, failure: str):
    options = Namespace(folder=tmp_path, weights=tmp_path / "last.pt", at_least=0.5, device="0")
    lines, reason = lines_and_failure(scores.exported(options, run=Scripts(aps).run))
    assert len(lines) == 4
    assert reason.startswith(failure)
    assert bool(reason) == bool(failure)


def test_exported_files_are_compared_without_the_packages_of_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stand_in = Scripts({".torchscript": 0.8, ".pt2": 0.8, ".pt": 0.8})
    monkeypatch.setattr(scores.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else name)
    options = Namespace(folder=tmp_path, weights=tmp_path / "last.pt", at_least=0.5, device="0")
    lines, reason = lines_and_failure(scores.exported(options, run=stand_in.run))
    assert lines[0] == "no ONNX file: onnxscript not installed"
    assert reason == ""
    assert "onnx" not in stand_in.commands[0]


@pytest.mark.parametrize(("ap", "failure"), [(0.71, ""), (0.69, "AP 0.6900 after training on the device")])
def test_a_poor_detector_fails_the_comparison_of_scores(tmp_path: Path, ap: float, failure: str):
    options = Namespace(folder=tmp_path, weights=tmp_path / "last.pt", at_least=0.7, device="0", variants=False)
    lines, reason = lines_and_failure(scores.validate(options, run=Scripts({".pt": ap}).run))
    assert len(lines) == 2  # on the device and on the CPU
    assert reason.startswith(failure)
    assert bool(reason) == bool(failure)


def test_untrained_weights_fail_the_comparison_of_their_scores(tmp_path: Path):
    weights = write_weights(tmp_path / "last.pt", ("a", "b", "c"))
    data = str(write_dataset(tmp_path / "set", train=4, val=2))
    options = Namespace(weights=weights, data=data, imgsz=64, batch_size=2, device="cpu", at_least=0.4)
    with pytest.raises(SystemExit, match=r"at least 0\.4 expected of trained weights"):
        list(scores.score_of_weights(options))


def training_options(**changes) -> Namespace:
    settings = {"data": "d.yaml", "model": "yolov8n", "imgsz": 64, "batch_size": 4, "epochs": 3, "device": "0"}
    return Namespace(**settings | {"layouts": 1, "peer": ""} | changes)


def write_results(folder: Path, seconds: list[float]) -> None:
    """Writes the results.csv of either program, whose epochs end after these seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{number}, {second}, 0.25" for number, second in enumerate(seconds, 1)]
    (folder / "results.csv").write_text("\n".join(["epoch, time, speed/data_wait", *rows]))


def test_our_rate_leaves_out_the_first_epoch_and_the_validation_after_the_last(tmp_path: Path):
    """Two of four epochs, of two seconds each, count, as for the peer."""

    def run(options: Namespace, *command: str) -> str:
        assert command[command.index("--epochs") + 1] == "4"
        write_results(Path(command[command.index("--project") + 1], "exp"), [10, 12, 14, 99])
        return ""

    options = training_options(data=str(write_dataset(tmp_path, train=6, val=1)))
    assert trainings.our_speed(options, [], run=run) == (3.0, 0.25)


# Stands in for the peer's Python, which gets the program and its flags.
PEER = """\
#!{python} -IS
import os, sys
command = sys.argv
assert command[command.index("--epochs") + 1] == "4"
folder = os.path.join(command[command.index("--project") + 1], "train")
os.mkdir(folder)
with open(os.path.join(folder, "results.csv"), "w") as file:
    file.write("epoch, time\\n1, 10\\n2, 12\\n3, 14\\n4, 99\\n")
"""


def test_the_peers_rate_is_that_of_the_same_epochs(tmp_path: Path):
    peer = tmp_path / "peer"
    peer.write_text(PEER.format(python=sys.executable))
    peer.chmod(0o755)
    data = write_dataset(tmp_path / "set", train=6, val=1)
    assert trainings.peer_speed(training_options(peer=str(peer), data=str(data))) == 3.0


@pytest.mark.parametrize(("ours", "peer"), [(900.0, 890.0), (100.0, 900.0)])
def test_speeds_are_reported_and_never_fail(ours: float, peer: float):
    rates = trainings.Rates(lambda options: 1000.0, lambda options, feed: (ours, 0.5), lambda options: peer)
    lines, reason = lines_and_failure(trainings.time_training(training_options(peer="python"), rates))
    assert reason == ""
    assert f"{ours / 1000:.2f} of the step alone" in lines[1]
    assert lines[2].endswith(f"{peer:.0f} images/s; ours is {ours / peer:.2f} times as fast")


def test_a_training_that_fails_is_reported_after_the_others():
    def our_speed(options: Namespace, feed: Sequence[str]) -> tuple[float, float]:
        if feed:
            sys.exit("no memory")
        return 500.0, 0.5

    rates = trainings.Rates(lambda options: 1000.0, our_speed, lambda options: sys.exit("no network"))
    lines, reason = lines_and_failure(trainings.time_training(training_options(peer="python"), rates))
    assert "no cache: 500 images/s" in lines[1]
    assert reason == "images from workers, cache ram: no memory; Ultralytics: no network"


def lose_evaluating_process(reason: str) -> None:
    """Logs what train.py logs when an evaluating process has failed for ``reason``."""
    store = torch.distributed.HashStore()
    store.set("process/1", this_process())
    evaluation_store(store).set(FAILED, reason)
    ctx = replace(DistributedContext.single(), store=store, eval_ranks=1)
    assert not ValidationService(ctx, evaluator=None, setup=None).can_take_weights()


def test_an_evaluating_process_that_ends_fails_its_part(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The part is judged by the log of train.py."""
    lose_evaluating_process("rank 1: no fp16 on CPUs")
    settings = training_options(amp="fp16", folder=tmp_path)
    whole = Scripts({}, "starting\n--eval-ranks: validation by rank 1\ndone").run
    figures = trainings.validate_elsewhere(settings, run=whole)
    assert lines_and_failure(figures) == (["--eval-ranks: validation by rank 1"], "")
    alone = Scripts({}, f"starting\n{caplog.messages[0]}\ndone").run
    assert lines_and_failure(trainings.validate_elsewhere(settings, run=alone)) == (caplog.messages, caplog.messages[0])


class Replicas:
    """`build_step` for `threads.data_parallel`, which notes the number of replicas. ``refusal``: why a module of torch,
    or one of ours, refuses two."""

    def __init__(self, refusal: str = "", file: str = "") -> None:
        self.numbers: list[int] = []
        self.refusal = refusal
        self.file = file

    def build(self, model: dict, *, images: int, ctx: DistributedContext) -> TrainStep:
        self.numbers.append(len(ctx.devices))
        if self.refusal and len(ctx.devices) > 1:
            exec(compile(f"raise RuntimeError({self.refusal!r})", self.file, "exec"))
        step = build_step(model, images=images, classes=3, ctx=ctx)
        assert step.settings.benchmark_images == images
        return step


OF_TORCH = "/site-packages/torch/nn/parallel/replicate.py"


@pytest.mark.parametrize(
    ("refusal", "limit", "last_line", "failure"),
    [
        ("", 1000, "times the time of a plain step", ""),
        ("", 0, "times the time of a plain step", "times as long as a plain one"),
        ("not twice\nat a", 1000, "the model twice on one device: refused, not twice", ""),
    ],
    ids=["works", "slow", "refused"],
)
def test_data_parallel_is_timed_with_the_model_twice(refusal: str, limit: float, last_line: str, failure: str):
    replicas = Replicas(refusal, OF_TORCH)
    options = Namespace(model=TINY_MODEL, batch_size=2, imgsz=64, device="cpu")
    lines, reason = lines_and_failure(threads.data_parallel(options, build=replicas.build, max_ratio=limit))
    assert replicas.numbers == [1, 2]
    assert lines[-1].endswith(last_line)
    assert reason.endswith(failure)
    assert bool(reason) == bool(failure)


def test_an_error_in_the_replicas_is_no_refusal():
    options = Namespace(model=TINY_MODEL, batch_size=2, imgsz=64, device="cpu")
    with pytest.raises(RuntimeError, match="two devices"):
        list(threads.data_parallel(options, build=Replicas("two devices", "engine/parallel/ddp.py").build))


def test_the_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert report.commit() == "unknown"


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (SimpleNamespace(__version__="4.11.0"), "no imdecodeWithMetadata"),
        (SimpleNamespace(__version__="4.12.0", imdecodeWithMetadata=None), ""),
        (None, "cannot be imported"),
    ],
)
def test_an_opencv_that_cannot_decode_is_named_first(monkeypatch: pytest.MonkeyPatch, module, problem: str):
    monkeypatch.setitem(sys.modules, "cv2", module)
    lines, reason = lines_and_failure(checks.environment(Namespace()))
    assert lines[0].startswith("OpenCV ")
    assert problem in lines[0]
    assert problem in reason
    assert bool(reason) == bool(problem)
    assert lines[-1].startswith("commit ")
