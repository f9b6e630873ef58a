#!/usr/bin/env bash
# Run a command of sglang-recv that starts an engine, as `command.sh demo`, in the Python that can show most: the caller's own where it
# has SGLang and a GPU, else a CPU environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command=$1
python=${PYTHON:-python3}

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available()); ' 2>/dev/null &&
  "$python" -c 'import sglang' 2>/dev/null; then
  # SGLang finds the plugin by its entry point, so it must be installed; not into an environment that isn't ours, though.
  if ! "$python" -c 'import importlib.metadata as m; m.distribution("sglang-recv")' 2>/dev/null; then
    echo "$command: this Python has SGLang and a GPU; installing sglang_recv for this command alone, in .venv/command"
    rm -rf .venv/command
    "$python" -m pip install --quiet --no-deps --target .venv/command . msgpack
    export PYTHONPATH="$PWD/.venv/command${PYTHONPATH:+:$PYTHONPATH}"
  fi
  exec "$python" -m sglang_recv.cli "$@"
fi

echo "$command: no SGLang with a GPU in $python; on the CPU instead"
"$python" scripts/environments.py sglang-0.5.23
export PYTHONPATH="$PWD/tests/support/cpu_shim" TORCHDYNAMO_DISABLE=1 SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
exec "${SGLANG_RECV_VENVS:-.venv}/sglang-0.5.23/bin/python" -m sglang_recv.cli "$@"
