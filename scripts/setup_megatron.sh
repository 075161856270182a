#!/usr/bin/env bash
# A virtual environment with Megatron-Core and Megatron-Bridge for machines without a GPU, to test april's backend on Megatron
# in: .frameworks/megatron by default. The bridge itself demands transformer_engine and more, which need CUDA; what converts
# weights does not, but for one import that the tests stand in for. It wants Python 3.12.
#   PYTHON=python3.12 scripts/setup_megatron.sh [DIR]
#   .frameworks/megatron/bin/python -m pytest tests/integrations/test_megatron.py
source "$(dirname "$0")/environment.sh"
PYTHON=${PYTHON:-python3.12}
environment "${1:-$root/.frameworks/megatron}" scripts/setup_megatron.sh
$pip install torch==2.13.0 transformers==5.12.1 accelerate einops==0.8.2 hydra-core==1.3.8 omegaconf==2.3.1 safetensors
$pip install megatron-core==0.19.2
$pip install pytest pytest-asyncio hypothesis
$pip install --editable "$root[train]"
$pip install --no-deps megatron-bridge==0.6.2
ready
