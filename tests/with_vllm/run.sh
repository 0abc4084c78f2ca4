#!/usr/bin/env bash
# The tests with real vLLM, on CPUs, in an environment of its own (.venv-vllm, 2 GB). `run.sh quick`: the part
# that continuous integration runs, a few minutes. Where vLLM can't be installed, it says why.
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=.venv-vllm
python=$environment/bin/python
stamp=$environment/.installed

skip() {
    echo "test-vllm: SKIPPED, since $*"
    exit 0
}

install() {
    # Nothing is resolved: all versions are named in the file.
    timeout --kill-after 10 900 $python -m pip install --quiet --no-deps -r tests/with_vllm/requirements.txt &&
        timeout --kill-after 10 300 $python -m pip install --quiet --editable .
}

case "$(uname -m)" in
x86_64 | aarch64) ;;
*) skip "there is no vLLM for CPUs for $(uname -m)" ;;
esac
[ "$(uname -s)" = Linux ] || skip "vLLM for CPUs runs on Linux here"
if ! [ -e "$stamp" ] || [ tests/with_vllm/requirements.txt -nt "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    free_kib=$(df --output=avail -k . | tail -1)
    [ -e "$python" ] || [ "$free_kib" -gt $((4 << 20)) ] || skip "it takes 2 GB of disk, and 4 GiB are not free"
    [ -x "$python" ] || ${PYTHON:-python3} -m venv "$environment"
    echo "test-vllm: installing vLLM into $environment, which takes minutes once"
    install || skip "vLLM could not be installed (see above). The build of torch for CPUs (+cpu) is not on PyPI:" \
        "tell pip of PyTorch's index for it, as with PIP_EXTRA_INDEX_URL"
    touch "$stamp"
fi
export CENOTE_TEST_VLLM_PYTHON=$PWD/$python
pytest=".venv/bin/python -m pytest tests/with_vllm --timeout 1200"
if [ "${1:-}" = quick ]; then
    exec timeout --kill-after 30 1800 $pytest -m "not slow_engine"
fi
exec timeout --kill-after 30 5400 $pytest "$@"
