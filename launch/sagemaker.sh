#!/bin/bash
# The entry point of a SageMaker training job, which it starts on each instance (entry_point="launch/sagemaker.sh",
# source_dir="."), with a data channel called train that contains data.yaml. Arguments are passed to train.py.
# SageMaker copies /opt/ml/checkpoints to and from checkpoint_s3_uri, so that a job on spot instances resumes.
CHECKPOINTS=${CHECKPOINTS:-/opt/ml/checkpoints}
read -r nodes first rank < <(python -c '
import json, os
hosts = sorted(json.loads(os.environ["SM_HOSTS"]))
print(len(hosts), hosts[0], hosts.index(os.environ["SM_CURRENT_HOST"]))')

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90

exec torchrun --max-restarts 3 --rdzv-id lockstep --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
    --nnodes "$nodes" --nproc-per-node "${SM_NUM_GPUS:-1}" --rdzv-conf "is_host=$([ "$rank" = 0 ] && echo true || echo false)" \
    train.py --data "$SM_CHANNEL_TRAIN/data.yaml" --project "$CHECKPOINTS" --name run --resume auto "$@"
