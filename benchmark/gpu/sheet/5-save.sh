#!/usr/bin/env bash
# Compiled kernels for the next machine, and all figures once more.
. "$(dirname "$0")/common.sh"
enter
python3 benchmark/gpu/caches.py save "$OUT" || true # one line says why; the figures come all the same
exec python3 benchmark/gpu/run.py --minutes 0 --bring "$OUT"
