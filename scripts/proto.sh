#!/bin/sh
# Regenerate the checked-in protobuf messages (and their type stubs) of the etcd client.
#
# usage: scripts/proto.sh [python]      a Python with grpcio-tools 1.62.x and mypy-protobuf (default: python3)
#
# grpcio-tools 1.62 on purpose: its output loads on every protobuf from 3.20 to 7; later ones tie the reader
# to their own protobuf version. It needs setuptools<80 to run:
#   python3 -m venv gen && gen/bin/pip install 'grpcio-tools==1.62.*' 'setuptools<80' 'mypy-protobuf<3.7'
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3}

version=$("$python" -c 'import importlib.metadata as m; print(m.version("grpcio-tools"))') || {
    echo "proto.sh: $python has no grpcio-tools; see the usage in this file" >&2
    exit 3
}
case $version in
1.62.*) ;;
*)
    echo "proto.sh: found grpcio-tools $version in $python; want 1.62.x (see this file for why)" >&2
    exit 3
    ;;
esac

# protoc looks for its mypy plugin on PATH; it lies beside the interpreter in a virtual environment.
PATH="$(dirname "$(command -v "$python")"):$PATH"
export PATH
package=baguarun/elastic/membership/etcdpb
"$python" -m grpc_tools.protoc -I "$package" --python_out="$package" --mypy_out="$package" "$package/etcd.proto"
