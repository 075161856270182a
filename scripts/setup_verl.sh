#!/usr/bin/env bash
# A virtual environment with verl for machines without a GPU, to test april's integration in: .frameworks/verl by default.
#   scripts/setup_verl.sh [DIR]
#   .frameworks/verl/bin/python -m pytest tests/integrations/verl
source "$(dirname "$0")/environment.sh"
environment "${1:-$root/.frameworks/verl}" scripts/setup_verl.sh
$pip install torch==2.13.0
$pip install verl==0.9.1 TransferQueue==0.1.11 transformers==5.10.4 cachetools fastapi msgspec pyzmq uvicorn
$pip install pytest pytest-asyncio hypothesis
$pip install --editable "$root"
"$env/bin/python" -W ignore -c "import april.integrations.verl"
ready
