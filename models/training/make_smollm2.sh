#!/usr/bin/env bash
# Makes a DFlash and a DFlash2 draft for SmolLM2-135M-Instruct on a CPU from the bundled answers, in order. Every step
# can be stopped and started again. The hidden states take 20 GB.
#   ./make_smollm2.sh WORK_DIR [MODELS_DIR]      PYTHON=... to choose an interpreter
# MINUTES, MINUTES2 and MINUTES3 limit the training of the plain draft, of the DFlash2 draft, and of that on later answers.
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
for answers in rollouts answers; do
    $python pack_rollouts.py "prompts/smollm2-$answers.npz" "$target" "$work/$answers"
done
train="$python train_chat_draft.py"
$train "$work/rollouts" "$target" "$draft" --minutes "${MINUTES:-53}" --finish
$train "$work/rollouts" "$target" "$work/first" --minutes "${MINUTES2:-112}" --finish --plain "$draft"
$train "$work/answers" "$target" "${draft}2" --minutes "${MINUTES3:-260}" --finish --start "$work/first" \
    --candidates 12288 --muon-lr 0.012 --adam-lr 0.0018
