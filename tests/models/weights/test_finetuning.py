"""Fine-tuning from files of full size in the public layouts of permissive licenses, through training, validation and
export."""

from __future__ import annotations

import pytest
import torch
import yaml
from torch import Tensor, nn

import export
import train
import val
from engine.inference.model import open_model
from engine.run import starts
from models.detector import Detector, build_detector
from models.spec import load_spec
from models.weights.layouts import ungrouped
from models.weights.load import load_detector, names_for
from tests.helpers.exports import calibrated_detector, noise_images
from tests.helpers.public_layouts import grouped, write_public
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset
from utils.process.main import run_main

NAMES = ["light", "Dog"]
DOG = 16  # among COCO's classes
FAMILIES = {"yolox": ("nano", "tiny", "s", "m", "x"), "yolov9": ("t", "s", "m", "c")}


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{family}{size}" for family, sizes in FAMILIES.items() for size in sizes])
def test_a_file_of_full_size_is_fine_tuned(tmp_path, monkeypatch, name: str):
    data = write_dataset(tmp_path / "set", train=4, val=2)
    data.write_text(yaml.safe_dump(yaml.safe_load(data.read_text()) | {"names": NAMES}))
    original = calibrated_detector(name, names_for(80, None, name))
    if name.startswith("yolov9"):  # the public files have box layers in four groups
        for first, second, last in original.head.cv2:
            for layer, channels in ((second.conv, len(first.conv.weight)), (last, len(second.conv.weight))):
                layer.weight.data = ungrouped(grouped(layer.weight.data, 4), channels)
    weights = write_public(original, tmp_path)
    started: dict[str, Tensor] = {}

    def recording(_: object, model: Detector, __: object) -> None:
        started.update({name: tensor.clone() for name, tensor in model.state_dict().items()})

    monkeypatch.setattr(starts, "check_same_model", recording)
    common = ["--project", str(tmp_path), *SMALL]
    given = ["--data", str(data), "--weights", str(weights), "--epochs", "1", "--optimizer", "SGD", "--name", "run"]
    run_main(train.main, [*given, *common])

    fresh = build_detector({"classes_of_width": 80} | load_spec(name).plain, 2, names=NAMES).state_dict()
    rows = {f"model.{len(original.model) - 1}.{layer}" for layer in original.head.class_rows()}
    for key, expected in original.state_dict().items():
        if key.rpartition(".")[0] in rows:
            assert torch.equal(started[key][1], expected[DOG]), key
            assert torch.equal(started[key][0], fresh[key][0]), key
        elif not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(started[key], expected, rtol=1e-6, atol=0)

    best = tmp_path / "run" / "best.pt"
    trained, info = load_detector(best)
    assert (trained.spec["name"], trained.names) == (name, tuple(NAMES))
    assert info["origin"] == {"weights": f"{weights.name} (unknown origin)", "license": "unknown"}
    moved = [key for key, p in trained.named_parameters() if not torch.equal(p, started[key])]
    assert len(moved) > 0.9 * len([*trained.parameters()])
    # Those of both families; torch's are 1e-5 and 0.1.
    assert {(m.eps, m.momentum) for m in trained.modules() if isinstance(m, nn.BatchNorm2d)} == {(1e-3, 0.03)}
    run_main(val.main, ["--weights", str(best), *common])
    run_main(export.main, ["--weights", str(best), "--format", "torchscript", "--imgsz", "64", "96", "--no-check"])
    model = open_model(best.with_suffix(".torchscript"), device=torch.device("cpu"), trust=True)
    with torch.inference_mode():
        expected, found = (torch.cat(each.decode(each(noise_images()[:1])), -1) for each in (trained, model))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.05)
