#!/usr/bin/env bash
# The list, as far as the minutes go: 4-measure.sh MINUTES
. "$(dirname "$0")/common.sh"
enter
exec python3 benchmark/gpu/run.py --minutes "${1:-9}" --bring "$OUT"
