#!/usr/bin/env bash
# The last part of the pack: 3-ready.sh N. Installs the plugin, places kernels of another machine, holds a server.
. "$(dirname "$0")/common.sh"
unpack "$1"
enter
python3 -m pip install --quiet --no-deps --no-build-isolation --no-index --editable .
[ ! -d .gpu/caches ] || python3 benchmark/gpu/caches.py load .gpu/caches || true # they are compiled anew
setsid python3 -m compileall -q -j 16 ~/gpu-env/site python > /dev/null 2>&1 &
exec python3 benchmark/gpu/run.py --hold
