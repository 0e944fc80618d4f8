#!/usr/bin/env bash
# Take the bundled models out of the checkout, which has to be small when it travels to a GPU machine.
#
#   benchmark/gpu/travel.sh out          # models/ to .gpu/models, which git ignores
#   benchmark/gpu/travel.sh bring NAME   # these models back, for the next command
#   benchmark/gpu/travel.sh back         # all of them
set -euo pipefail
cd "$(dirname "$0")/../.."
away=.gpu/models

bring() { # NAME: move it home, if it is away
    [ ! -e "models/$1" ] && [ -e "$away/$1" ] || return 0
    mkdir -p models
    mv "$away/$1" "models/$1"
}

case "${1:-}" in
    out)
        mkdir -p "$away"
        for path in models/*; do
            [ ! -e "$path" ] || mv "$path" "$away/"
        done
        [ ! -d models ] || rmdir models
        ;;
    bring)
        for name in "${@:2}"; do
            [ -e "models/$name" ] || [ -e "$away/$name" ] || { echo "there is no model $name" >&2; exit 2; }
            bring "$name"
        done
        ;;
    back)
        [ -d "$away" ] || exit 0
        for path in "$away"/*; do
            [ ! -e "$path" ] || bring "${path##*/}"
        done
        rmdir "$away"
        ;;
    *)
        sed -n '2,6p' "$0" >&2
        exit 2
        ;;
esac
