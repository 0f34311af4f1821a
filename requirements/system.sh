#!/usr/bin/env bash
# Install the Debian packages that runs and tests use: bubblewrap, for the tool python; SLURM, to run batch scripts, Redis, and shellcheck.
# Needs root and apt-get; otherwise, or after a failed installation, it prints the tests that will be skipped. Never fails.
set -uo pipefail
declare -A packages=([slurmctld]=slurm-wlm [munged]=munge [shellcheck]=shellcheck [redis-server]=redis-server [bwrap]=bubblewrap)
declare -A skipped=([slurmctld]="tests/system/test_slurm.py" [munged]="tests/system/test_slurm.py"
    [shellcheck]="shellcheck in tests/unit/test_shell.py"
    [redis-server]="tests of the log in Redis" [bwrap]="tests/unit/test_tools_sandbox*.py")
PATH=$PATH:/usr/sbin:/sbin
missing=()
for program in "${!packages[@]}"; do command -v "$program" > /dev/null || missing+=("$program"); done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    wanted=()
    for program in "${missing[@]}"; do wanted+=("${packages[$program]}"); done
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    { apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends "${wanted[@]}"; } > "$log" 2>&1 || tail -n 5 "$log" >&2
    rm -f "$log"
fi
for program in "${missing[@]}"; do
    command -v "$program" > /dev/null || echo "no $program (Debian's ${packages[$program]}): skipped are ${skipped[$program]}" >&2
done
exit 0
