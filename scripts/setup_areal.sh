#!/usr/bin/env bash
# A virtual environment with AReaL for machines without a GPU, to test april's integration in: .frameworks/areal by default.
# AReaL demands an older torch, and the packages of every agent framework that it has an example for; its trainer runs
# with this torch, and without those. Its examples are not in its package: they come from its source (v1.0.4), the folder
# that APRIL_AREAL_SOURCE names, or else .frameworks/areal-source; if there is none, it is cloned.
#   scripts/setup_areal.sh [DIR]
#   APRIL_AREAL_SOURCE=.frameworks/areal-source .frameworks/areal/bin/python -m pytest tests/integrations/areal
source "$(dirname "$0")/environment.sh"
source=${APRIL_AREAL_SOURCE:-$root/.frameworks/areal-source}
if [ ! -e "$source/examples/math" ]; then
  git -c advice.detachedHead=false clone --quiet --depth 1 --branch v1.0.4 --sparse https://github.com/inclusionAI/AReaL "$source"
  git -C "$source" sparse-checkout set --no-cone /examples # the package is installed
fi
environment "${1:-$root/.frameworks/areal}" scripts/setup_areal.sh
$pip install torch==2.13.0
$pip install ray==2.55.0 transformers==5.3.0 peft==0.18.1 hydra-core==1.4.0.dev1 omegaconf==2.4.0.dev2 accelerate aiofiles \
  colorlog datasets einops fastapi flask httpx lark math-verify==0.8.0 networkx numba openai orjson pillow psutil pybase64 \
  pyzmq requests rich setproctitle swanlab tabulate tenacity tensorboardX torchdata trackio uvicorn uvloop wandb
$pip install pytest pytest-asyncio hypothesis
$pip install --editable "$root[servers]"
$pip install --no-deps areal==1.0.4
AREAL_SPMD_MODE=1 "$env/bin/python" -W ignore -c "import april.integrations.areal"
ready
