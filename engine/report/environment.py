"""The settings and the machine of a run, as tables of a report."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields

import torch

from utils.config.flags import flag_name
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig, default_of
from utils.distributed.context import DistributedContext
from utils.drawing import page
from utils.machine.resources import available_cores


def settings_table(config: TrainConfig | ValConfig, hyp: Hyperparameters | None) -> page.HtmlTable:
    """Lists the flags and hyper-parameters that differ from their defaults."""
    groups: list[tuple[TrainConfig | ValConfig | Hyperparameters, Callable[[str], str]]]
    groups = [(config, flag_name)]
    if hyp is not None:
        groups.append((hyp, str))
    rows = []
    for settings, display_name in groups:
        for field in fields(settings):
            value = getattr(settings, field.name)
            default = default_of(field)
            if value != default:
                name = page.code(display_name(field.name))
                rows.append((name, _display_value(value), _display_value(default), field.metadata["help"]))
    return page.HtmlTable(("setting", "value", "default", "meaning"), rows, "Settings that differ from their defaults")


def _display_value(value: object) -> str:
    if value in ("", []):
        return "empty"
    if value in (None, MISSING):
        return "none"
    return str(value)


def machine_facts(ctx: DistributedContext) -> Sequence[tuple[str, str]]:
    """Describes the versions and the machine, as names and values."""
    return (
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("device", f"{ctx.device} ({_device_name(ctx.device)})"),
        ("processes", str(ctx.world_size)),
        ("cores of this machine that may be used", str(available_cores())),
        ("threads per process", str(torch.get_num_threads())),
        ("system", f"{platform.system()} {platform.release()}"),
        ("machine", platform.node() or page.UNKNOWN),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        if models:
            return models[0]
    return platform.processor() or page.UNKNOWN
