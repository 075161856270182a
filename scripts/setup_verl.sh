#!/usr/bin/env bash
# A virtual environment with verl for machines without a GPU, to test april's integration in: .frameworks/verl by default.
#   scripts/setup_verl.sh [DIR]
#   .frameworks/verl/bin/python -m pytest tests/integrations/verl
source "$(dirname "$0")/environment.sh"
shim=$root/tests/servers/sglang_cpu/shims/sitecustomize.py
environment "${1:-$root/.frameworks/verl}" scripts/setup_verl.sh "${shim#"$root/"}"
$pip install torch==2.13.0
$pip install verl==0.9.1 TransferQueue==0.1.11 transformers==5.10.4 cachetools fastapi msgspec pyzmq uvicorn
# For images: verl's dataset and processors import them. The shim lets torchvision's build for CUDA import.
$pip install --no-deps torchvision==0.28.0
$pip install qwen-vl-utils==0.0.14 av
cp "$shim" "$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
$pip install pytest pytest-asyncio hypothesis
$pip install --editable "$root"
"$env/bin/python" -W ignore -c "import april.integrations.verl, qwen_vl_utils, torchvision"
ready
