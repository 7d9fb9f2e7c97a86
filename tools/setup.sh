#!/usr/bin/env bash
# Makes .venv hold what uv.lock pins, hashes enforced, and nothing where it does already.
#
#   tools/setup.sh [--extra NAME]... [--group NAME]...
#
# Extras and groups asked for once stay until .venv is deleted. The uv that was used is .venv/bin/uv afterwards.
# Writes to .venv, .uv and build alone; git ignores them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON_SERIES=3.12
UV_AT_LEAST=0.13.8 # earlier ones were not tried on a lock that names no registry
STAMP=.venv/.setup-stamp
WANTED=.venv/.setup-wanted

# Around `uv pip`, UV_PYTHON means "install into that interpreter"; the others would lead uv to another environment.
unset UV_PYTHON UV_PROJECT_ENVIRONMENT VIRTUAL_ENV

say() { echo "setup: $*"; }

fail() {
    echo "setup: $*" >&2
    exit 1
}

# What a set-up environment depends on; changes with the lock, the extras, the interpreter and the place.
fingerprint() {
    { sha256sum pyproject.toml uv.lock tools/setup.sh && echo "$wanted" && readlink -f .venv/bin/python && pwd -P; } |
        sha256sum
}

environment_runs() { [[ -x .venv/bin/python ]] && .venv/bin/python -c '' 2>/dev/null; }

is_new_enough() {
    local version
    version=$("$1" --version 2>/dev/null | awk '{print $2}') || return 1
    [[ -n $version && $(printf '%s\n' "$UV_AT_LEAST" "$version" | sort -V | head -n 1) == "$UV_AT_LEAST" ]]
}

# pyenv keeps its interpreters where uv does not look, and its shims run only the versions that are switched on.
put_pyenv_first() {
    local folder
    for folder in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$PYTHON_SERIES"*/bin; do
        if [[ -x $folder/python3 ]]; then export PATH="$folder:$PATH"; fi
    done
}

# Never .venv/bin/uv itself, which is a link that this script makes: that of PATH, or else what the link leads to.
find_uv() {
    local python candidates
    mapfile -t candidates < <(type -ap uv)
    if [[ -L .venv/bin/uv ]]; then candidates+=("$(readlink .venv/bin/uv)"); fi
    for uv in ${candidates[@]+"${candidates[@]}"} "$PWD/.uv/bin/uv"; do
        if [[ ! ${uv%/*} -ef .venv/bin ]] && is_new_enough "$uv"; then return; fi
    done
    for python in "python$PYTHON_SERIES" python3; do
        if "$python" -c 'import ensurepip, sys, venv; assert sys.version_info >= (3, 9)' 2>/dev/null; then
            say "no uv $UV_AT_LEAST or newer on PATH: installing one into .uv with pip"
            "$python" -m venv --clear .uv
            .uv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r tools/uv-bootstrap.txt
            return
        fi
    done
    fail "there is no uv $UV_AT_LEAST or newer on PATH, and no Python 3 with the modules venv and ensurepip to" \
        "install one with. Install uv, or your system's package of Python's venv (python3-venv on Debian and Ubuntu)."
}

find_python() {
    if python=$("$uv" python find --system "$PYTHON_SERIES" 2>/dev/null); then return; fi
    say "no Python $PYTHON_SERIES on this machine: asking uv to download one into .uv/python"
    export UV_PYTHON_INSTALL_DIR=$PWD/.uv/python
    if "$uv" python install --no-bin "$PYTHON_SERIES" &&
        python=$("$uv" python find --system --managed-python "$PYTHON_SERIES"); then return; fi
    fail "Python $PYTHON_SERIES is needed, was not found on PATH or under pyenv, and could not be downloaded." \
        "Install it (pyenv install $PYTHON_SERIES, or your system's package) and put it on PATH."
}

install_locked() {
    local seconds=$SECONDS
    mkdir -p build
    say "installing what uv.lock pins into .venv${wanted:+ (with $wanted)}: about 5 GB, fetched where they are not cached"
    if [[ " $wanted " == *" te "* ]]; then
        say "Transformer Engine's torch part is compiled, unless uv has it cached: ten minutes and more on two cores"
    fi
    # shellcheck disable=SC2086 # $wanted is a list of options
    "$uv" export --frozen --quiet --no-emit-project $wanted -o build/requirements.txt >/dev/null
    "$uv" pip sync --quiet --python .venv --require-hashes build/requirements.txt
    # shellcheck disable=SC2086
    # Not `uv sync`: it builds Transformer Engine anew, from an sdist whose address the lock does not name.
    "$uv" pip install --quiet --python .venv --no-deps --editable .
    say "installed in $((SECONDS - seconds)) s"
}

asked=("$@")
while (($#)); do
    case $1 in
    --extra | --group)
        (($# > 1)) || fail "$1 needs a name, as in: tools/setup.sh $1 te"
        shift 2
        ;;
    *) fail "unknown argument '$1'; use: tools/setup.sh [--extra NAME]... [--group NAME]..." ;;
    esac
done
if environment_runs && [[ -f $WANTED ]]; then read -ra asked <<<"$(cat "$WANTED") ${asked[*]-}"; fi
wanted=$(printf '%s %s\n' ${asked[@]+"${asked[@]}"} | sort -u | xargs)

if environment_runs && [[ -x .venv/bin/uv && -f $STAMP && $(fingerprint) == "$(cat "$STAMP")" ]]; then exit 0; fi

[[ $(uname -sm) == "Linux x86_64" ]] || fail "uv.lock is for Linux on x86_64, and this is $(uname -sm)."
rm -f "$STAMP"
put_pyenv_first
find_uv
say "uv is $uv"
if ! environment_runs; then
    find_python
    say "Python is $python"
    "$uv" venv --quiet --clear --python "$python" .venv
fi
install_locked
ln -sfn "$uv" .venv/bin/uv
echo "$wanted" >"$WANTED"
fingerprint >"$STAMP"
say "done; .venv is ready"
