"""What etcd answers to a login that is over, version by version: it is made again."""

from __future__ import annotations

import grpc
import pytest

from cenote.kv.etcd import _is_login_over


class _Answer(grpc.RpcError):  # type: ignore[misc]
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize(
    ("code", "details", "is_over"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token", True),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", True),
        (grpc.StatusCode.UNKNOWN, "auth: revision in header is old", True),  # 3.5.1
        (grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied", False),
        (grpc.StatusCode.UNKNOWN, "", False),
    ],
)
def test_a_login_that_is_over_is_known(
    code: grpc.StatusCode, details: str, *, is_over: bool
) -> None:
    assert _is_login_over(_Answer(code, details)) is is_over
