#!/usr/bin/env bash
# Checks the named C++ files against .clang-format; a missing clang-format is an error where CI=true, else a notice.
set -euo pipefail

[[ $# -gt 0 ]] || exit 0
tool=${CLANG_FORMAT:-clang-format}
if ! command -v "$tool" >/dev/null && [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends clang-format
fi
if ! command -v "$tool" >/dev/null; then
    echo "lint: no clang-format on PATH: C++ style was not checked (Debian, Ubuntu: apt-get install clang-format)" >&2
    [[ ${CI:-} != true ]]
    exit
fi
"$tool" --dry-run -Werror "$@"
