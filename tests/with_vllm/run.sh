#!/usr/bin/env bash
# The tests with real vLLM, on CPUs. `run.sh quick`: the part that continuous integration runs, bounded in time.
# Where vLLM can't be installed, it says why.
#
# vLLM and torch (2 GB) are installed once for all checkouts, in a directory of the user's cache that is named
# after the file of versions; .venv-vllm is a thin environment of this checkout over it, with cenote in it.
set -euo pipefail
cd "$(dirname "$0")/../.."
requirements=$PWD/tests/with_vllm/requirements.txt
environment=.venv-vllm
python=$environment/bin/python
stamp=$environment/.installed
install_s=900
[ "${1:-}" = quick ] && install_s=240
cache=${CENOTE_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/cenote}

skip() {
    echo "test-vllm: SKIPPED, since $*"
    exit 0
}

# One at a time: another checkout may be at it.
install_base() {
    mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] || cache=$PWD/$environment-cache
    mkdir -p "$cache"
    version=$(${PYTHON:-python3} -c 'import platform, sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}-{platform.machine()}")')
    base=$cache/vllm-$(sha256sum "$requirements" | cut -c1-16)-$version
    exec 7>"$cache/vllm.lock"
    flock --wait 600 7 || skip "another checkout has been installing vLLM for ten minutes"
    if [ -e "$base/.installed" ]; then
        touch "$base/.installed"
    else
        free_kib=$(df --output=avail -k "$cache" | tail -1)
        [ "$free_kib" -gt $((4 << 20)) ] || skip "it takes 2 GB of disk, and 4 GiB are not free in $cache"
        # What no checkout has used for a month.
        find "$cache" -maxdepth 2 -path '*/vllm-*/.installed' -mtime +30 -printf '%h\0' | xargs -0 -r rm -rf --
        echo "test-vllm: installing vLLM into $base, which takes minutes once"
        rm -rf "$base"
        ${PYTHON:-python3} -m venv "$base"
        # Nothing is resolved: all versions are named in the file.
        timeout --kill-after 10 "$install_s" "$base/bin/python" -m pip install --quiet --no-deps -r "$requirements" ||
            skip "vLLM could not be installed within $install_s s (see above). The build of torch for CPUs (+cpu) is not on PyPI:" \
                "tell pip where it is, as with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS"
        touch "$base/.installed"
    fi
    exec 7>&-
}

install_here() {
    rm -rf "$environment"
    ${PYTHON:-python3} -m venv "$environment"
    local there here
    there=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    here=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$there" >"$here/vllm-base.pth"
    timeout --kill-after 10 300 $python -m pip install --quiet --editable . ||
        skip "cenote could not be installed beside vLLM (see above)"
    touch "$stamp"
}

case "$(uname -m)" in
x86_64 | aarch64) ;;
*) skip "there is no vLLM for CPUs for $(uname -m)" ;;
esac
[ "$(uname -s)" = Linux ] || skip "vLLM for CPUs runs on Linux here"
install_base
if ! [ "$stamp" -nt "$requirements" ] || ! [ "$stamp" -nt pyproject.toml ] || ! [ "$stamp" -nt "$base/bin/python" ]; then
    install_here
fi
export CENOTE_TEST_VLLM_PYTHON=$PWD/$python
pytest=".venv/bin/python -m pytest --timeout 1200"
if [ "${1:-}" = quick ]; then
    shift
    # Five and a half minutes, of which the installing took some; what has begun by then is ended.
    export CENOTE_TEST_VLLM_BUDGET_S=$((330 - SECONDS > 60 ? 330 - SECONDS : 60))
    exec timeout --kill-after 30 450 $pytest -m "not slow_engine" "$@" \
        tests/with_vllm/test_vllm_blocks.py tests/with_vllm/test_vllm_store.py tests/with_vllm/test_vllm_models.py \
        tests/with_vllm/test_vllm_weights.py
fi
exec timeout --kill-after 30 5400 $pytest "$@" tests/with_vllm
