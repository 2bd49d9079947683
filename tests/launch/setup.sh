#!/usr/bin/env bash
# Installs the launchers that tests/launch/real runs: SLURM, ssh, pdsh, Open MPI, MPICH (Debian packages, with apt-get).
# Does nothing where they are there. Without root or apt-get it says so, and the tests that need the programs are skipped.
# Starts no service: a policy-rc.d forbids it for as long as this script runs, unless the machine has one already.
set -euo pipefail

packages=(slurm-wlm munge openssh-server openssh-client pdsh openmpi-bin mpich iproute2)
policy=/usr/sbin/policy-rc.d

say() { echo "launchers: $*"; }
installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

absent=()
if command -v dpkg-query >/dev/null; then
    for package in "${packages[@]}"; do
        installed "$package" || absent+=("$package")
    done
    [ ${#absent[@]} -gt 0 ] || exit 0
fi
skip() {
    say "$1; the tests of real launchers whose programs are absent are skipped"
    exit 0
}
command -v apt-get >/dev/null || skip "no apt-get on this machine to install ${packages[*]}"
[ "$(id -u)" = 0 ] || skip "only root can install ${absent[*]}"

say "installing ${absent[*]} (a minute or two)"
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
quiet=(-qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300)
if ! { apt-get "${quiet[@]}" update && apt-get "${quiet[@]}" install -y --no-install-recommends "${absent[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    skip "apt-get could not install ${absent[*]}"
fi
rm -f "$log"
say "done in $SECONDS s"
