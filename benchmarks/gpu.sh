#!/usr/bin/env bash
# Everything that needs a GPU, in four calls of at most 500 seconds each on a bare machine: checks and figures.
#
#   ONLY=checks benchmarks/gpu.sh     results equal to the CPU's, host syncs, bitwise equality, AP, half precision, NCCL
#   ONLY=others benchmarks/gpu.sh     DataParallel, threads, TorchScript, torchrun, NCCL, the largest batch
#   ONLY=speed benchmarks/gpu.sh      loss, steps and whole trainings, compared with the peer
#   ONLY=compiled benchmarks/gpu.sh   --compile, the costliest kernels, resuming, the renderer
#   benchmarks/gpu.sh                 all of them one after another
#   benchmarks/gpu.sh --list          the parts and how long each should take on an H100 with 16 cores
#   benchmarks/gpu.sh --dry           the same parts on the CPU with tiny sizes, to see that they run
#
# Parts are independent: one that fails or hangs does not stop the others. One table with all figures and failures is
# printed at the end and written to gpu.txt after each part. The exit code is 1 if a part fails or is too slow.
#
# PYTHON    interpreter with torch, torchvision, OpenCV, NumPy and PyYAML (python3)
# WHEELS    folder of wheels of missing packages, installed into a temporary folder (.whl), for machines without network
# PEER      Python of an environment that has Ultralytics; by default PYTHON if it has it, with the wheels; empty: none
# OUT       where gpu.txt (the table) and gpu.log (all output) go (runs/gpu)
# ONLY      checks, others, speed or compiled; empty: all
# PARTS     regular expression: the parts whose names match it
# BUDGET_S  seconds a call (500): a part that would start later is skipped, and one that takes longer is stopped
# SLOWDOWN  factor for all limits, including BUDGET_S (1): for a machine that is busy with something else
#
# albumentations, lmdb and tqdm are not needed. For the peer, put these wheels into WHEELS (55 MB, no network needed):
# ultralytics, ultralytics-thop, ultralytics-platform, polars, polars-runtime-32; and those of its other requirements
# (matplotlib, pillow, psutil, requests, httpx, nvidia-ml-py) that the machine lacks:
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#       --platform manylinux2014_x86_64 -d .whl ultralytics ultralytics-thop ultralytics-platform polars polars-runtime-32
#
# A machine whose host name cannot be resolved, or whose only network interface is the loopback, needs
# GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo and torchrun --local-addr 127.0.0.1; one of the checks runs with these.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-.whl}
export OUT=${OUT:-runs/gpu} ONLY=${ONLY:-} PARTS=${PARTS:-} BUDGET_S=${BUDGET_S:-500} SLOWDOWN=${SLOWDOWN:-1}

TMP=$(mktemp -d "${TMPDIR:-/tmp}/lockstep-gpu.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
export XDG_CACHE_HOME=$TMP/cache TORCHINDUCTOR_CACHE_DIR=$TMP/inductor TRITON_CACHE_DIR=$TMP/triton
export YOLO_CONFIG_DIR=$TMP YOLO_OFFLINE=true PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

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
"$PYTHON" -m benchmarks.gpu.runner "$@"
