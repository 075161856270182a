#!/usr/bin/env bash
# A virtual environment with the tested versions of TRL and of DeepSpeed, which nothing else of april's needs:
# .frameworks/trl by default. DeepSpeed compiles what it needs when it needs it (DS_BUILD_OPS=0).
#   scripts/setup_trl.sh [DIR]
#   .frameworks/trl/bin/python -m pytest -m "slow or not slow" tests/integrations/trl
source "$(dirname "$0")/environment.sh"
environment "${1:-$root/.frameworks/trl}" scripts/setup_trl.sh pyproject.toml constraints.txt
$pip install -c "$root/constraints.txt" torch==2.13.0
$pip install -c "$root/constraints.txt" --editable "$root[train,servers,trl,lora]" \
  pytest pytest-asyncio hypothesis
$pip install --upgrade setuptools wheel
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $pip install --no-build-isolation deepspeed==0.19.8
DS_ACCELERATOR=cpu "$env/bin/python" -W ignore -c "import april.integrations.trl, deepspeed"
ready
