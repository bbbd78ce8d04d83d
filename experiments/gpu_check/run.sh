#!/usr/bin/env bash
# One GPU in under 8 minutes: sweep of Qwen3-30B-A3B at EP 8, fit, parity with published rows, plan of one batch.
# DEVICE=cpu runs the same code on a small model. MINUTES bounds the sweep, OUT takes the results, PYTHON is the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" MLFLOW_DISABLE_TELEMETRY=true DO_NOT_TRACK=true
exec "${PYTHON:-python}" experiments/gpu_check/gpu_check.py --device "${DEVICE:-cuda}" \
  --out "${OUT:-experiments/.cache/gpu_check}" --max-minutes "${MINUTES:-4}" "$@"
