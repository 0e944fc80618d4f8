#!/usr/bin/env bash
# The commands of the sheet (README.md). OUT is the folder that comes back from the machine.
#
#   sheet.sh out | back        at home: take the bundled models out of the checkout, which travels, and bring them back
#   sheet.sh bare              part 1 of the pack, and what torch and Triton alone can check
#   sheet.sh part N            part N of the pack, unpacked in the background
#   sheet.sh ready N           part N, the last one; installs the plugin, holds the first server
#   sheet.sh measure MINUTES   the list, as far as the minutes go
#   sheet.sh save              compiled kernels for the next machine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONUNBUFFERED=1 OUT=${OUT:-build/gpu/out}
parts=$HOME/gpu-parts log=$HOME/gpu-parts/log

# away COMMAND: run it in the background, in a separate session when this returns: the end of this script does not end it.
away() {
    setsid "$@" >> "$log" 2>&1 &
    while [ "$(cut -d ' ' -f 6 "/proc/$!/stat" 2> /dev/null || echo $!)" != $! ]; do sleep 0.02; done
}

# unpack N: install part N of the pack in the background, one part at a time, and mark it.
unpack() {
    [ ! -e "$parts/part-$1.done" ] || return 0
    [ -d ".gpu/pack/part-$1" ] || { echo "part $1 of the pack has not come: send it again"; return 1; }
    rm -rf "$parts/part-$1"
    mv ".gpu/pack/part-$1" "$parts/"
    cp -r .gpu/offline "$parts/"
    # Status 1 is a damaged part; 0 and 3 are the last one and another.
    away flock "$parts/lock" bash -c 'python3 "$0" "$1"; [ $? = 1 ] || touch "$1.done"' "$parts/offline/unpack.py" "$parts/part-$1"
}

# enter: wait for the parts, and use what they and the command brought.
enter() {
    while pgrep -f "$parts/offline/unpack.py" > /dev/null; do sleep 0.2; done
    if [ ! -f ~/gpu-env/env.sh ]; then
        for n in $(seq "$(cat "$parts/last")"); do
            [ -e "$parts/part-$n.done" ] || echo "part $n of the pack is missing: send it again (sheet.sh part $n)"
        done
        tail -n 3 "$log"
        return 1
    fi
    set +u
    . ~/gpu-env/env.sh
    set -u
    [ -d models ] || [ ! -d .gpu/models ] || ln -sfn .gpu/models models
}

install() { python3 -m pip install --quiet --no-deps --no-build-isolation --no-index --editable .; }

case "${1:-}" in
    out) mkdir -p .gpu; [ ! -e .gpu/models ] && mv models .gpu/models; exit ;;
    back) mv -T .gpu/models models; exit ;;
esac
mkdir -p "$parts" "$OUT"
case "${1:-}" in
    bare)
        unpack 1 || true # the check needs no pack
        install
        away bash -c 'timeout 150 compute-sanitizer --tool memcheck "$@" > "$0" 2>&1' "$parts/memcheck" \
            python3 -m pytest --core -m gpu --hypothesis-profile few -q test/srt/unit/kernels
        ;;
    part) unpack "$2" ;;
    ready)
        echo "$2" > "$parts/last"
        unpack "$2"
        enter
        install
        [ ! -d .gpu/caches ] || python3 benchmark/gpu/caches.py load .gpu/caches || true # they are compiled anew
        away python3 -m compileall -q -j 16 ~/gpu-env/site python
        [ ! -f "$parts/memcheck" ] || { cp "$parts/memcheck" "$OUT/memcheck.txt"; tail -n 4 "$parts/memcheck"; }
        python3 benchmark/gpu/run.py --minutes 0 --hold || true
        ;;
    measure)
        enter
        from=(); [ ! -f .gpu/figures.tar.xz ] || from=(--from .gpu/figures.tar.xz)
        exec python3 benchmark/gpu/run.py --minutes "${2:-9}" --hold --out "$OUT" "${from[@]}"
        ;;
    save) exec python3 benchmark/gpu/caches.py save "$OUT" ;;
    *) sed -n '2,10p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
