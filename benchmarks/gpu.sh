#!/usr/bin/env bash
# All that wants a GPU, in less than ten minutes: checks that pass or fail, and figures. One that fails stops no other.
#
#   benchmarks/gpu.sh          on GPU 0
#   benchmarks/gpu.sh --dry    the same parts on the CPU with tiny sizes, to see that they run
#
# PYTHON    interpreter with torch (python3)
# WHEELS    folder of wheels for what that lacks, installed aside (.whl); they may be carried to a machine without network
# PEER      Python of an environment that has Ultralytics; empty: ours alone
# OUT       where gpu.txt (verdicts and figures) and gpu.log (all output) go (runs/gpu)
# BUDGET_S  seconds in all (570): parts that would begin later are left out, and said to be
# SLOWDOWN  factor for every limit, those of parts and BUDGET_S (1): for a machine that is busy with something else
# ONLY      regular expression: the parts whose names match it (with PEER: ONLY="end to end|steps alone")
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} WHEELS=${WHEELS:-.whl} PEER=${PEER:-} OUT=${OUT:-runs/gpu} BUDGET_S=${BUDGET_S:-570}
ONLY=${ONLY:-.} SLOWDOWN=${SLOWDOWN:-1}
BUDGET_S=$((BUDGET_S * SLOWDOWN))
DEVICE=0 SIZE=640 SMALL=320 MODELS="yolov8n yolov8s" BATCHES="64 256" STEPS=20 ROUNDS=3 IMAGES=256 TIMES=32 EPOCHS=4
TRAIN_BATCHES="64 256" RESUME_EPOCHS=3
if [[ ${1:-} == --dry ]]; then
    DEVICE=cpu SIZE=64 SMALL=64 MODELS=yolov8n BATCHES=2 STEPS=1 ROUNDS=1 IMAGES=8 TIMES=2 EPOCHS=2 TRAIN_BATCHES=4
    RESUME_EPOCHS=4
fi

mkdir -p "$OUT"
TMP=$(mktemp -d "${TMPDIR:-/tmp}/lockstep-gpu.XXXXXX")
trap 'rm -rf "$TMP"' EXIT
export XDG_CACHE_HOME=$TMP/cache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
: >"$OUT/gpu.txt"
: >"$OUT/gpu.log"
failed=0

say() { echo "$*" | tee -a "$OUT/gpu.txt"; }

is_wanted() { [[ $1 =~ $ONLY || $1 == "data set" || $1 == wheels ]]; }

# part NAME LIMIT_S COMMAND...: runs it and says PASS, FAIL or SKIP; of its output, lines that begin with "figure:" and
# rows of tables are kept, and the last lines if it failed.
part() {
    local name=$1 limit=$(($2 * SLOWDOWN)) began=$SECONDS left=$((BUDGET_S - SECONDS)) verdict=PASS
    shift 2
    is_wanted "$name" || return
    if ((left < 5)); then
        say "SKIP $name: the time is used up"
        return
    fi
    ((limit < left)) || limit=$left
    { echo; echo "===== $name: $*"; } >>"$OUT/gpu.log"
    timeout -k 5 "$limit" "$@" >"$TMP/part" 2>&1 || verdict="FAIL (exit $?)"
    cat "$TMP/part" >>"$OUT/gpu.log"
    say "$verdict $name, $((SECONDS - began)) s"
    grep -E '^(figure:|\|)' "$TMP/part" | sed 's/^/    /' | tee -a "$OUT/gpu.txt"
    if [[ $verdict != PASS ]]; then
        failed=$((failed + 1))
        tail -n 4 "$TMP/part" | sed 's/^/    ! /' | tee -a "$OUT/gpu.txt"
    fi
}

if compgen -G "$WHEELS/*.whl" >/dev/null; then
    part "wheels" 120 "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$TMP/site" "$WHEELS"/*.whl
    export PYTHONPATH=$TMP/site${PYTHONPATH:+:$PYTHONPATH}
fi
check() { part "$1" "$2" "$PYTHON" -m benchmarks.gpu_checks "${@:3}" --device "$DEVICE"; }
train=("$PYTHON" train.py --data "$TMP/small/data.yaml" --model yolov8n --imgsz "$SMALL" --batch-size 8 --epochs 1
    --device "$DEVICE" --workers 2 --noplots --project "$TMP/runs")

check "environment" 60 environment
check "data set" 120 data --folder "$TMP" --images "$IMAGES" --times "$TIMES" --size "$SIZE"
check "no host sync in the step" 90 sync-free --model yolov8n --imgsz "$SIZE" --batch-size 8
check "batches straight from the workers' memory" 60 feed --data "$TMP/small/data.yaml" --imgsz "$SMALL" --batch-size 16
check "loss and assignment, share of the step" 90 loss-share --model yolov8n --imgsz "$SIZE" --batch-size ${BATCHES%% *}
part "trains with one GPU" 90 "${train[@]}" --name plain
part "validates" 60 "$PYTHON" val.py --weights "$TMP/runs/plain/last.pt" --device "$DEVICE" --project "$TMP/val" --noplots
part "torchrun, one rank, SyncBN" 90 "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 1 \
    "${train[@]:1}" --sync-bn --name syncbn
amp=fp16
[[ $DEVICE == cpu ]] && amp=bf16
part "trains in $amp" 90 "${train[@]}" --amp $amp --name half
check "DataParallel on one device" 60 data-parallel --model yolov8n --imgsz "$SMALL" --batch-size 8
check "stopped and resumed: the same bits" 150 resume --data "$TMP/small/data.yaml" --imgsz "$SMALL" \
    --epochs "$RESUME_EPOCHS"
part "steps alone" 150 "$PYTHON" -m benchmarks.step --model $MODELS --imgsz "$SIZE" --batch-size $BATCHES --amp auto \
    --device "$DEVICE" --steps "$STEPS" --rounds "$ROUNDS" ${PEER:+--peer "$PEER"}
part "share of the device's peak" 60 "$PYTHON" -m benchmarks.roofline --model yolov8n --imgsz "$SIZE" \
    --batch-size ${BATCHES%% *} --device "$DEVICE"
fuse=
[[ $DEVICE == cpu ]] && fuse=--no-fuse
part "renderer on the device" 90 "$PYTHON" -m benchmarks.device_render --imgsz "$SIZE" --batch-size ${BATCHES%% *} \
    --device "$DEVICE" --rounds "$ROUNDS" $fuse
part "trains with pictures drawn on the device" 90 "${train[@]}" --augment device --cache device --name drawn
part "NMS" 60 "$PYTHON" -m benchmarks.nms --device "$DEVICE" --batch-size ${BATCHES%% *} --rounds "$ROUNDS" \
    ${PEER:+--peer "$PEER"}
for model in $MODELS; do
    for batch in $TRAIN_BATCHES; do
        check "end to end, $model batch $batch" 100 train --data "$TMP/large/data.yaml" --model "$model" \
            --imgsz "$SIZE" --batch-size "$batch" --epochs "$EPOCHS" ${PEER:+--peer "$PEER"}
    done
done
on_gpu() { # as part, but named and left out on a CPU
    if [[ $DEVICE != cpu ]]; then part "$@"; elif is_wanted "$1"; then say "SKIP $1: on a CPU it takes minutes"; fi
}
on_gpu "compiled steps are the uncompiled ones" 200 "$PYTHON" -m benchmarks.gpu_checks compiled --model yolov8n \
    --imgsz "$SIZE" --batch-size 16 --device "$DEVICE"
on_gpu "trains compiled" 150 "${train[@]}" --compile --name compiled
on_gpu "trains compiled, DDP, accumulating" 150 "$PYTHON" -m torch.distributed.run --standalone \
    --nproc_per_node 1 "${train[@]:1}" --compile --accumulate 2 --name compiled-ddp
on_gpu "trains compiled, sizes vary" 150 "${train[@]}" --compile --multi-scale --name compiled-sizes
on_gpu "steps compiled" 120 "$PYTHON" -m benchmarks.step --model yolov8n --imgsz "$SIZE" --batch-size ${BATCHES%% *} \
    --amp auto --device "$DEVICE" --steps "$STEPS" --rounds "$ROUNDS" --compile
say "$failed failed, $SECONDS s"
exit $((failed > 0))
