#!/usr/bin/env bash
# A virtual environment with what slime 0.3.1 imports, for machines without a GPU, to test april's integration in:
# .frameworks/slime by default. slime itself comes from its source (commit 624b824): the folder that APRIL_SLIME_SOURCE
# names, or else .frameworks/slime-source; if there is none, it is cloned.
#   scripts/setup_slime.sh [DIR]
#   APRIL_SLIME_SOURCE=.frameworks/slime-source .frameworks/slime/bin/python -m pytest tests/integrations/slime tests/servers/test_slime.py tests/servers/test_slime_functions.py tests/servers/test_slime_scripts.py tests/servers/test_slime_images.py
source "$(dirname "$0")/environment.sh"
cpu=$root/tests/servers/sglang_cpu
source=${APRIL_SLIME_SOURCE:-$root/.frameworks/slime-source}
if [ ! -e "$source/slime/__init__.py" ]; then
  rm -rf "$source.part"
  git -c advice.detachedHead=false clone --quiet https://github.com/THUDM/slime "$source.part"
  git -C "$source.part" checkout --quiet 624b824
  mv "$source.part" "$source"  # a clone that was interrupted is begun again
fi
environment "${1:-$root/.frameworks/slime}" scripts/setup_slime.sh tests/servers/sglang_cpu
$pip install torch==2.13.0
$pip install -r "$cpu/requirements.txt"
$pip install transformers==5.12.1
# Without dependencies: theirs are CUDA packages, and the list above is what remains of them on a CPU.
$pip install --no-deps sglang==0.5.15.post1 torchvision==0.28.0
cp -r "$cpu"/shims/* "$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
$pip install "ray[default]==2.60.*" sglang-router==0.3.2 accelerate blobfile datasets httpx numba omegaconf openai pillow \
  pylatexenc pyyaml qwen_vl_utils safetensors tensorboard wandb xxhash zstandard
$pip install pytest pytest-asyncio hypothesis
$pip install --editable "$root"
PYTHONPATH="$source" "$env/bin/python" -W ignore -c "import april.integrations.slime"
ready
