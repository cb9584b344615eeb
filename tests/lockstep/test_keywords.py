"""Keywords of the Python API: each with values of many types, compared with the words of a command line."""

from __future__ import annotations

import dataclasses
import enum
import functools
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.keywords import flags_of_keywords, keyword_fields
from tests.helpers.messages import refused
from utils.config.commands import COMMANDS
from utils.config.flags import flag_actions, flag_name, given_values
from utils.config.other_programs.arguments import flags_of_argument
from utils.config.parser import parse_config
from utils.config.recipes import with_overrides
from utils.config.settings import Hyperparameters, TrainConfig
from utils.errors import Mistakes, UserError

NOT_PLAIN = (
    b"a", bytearray(b"a"), 1j, object(), object, np.float32, len, Decimal("0.5"), {1}.__iter__(), (i for i in (0, 1)),
    np.array(object()), np.array([1j]), np.datetime64("2026-01-01"), np.array([b"a"]), [object()], {"a": [b"a"]},
    {(1, 2): 3}, "a\0b", "\ud800", 10**5000, torch.float32,
)  # fmt: skip
# A value, and the words that a user writes after the flag for it. A list of words is written for a list.
PLAIN: tuple[tuple[Any, str | list[str]], ...] = (
    (0, "0"),
    (3, "3"),
    (-1, "-1"),
    (2**62, str(2**62)),
    (0.5, "0.5"),
    (1e-5, "1e-05"),
    (float("nan"), "nan"),
    (float("inf"), "inf"),
    (np.int64(3), "3"),
    (np.float64(0.5), "0.5"),
    (np.array(3), "3"),
    (torch.tensor(3), "3"),
    (torch.tensor(0.5, requires_grad=True), "0.5"),
    ("3", "3"),
    ("", ""),
    ("cat", "cat"),
    (np.str_("cat"), "cat"),
    (Path("a b"), "a b"),
    (torch.device("cuda:1"), "cuda:1"),
    ([3], ["3"]),
    ([0, 3], ["0", "3"]),
    ((0, 3), ["0", "3"]),
    ({3, 0}, ["0", "3"]),
    (range(2), ["0", "1"]),
    (np.array([0, 3]), ["0", "3"]),
    (torch.tensor([0, 3]), ["0", "3"]),
    (["cat", Path("dog")], ["cat", "dog"]),
    ([0.5], ["0.5"]),
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    np.bool_(True),
    [],
    np.array([]),
    [[0]],
    [None],
    [True],
    {},
    {"a": 1},
    [{"a": 1}],
)
COMMAND_NAMES = ("train", "val", "export", "check")
REQUIRED = {
    "val": ["--weights=a.pt"],
    "detect": ["--weights=a.pt", "--source=b"],
    "export": ["--weights=a.pt"],
    "check": ["a.yaml"],
}


def keyword_names(command: str) -> list[str]:
    hyperparameters = dataclasses.fields(Hyperparameters) if command == "train" else ()
    return [field.name for field in (*keyword_fields(COMMANDS[command].settings), *hyperparameters)]


def is_hyperparameter(name: str) -> bool:
    return name in Hyperparameters.__annotations__


def words_of(name: str, value: str | list[str]) -> list[str]:
    """Returns the words of a command line that set ``name``."""
    if is_hyperparameter(name):
        return [f"--set={name}={value if isinstance(value, str) else '[' + ', '.join(value) + ']'}"]
    flag = flag_name(name)
    return [f"{flag}={value}"] if isinstance(value, str) else [flag, *value]


@functools.cache
def settings_or_error(command: str, words: tuple[str, ...]) -> tuple[str, str]:
    """Returns the settings of a command line as text, and the message if it is refused."""
    mistakes = Mistakes()
    values = given_values(COMMANDS[command].settings, [*REQUIRED.get(command, []), *words], mistakes)
    with mistakes.collecting():
        values["hyp"] = with_overrides(Hyperparameters(), values.pop("override", ()))
    return "" if mistakes else str(values), "; ".join(mistakes.messages)


def settings_of_keyword(command: str, name: str, value: Any) -> str:
    """Returns the settings of a keyword as text, or "" if it is refused, by a line with its name."""
    try:
        settings, message = settings_or_error(command, tuple(flags_of_keywords(command, {name: value})))
    except UserError as error:
        settings, message = "", str(error)
    assert settings or name in message or flag_name(name) in message, (name, value, message)
    return settings


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_plain_values_mean_the_same_as_on_a_command_line(command):
    for name in keyword_names(command):
        takes_list = is_hyperparameter(name) or flag_actions(COMMANDS[command].settings)[flag_name(name)].nargs == "+"
        for value, words in PLAIN:
            found = settings_of_keyword(command, name, value)
            if name == "freeze" and words == ["3"]:
                words = ["3", "3"]  # on a command line, 3 alone is layers 0 to 2; a list names its layer
            if takes_list or isinstance(words, str):
                assert found == settings_or_error(command, tuple(words_of(name, words)))[0], (name, value)
            else:
                assert not found or name in ("device", "imgsz"), (name, value)


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_values_that_no_command_line_can_express_are_refused(command):
    """Some were a TypeError, others the text of an object."""
    for name in (*keyword_names(command), "lr", "nbs", "split", "half"):
        for value in NOT_PLAIN:
            assert not settings_of_keyword(command, name, value), (name, value)


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_none_true_false_and_empty_lists_are_settings_or_refused(command):
    unset, _ = settings_or_error(command, ())
    for name in keyword_names(command):
        is_switch = not is_hyperparameter(name) and flag_actions(COMMANDS[command].settings)[flag_name(name)].nargs == 0
        for value in OTHERS:
            found = settings_of_keyword(command, name, value)
            if value is None and not is_hyperparameter(name):
                assert found == unset
            if is_switch and isinstance(value, bool):
                assert (
                    found
                    == settings_or_error(command, (flag_name(name) if value else f"--no-{flag_name(name)[2:]}",))[0]
                )


@pytest.mark.parametrize(
    "kind", [list, tuple, set, np.array, torch.tensor, lambda values: range(values[0], values[0] + 1)]
)
@pytest.mark.parametrize("layer", [0, 3])
def test_a_list_of_one_layer_freezes_this_layer(kind, layer):
    """[0] froze no layer, and [3] the layers before it."""
    assert flags_of_keywords("train", {"freeze": kind([layer])}) == ["--freeze", str(layer), str(layer)]
    assert flags_of_keywords("train", {"freeze": layer}) == [f"--freeze={layer}"]


def test_a_list_of_one_layer_says_what_the_number_alone_would_freeze(capsys):
    """settings.yaml stores ``--freeze 3`` as [3], so that it may be passed on with another meaning."""
    for value in ([3], [1], [0], ["backbone"]):
        flags_of_keywords("train", {"freeze": value})
    assert capsys.readouterr().out.splitlines() == [
        "freeze=[3] freezes layer 3 only; freeze=3 would freeze layers 0 to 2",
        "freeze=[1] freezes layer 1 only; freeze=1 would freeze layer 0",
    ]


@pytest.mark.parametrize(
    ("command", "argument", "reason"),
    [
        ("export", {"fraction": 1.0, "keras": False, "optimize": False}, ""),
        ("export", {"device": "cpu"}, "device='cpu': without effect (models are exported on the CPU)\n"),
        ("train", {"rle": 1.0}, "rle=1.0: without effect (belongs to another task or command)\n"),
        ("train", {"bgr": 0.0}, ""),
    ],
)
def test_the_reason_of_an_argument_without_effect_is_about_its_value(command, argument, reason, capsys):
    """It was that of the refusal of other values: "use --calibration-images ..."."""
    assert flags_of_keywords(command, argument) == []
    assert capsys.readouterr().out == reason


def test_negative_numbers_in_lists_are_numbers():
    """The model, which has no such layer, says so; the parser said that '["-1", "2"]' is no number."""
    for values in ([-1, 2], [-1]):
        flags = flags_of_keywords("train", {"freeze": values})
        assert parse_config(TrainConfig, flags).freeze == (values if len(values) > 1 else values * 2)


@pytest.mark.parametrize("name", ["classes", "albumentations", "epochs", "epocs"])
def test_values_that_contain_themselves_are_refused(name):
    endless: list[Any] = []
    endless.append(endless)
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    for value in (endless, nested, {"a": endless}):
        with refused(f"{name}: is nested too deeply, or contains itself"):
            flags_of_keywords("train", {name: value})


def test_numbers_in_lists_of_hyperparameters_stay_numbers():
    """YAML 1.1 reads "1e-05", as JSON writes it, as text."""
    transforms = [{"name": "Blur", "p": 1e-5}, {"name": "\N{GRINNING FACE} 1", "limit": [3, None], "x": {"a": True}}]
    (flag,) = flags_of_keywords("train", {"albumentations": transforms})
    assert with_overrides(Hyperparameters(), [flag.removeprefix("--set=")]).albumentations == transforms


def test_members_of_an_enum_are_their_values():
    cat = enum.Enum("Label", {"CAT": "cat"}, type=str).CAT
    given = {"classes": [cat], "name": cat, "albumentations": [cat]}
    assert flags_of_keywords("train", given) == ["--classes", "cat", "--name=cat", "--set=albumentations=[cat]"]


@pytest.mark.parametrize("name", ["weights_", "data_", "epochs_", "Epochs", "_epochs", "", "from", "from_", "lr0_"])
def test_only_exact_names_are_keywords(name):
    """``weights_`` was ``weights``, so that another file was scored."""
    for value in (3, None):
        with refused(f"{name}={value!r}: unknown..."):
            flags_of_keywords("train", {name: value})


def test_objects_are_refused_with_the_reason_why_ultralytics_takes_them():
    with refused("augmentations=[<...>]: there is no such augmentation; configs/hyp/scratch.yaml lists all, ..."):
        flags_of_keywords("train", {"augmentations": [object()]})


HABITS = {  # what scripts for Ultralytics write although it is the default there, and what it is here
    "train": "task=detect mode=train tracker=botsort.yaml amp=True save_period=-1 val=True save=True dropout=0.0 "
    "split=val half=False plots=True verbose=True iou=0.7 max_det=300 fraction=1.0 close_mosaic=10 copy_paste=0.0",
    "val": "task=detect mode=val tracker=botsort.yaml amp=False half=False plots=True split=val save_txt=False "
    "dnn=False",
    "detect": "task=detect mode=predict amp=False half=False save=True show=False stream=False augment=False batch=1 "
    "visualize=False retina_masks=False show_labels=True show_boxes=True verbose=True save_txt=False vid_stride=1",
    "export": "task=detect mode=export tracker=botsort.yaml max_det=300 fraction=1.0 simplify=True keras=False "
    "half=False optimize=False int8=False verbose=True batch=1 workspace=None nms=False device=cpu",
}
HABITS["kfold"] = HABITS["search"] = "task=detect mode=train tracker=botsort.yaml amp=True iou=0.7 dnn=False"


def parsed(command: str, words: list[str]) -> tuple[dict[str, Any], Hyperparameters]:
    """Returns the settings of a command line, and its hyper-parameters."""
    settings = vars(parse_config(COMMANDS[command].settings, [*REQUIRED.get(command, []), *words])).copy()
    return settings, with_overrides(Hyperparameters(close_mosaic=10), settings.pop("override", []))


@pytest.mark.parametrize(("command", "argument"), [(c, word) for c, words in HABITS.items() for word in words.split()])
def test_what_happens_anyway_may_be_written_as_a_keyword_a_flag_and_an_argument(command, argument):
    """``tracker=``, ``task=detect`` and ``mode=predict`` were accepted by some commands, in some of these ways."""
    name, _, value = argument.partition("=")
    unset = parsed(command, [])
    assert parsed(command, flags_of_argument(command, name, value)) == unset
    is_switch = flag_name(name) in flag_actions(COMMANDS[command].settings) and value in ("True", "False")
    if not is_hyperparameter(name) and (not is_switch or name == "amp"):  # these are --set NAME=VALUE and --NAME
        assert parsed(command, [flag_name(name), value]) == unset
        assert parsed(command, [f"{flag_name(name)}={value}"]) == unset
    if command in COMMAND_NAMES:
        plain = {"True": True, "False": False, "None": None}.get(value, value)
        assert parsed(command, flags_of_keywords(command, {name: plain})) == unset
