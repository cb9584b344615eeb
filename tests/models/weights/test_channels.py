"""Weights of RGB models in models of other channels."""

import pytest
import torch

from models.detector import build_detector
from models.weights.load import load_detector
from models.weights.transfer import transfer_weights
from tests.helpers.messages import refused
from tests.helpers.tiny import TINY_MODEL, randomize_batch_norms, write_detector

NAMES = ("disc", "ring")


@pytest.fixture(scope="module")
def rgb(tmp_path_factory):
    """A detector of RGB images, and its file."""
    detector = build_detector(TINY_MODEL, 2, names=NAMES, seed=3)
    randomize_batch_norms(detector)
    return detector.eval(), write_detector(tmp_path_factory.mktemp("weights") / "rgb.pt", detector)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_an_image_of_equal_channels_gives_what_it_gives_as_rgb(rgb, channels):
    """The reference is a closed form: the sums of the kernels over the channels are equal."""
    trained, path = rgb
    adapted = build_detector(TINY_MODEL, 2, names=NAMES, seed=4, channels=channels)
    report = transfer_weights(adapted, path)
    assert not report.skipped
    assert not report.new_rows
    gray = torch.rand(2, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = trained(gray.expand(-1, 3, -1, -1))
        for a, b in zip(adapted.eval()(gray.expand(-1, channels, -1, -1)), expected):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_the_number_of_channels_is_kept_in_the_checkpoint(tmp_path):
    detector = build_detector(TINY_MODEL, 2, names=NAMES, channels=5)
    again, _ = load_detector(write_detector(tmp_path / "five.pt", detector))
    assert again.channels == 5
    assert again(torch.rand(1, 5, 64, 64))[0].shape[2:] == (8, 8)
    assert build_detector({**TINY_MODEL, "ch": 4}, 2).channels == 4
    with refused("model: takes images of 5 channels, those of the data set have 1; choose another model"):
        build_detector(again.spec, 2, channels=1)
