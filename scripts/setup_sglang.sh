#!/usr/bin/env bash
# A virtual environment with the real SGLang server for machines without a GPU: .servers/sglang by default.
#   scripts/setup_sglang.sh [DIR]
source "$(dirname "$0")/environment.sh"
cpu=$root/tests/servers/sglang_cpu
environment "${1:-$root/.servers/sglang}" scripts/setup_sglang.sh tests/servers/sglang_cpu
$pip install torch==2.13.0
$pip install -r "$cpu/requirements.txt"
# Without dependencies: theirs are CUDA packages, and the list above is what remains of them on a CPU.
$pip install --no-deps sglang==0.5.23 torchvision==0.28.0
# The two stand-ins live in the environment itself, so that starting the server needs no PYTHONPATH.
cp -r "$cpu"/shims/* "$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 "$env/bin/python" -c "import sglang.srt.entrypoints.http_server"
ready
