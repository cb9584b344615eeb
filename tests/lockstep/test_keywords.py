"""Keywords of the Python API: each with values of many types, compared with the words of a command line."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import lockstep.settings
from lockstep.keywords import parse_keywords
from lockstep.signatures import keyword_fields
from tests.helpers.messages import refused
from utils.config.commands import COMMANDS
from utils.config.flags import flag_actions, flag_name, words_of_settings
from utils.config.other_programs.arguments import translate_argument
from utils.config.parser import ParsedCommand, parse_command, parse_config
from utils.config.recipes import with_overrides
from utils.config.settings import Hyperparameters
from utils.errors import UserError

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
)
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
OWN_SETTINGS = {"val": {"weights": "a.pt"}, "export": {"weights": "a.pt"}, "check": {"data": "a.yaml"}}


def keyword_names(command: str) -> list[str]:
    hyperparameters = dataclasses.fields(Hyperparameters) if command == "train" else ()
    return [field.name for field in (*keyword_fields(COMMANDS[command].settings), *hyperparameters)]


def is_hyperparameter(name: str) -> bool:
    return name in Hyperparameters.__annotations__


def is_switch(command: str, name: str) -> bool:
    """Returns whether a keyword of ``command`` is true or false."""
    return not is_hyperparameter(name) and flag_actions(COMMANDS[command].settings)[flag_name(name)].nargs == 0


def words_of(name: str, value: str | list[str]) -> list[str]:
    """Returns the words of a command line that set ``name``."""
    if is_hyperparameter(name):
        return [f"--set={name}={value if isinstance(value, str) else '[' + ', '.join(value) + ']'}"]
    flag = flag_name(name)
    return [f"{flag}={value}"] if isinstance(value, str) else [flag, *value]


def parsed_keywords(command: str, keywords: dict[str, Any]) -> ParsedCommand:
    return parse_keywords(command, OWN_SETTINGS.get(command, {}), keywords)


def given(command: ParsedCommand) -> dict[str, Any]:
    """Returns the settings that a command is given, and its hyper-parameters."""
    settings = {name: getattr(command.config, name) for name in sorted(command.explicit_flags)}
    return settings | {"hyp": with_overrides(Hyperparameters(), settings.pop("override", []))}


@functools.cache
def settings_of_words(command: str, words: tuple[str, ...]) -> str:
    """Returns the settings of a command line as text, or "" if it is refused."""
    try:
        return str(given(parse_command(COMMANDS[command].settings, [*REQUIRED.get(command, []), *words])))
    except UserError:
        return ""


def settings_of_keyword(command: str, name: str, value: Any) -> str:
    """Returns the settings of a keyword as text, or "" if it is refused, by a line with its name."""
    message = ""
    try:
        return str(given(parsed_keywords(command, {name: value})))
    except UserError as error:
        message = str(error)
    assert name in message, (name, value, message)
    return ""


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_plain_values_mean_the_same_as_on_a_command_line(command):
    for name in keyword_names(command):
        takes_list = is_hyperparameter(name) or flag_actions(COMMANDS[command].settings)[flag_name(name)].nargs == "+"
        for value, words in PLAIN:
            found = settings_of_keyword(command, name, value)
            if name == "freeze" and words == ["3"]:
                words = ["3", "3"]  # on a command line, 3 alone is layers 0 to 2; a list names its layer
            if is_switch(command, name) and words == "0":
                assert found == settings_of_words(command, (f"--no-{flag_name(name)[2:]}",))
            elif takes_list or isinstance(words, str):
                assert found == settings_of_words(command, tuple(words_of(name, words))), (name, value)
            else:
                assert not found or name in ("device", "imgsz"), (name, value)


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_values_that_no_command_line_can_express_are_refused(command):
    for name in (*keyword_names(command), "lr", "nbs", "split", "half"):
        for value in NOT_PLAIN:
            assert not settings_of_keyword(command, name, value), (name, value)


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_none_true_false_and_empty_lists_are_settings_or_refused(command):
    unset = settings_of_words(command, ())
    for name in keyword_names(command):
        for value in OTHERS:
            found = settings_of_keyword(command, name, value)
            if value is None and not is_hyperparameter(name):
                assert found == unset
            if is_switch(command, name) and isinstance(value, bool):
                flag = flag_name(name) if value else f"--no-{flag_name(name)[2:]}"
                assert found == settings_of_words(command, (flag,))


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_the_numbers_0_and_1_are_booleans_and_other_numbers_are_not(command):
    """The model for detection accepted them before these functions did."""
    for name in filter(functools.partial(is_switch, command), keyword_names(command)):
        for value in (1, 0, np.int64(1), 0.0, np.bool_(True)):
            assert settings_of_keyword(command, name, value) == settings_of_keyword(command, name, bool(value)) != ""
        with refused(f"{name}: must be true or false..., got 2"):
            parsed_keywords(command, {name: 2})


@pytest.mark.parametrize(
    "kind", [list, tuple, set, np.array, torch.tensor, lambda values: range(values[0], values[0] + 1)]
)
@pytest.mark.parametrize("layer", [0, 3])
def test_a_list_of_one_layer_freezes_this_layer(kind, layer):
    """A number alone freezes the layers before it."""
    assert parsed_keywords("train", {"freeze": kind([layer])}).config.freeze == [layer, layer]
    assert parsed_keywords("train", {"freeze": [str(layer)]}).config.freeze == [layer, layer]
    assert parsed_keywords("train", {"freeze": layer}).config.freeze == [layer]


def test_a_list_of_one_layer_says_that_the_layers_before_it_are_not_frozen(capsys):
    """settings.yaml stores ``--freeze 3`` as [3], so that it may be passed on with another meaning."""
    for value in ([3], [1], [0]):
        parsed_keywords("train", {"freeze": value})
    for value in ("backbone", True):
        with refused(f"freeze: element 1: must be a whole number, got {value!r}"):
            parsed_keywords("train", {"freeze": [value]})
    assert capsys.readouterr().out.splitlines() == [
        "freeze=[3]: freezes layer 3 only, not the layers before it",
        "freeze=[1]: freezes layer 1 only, not the layers before it",
    ]


@pytest.mark.parametrize(
    ("command", "argument", "reason"),
    [
        ("export", {"fraction": 1.0, "keras": False, "optimize": False}, ""),
        ("export", {"device": "cpu"}, "device='cpu': without effect (models are exported on the CPU)\n"),
        ("train", {"plots": True}, "plots=True: without effect (plots are drawn unless `noplots` is given)\n"),
        ("train", {"rle": 1.0}, "rle=1.0: without effect (belongs to another task or command)\n"),
        ("train", {"bgr": 0.0}, ""),
        ("train", {"cfg": False}, ""),
    ],
)
def test_the_reason_of_an_argument_without_effect_is_about_its_value(command, argument, reason, capsys):
    assert parsed_keywords(command, argument).explicit_flags == OWN_SETTINGS.get(command, {}).keys()
    assert capsys.readouterr().out == reason


@pytest.mark.parametrize("sides", [(640, 1280), [640.0, 1280], "640,1280", "(640, 1280)", np.array([[1280, 640]])])
def test_a_pair_of_sides_is_the_larger_one_whatever_its_type(sides, capsys):
    """640.0 was larger than 1280 because its text is longer, and text was no pair."""
    assert parsed_keywords("train", {"imgsz": sides}).config.imgsz == 1280
    assert capsys.readouterr().out.endswith(": used as 1280, the larger side\n")
    assert parsed_keywords("train", {"imgsz": (640, 640)}).config.imgsz == 640
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("freeze", "0,1", [0, 1]),
        ("freeze", "[3]", [3, 3]),
        ("freeze", " 3", [3]),
        ("export", "onnx,PT2", ["onnx", "pt2"]),
        ("device", "[0, 1]", "0,1"),
        ("classes", "0,2", ["0", "2"]),
        ("classes", "cat,dog", ["cat,dog"]),
        ("name", "[a], b", "[a], b"),
    ],
)
def test_text_may_be_a_list_unless_it_may_be_a_name(name, text, value):
    assert getattr(parsed_keywords("train", {name: text}).config, name) == value


def test_negative_numbers_in_lists_are_numbers():
    """The model refuses them, because it has no such layer."""
    for values in ([-1, 2], [-1]):
        freeze = parsed_keywords("train", {"freeze": values}).config.freeze
        assert freeze == (values if len(values) > 1 else values * 2)


@pytest.mark.parametrize("name", ["classes", "albumentations", "epochs", "epocs"])
def test_values_that_contain_themselves_are_refused(name):
    endless: list[Any] = []
    endless.append(endless)
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    for value in (endless, nested, {"a": endless}):
        with refused(f"{name}: is nested too deeply, or contains itself"):
            parsed_keywords("train", {name: value})


def test_numbers_in_lists_of_hyperparameters_stay_numbers():
    """YAML 1.1 reads "1e-05", as JSON writes it, as text."""
    transforms = [{"name": "Blur", "p": 1e-5}, {"name": "\N{GRINNING FACE} 1", "limit": [3, None], "x": {"a": True}}]
    (override,) = parsed_keywords("train", {"albumentations": transforms}).config.override
    assert with_overrides(Hyperparameters(), [override]).albumentations == transforms


def test_members_of_an_enum_are_their_values():
    cat = enum.Enum("Label", {"CAT": "cat"}, type=str).CAT
    config = parsed_keywords("train", {"classes": [cat], "name": cat, "albumentations": [{"name": cat}]}).config
    assert (config.classes, config.name, config.override) == (["cat"], "cat", ["albumentations=[{name: cat}]"])


@pytest.mark.parametrize("name", ["weights_", "data_", "epochs_", "Epochs", "_epochs", "", "from", "from_", "lr0_"])
def test_only_exact_names_are_keywords(name):
    """Else a misspelled keyword could score another file."""
    for value in (3, None):
        with refused(f"{name}={value!r}: unknown..."):
            parsed_keywords("train", {name: value})


@pytest.mark.parametrize(
    ("command", "keywords", "message"),
    [
        ("train", {"batch": 4, "batch_size": 8}, "batch, batch_size: both set batch_size; give only one of them"),
        ("train", {"lr": 0.1, "lr0": 0.2}, "lr, lr0: both set lr0; give only one of them"),
        ("train", {"set": ["lr0=1"]}, "set=['lr0=1']: hyper-parameters are keywords of lockstep.train, ..."),
        ("export", {"no_check": True}, "no_check=True: unknown (did you mean 'check'?)"),
        ("export", {"format": []}, "format: must not be empty"),
        ("val", {"imgsz": []}, "imgsz=[]: must be one value, not a list"),
        ("val", {"imgsz": "[]"}, "imgsz: must be a whole number, got '[]'"),
        ("val", {"imgsz": "(320, large)"}, "imgsz: must be a whole number, got 'large'"),
        ("train", {"imgsz": [640.0, 1280.0]}, "imgsz: must be a whole number, got 1280.0"),
        ("train", {"weights": ["a.pt"]}, "weights=['a.pt']: must be one value, not a list"),
        ("train", {"cache": "--"}, "cache: must be one of none, ram, disk, device, got '--'"),
        ("train", {"batch": "many"}, "batch: must be a whole number, got 'many'"),
        ("train", {"lr": "many"}, "lr: must be a number or null, got 'many'"),
        ("val", {"devices": 2}, "devices=2: a parameter of lockstep.train; lockstep.val takes spawn=N, ..."),
        ("train", {"noval": 1}, "noval=1: must be true or false"),
        ("train", {"epochs": 3.0}, "epochs: must be a whole number, got 3.0"),
        ("train", {"nbs": 3.5}, "nbs: must be a whole number, got 3.5"),
        ("train", {"epochs": True}, "epochs: must be a whole number, got True"),
        ("train", {"freeze": ["3", "neck"]}, "freeze: element 2: must be a whole number, got 'neck'"),
        ("val", {"imgsz": [640.0, 480.0]}, "imgsz: must be a whole number, got 640.0"),
        ("train", {"classes": [True]}, "classes: element 1: must be text, got True"),
        ("export", {"format": ["onnx", "engine"]}, "format='engine': trtexec ..."),
        ("train", {"lr0": float("nan")}, "lr0: must be at least 0, got nan"),
        ("train", {"half": True}, "half=True: use `amp` bf16 or `amp` fp16; `amp` auto uses bf16 if the device ..."),
        ("val", {"visualize": True}, "visualize=True: feature maps are not drawn; ..."),
        ("val", {"task": "speed"}, "task='speed': every validation prints the milliseconds an image takes"),
        (
            "train",
            {"epocs": 3, "lr0": "x", "epochs": 0},
            "3 mistakes: (1) epocs=3: unknown (did you mean 'epochs'?); (2) lr0: must be a number or null, got 'x'; "
            "(3) epochs: must be at least 1, got 0",
        ),
    ],
)
def test_mistakes_name_the_keywords(command, keywords, message):
    """Nothing is dropped silently: neither one of two names of a setting nor an empty list."""
    with refused(message):
        parsed_keywords(command, keywords)


def test_two_names_may_give_the_same_value():
    assert parsed_keywords("train", {"batch": 4, "batch_size": "4"}).config.batch_size == 4
    assert parsed_keywords("val", {"conf": "0.25", "conf_thres": 0.25}).config.conf_thres == 0.25
    assert parsed_keywords("train", {"lr0": "1e-3", "lr": 0.001}).config.override == ["lr0=0.001"]


def test_an_empty_list_replaces_the_list_of_a_resumed_run():
    assert parsed_keywords("train", {"export": []}).explicit_flags == {"export"}


@pytest.mark.parametrize(("name", "value"), [("cache", "none"), ("multi_scale", 0), ("sync_bn", 0)])
def test_false_replaces_the_value_of_a_resumed_run(name, value):
    """It was dropped in silence, so that the run kept its cache."""
    command = parsed_keywords("train", {name: False})
    assert command.explicit_flags == {name}
    assert getattr(command.config, name) == value


def test_weights_that_cannot_be_used_are_one_of_several_mistakes():
    """``pretrained`` is compared with them."""
    with refused("2 mistakes: (1) weights: must be text, ..., got an object of type bytes; (2) epochs: must be a ..."):
        parsed_keywords("train", {"weights": b"x", "pretrained": True, "epochs": "x"})


def test_text_is_not_parsed_as_a_list():
    assert parsed_keywords("train", {"classes": '["cat"]'}).config.classes == ['["cat"]']


def test_objects_are_refused_with_the_reason_why_ultralytics_takes_them():
    with refused("augmentations=[<...>]: there is no such augmentation; configs/hyp/scratch.yaml lists all, ..."):
        parsed_keywords("train", {"augmentations": [object()]})


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a type checker takes ``value`` for the type ``hint``."""
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, member) for member in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    elements = typing.get_args(hint) if origin in (list, Sequence) else ()
    return isinstance(value, origin) and all(fits(item, element) for element in elements for item in value)


@pytest.mark.parametrize(
    ("command", "keywords"),
    [
        ("train", {"classes": [0, 2], "device": 0, "cache": True, "project": Path("r"), "cache_dir": Path("c")}),
        ("train", {"classes": 2, "device": [0, 1], "multi_scale": True, "sync_bn": True, "freeze": (0, 1)}),
        ("train", {"hyp": Path("h.yaml"), "weights": Path("a.pt"), "model": Path("m.yaml"), "stage": Path("/s")}),
        ("train", {"val_fraction": None, "lr0": None, "export": ("onnx", "pt2"), "classes": ["cat", 1]}),
        ("val", {"device": "cpu", "classes": ("cat", "dog"), "project": Path("r")}),
        ("export", {"data": Path("x.yaml"), "imgsz": (640, 480), "format": ("onnx",)}),
        ("check", {"split": ("train",), "out": Path("o"), "weights": Path("a.pt")}),
    ],
)
def test_the_types_for_editors_take_what_the_functions_take(command, keywords):
    """Numbers of classes and devices, paths and tuples were errors in editors."""
    hints = typing.get_type_hints(getattr(lockstep.settings, f"{command.title()}Settings"))
    assert [name for name, value in keywords.items() if not fits(value, hints[name])] == []
    parsed_keywords(command, keywords)


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


def settings_of(config: Any) -> tuple[dict[str, Any], Hyperparameters]:
    """Returns settings, and the hyper-parameters among them."""
    settings = vars(config).copy()
    return settings, with_overrides(Hyperparameters(close_mosaic=10), settings.pop("override", []))


def parsed(command: str, words: list[str]) -> tuple[dict[str, Any], Hyperparameters]:
    return settings_of(parse_config(COMMANDS[command].settings, [*REQUIRED.get(command, []), *words]))


@pytest.mark.parametrize(("command", "argument"), [(c, word) for c, words in HABITS.items() for word in words.split()])
def test_what_happens_anyway_may_be_written_as_a_keyword_a_flag_and_an_argument(command, argument):
    name, _, value = argument.partition("=")
    unset = parsed(command, [])
    translation = translate_argument(command, name, value)
    assert translation is not None
    assert not translation.refusal
    assert parsed(command, words_of_settings(translation.settings)) == unset
    is_our_switch = flag_name(name) in flag_actions(COMMANDS[command].settings) and value in ("True", "False")
    if not is_hyperparameter(name) and (not is_our_switch or name == "amp"):  # these are --set NAME=VALUE and --NAME
        assert parsed(command, [flag_name(name), value]) == unset
        assert parsed(command, [f"{flag_name(name)}={value}"]) == unset
    if command in COMMAND_NAMES:
        plain = {"True": True, "False": False, "None": None}.get(value, value)
        assert settings_of(parsed_keywords(command, {name: plain}).config) == unset
