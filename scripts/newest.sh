#!/usr/bin/env bash
# Tests the integration in a framework against its newest release: its environment of the tested versions first, then the
# framework alone brought up to date. Says in one line what came of it, and in GitHub's summary if there is one.
#   scripts/newest.sh trl|verl|openrlhf|skyrl|areal
root=$(cd "$(dirname "$0")/.." && pwd)
name=${1:?which framework: trl, verl, openrlhf, skyrl or areal}
env=$root/.frameworks/$name
"$root/scripts/setup_$name.sh" || exit 1
version() { "$env/bin/python" -c "import importlib.metadata as m; print(m.version('$name'))"; }
tested=$(version)
"$env/bin/python" -m pip install --quiet --no-deps --upgrade "$name" || exit 1
newest=$(version)
log=$(mktemp)
cd "$root" && APRIL_ANY_VERSION=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
  "$env/bin/python" -m pytest -q -rfE --tb=short "tests/integrations/$name" 2>&1 | tee "$log"
failed=${PIPESTATUS[0]}
broken=$(grep -E '^(FAILED|ERROR) ' "$log" | sed -E 's/^[A-Z]+ [^ ]*\.py(::)?//; s/ - .*//' | paste -sd ' ')
[ "$failed" -eq 0 ] && broken=nothing
line="$name $newest (april is tested with $tested): broke ${broken:-before a test ran}"
echo "$line"
[ -z "${GITHUB_STEP_SUMMARY:-}" ] || echo "$line" >> "$GITHUB_STEP_SUMMARY"
rm -f "$log"
rm -f "$env/.made-from" # the environment is no longer the tested one
exit "$failed"
