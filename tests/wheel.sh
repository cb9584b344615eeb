#!/usr/bin/env bash
# What users of the wheel do, in a folder of their own, with BIN of an environment in which nothing else is installed:
#     tests/wheel.sh BIN        (`make test-wheel` makes the environment)
set -euo pipefail
PATH="$(cd "$1" && pwd):$PATH"
unset PYTHONPATH
FOLDER=$(mktemp -d "${TMPDIR:-/tmp}/lockstep-wheel.XXXXXX")
trap 'rm -rf "$FOLDER"' EXIT
cd "$FOLDER"
export XDG_CACHE_HOME="$FOLDER/cache"
for name in data engine models train utils; do echo "OWN = True" > $name.py; done # hidden by none of ours, and hide none
TINY=(--imgsz 64 --epochs 1 --fraction 0.1 --batch-size 8 --workers 1 --device cpu)

python -c 'import lockstep, pathlib, sys; sys.exit(pathlib.Path(sys.prefix) not in pathlib.Path(lockstep.__file__).parents)'
test "$(python -c 'from importlib import metadata; print(*metadata.packages_distributions()["lockstep"])')" = lockstep-yolo
lockstep demo set
lockstep train --data set/data.yaml --model yolov8n "${TINY[@]}" --name one
test -s runs/train/one/report.html
lockstep train --data set/data.yaml --model yolov8n "${TINY[@]}" --name two --spawn 2
torchrun --standalone --nproc_per_node 2 --no-python lockstep train --data set/data.yaml "${TINY[@]}" --name torchrun --noplots
lockstep train --resume runs/train/two --epochs 2 | grep -q resuming
lockstep val --weights runs/train/two/best.pt --device cpu
lockstep export --weights runs/train/two/best.pt --format torchscript --no-check
test -s runs/train/two/best.torchscript
lockstep weights runs/train/two/best.pt two.safetensors
lockstep check set/data.yaml --noplots || test $? = 1 # it has found something
lockstep detect --weights runs/train/one/best.pt --source set/images/val --device cpu
test "$(ls runs/detect/exp/*.jpg | wc -l)" = "$(ls set/images/val | wc -l)"
python - <<'END'
import lockstep
import lockstep.launch.ray_train
import utils

if __name__ == "__main__":
    run = lockstep.train("set/data.yaml", model="yolov8n", imgsz=64, epochs=1, fraction=0.1, workers=1, device="cpu", name="three")
    (result,) = lockstep.load(run.best)("set/images/val/00000.jpg")
    assert utils.OWN and result.names[0] == "ring" and 0 <= run.metrics["AP"] <= 1
END
