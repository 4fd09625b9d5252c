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
    clang++:clang
    iptables:iptables
)

# The sanitizer runtime that fits Debian's default clang, e.g. libclang-rt-14-dev.
fuzzer_package() {
    local version
    version=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p' | head -n 1)
    echo "libclang-rt-${version:-14}-dev"
}

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
# clang's sanitizers and libFuzzer are a package of their own, named after its version.
if [[ " ${missing[*]} " == *" clang++ "* ]] || ! ls "$(clang++ -print-resource-dir)"/lib/*/libclang_rt.fuzzer*.a >/dev/null 2>&1; then
    missing+=(libFuzzer)
    packages+=("$(fuzzer_package)")
fi
[[ ${#missing[@]} -eq 0 ]] && exit 0

if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
    echo "test_deps: installing ${packages[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
    exit 0
fi
echo "test_deps: tests need ${missing[*]}; install them (Debian, Ubuntu: sudo apt-get install ${packages[*]})" >&2
exit 3
