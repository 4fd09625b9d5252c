#!/usr/bin/env bash
# Builds the NCCL network plugin: scripts/build_nccl_plugin.sh OUTPUT [compiler flags, for instance -fsanitize=address]
#
# One shared object without torch and CUDA. It exports NCCL's tables and nothing else, and stays loaded after
# dlclose (-z nodelete): NCCL 2.28 and 2.29 unload plugins with the last communicator and reload them with the next.
set -euo pipefail

[[ $# -ge 1 ]] || { echo "usage: $0 OUTPUT [FLAG...]" >&2; exit 2; }
output=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
sources=("$root"/cpp_ext/nccl_plugin/*.cc)
for name in address connector env frame hello interfaces link listener sha256 socket stream; do
    sources+=("$root/cpp_ext/net/$name.cc")
done
mkdir -p "$(dirname "$output")"
# shellcheck disable=SC2086  # CXX may be a command with flags
${CXX:-g++} -std=c++20 -O3 -g0 -fPIC -shared -fvisibility=hidden -fvisibility-inlines-hidden \
    -Wall -Wextra -Werror -Wl,-z,nodelete "-Wl,--version-script=$root/cpp_ext/nccl_plugin/exports.map" \
    "$@" -I"$root/cpp_ext" "${sources[@]}" -o "$output"
