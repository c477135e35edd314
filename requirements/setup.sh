#!/usr/bin/env bash
# Make .venv with the locked CPU stack and this project, editable. Run by `make setup`, from any folder.
#
# Idempotent: a stamp in .venv holds the hash of what was installed; nothing happens while it still fits.
# An interrupted install leaves a mark in .venv and is started over, never taken for a finished one.
#
#   PYTHON               the Python 3.11 to use (default: python3.11)
#   ASYNCRL_TORCH_INDEX  PyTorch's CPU wheel index; tried only when pip's own configuration has no CPU build of torch
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
python=${PYTHON:-python3.11}
venv=.venv
lock=requirements/cpu.lock
stamp=$venv/asyncrl-installed
mark=$venv/asyncrl-installing
log=$venv/asyncrl-install.log
needed_gib=6

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: FAILED: %s\n' "$1" >&2; shift; printf 'setup:   %s\n' "$@" >&2; exit 1; }

# What .venv must fit: the lock, the project's metadata, this script, and the folder (an environment cannot be moved).
wanted() { { cat "$lock" pyproject.toml requirements/setup.sh; printf '%s' "$root"; } | sha256sum | cut -d' ' -f1; }

is_current() { [ -x $venv/bin/python ] && [ ! -e $mark ] && [ "$(cat $stamp 2>/dev/null)" = "$(wanted)" ]; }

check_python() {
    command -v "$python" >/dev/null || fail "$python not found: asyncrl needs Python 3.11." \
        "Install it (Debian, Ubuntu: apt-get install python3.11 python3.11-venv; else pyenv or conda)," \
        "or name one: make setup PYTHON=/path/to/python3.11"
    local found
    found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$python does not run."
    [ "$found" = 3.11 ] || fail "$python is Python $found, asyncrl needs 3.11." \
        "Name another one: make setup PYTHON=/path/to/python3.11"
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make environments: its venv or ensurepip module is missing." \
        "Debian, Ubuntu: apt-get install python3.11-venv"
    [ "$(uname -sm)" = "Linux x86_64" ] || fail "the lock is for Linux on x86-64, this is $(uname -sm)." \
        "docs/install.md says how to install without the lock."
}

check_disk() {
    local free_kib
    free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free_kib" -ge $((needed_gib * 1024 * 1024)) ] || \
        fail "$((free_kib / 1024 / 1024)) GiB free in $root, the environment needs $needed_gib GiB." "Make room and run again."
}

# Run pip; its words go to the log, and to the screen where somebody watches.
pip_install() {
    if [ -t 1 ]; then
        $venv/bin/python -m pip install --disable-pip-version-check --no-input --no-deps "$@" 2>&1 | tee -a $log
    else
        $venv/bin/python -m pip install --disable-pip-version-check --no-input --no-deps "$@" >>$log 2>&1
    fi
}

is_offline() {
    grep -qE 'name resolution|Name or service not known|NewConnectionError|ConnectTimeout|ProxyError|SSLError|Read timed out|Network is unreachable' $log
}

explain() {
    grep -E '^(ERROR|WARNING: Retrying|OSError)' $log | tail -n 3 >&2 || tail -n 3 $log >&2
    if grep -q 'No space left' $log; then
        fail "the disk is full." "Make room ($needed_gib GiB) and run again."
    elif is_offline; then
        fail "the package registry cannot be reached." "Check the network and pip's configuration (pip config list), then run again." \
            "pip's own words: $root/$log"
    fi
    fail "pip could not install the lock." "pip's own words: $root/$log"
}

# torch's CPU build lies outside the general registry. Ask where pip is configured to look first: an index that cannot
# be reached makes pip retry for minutes.
install_torch() {
    local pin
    pin=$(grep '^torch==' $lock)
    if pip_install "$pin"; then return; fi
    grep -q 'No matching distribution found for torch' $log || explain
    if [ -n "${ASYNCRL_TORCH_INDEX:-}" ]; then
        say "pip's configuration has no $pin; trying ASYNCRL_TORCH_INDEX"
        PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:+$PIP_EXTRA_INDEX_URL }$ASYNCRL_TORCH_INDEX" pip_install "$pin" || explain
        return
    fi
    if is_offline; then explain; fi
    fail "pip found no $pin, the CPU build of torch." \
        "Set ASYNCRL_TORCH_INDEX to PyTorch's CPU wheel index (pytorch.org, 'Get started': Pip, CPU) and run again, or" \
        "put that wheel where pip is configured to look (pip config list)."
}

# Every pin is there in its version. pip says so too; this reads what is really on the disk.
verify() {
    $venv/bin/python - "$lock" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

wrong = []
for line in open(sys.argv[1]):
    if "==" not in line or line.startswith("#"):
        continue

    name, pin = line.strip().split("==")
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "missing"

    if found != pin:
        wrong.append(f"{name}: locked {pin}, found {found}")

sys.exit("\n".join(wrong) or 0)
PYTHON
}

install() {
    local start=$SECONDS
    check_python
    if [ -e $mark ]; then say "the last install did not finish: starting over"; rm -rf $venv; fi
    if [ ! -x $venv/bin/python ]; then
        check_disk
        rm -rf $venv
    elif ! $venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        fail "$venv is not an environment of Python 3.11." "Remove it and run again: rm -r $venv && make setup"
    fi
    mkdir -p $venv
    rm -f $stamp
    : >$mark
    : >$log
    if [ ! -x $venv/bin/python ]; then
        "$python" -m venv $venv >>$log 2>&1 || fail "cannot make $venv with $python." "Its words: $root/$log"
    fi
    say "installing $(grep -c == $lock) locked packages into $venv (1 GiB to fetch, 4 GiB on disk; one to several minutes)"
    install_torch
    pip_install -r $lock || explain
    pip_install --no-build-isolation --editable . || explain
    verify || fail "$venv differs from the lock (above)." "Remove it and run again: rm -r $venv && make setup"
    wanted >$stamp
    rm -f $mark
    say "done in $((SECONDS - start)) s"
}

# One at a time: two `make` in one clone must not tear down each other's install.
exec 9>.venv.lock
flock 9 2>/dev/null || true # no flock: nothing to wait with
is_current || install
