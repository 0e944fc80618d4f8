#!/usr/bin/env bash
# Part N of the pack, unpacked in the background: 2-part.sh N
. "$(dirname "$0")/common.sh"
unpack "$1"
