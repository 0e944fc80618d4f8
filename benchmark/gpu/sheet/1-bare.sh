#!/usr/bin/env bash
# Part 1 of the pack, unpacked in the background, and what torch and Triton alone can measure.
. "$(dirname "$0")/common.sh"
unpack 1 || true # bare.py needs no pack
exec python3 benchmark/gpu/bare.py --out "$OUT"
