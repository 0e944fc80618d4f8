# What the commands of the sheet share. OUT: the folder that comes back from the machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
export PYTHONUNBUFFERED=1 OUT=${OUT:-build/gpu/out}
parts=$HOME/gpu-parts log=$HOME/gpu-parts/log
mkdir -p "$parts" "$OUT"

# unpack N: install part N of the pack in the background, one part at a time. It goes on when the command is over.
unpack() {
    [ -d ".gpu/pack/part-$1" ] || { echo "part $1 of the pack has not come: bring it again"; return 1; }
    rm -rf "$parts/part-$1"
    mv ".gpu/pack/part-$1" "$parts/"
    cp -r .gpu/offline "$parts/"
    setsid flock "$parts/lock" python3 "$parts/offline/unpack.py" "$parts/part-$1" >> "$log" 2>&1 &
}

# enter: wait for the parts, and use what they brought.
enter() {
    while pgrep -f "$parts/offline/unpack.py" > /dev/null; do sleep 0.2; done
    [ -f ~/gpu-env/env.sh ] || { tail -n 3 "$log"; echo "the pack is not complete: bring the part that is missing again"; return 1; }
    set +u
    . ~/gpu-env/env.sh
    set -u
}
