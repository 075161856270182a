#!/usr/bin/env bash
# april as a job of a Ray cluster that is running: the trainer runs on the cluster's head.
#     examples/cluster/ray_job.sh http://HEAD:8265 /shared/recipe.toml [FLAGS]
# TRAINER_GPUS is how many it trains on, 1 by default. The dashboard that takes jobs comes with Ray's extra `default`,
# which april's extra `cluster` brings. Not run by april's authors.
set -euo pipefail
dashboard=$1 recipe=$2
shift 2
ray job submit --address "$dashboard" --entrypoint-num-gpus "${TRAINER_GPUS:-1}" -- april train "$recipe" --cluster.address auto "$@"
