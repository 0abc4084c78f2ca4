#!/usr/bin/env bash
# One of the programs here, in an emulated machine with soft-RoCE devices: in_vm.sh PROGRAM [OPTION...]
# NICS=2 for two devices. How fast anything is there says nothing of a NIC; ratios within a run do.
set -euo pipefail
cd "$(dirname "$0")/../.."
program=$1
shift
.venv/bin/python tests/rdma/vm/run.py --setup
.venv/bin/python -c 'import ibverbs' 2>/dev/null || .venv/bin/python -m pip install --quiet --editable '.[rdma]'
exec env PYTHONPATH=tests:benchmarks/rdma .venv/bin/python tests/rdma/vm/run.py --nics "${NICS:-1}" \
    --memory 3072 --timeout "${TIMEOUT_S:-3000}" -- .venv/bin/python "benchmarks/rdma/$program" "$@"
