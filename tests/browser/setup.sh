#!/usr/bin/env bash
# Installs what tests/browser needs: Debian's chromium and its chromedriver (0.4 GB) with apt-get, selenium into .venv.
# Does nothing where they are there. Without root or apt-get it says so, and these tests are skipped.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=.venv/bin/python

say() { echo "browser: $*"; }
skip() {
    say "$1; the tests of web pages are skipped"
    exit 0
}

if ! { command -v chromium && command -v chromedriver; } >/dev/null; then
    command -v apt-get >/dev/null || skip "no apt-get on this machine to install chromium and chromium-driver"
    [ "$(id -u)" = 0 ] || skip "only root can install chromium and chromium-driver"
    say "installing chromium and chromium-driver (a minute)"
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    quiet=(-qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300)
    if ! { apt-get "${quiet[@]}" update && apt-get "${quiet[@]}" install -y --no-install-recommends chromium chromium-driver; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        skip "apt-get could not install chromium"
    fi
    rm -f "$log"
fi
# chromedriver comes from chromium's own source, so it always fits; selenium speaks WebDriver, a standard.
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("selenium") is None)' && exit
say "installing selenium"
"$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt selenium ||
    skip "pip could not install selenium"
