#!/usr/bin/env bash
# The sdist and the wheel, built from it, in an environment with nothing else: what `pip install april-rl` gives.
#   scripts/test_wheel.sh              PYTHON=python3.12 chooses the interpreter that april is installed for
# build/dist holds both afterwards.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
builder=${BUILDER:-$root/.venv/bin/python}
python=${PYTHON:-python3.11}
place=$root/build/wheel
rm -rf "$place" "$root/build/dist" && mkdir -p "$place"
"$builder" -m build --outdir "$root/build/dist" "$root" > "$place/build.log" 2>&1 || { tail -20 "$place/build.log"; exit 1; }
"$python" -m venv "$place/env"
"$place/env/bin/python" -m pip --quiet --disable-pip-version-check install "$root"/build/dist/*.whl
cd "$place" # away from the sources, so that nothing but the wheel can be imported
env -u PYTHONPATH "$place/env/bin/python" -I "$root/scripts/check_wheel.py" "$root/README.md"
