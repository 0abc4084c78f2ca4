#!/usr/bin/env bash
# The RDMA tests on real verbs, in emulated machines with soft-RoCE devices: no NIC, no kernel module and no
# KVM is needed here. Where such a machine can't be made, it says why. `run.sh quick`: the part that takes minutes;
# `two-devices`, `one-device`, `two-machines`: one of the parts of the whole, which takes long.
set -euo pipefail
cd "$(dirname "$0")/../.."
case "${1:-}" in
"" | quick | two-devices | one-device | two-machines) part=${1:-all} ;;
*) echo "there is no part $1: quick, two-devices, one-device, two-machines, or none for all of it" >&2 && exit 2 ;;
esac
python=.venv/bin/python
machine="$python tests/rdma/vm/run.py"

status=0
$machine --setup || status=$?
if [ "$status" = 77 ]; then
    echo "test-rdma: SKIPPED, since no machine with RDMA devices can be made here (see above)"
    exit 0
fi
[ "$status" = 0 ] || exit "$status"
$python -c 'import ibverbs' 2>/dev/null || $python -m pip install --quiet --editable '.[rdma]'
# The guest sees these files, and can't keep what it compiles.
$python -m compileall -q proto core master store client tests

pytest="$python -m pytest -p no:cacheprovider -m rdma --timeout 1800"
if [ "$part" = quick ]; then
    $machine --nics 2 --timeout 900 -- $pytest tests/contract/test_verbs_contract.py \
        "tests/contract/test_rdma_contract.py::TestRdmaWithIbverbs::test_bytes_go_over_the_devices" \
        "tests/contract/test_rdma_contract.py::TestRdmaWithPyverbs::test_bytes_go_over_the_devices" \
        "tests/rdma/test_rdma_faults.py::TestFaultsWithIbverbs::test_a_writer_that_is_cut_off_writes_no_more"
    exit
fi
say() { echo "== $(date +%T) $*"; }
if [ "$part" = all ] || [ "$part" = two-devices ]; then
    say "two devices"
    $machine --nics 2 --timeout 7200 -- $pytest --durations 10 tests/contract tests/rdma
fi
if [ "$part" = all ] || [ "$part" = one-device ]; then
    say "one device"
    CENOTE_TEST_CONNECTS=20 $machine --nics 1 --timeout 3600 -- $pytest --durations 10 tests/contract tests/rdma/test_rdma_faults.py
fi
if [ "$part" = all ] || [ "$part" = two-machines ]; then
    say "two machines"
    CENOTE_TEST_RDMA=1 $python -m pytest tests/rdma/test_rdma_guests.py
fi
