#!/bin/sh
# Installs cenote from this source tree into a fresh virtual environment, with the releases of its
# dependencies that constraints.txt names. The image is built by it, and a test runs it.
#
#     deploy/docker/install.sh /opt/cenote [EXTRAS]        # EXTRAS: etcd,rdma unless told
set -eu
target=${1:?usage: install.sh DIRECTORY [EXTRAS]}
extras=${2-etcd,rdma}
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
"${PYTHON:-python3}" -m venv "$target"
# What builds the wheel is held to them, too; which of the two variables says so depends on pip's release.
export PIP_CONSTRAINT="$here/constraints.txt" PIP_BUILD_CONSTRAINT="$here/constraints.txt"
"$target/bin/pip" install --quiet --disable-pip-version-check "$source${extras:+[$extras]}"
"$target/bin/pip" check
"$target/bin/cenote-master" --version
"$target/bin/cenote-store" --version
