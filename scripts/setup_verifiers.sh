#!/usr/bin/env bash
# A virtual environment with the package verifiers beside april: .frameworks/verifiers by default. verifiers pins an
# older client of OpenAI than april is tested with.
#   scripts/setup_verifiers.sh [DIR]
#   .frameworks/verifiers/bin/python -m pytest -m "slow or not slow" tests/gateway/test_verifiers.py
source "$(dirname "$0")/environment.sh"
environment "${1:-$root/.frameworks/verifiers}" scripts/setup_verifiers.sh
$pip install torch==2.13.0
$pip install --editable "$root[train,verifiers]"
$pip install --no-deps "trl>=1.16,<1.17"  # for its chat templates
$pip install pytest pytest-asyncio hypothesis
"$env/bin/python" -W ignore -c "import verifiers.v1"
ready
