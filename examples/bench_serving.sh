#!/usr/bin/env bash
# SGLang's own load generator against a DFLASH server:   bash examples/bench_serving.sh [URL [FILE]]
# The figures are appended to FILE as one line of JSON.
#
# `random-ids` needs no data set (`random` downloads one). Its prompts are random tokens, so the throughput is valid for this
# machine, but the accept length at the end is not that of your traffic. For that give your own conversations,
# --dataset-name custom --dataset-path FILE (one JSON object per line, {"conversations": [{"content": ...}, {"content": ...}]}).
# SGLang averages the accept length between two of its log lines, so a run of fewer than 40 decode steps prints none.
set -euo pipefail
url=${1:-http://127.0.0.1:30000}
file=${2:-bench_serving.jsonl}

${PYTHON:-python} -m sglang.benchmark.serving --backend sglang --base-url "$url" --flush-cache \
    --dataset-name random-ids --random-input-len 64 --random-output-len 64 --random-range-ratio 1.0 \
    --num-prompts 16 --max-concurrency 4 --output-file "$file"
