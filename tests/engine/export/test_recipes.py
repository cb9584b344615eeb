"""The programs of docs/export.md that make files of other formats, in environments of their own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.documents import blocks
from tests.helpers.exports import NAMES, calibrated_detector, write_exports
from tests.helpers.repository import ROOT
from tests.helpers.tiny import TINY_MODEL, write_detector

COMPARE_MNN = """
import MNN.expr
import MNN.nn
import numpy
import onnxruntime

images = numpy.random.default_rng(0).random((1, 3, 64, 96), numpy.float32)
net = MNN.nn.load_module_from_file("best.mnn", ["images"], ["output0"])
output = net.forward([MNN.expr.const(images, [1, 3, 64, 96], MNN.expr.NCHW)])
output = output[0] if isinstance(output, (list, tuple)) else output
(expected,) = onnxruntime.InferenceSession("best.onnx").run(None, {"images": images})
found = MNN.expr.convert(output, MNN.expr.NCHW).read()
numpy.testing.assert_allclose(found[:, :4], expected[:, :4], atol=0.01)
numpy.testing.assert_allclose(found[:, 4:], expected[:, 4:], atol=1e-4)
"""
# Its models run on macOS only, so the weights are compared: each convolution of the checkpoint is in the program.
COMPARE_COREML = """
import coremltools
import numpy
import torch

from models.weights.load import load_detector
from pathlib import Path

model = coremltools.models.MLModel("best.mlpackage", skip_model_load=True)
assert [each.name for each in model.get_spec().description.input] == ["images"]
program = torch.export.load("best.pt2").run_decompositions({})
exact = coremltools.convert(program, compute_precision=coremltools.precision.FLOAT32)
converted = [each.weight.val for each in exact._mil_program.functions["main"].find_ops(op_type="conv")]
detector, _ = load_detector(Path("best.pt"))
layers = [each for each in detector.fuse().modules() if isinstance(each, torch.nn.Conv2d)]
assert layers
missing = [
    each for each in layers
    if not any(numpy.array_equal(each.weight.detach().numpy(), weight) for weight in converted)
    and each.out_channels > 1  # not the expectation of a distribution, which needs no layer
]
assert not missing, missing
"""


def environment_with(folder: Path, package: str) -> Path:
    """Creates an environment with the packages of this one, and with ``package``.

    Returns its interpreter. Skips the test where pip cannot install it.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    Path(packages, "shared.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "--quiet", package]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        pytest.skip(f"cannot install {package}: {installed.stderr[-300:]}")
    return python


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "package", "source", "target", "compare"),
    [
        ("to_mnn.py", "mnn==3.6.1", "best.onnx", "best.mnn", COMPARE_MNN),
        ("to_coreml.py", "coremltools==9.0", "best.pt2", "best.mlpackage", COMPARE_COREML),
    ],
)
def test_a_recipe(tmp_path: Path, title: str, package: str, source: str, target: str, compare: str):
    (recipe,) = [block.text for block in blocks("docs/export.md") if block.title == title]
    detector = calibrated_detector(TINY_MODEL, NAMES)
    write_exports(tmp_path, detector, [source])
    write_detector(tmp_path / "best.pt", detector)
    python = environment_with(tmp_path / "venv", package)
    for program in (recipe, compare):
        done = subprocess.run(
            [python, "-c", program],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / target).exists()
