# shellcheck shell=bash
# Sourced by the other scripts: `use_environment EXTRAS` puts a Python environment with the package in front of PATH.
# With --help a script prints the comment at its head, before anything is installed.
#
# The environment is ENERGON_VENV, else the active one (VIRTUAL_ENV), else .venv in the checkout; it is created if it is not
# there. Installing twice costs nothing: a stamp in the environment remembers what was installed from which files.

case "${1:-}" in
-h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "scripts/$(basename "$0")"
    exit
    ;;
esac

TORCH_VERSION="$(sed -n 's/^torch==//p' constraints.txt)"

create_environment() { # FOLDER
    local folder="$1"
    [ -x "$folder/bin/python" ] && return
    local python
    for python in "${PYTHON:-}" python3.11 python3.12 python3.13 python3.14 python3; do
        if [ -n "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "creating $folder with $("$python" --version)"
            "$python" -m venv "$folder"
            return
        fi
    done
    echo "no Python from 3.11 on found; name one in PYTHON" >&2
    return 1
}

# torchvision's wheel on the package index is the one for CUDA: beside a CPU build of torch it breaks the imports of
# lightning and transformers. Nothing here needs it.
refuse_torchvision() { # PYTHON
    if "$1" -m pip list 2>/dev/null | grep -i torchvision; then
        echo "torchvision is installed in this environment; remove it: $1 -m pip uninstall torchvision" >&2
        return 1
    fi
}

# Installs with pip and says for how long: by pip's own words in a terminal, else by a line a minute.
install() { # PYTHON WHAT ARGUMENT...
    local python="$1" what="$2" start=$SECONDS quiet=(--quiet) ticking
    shift 2
    echo "installing $what"
    if [ -t 1 ]; then
        quiet=()
    fi
    while sleep 60 >/dev/null 2>&1; do echo "  still installing, $((SECONDS - start)) s"; done &
    ticking=$!
    if ! "$python" -m pip install "${quiet[@]}" --disable-pip-version-check "$@"; then
        kill "$ticking"
        return 1
    fi
    kill "$ticking"
    echo "  installed in $((SECONDS - start)) s"
}

use_environment() { # EXTRAS
    local extras="$1" folder stamp installed
    folder="${ENERGON_VENV:-${VIRTUAL_ENV:-$PWD/.venv}}"
    create_environment "$folder"
    folder="$(cd "$folder" && pwd)"
    export VIRTUAL_ENV="$folder" PATH="$folder/bin:$PATH"
    stamp="$folder/.energon-bridge-${extras//,/-}"
    installed="$PWD $(cat pyproject.toml setup.py constraints.txt energon_bridge/core/{*.h,*/*.c} | cksum)"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$installed" ] || ! python -I -c 'import energon_bridge' 2>/dev/null; then
        # torch first and by itself, so that whichever build suits the machine is chosen before anything depends on it
        compgen -G "$folder/lib/python*/site-packages/torch-$TORCH_VERSION[.+-]*" >/dev/null ||
            install python "torch $TORCH_VERSION (200 MB, with CUDA some GB)" -c constraints.txt "torch==$TORCH_VERSION"
        install python "energon_bridge[$extras] and what it needs" -c constraints.txt -e ".[$extras]"
        echo "$installed" >"$stamp"
    fi
    refuse_torchvision python
}
