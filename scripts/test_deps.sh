#!/usr/bin/env bash
# Sees to it that the programs that tests start are here; as root on Debian or Ubuntu it installs what is missing.
set -euo pipefail

# program:package
needed=(
    etcd:etcd-server
    g++:g++
    ip:iproute2
    tc:iproute2
    nsenter:util-linux
    openssl:openssl
)

missing=()
packages=()
for pair in "${needed[@]}"; do
    program=${pair%%:*}
    # /usr/sbin, where ip and tc may lie, is not on every user's PATH.
    if ! PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null; then
        missing+=("$program")
        packages+=("${pair##*:}")
    fi
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
    echo "test_deps: installing ${packages[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
    exit 0
fi
echo "test_deps: tests need ${missing[*]}; install them (Debian, Ubuntu: sudo apt-get install ${packages[*]})" >&2
exit 3
