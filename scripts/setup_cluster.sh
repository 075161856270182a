#!/usr/bin/env bash
# A virtual environment with Ray, to test april on a cluster of several nodes in: .frameworks/cluster by default.
#   scripts/setup_cluster.sh [DIR]
#   .frameworks/cluster/bin/python -m pytest tests/cluster
source "$(dirname "$0")/environment.sh"
environment "${1:-$root/.frameworks/cluster}" scripts/setup_cluster.sh pyproject.toml constraints.txt
$pip install -c "$root/constraints.txt" torch==2.13.0
$pip install -c "$root/constraints.txt" --editable "$root[cluster]" pytest pytest-asyncio hypothesis
"$env/bin/python" -W ignore -c "import april.engines.pool, ray, torch"
ready
