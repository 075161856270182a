# Sourced by the setup scripts: a virtual environment that is made from nothing, and only when what makes it has changed.
#   environment ENV DEPENDS_ON...   sets env and pip, and makes ENV anew; exits if ENV is ready
#   ready                           notes what ENV was made from
# Processes that need the same environment at the same time wait for the one that makes it.
# PYTHON=python3.11 chooses the interpreter. The CPU build of torch comes from wherever pip is configured to look
# (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

# A checksum of files without what does nothing: comments, empty lines, and compiled Python.
checksum() {
  find "$@" -type f ! -name '*.pyc' | LC_ALL=C sort | xargs sed -E '/^[[:space:]]*(#|$)/d' | sha256sum | cut -d' ' -f1
}

environment() {
  env=$1
  wanted=$(cd "$root" && checksum "${@:2}")
  mkdir -p "$(dirname "$env")"
  case $env in "$root"/.*/*) echo '*' > "$(dirname "$env")/.gitignore" ;; esac
  if command -v flock > /dev/null; then
    exec 9> "$env.lock"
    flock 9
  fi
  if [ "$(cat "$env/.made-from" 2> /dev/null)" = "$wanted" ]; then
    echo "$env is ready"
    exit 0
  fi
  rm -rf "$env"
  "${PYTHON:-python3.11}" -m venv "$env"
  pip="$env/bin/python -m pip --quiet --disable-pip-version-check"
}

ready() {
  echo "$wanted" > "$env/.made-from"
  echo "$env is ready"
}
