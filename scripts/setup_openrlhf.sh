#!/usr/bin/env bash
# A virtual environment with OpenRLHF for machines without a GPU, to test april's integration in: .frameworks/openrlhf by
# default. OpenRLHF itself demands flash-attn, bitsandbytes and vLLM, which need CUDA; its classes for rollouts do not.
#   scripts/setup_openrlhf.sh [DIR]
#   .frameworks/openrlhf/bin/python -m pytest tests/integrations/openrlhf
source "$(dirname "$0")/environment.sh"
environment "${1:-$root/.frameworks/openrlhf}" scripts/setup_openrlhf.sh
$pip install torch==2.13.0
$pip install 'ray[default]==2.55.0' transformers==5.15.0 accelerate datasets einops jsonlines loralib optree peft \
  pylatexenc tensorboard torchdata torchmetrics wandb setuptools
DS_BUILD_OPS=0 $pip install --no-build-isolation deepspeed==0.19.6
$pip install --no-deps openrlhf==0.11.2
$pip install pytest pytest-asyncio hypothesis
$pip install --editable "$root[train,servers]"
PYTHONPATH="$root/tests/integrations/openrlhf/stand_ins" "$env/bin/python" -W ignore -c "import april.integrations.openrlhf"
ready
