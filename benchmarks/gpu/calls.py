"""The calls of `benchmarks/gpu.sh`: the parts that each call runs, their order, and the time limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.parts import Part, Parts


@dataclass(frozen=True)
class Call:
    """A call of `benchmarks/gpu.sh`.

    ``choose`` lists the parts in order of priority, so that a slow machine leaves out the last ones. ``budget_s``: time
    limit in seconds, unless BUDGET_S is set.
    """

    budget_s: int
    choose: Callable[[Parts], list[Part]]


def first(parts: Parts) -> list[Part]:
    """Lists the parts for the first quarter of an hour on a GPU; `again` lists the others."""
    steps = [f"yolov8n:{batch}:SGD" for batch in parts.sizes.first_batches]
    return [
        parts.environment(),
        parts.trains(),
        parts.equal_steps(["SGD"], expected_s=28),
        parts.sync_free_steps(["yolov8n"], expected_s=25),
        parts.first_timed_steps(),
        parts.equal_scores(variants=False, expected_s=18),
        parts.end_to_end("yolov8n", expected_s=100),
        parts.kernels([*steps, f"yolov8n:{parts.sizes.first_batches[0]}:Muon"], expected_s=30),
        parts.equal_exports(),
        parts.torchrun_by_loopback(),
        parts.resumed(["torchrun"], expected_s=32),
        parts.detects(),
        parts.data_parallel(),
        parts.timed_steps_compiled([16], rounds=1, expected_s=45),
    ]


def again(parts: Parts) -> list[Part]:
    """Lists the parts that follow `first`. PARTS can select parts of `first` to run again (`candidates`)."""
    return [
        parts.environment(),
        parts.timed_steps_compiled([16, 64], rounds=2, expected_s=70),
        parts.overflow(),
        parts.trains_in_half(),
        parts.same_bits(),
        parts.pinned_batches(),
        parts.sync_free_loop(expected_s=18),
        parts.validated_elsewhere(amp=parts.sizes.half, expected_s=35),
    ]


def checks(parts: Parts) -> list[Part]:
    """Lists the parts about results equal to the CPU's, host syncs, equal bits, and trained detectors."""
    sizes = parts.sizes
    return [
        parts.environment(),
        parts.equal_steps(sizes.optimizers, expected_s=60),
        parts.equal_detections(),
        parts.sync_free_steps(sizes.heads, expected_s=50),
        parts.trains(),
        parts.equal_scores(variants=True, expected_s=25),
        parts.detects(),
        parts.sync_free_loop(expected_s=35),
        parts.overflow(),
        parts.same_bits(),
        parts.ddp(),
        parts.pinned_batches(),
        parts.trains_in_half(),
    ]


def others(parts: Parts) -> list[Part]:
    """Lists the parts about less common ways to run."""
    return [
        parts.environment(),
        parts.equal_exports(),
        parts.torchrun(),
        parts.predictor_threads(),
        parts.data_parallel(),
        parts.validated_elsewhere(amp="auto", expected_s=45),
        parts.equal_score_of_weights(),
        parts.first_steps(),
        parts.ddp_by_nccl(),
        parts.largest_batch(),
    ]


def speed(parts: Parts) -> list[Part]:
    """Lists the parts about the speed of the loss, steps and whole trainings, compared with the peer."""
    return [
        parts.environment(),
        parts.loss(),
        parts.timed_steps(),
        parts.timed_steps_in_half(),
        parts.end_to_end("yolov8n", expected_s=120 if parts.peer else 80),
        *(parts.end_to_end(model, expected_s=100 if parts.peer else 60) for model in parts.sizes.larger_models),
    ]


def compiled(parts: Parts) -> list[Part]:
    """Lists the parts about ``--compile``, the costliest kernels, and resuming."""
    sizes = parts.sizes
    batches = sizes.first_batches
    cases = [f"yolov8n:{batch}:{optimizer}" for batch in batches for optimizer in sizes.optimizers]
    cases += [f"{model}:{batches[-1]}:{sizes.optimizers[-1]}" for model in sizes.further_models]
    return [
        parts.environment(),
        parts.equal_compiled_steps(),
        parts.timed_steps_compiled([16, 64], rounds=3, expected_s=70),
        parts.kernels(cases, expected_s=60),
        parts.resumed(["sigterm", "torchrun", "sigkill"], expected_s=55),
        parts.trains_compiled_ddp(),
        parts.trains_compiled_sizes(),
        parts.torchrun_by_loopback(),
    ]


CALLS = {
    "first": Call(520, first),
    "again": Call(225, again),
    "checks": Call(500, checks),
    "others": Call(500, others),
    "speed": Call(500, speed),
    "compiled": Call(500, compiled),
}
EVERYTHING = ("checks", "others", "speed", "compiled")  # `first` and `again` are extracts of these


def candidates(call: str, parts: Parts) -> list[Part]:
    """Returns the parts that PARTS selects from: the parts of the call and, for `again`, also the parts of `first`."""
    chosen = CALLS[call].choose(parts)
    if call != "again":
        return chosen
    chosen_names = {part.name for part in chosen}
    return [*(part for part in first(parts) if part.name not in chosen_names), *chosen]


def with_providers(chosen: Sequence[Part], parts: Parts) -> Iterator[Part]:
    """Yields the parts in the order in which they run: each after the parts that make its needed products, unless these
    have already run."""
    products: set[str] = set()

    def preceded(part: Part) -> Iterator[Part]:
        for product in () if parts.is_skipped(part) else part.needs:
            if product not in products:
                yield from preceded(parts.provider(product))
        products.add(part.product)
        yield part

    for part in chosen:
        yield from preceded(part)
