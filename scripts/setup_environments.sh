#!/usr/bin/env bash
# A virtual environment with the packages of environments that april has adapters for: .frameworks/environments by
# default. gem-llm pins older versions of what april is tested with.
#   scripts/setup_environments.sh [DIR]
#   .frameworks/environments/bin/python -m pytest tests/environments/test_adapters.py
source "$(dirname "$0")/environment.sh"
environment "${1:-$root/.frameworks/environments}" scripts/setup_environments.sh
$pip install gem-llm==0.1.0 skyrl-gym==0.4.0 gymnasium==1.4.0
# Without what its command line and its pages need.
$pip install --no-deps openenv-core==0.3.0
$pip install fastapi uvicorn websockets requests pydantic pyyaml httpx fastmcp
$pip install pytest pytest-asyncio hypothesis
$pip install --editable "$root[servers]"
"$env/bin/python" -W ignore -c "import gem, gymnasium, skyrl_gym"
ready
