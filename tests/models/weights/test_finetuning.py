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
from engine.train import run
from models.detector import Detector, build_detector
from models.spec import load_spec
from models.weights.layouts import ungrouped
from models.weights.load import load_detector, names_for
from tests.helpers.exports import calibrated_detector, noise_images
from tests.helpers.public_layouts import grouped, write_public
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset
from utils.process.main import run_main

# The batch norms of both families; torch's defaults are 1e-5 and 0.1.
EPS = 1e-3
MOMENTUM = 0.03
NAMES = ["light", "Dog"]
DOG = 16  # among COCO's classes


@pytest.fixture
def recorded(monkeypatch) -> tuple[list[dict[str, Tensor]], set[tuple[float, float]]]:
    """The state of each model with which a training starts; momentum and eps of all batch norms in training mode."""
    states: list[dict[str, Tensor]] = []
    norms: set[tuple[float, float]] = set()
    start = run.build_starting_model
    batch_norm = nn.functional.batch_norm

    def recording_start(*args, **settings):
        built = start(*args, **settings)
        states.append({name: tensor.clone() for name, tensor in built.model.state_dict().items()})
        return built

    def recording_norm(x, mean, var, weight, bias, training, momentum, eps):
        if training:
            norms.add((momentum, eps))
        return batch_norm(x, mean, var, weight, bias, training, momentum, eps)

    monkeypatch.setattr(run, "build_starting_model", recording_start)
    monkeypatch.setattr(nn.functional, "batch_norm", recording_norm)
    return states, norms


def outputs(detector: Detector, images: Tensor, eps: float) -> Tensor:
    """Boxes and scores of the detector, not fused, with this eps."""
    for module in detector.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = eps
    with torch.inference_mode():
        return torch.cat(detector.decode(detector(images)), -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(f"yolox{size}" for size in ("nano", "tiny", "s", "m", "x")),
        *(f"yolov9{size}" for size in ("t", "s", "m", "c")),
    ],
)
def test_a_file_of_full_size_is_fine_tuned(tmp_path, capsys, recorded, name: str):
    data = write_dataset(tmp_path / "set", train=4, val=2)
    data.write_text(yaml.safe_dump(yaml.safe_load(data.read_text()) | {"names": NAMES}))
    original = calibrated_detector(name, names_for(80, None, name))
    if name.startswith("yolov9"):  # the public files have box layers in four groups
        for first, second, last in original.head.cv2:
            for layer, channels in ((second.conv, len(first.conv.weight)), (last, len(second.conv.weight))):
                layer.weight.data = ungrouped(grouped(layer.weight.data, 4), channels)
    weights = write_public(original, tmp_path)
    common = ["--project", str(tmp_path), *SMALL]
    states, norms = recorded
    norms.clear()  # those of `calibrated_detector`
    given = ["--data", str(data), "--weights", str(weights), "--epochs", "1", "--optimizer", "SGD", "--name", "run"]
    run_main(train.main, [*given, *common])

    started = states[0]
    fresh = build_detector({"classes_of_width": 80} | load_spec(name).plain, 2, names=NAMES).state_dict()
    rows = {f"model.{len(original.model) - 1}.{layer}" for layer in original.head.class_rows()}
    for key, expected in original.state_dict().items():
        if key.rpartition(".")[0] in rows:
            assert torch.equal(started[key][1], expected[DOG]), key
            assert torch.equal(started[key][0], fresh[key][0]), key
        elif not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(started[key], expected, rtol=1e-6, atol=0)
    assert norms == {(MOMENTUM, EPS)}

    best = tmp_path / "run" / "best.pt"
    trained, info = load_detector(best)
    assert trained.spec["name"] == name
    assert trained.names == tuple(NAMES)
    assert info["origin"] == {"weights": f"{weights.name} (unknown origin)", "license": "unknown"}
    moved = [key for key, p in trained.named_parameters() if not torch.equal(p, states[-1][key])]
    assert len(moved) > 0.9 * len([*trained.parameters()])
    run_main(val.main, ["--weights", str(best), *common])
    run_main(export.main, ["--weights", str(best), "--format", "torchscript", "--imgsz", "64", "96", "--no-check"])
    images = noise_images()[:1]
    expected, other = (outputs(trained, images, eps) for eps in (EPS, 1e-5))
    for path in (best, best.with_suffix(".torchscript")):
        model = open_model(path, device=torch.device("cpu"), trust=True)
        with torch.inference_mode():
            found = torch.cat(model.decode(model(images)), -1)
        assert (found - expected).abs().max() < 0.1 * (other - expected).abs().max()
