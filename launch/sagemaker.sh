#!/bin/bash
# The entry point of a SageMaker training job, started on each instance (entry_point="launch/sagemaker.sh",
# source_dir="."), with a data channel called train that contains data.yaml. Arguments are passed to train.py.
# SageMaker copies /opt/ml/checkpoints to and from checkpoint_s3_uri, so that a job on a spot instance resumes. With
# several instances, set CHECKPOINTS in the job's environment to a shared folder (FSx, EFS).
read -r nodes first rank < <(python -c '
import json, os
hosts = sorted(json.loads(os.environ["SM_HOSTS"]))
print(len(hosts), hosts[0], hosts.index(os.environ["SM_CURRENT_HOST"]))') || exit 2

if [ "$nodes" -gt 1 ] && [ -z "$CHECKPOINTS" ]; then
    echo "error: $nodes instances: set CHECKPOINTS to a folder that all of them see; /opt/ml/checkpoints is each one's own" >&2
    exit 2
fi
CHECKPOINTS=${CHECKPOINTS:-/opt/ml/checkpoints}

processes=$((SM_NUM_GPUS > 0 ? SM_NUM_GPUS : 1))  # SM_NUM_GPUS is 0 on an instance without GPUs

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise a node that was replaced cannot join again

exec torchrun --max-restarts 3 --rdzv-id lockstep --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
    --nnodes "$nodes" --nproc-per-node "$processes" --rdzv-conf "is_host=$([ "$rank" = 0 ] && echo true || echo false)" \
    train.py --data "$SM_CHANNEL_TRAIN/data.yaml" --project "$CHECKPOINTS" --name run --resume auto "$@"
