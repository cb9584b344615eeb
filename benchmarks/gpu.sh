#!/usr/bin/env bash
# All that wants a GPU, as three calls that each fit ten minutes on a bare machine: checks that pass or fail, and figures.
#
#   ONLY=checks benchmarks/gpu.sh     is it right: no host sync, the same bits, resumed, half precision, NCCL, ...
#   ONLY=speed benchmarks/gpu.sh      how fast: loss, steps and whole trainings, beside the peer's; the costliest kernels
#   ONLY=compiled benchmarks/gpu.sh   --compile, the renderer on the device, NMS, share of the peak
#   benchmarks/gpu.sh                 the three one after another
#   benchmarks/gpu.sh --list          the parts and how long each is expected to take on an H100 with 16 cores
#   benchmarks/gpu.sh --dry           the same parts on the CPU with tiny sizes, to see that they run
#
# Parts are independent: one that fails or hangs stops no other. At the end, and after each part in gpu.txt, there is one
# table with every figure and every failure. What fails or is slower than wanted makes the exit code 1.
#
# PYTHON    interpreter with torch, torchvision, OpenCV, NumPy and PyYAML (python3)
# WHEELS    folder of wheels for what that lacks, installed aside (.whl); they may be carried to a machine without network
# PEER      Python of an environment that has Ultralytics; by default PYTHON if it has it, with the wheels; empty: none
# OUT       where gpu.txt (the table) and gpu.log (all output) go (runs/gpu)
# ONLY      checks, speed or compiled; empty: all three
# PARTS     regular expression: the parts whose names match it
# BUDGET_S  seconds a call (570): a part that would begin later is left out, and one that takes longer is stopped
# SLOWDOWN  factor for every limit, those of parts and BUDGET_S (1): for a machine that is busy with something else
#
# Nothing is needed of albumentations, lmdb or tqdm. For the peer, these wheels in WHEELS (55 MB, without a network):
# ultralytics, ultralytics-thop, ultralytics-platform, polars, polars-runtime-32; and of its other needs (matplotlib,
# pillow, psutil, requests, httpx, nvidia-ml-py) those that the machine lacks:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#       --platform manylinux2014_x86_64 -d .whl ultralytics ultralytics-thop ultralytics-platform polars polars-runtime-32
#
# A machine whose host name leads nowhere, or whose only network interface is the loopback, wants
# GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo and torchrun --local-addr 127.0.0.1; a part of the checks runs that way.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-.whl}
export OUT=${OUT:-runs/gpu} ONLY=${ONLY:-} PARTS=${PARTS:-} BUDGET_S=${BUDGET_S:-570} SLOWDOWN=${SLOWDOWN:-1}

TMP=$(mktemp -d "${TMPDIR:-/tmp}/lockstep-gpu.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
export XDG_CACHE_HOME=$TMP/cache TORCHINDUCTOR_CACHE_DIR=$TMP/inductor TRITON_CACHE_DIR=$TMP/triton
export YOLO_CONFIG_DIR=$TMP YOLO_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

if compgen -G "$WHEELS/*.whl" >/dev/null && [[ ${1:-} != --list ]]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$TMP/site" \
        "$WHEELS"/*.whl || echo "the wheels could not be installed" >&2
    export PYTHONPATH=$TMP/site${PYTHONPATH:+:$PYTHONPATH}
fi
if [[ -z ${PEER+set} ]]; then
    PEER=
    "$PYTHON" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("ultralytics") is None)' && PEER=$PYTHON
fi
export PEER SPENT_S=$SECONDS
"$PYTHON" -m benchmarks.gpu_runner "$@"
