#!/usr/bin/env bash
# A virtual environment with the real SGLang server for machines without a GPU: .servers/sglang by default.
# Repeatable from nothing; does nothing when the environment is already what this script would make.
#   scripts/setup_sglang.sh [DIR]      PYTHON=python3.11 chooses the interpreter
# The CPU build of torch comes from wherever pip is configured to look (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
env=${1:-$root/.servers/sglang}
python=${PYTHON:-python3.11}
cpu=$root/tests/servers/sglang_cpu
wanted=$(cd "$root" && find scripts/setup_sglang.sh tests/servers/sglang_cpu -type f ! -name '*.pyc' | sort | xargs cat | sha256sum | cut -d' ' -f1)
[ "$(cat "$env/.ready" 2>/dev/null)" = "$wanted" ] && { echo "$env is ready"; exit 0; }

mkdir -p "$(dirname "$env")"
[ -e "$root/.servers" ] && echo '*' > "$root/.servers/.gitignore"
rm -rf "$env"
"$python" -m venv "$env"
pip="$env/bin/python -m pip --quiet --disable-pip-version-check"
$pip install torch==2.13.0
$pip install -r "$cpu/requirements.txt"
# Without dependencies: theirs are CUDA packages, and the list above is what remains of them on a CPU.
$pip install --no-deps sglang==0.5.23 torchvision==0.28.0
# The two stand-ins live in the environment itself, so that starting the server needs no PYTHONPATH.
cp -r "$cpu"/shims/* "$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 "$env/bin/python" -c "import sglang.srt.entrypoints.http_server"
echo "$wanted" > "$env/.ready"
echo "$env is ready"
