#!/usr/bin/env bash
# Makes the tiny pairs from nothing but the standard library's source, in order.
#   ./make.sh WORK_DIR [MODELS_DIR]      PYTHON=... to choose an interpreter
# COMPILE= (empty) turns torch.compile off, for machines without a C++ compiler.
# KIND=qwen3_5 makes the hybrid pair instead, in two processes; the first pair must be there (its embedding).
# SPECULATORS_PYTHON=... (README.md) also makes the drafts of the `speculators` package.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mkdir -p "$1" && cd "$1" && pwd)
models=$(mkdir -p "${2:-$here/../../models}" && cd "${2:-$here/../../models}" && pwd)
kind=${KIND:-qwen3}
target=$models/tiny-$kind-code
draft=$target-dflash
python=${PYTHON:-python}
compile=${COMPILE---compile}

# Waiting threads must not spin, and large temporaries must not go back to the
# system at every step: without these, up to a third of the time is page faults.
export OMP_WAIT_POLICY=passive
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1000000000
export MALLOC_ARENA_MAX=1  # else the backward thread has heaps of 64 MB that are unmapped each step

cd "$here"
$python corpus.py "$work"
if [ "$kind" = qwen3 ]; then
    $python train_target.py "$work" "$target" --steps 1050 $compile
    $python rollouts.py "$work" "$target" --scale 4
    $python train_draft.py "$work" "$target" "$draft" --steps 2500 $compile
else
    export OMP_NUM_THREADS=1
    both="$python -m torch.distributed.run --nproc-per-node 2"
    $both train_target.py "$work" "$target" --kind "$kind" --steps 1050 $compile \
        --embedding-from "$models/tiny-qwen3-code"
    $both rollouts.py "$work" "$target" --scale 4
    $both train_draft.py "$work" "$target" "$draft" --steps 3500  # compiled it is no faster
fi

sampled=$work/sampled
mkdir -p "$sampled" && cp "$work/corpus.npz" "$work/tokenizer.json" "$sampled"
$python rollouts.py "$sampled" "$target" --sampled
$python train_dflash2.py "$sampled" "$target" "$draft" "${draft}2" --steps 1500

[ -n "${SPECULATORS_PYTHON:-}" ] || exit 0
train=train_speculators_draft.py
if [ "$kind" != qwen3 ]; then
    $SPECULATORS_PYTHON $train peagle "$work" "$target" "$target-peagle" --steps 4500 --muon-lr 0.02 --adam-lr 0.003
    exit 0
fi
$SPECULATORS_PYTHON $train dflash "$work" "$target" "$draft-speculators" --steps 600 --warm-start "$draft"
$SPECULATORS_PYTHON $train peagle "$work" "$target" "$target-peagle" --steps 6000 --muon-lr 0.02 --adam-lr 0.003
