#!/usr/bin/env bash
# A virtual environment with SkyRL for machines without a GPU, to test april's integration in: .frameworks/skyrl by default.
# SkyRL itself demands flash-attn, vLLM and nixl, which need CUDA; its trainer and its FSDP2 worker do not. It wants
# Python 3.12. Where pip finds no CPU build of torch for that, it takes the one with CUDA: larger, the same here.
#   PYTHON=python3.12 scripts/setup_skyrl.sh [DIR]
#   .frameworks/skyrl/bin/python -m pytest tests/integrations/skyrl
source "$(dirname "$0")/environment.sh"
PYTHON=${PYTHON:-python3.12}
environment "${1:-$root/.frameworks/skyrl}" scripts/setup_skyrl.sh
$pip install torch==2.13.0
$pip install ray==2.57.0 transformers==5.15.0 peft==0.18.1 accelerate cloudpathlib datasets fastapi hydra-core==1.3.4 \
  httpx jaxtyping loguru omegaconf orjson psutil pybase64 rich setuptools skyrl-gym==0.4.0 tensorboard tensordict \
  torchdata uvicorn vllm-router xxhash zstandard
$pip install pytest pytest-asyncio hypothesis
$pip install --editable "$root[servers]"
$pip install --no-deps skyrl==0.4.0
"$env/bin/python" -W ignore -c "import april.integrations.skyrl"
ready
