#!/usr/bin/env bash
# Makes a DFlash and a DFlash2 draft for SmolLM2-135M-Instruct on a CPU, in order. Every step can be stopped and
# started again.
#   ./make_smollm2.sh WORK_DIR [MODELS_DIR]      PYTHON=... to choose an interpreter
# MINUTES and MINUTES2 limit the training of the two drafts, TOKENS the rollouts before it starts.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mkdir -p "$1" && cd "$1" && pwd)
models=$(mkdir -p "${2:-$work/models}" && cd "${2:-$work/models}" && pwd)
target=$models/smollm2-135m-instruct
draft=$target-dflash
python=${PYTHON:-python}

# One thread a process, as two processes of one thread do more than one of two.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
export MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1000000000

cd "$here"
$python ../../models/fetch_smollm2.py "$target"
[ -f "$work/prompts/train.jsonl" ] || $python open_prompts.py "$work/prompts"
$python chat_rollouts.py "$target" "$work/prompts/heldout.jsonl" "$work/heldout" --greedy-share 1 --limit 60
$python chat_rollouts.py "$target" "$work/prompts/train.jsonl" "$work/rollouts" --tokens "${TOKENS:-400000}"
$python train_chat_draft.py "$work/rollouts" "$target" "$draft" --minutes "${MINUTES:-180}" --finish
$python train_chat_draft.py "$work/rollouts" "$target" "${draft}2" --minutes "${MINUTES2:-90}" --finish \
    --plain "$draft"
$python evaluate_shards.py "$work/heldout" "$target" "$draft" "${draft}2"
