#!/usr/bin/env bash
# Wheels for `make gpu` on a GPU machine without a network, whose image has Python 3.12 and a CUDA build of torch.
#   scripts/gpu_wheels.sh            prepares them in .gpu-wheels, and prints the command that installs them there
# april's own wheel is built from the commit that is checked out. A folder of pieces holds at most 64 MiB: carry as many as
# are there.
# PYTHON=python3.11 chooses the interpreter whose pip downloads; the wheels are for Python 3.12 on manylinux whatever it is.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
most=$((64 << 20))
folder=$root/.gpu-wheels
# What april's extras `train` and `trl`, and its tests, need beside such an image.
packages=(
  annotated_types==0.8.0 antlr4_python3_runtime==4.13.2 datasets==5.2.0 dill==0.4.1 docstring_parser==0.18.0
  httpcore2==2.16.2 httpx2==2.16.2 huggingface_hub==2.4.0 hypothesis==6.170.15 latex2sympy2_extended==1.11.0
  math_verify==0.9.0 msgspec==0.22.0 multiprocess==0.70.19 nvidia_ml_py==13.615.71 packaging==26.3
  pydantic==2.14.4 pydantic_core==2.50.5 pytest_asyncio==1.5.0 sortedcontainers==2.4.0 tensorboardX==2.6.5
  tokenizers==0.23.3 transformers==5.23.0 trl==1.16.0 truststore==0.10.5 typeguard==4.6.1 typing_inspection==0.4.5
  tyro==1.0.17
)
pip="$python -m pip --quiet --disable-pip-version-check"
rm -rf "$folder" && mkdir -p "$folder/all"
echo '*' > "$folder/.gitignore"
platforms=()
for each in manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 any; do platforms+=(--platform "$each"); done
$pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  "${platforms[@]}" --dest "$folder/all" "${packages[@]}"
commit=$(git -C "$root" rev-parse --short HEAD)
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git -C "$root" archive HEAD | tar -x -C "$source"
$pip wheel --no-deps --wheel-dir "$folder/all" "$source"
piece=1 held=0
for wheel in "$folder"/all/*.whl; do
  size=$(stat -c %s "$wheel")
  [ "$size" -le "$most" ] || { echo "$(basename "$wheel") alone is larger than 64 MiB" >&2; exit 1; }
  [ $((held + size)) -le "$most" ] || { piece=$((piece + 1)); held=0; }
  mkdir -p "$folder/$piece"
  mv "$wheel" "$folder/$piece/"
  held=$((held + size))
done
rmdir "$folder/all"
total=$(du -cb "$folder"/*/*.whl | tail -1 | cut -f1)
cat << END
$(ls "$folder"/*/*.whl | wc -l) wheels, $((total >> 20)) MiB, in $piece piece(s) under .gpu-wheels, april's own from commit $commit
On the GPU machine, in the checkout:
  python -m pip install --no-index --no-deps --force-reinstall .gpu-wheels/*/*.whl && python benchmarks/gpu.py
END
