#!/usr/bin/env bash
# A virtual environment with NeMo Gym's servers, without april: .frameworks/nemo-gym by default. It wants Python 3.12, and
# clients that are older than april's; packages that only its command line needs are left out.
#   PYTHON=python3.12 scripts/setup_nemo_gym.sh [DIR]
#   .venv/bin/python -m pytest -m "slow or not slow" tests/gateway/test_nemo_gym.py
source "$(dirname "$0")/environment.sh"
environment "${1:-$root/.frameworks/nemo-gym}" scripts/setup_nemo_gym.sh
$pip install --no-deps nemo-gym==0.4.0
$pip install "openai<=2.7.2" fastapi uvicorn itsdangerous pydantic hydra-core omegaconf aiohttp orjson devtools tqdm \
    rich "mcp>=1.27,<2" requests psutil ray wandb pandas yappi gprof2dot pydot GitPython
"$env/bin/python" -W ignore -c "import nemo_gym.base_resources_server, resources_servers.blackjack.app"
ready
