#!/usr/bin/env bash
# Everything that needs a GPU: checks and figures, in calls that fit a few minutes on a borrowed machine.
#
#   ONLY=first benchmarks/gpu.sh      the first look, at most 540 s: trains, gradients and scores equal to the CPU's, host
#                                     syncs, speed against the peer, kernels, exports, torchrun, resuming
#   ONLY=again benchmarks/gpu.sh      the second look, at most 240 s: what the first one had no time for
#   ONLY=again PARTS='NAME|NAME' benchmarks/gpu.sh     instead: parts that failed and were fixed, by their names in gpu.txt
#   ONLY=others benchmarks/gpu.sh     at most 580 s: compiled steps and trainings, all heads, DDP, NCCL, the largest batch
#   benchmarks/gpu.sh                 all three one after another
#
#   benchmarks/gpu.sh --list          the parts and how long each should take on an H100 with 16 cores
#   benchmarks/gpu.sh --dry           the same parts on the CPU with tiny sizes, to see that they run
#
# A part depends on data sets and trained weights only, which are made when they are missing: one that fails or hangs does
# not stop the others. One table with all figures and failures is printed at the end and written to gpu.txt after each
# part. The exit code is 1 if a part fails: a result is wrong, or it does not end in time. Speeds are only reported.
#
# PYTHON    interpreter with torch, torchvision, OpenCV (4.12 or newer), NumPy and PyYAML (python3)
# WHEELS    folder of wheels of missing packages, installed into a temporary folder (.whl), for machines without network
# PEER      Python of an environment that has Ultralytics; by default PYTHON if it has it, with the wheels; empty: none
# OUT       where gpu.txt (the table) and gpu.log (all output) go (runs/gpu)
# ONLY      first, again or others; empty: all
# PARTS     regular expression: the parts whose names match it; in `again` also those of `first`
# BUDGET_S  seconds a call: a part that would start later is skipped, and one that takes longer is stopped. Without it 520
#           for first, 225 for again, 560 for others, so that all have ended in the times above
# SLOWDOWN  factor for all limits, including BUDGET_S (1): for a machine that is busy with something else
#
# Not needed: git, albumentations, lmdb, openvino, pycocotools, tqdm; onnx, onnxscript and onnxruntime only for ONNX files.
# The peer needs three wheels in WHEELS (1.5 MB), and those of its other requirements that the machine lacks (matplotlib,
# pillow, psutil, requests; not polars):
#
#   pip download --no-deps -d .whl ultralytics ultralytics-thop ultralytics-platform
#
# A machine whose host name cannot be resolved, or whose only network interface is the loopback, needs
# GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo and torchrun --local-addr 127.0.0.1, so all parts run with these.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-.whl}
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo

TMP=$(mktemp -d "${TMPDIR:-/tmp}/lockstep-gpu.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
export XDG_CACHE_HOME=$TMP/cache TORCHINDUCTOR_CACHE_DIR=$TMP/inductor TRITON_CACHE_DIR=$TMP/triton
export YOLO_CONFIG_DIR=$TMP PYTHONUNBUFFERED=1

if compgen -G "$WHEELS/*.whl" >/dev/null && [[ ${1:-} != --list ]]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$TMP/site" \
        "$WHEELS"/*.whl || echo "the wheels could not be installed" >&2
    export PYTHONPATH=$TMP/site${PYTHONPATH:+:$PYTHONPATH}
fi
if [[ -z ${PEER+set} ]]; then
    PEER=
    "$PYTHON" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("ultralytics") is None)' && PEER=$PYTHON
fi
"$PYTHON" -m benchmarks.gpu.runner --peer "$PEER" --out "${OUT:-runs/gpu}" --only "${ONLY:-}" --parts "${PARTS:-}" \
    --budget "${BUDGET_S:-0}" --slowdown "${SLOWDOWN:-1}" --spent "$SECONDS" "$@"
