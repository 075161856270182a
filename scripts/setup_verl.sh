#!/usr/bin/env bash
# A virtual environment with verl for machines without a GPU, to test april's integration in: .frameworks/verl by default.
# Repeatable from nothing; does nothing when the environment is already what this script would make.
#   scripts/setup_verl.sh [DIR]        PYTHON=python3.11 chooses the interpreter
#   .frameworks/verl/bin/python -m pytest tests/integrations/test_verl.py tests/integrations/test_verl_replicas.py
# The CPU build of torch comes from wherever pip is configured to look (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
env=${1:-$root/.frameworks/verl}
python=${PYTHON:-python3.11}
wanted=$(cat "$0" | sha256sum | cut -d' ' -f1)
[ "$(cat "$env/.ready" 2>/dev/null)" = "$wanted" ] && { echo "$env is ready"; exit 0; }

mkdir -p "$(dirname "$env")"
[ -e "$root/.frameworks" ] && echo '*' > "$root/.frameworks/.gitignore"
rm -rf "$env"
"$python" -m venv "$env"
pip="$env/bin/python -m pip --quiet --disable-pip-version-check"
$pip install torch==2.13.0
$pip install verl==0.9.1 TransferQueue==0.1.11 transformers==5.10.4 cachetools fastapi msgspec pyzmq uvicorn
$pip install pytest pytest-asyncio hypothesis
# Without dependencies: the tests of this integration need no more of april's.
$pip install --no-deps --editable "$root"
"$env/bin/python" -W ignore -c "import april.integrations.verl"
echo "$wanted" > "$env/.ready"
echo "$env is ready"
