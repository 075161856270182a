#!/usr/bin/env bash
# april as a job of a Ray cluster that is running, handed in from anywhere; its exit status is the run's.
#     examples/cluster/ray_job.sh http://HEAD:8265 train /shared/recipe.toml [FLAGS]
#     examples/cluster/ray_job.sh http://HEAD:8265 resume /shared/run [FLAGS]     # a run that was stopped, or died
# TRAINER_GPUS is how many it trains on, 1 by default: the trainer is on a node that has them free; with 0, on the head.
# ray job stop saves the run before it ends: Ray itself would give it 3 seconds for that. The dashboard that takes jobs
# comes with Ray's extra `default`, which april's extra `cluster` brings; `april` must be on the PATH of ray start.
set -euo pipefail
dashboard=$1 command=$2 what=$3
shift 3
ray job submit --address "$dashboard" --entrypoint-num-gpus "${TRAINER_GPUS:-1}" \
  --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}' \
  -- april "$command" "$what" --cluster.address auto "$@"
