"""Hyper-parameters from a YAML, a built-in recipe and ``--set``; malformed YAML is one line that names its place."""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.messages import refused
from tests.helpers.repository import ROOT
from utils.config.flags import words_of_settings
from utils.config.recipes import hyperparameters_from, read_recipe, with_overrides
from utils.config.settings import Hyperparameters
from utils.config.yaml_files import load_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mosaik: 1", ": unknown key 'mosaik' (did you mean 'mosaic'?)"),
        ("label_smoothing: 0.1", ": 'label_smoothing': is a flag, not a hyper-parameter; give it as --label-smoothing"),
        ("a: [1\n", ":2: ..."),
        ("a: 1\nb: 2\na: 3\n", ":3: ..."),
        ("1: a\n01: b\n", ":2: ..."),
        ("base: &a {x: 1}\nlr0: {<<: *a}\n", ":2: ..."),
        ("lr0: 1\nlrf: 2020-13-45\n", ":2: ..."),
        ("a: " + "[" * 100_000, "...nesting depth"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_place(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with refused(f"x.yaml{message}") as caught:
        read_recipe(str(path), pretrained=False)
    assert "\n" not in str(caught.value)


def test_values_under_some_keys_stay_as_written(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("nc: &n 012\nnames: [012, 1e3, *n, cat, yes, ~]\nclass_of: {0x10: 1.50}\n")
    values = load_yaml(path, text_under=frozenset({"names", "class_of"}))
    assert values == {"nc": 10, "names": ["012", "1e3", "012", "cat", "yes", None], "class_of": {"0x10": "1.50"}}


@pytest.mark.parametrize(
    "content", [{"name": "Blur", "p": None}, {"p": 1e-05, "on": True}, {"mode": "it's: #1", "n": "1"}]
)
def test_a_hyperparameter_that_a_message_shows_as_a_flag_reads_back_as_itself(content):
    """None was read back as the text 'None', and 1e-05 as text."""
    flag, override = words_of_settings({"albumentations": [content]})
    assert flag == "--set"
    assert with_overrides(Hyperparameters(), [override]).albumentations == [content]


def test_overrides_take_precedence_over_the_yaml(tmp_path):
    path = tmp_path / "hyp.yaml"
    path.write_text("lr0: 1e-3\nmosaic: 0\nalbumentations:\n- {name: Blur, p: 0.1}\n")
    hyp = hyperparameters_from(str(path), ["mosaic=0.5", "lrf=0.1"])
    assert hyp == Hyperparameters(lr0=0.001, mosaic=0.5, lrf=0.1, albumentations=[{"name": "Blur", "p": 0.1}])
    for wrong, message in (
        ("lr=0.01", "--set: unknown key 'lr' (did you mean 'lr0'?)"),
        ("lr0", "--set lr0: must be key=value"),
        ("lr0=", "--set lr0=: has no value; write null for none"),
    ):
        with refused(message):
            hyperparameters_from("", [wrong])


def test_the_listed_hyperparameters_are_the_defaults():
    path = ROOT / "configs" / "hyp" / "scratch.yaml"
    assert hyperparameters_from(str(path)) == Hyperparameters()
    text = path.read_text()
    for field in dataclasses.fields(Hyperparameters):
        assert f"# {field.metadata['help']}" in text, field.name
        assert f"\n{field.name}: " in text, field.name


def test_recipes_are_found_by_name_file_and_auto(tmp_path):
    scratch, finetune = (read_recipe("auto", pretrained=pretrained) for pretrained in (False, True))
    assert scratch == read_recipe("scratch", pretrained=True) == Hyperparameters()
    assert finetune == read_recipe("finetune", pretrained=False) != scratch
    kept = read_recipe("auto", pretrained=True, keep_old=True)
    assert kept == dataclasses.replace(finetune, lr_mult=0.03125)
    own = tmp_path / "own.yaml"
    own.write_text("mosaic: 0.25\n")
    for options in ({"pretrained": False}, {"pretrained": True}, {"pretrained": True, "keep_old": True}):
        usual = read_recipe("auto", **options)
        assert read_recipe(str(own), ["mixup=1"], **options) == dataclasses.replace(usual, mosaic=0.25, mixup=1.0)
    own.write_text("")
    assert read_recipe(str(own), pretrained=True) == finetune
    with refused("--hyp fine-tune: no such recipe or file (did you mean 'finetune'?)..."):
        read_recipe("fine-tune", pretrained=True)


def test_files_of_hyperparameters_of_yolov5_are_read(tmp_path):
    """Its gains have another scale, and must not be taken for ours."""
    path = tmp_path / "hyp.yaml"
    path.write_text("box: 0.05\ncls: 0.5\nobj: 1.0\ncls_pw: 1.0\niou_t: 0.20\nfl_gamma: 0.0\nmixup: 0.3\n")
    lines: list[str] = []
    assert hyperparameters_from(str(path), lines=lines) == Hyperparameters(mixup=0.3)
    assert "box" in lines[0]
    path.write_text("box: 0.07\nfl_gamma: 1.5\n")
    with refused("...fl_gamma...box..."):
        hyperparameters_from(str(path))
