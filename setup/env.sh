# Shared by ./quickstart, ./test and setup/lock (bash, sourced from the project's folder): the virtual environment and Debian packages.
#
# Every function is idempotent and quick when there is nothing to do. What can't be done is said in one line with the remedy.

VENV=${GYRE_VENV:-$PWD/.venv}
UV_VERSION=0.13.9
SETUP_LOG=$VENV/setup.log

say() { printf '%s %s\n' '--' "$*"; }
die() { printf '%s\n' "$0: $*" >&2; exit 1; }

# need_commands PACKAGES COMMAND...: true if all commands are there, else installs the Debian packages (as root) or says what to install.
need_commands() {
    local packages=$1 command lacking=()
    shift
    for command in "$@"; do
        PATH=$PATH:/usr/sbin:/sbin command -v "$command" > /dev/null || lacking+=("$command")
    done
    [ ${#lacking[@]} -eq 0 ] && return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        say "installing Debian packages for ${lacking[*]}: $packages"
        apt_install $packages && return 0
        say "apt-get failed (see $SETUP_LOG); by hand: apt-get install --no-install-recommends $packages"
        return 1
    fi
    say "missing ${lacking[*]}; as root: apt-get install --no-install-recommends $packages"
    return 1
}

apt_install() {
    mkdir -p "$(dirname "$SETUP_LOG")"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get install -y --no-install-recommends "$@" || { apt-get update && apt-get install -y --no-install-recommends "$@"; }; } \
        < /dev/null >> "$SETUP_LOG" 2>&1
}

# The newest suitable Python: $PYTHON, else one of these with version 3.11 or more and the venv module.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

make_venv() {
    "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && "$VENV/bin/uv" --version > /dev/null 2>&1 && return 0
    local python
    if ! python=$(find_python); then
        need_commands "python3 python3-venv" python3-with-venv || true
        python=$(find_python) || die "no Python 3.11 or newer with the venv module; install it (Debian: python3-venv) or set PYTHON"
    fi
    say "virtual environment in $VENV ($("$python" --version))"
    "$python" -m venv "$VENV" || die "could not make $VENV; remove it and try again"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION" 2>> "$SETUP_LOG" || die "pip could not install uv; check pip's own configuration"
}

# uv does not read pip's configuration: hand over where pip looks for packages.
index_options() {
    INDEX_OPTIONS=()
    local value word
    value=${PIP_FIND_LINKS:-$(pip_config find-links)}
    for word in $value; do INDEX_OPTIONS+=(--find-links "$word"); done
    value=${PIP_INDEX_URL:-$(pip_config index-url)}
    [ -z "$value" ] || INDEX_OPTIONS+=(--index-url "$value")
    value=${PIP_EXTRA_INDEX_URL:-$(pip_config extra-index-url)}
    for word in $value; do
        case $word in file:*) [ -d "${word#file://}" ] || continue ;; esac
        INDEX_OPTIONS+=(--extra-index-url "$word")
    done
    [ -z "$value" ] || INDEX_OPTIONS+=(--index-strategy unsafe-best-match)
    value=$(pip_config cert)
    [ -z "$value" ] || [ -n "${SSL_CERT_FILE:-}" ] || export SSL_CERT_FILE=$value
}

pip_config() {
    "$VENV/bin/python" -m pip config list 2> /dev/null | sed -n "s/^[a-z:]*\.\{0,1\}$1='\(.*\)'$/\1/p" | sed 's/\\n/ /g' | tail -n 1
}

# What requirements.txt pins, and whatever the torch build that is found needs besides: PyPI's is for CUDA and wants NVIDIA's libraries.
# The CPU build is a quarter of the size: where pip's configuration names no place for it, uv's own knowledge of torch's indexes is tried first.
install_pinned() {
    local install=("$VENV/bin/uv" pip install --python "$VENV/bin/python" --override setup/overrides.txt)
    if [ ${#INDEX_OPTIONS[@]} -eq 0 ]; then
        "${install[@]}" --torch-backend cpu -r requirements.txt >> "$SETUP_LOG" 2>&1 && return 0
        say "no CPU build of torch to be had; taking PyPI's, which is larger"
    fi
    "${install[@]}" "${INDEX_OPTIONS[@]}" -r requirements.txt >> "$SETUP_LOG" 2>&1
}

stamp() { { cat requirements.txt pyproject.toml setup/env.sh setup/overrides.txt; "$VENV/bin/python" --version; pwd; } | sha256sum | cut -d' ' -f1; }

# The environment finds this project in one folder only: a second clone that takes it is told what becomes of the first one's commands and jobs.
tell_of_other_clone() {
    local other
    other=$(cat "$VENV"/lib/python3*/site-packages/gyre_hpc-*.dist-info/direct_url.json 2> /dev/null | sed -n 's#.*"file://\([^"]*\)".*#\1#p' | tail -n 1) || true
    [ ! -d "$other" ] || [ "$other" -ef "$PWD" ] \
        || say "$VENV was $other's: its commands and jobs run the code of $PWD from now on; GYRE_VENV=ELSEWHERE $0 keeps both"
}

# All pinned packages, this project itself (editable), byte code where Python is told not to write it, DeepSpeed's one-time builds.
python_environment() {
    make_venv
    [ "$(cat "$VENV/gyre-stamp" 2> /dev/null)" = "$(stamp)" ] && return 0
    tell_of_other_clone
    index_options
    say "installing $(grep -c == requirements.txt) pinned packages (log: $SETUP_LOG)"
    install_pinned || die "installation failed: $(grep -v '^ *$' "$SETUP_LOG" | tail -n 1); the whole story is in $SETUP_LOG"
    "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps --no-build-isolation -e . >> "$SETUP_LOG" 2>&1 \
        || die "installing this project failed; see $SETUP_LOG"
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
        say "byte code of the installed packages (Python is told not to write it; a minute or two, once)"
        # a few files are for other Python versions and don't compile: that is no error
        env -u PYTHONDONTWRITEBYTECODE "$VENV/bin/python" -m compileall -q -j 0 "$VENV"/lib/python*/site-packages >> "$SETUP_LOG" 2>&1 || true
    fi
    "$VENV/bin/python" -m gyre_hpc.training.prebuild || die "DeepSpeed is not ready; see the line above"
    stamp > "$VENV/gyre-stamp"
}
