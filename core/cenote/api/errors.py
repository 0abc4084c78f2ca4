"""Every error that a caller can meet: one class per reason, the same on both sides of the wire.

A class carries its wire `code` (stable, never reused), its gRPC status name and whether the same
call may succeed when it is sent again. `message` says what happened; `remedy` says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

__all__ = [
    "ERRORS_BY_CODE",
    "AlreadyExists",
    "BufferInUse",
    "CenoteError",
    "ClientClosed",
    "ConfigError",
    "DeadlineExceeded",
    "FingerprintMismatch",
    "ForkedClient",
    "GrantRevoked",
    "InternalError",
    "InvalidArgument",
    "InvalidBuffer",
    "InvalidKey",
    "LeaseExpired",
    "NamespaceNotFound",
    "NamespaceReset",
    "NoSpace",
    "NodeNameTaken",
    "NodeSuperseded",
    "NotLeader",
    "ObjectTooLarge",
    "PermissionDenied",
    "PoolMismatch",
    "ProtocolError",
    "ProtocolVersionMismatch",
    "QuotaExceeded",
    "ReplicasUnavailable",
    "ResourceUnavailable",
    "SessionUnknown",
    "StaleEpoch",
    "StaleLocation",
    "TenureEnded",
    "TlsFailed",
    "Unauthenticated",
    "Unavailable",
    "error_from_code",
]


class CenoteError(Exception):
    """Base of all errors of cenote. `str(error)` is one line: what happened, then the remedy."""

    code: ClassVar[int] = 1
    grpc_status: ClassVar[str] = "UNKNOWN"
    retryable: ClassVar[bool] = False
    default_remedy: ClassVar[str] = ""

    # True where the request had left when its reply was lost: it may have taken effect, so only a
    # caller whose request carries an id (or is idempotent) may send it again.
    maybe_executed: bool = False

    def __init__(self, message: str = "", *, remedy: str | None = None) -> None:
        self.message = message or type(self).__name__
        self.remedy = type(self).default_remedy if remedy is None else remedy
        super().__init__(self.message)

    @property
    def reason(self) -> str:
        """The class name: stable, for scripts and metrics labels."""
        return type(self).__name__

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class InternalError(CenoteError):
    """A bug of ours: an invariant did not hold."""

    code = 2
    grpc_status = "INTERNAL"
    default_remedy = "please report this with the logs of the master and the store daemon"


class InvalidArgument(CenoteError):
    """The request can't be right, whatever the state of the pool."""

    code = 3
    grpc_status = "INVALID_ARGUMENT"


class InvalidKey(InvalidArgument):
    """A key is not str/bytes of 1-512 bytes."""

    code = 4
    default_remedy = "keys are str or bytes of 1 to 512 bytes"


class InvalidBuffer(InvalidArgument):
    """A buffer is read-only, not contiguous, too small, or of a type without buffer protocol."""

    code = 5


class ObjectTooLarge(InvalidArgument):
    """No segment, nor all of them together, could ever hold this object."""

    code = 6
    default_remedy = "split the value or add capacity"


class ConfigError(InvalidArgument):
    """A flag, environment variable or configuration file entry is unknown or wrong."""

    code = 7


class ProtocolError(CenoteError):
    """The other side sent bytes that are no valid frame or message; the connection is closed."""

    code = 8
    grpc_status = "INVALID_ARGUMENT"
    default_remedy = "check that both ends are cenote and that the port is the right one"


class ProtocolVersionMismatch(ProtocolError):
    """Both ends speak cenote, but no common protocol version."""

    code = 9
    grpc_status = "FAILED_PRECONDITION"
    default_remedy = "install the same cenote release on both ends"


class NamespaceNotFound(CenoteError):
    """No namespace of this name or id."""

    code = 10
    grpc_status = "NOT_FOUND"
    default_remedy = "open it with Client.namespace(name, fingerprint=...), which creates it"


class FingerprintMismatch(CenoteError):
    """The namespace exists with another fingerprint: its bytes have another shape."""

    code = 11
    grpc_status = "FAILED_PRECONDITION"
    default_remedy = (
        "open it with the fingerprint that it was made with, or use another namespace name"
    )


class NamespaceReset(CenoteError):
    """The namespace was reset since this client opened it, or the master does not know its number
    (any more); the client opens it again, by its name, by itself."""

    code = 12
    grpc_status = "ABORTED"
    retryable = True


class AlreadyExists(CenoteError):
    """Another writer committed this key first. `same_bytes`: whether it stored the same bytes."""

    code = 13
    grpc_status = "ALREADY_EXISTS"

    def __init__(
        self, message: str = "", *, remedy: str | None = None, same_bytes: bool | None = None
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.same_bytes = same_bytes


class NoSpace(CenoteError):
    """The pool is full of what may not be evicted now (leased, pinned, granted to writers, within
    quotas of other namespaces)."""

    code = 14
    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True
    default_remedy = (
        "add capacity, or release leases and pins, or lower what quotas keep for others; `cenote "
        "status` shows who holds it; after a master's crash wait until leases from before have "
        "ended (by default 10 s)"
    )


class QuotaExceeded(NoSpace):
    """A namespace or session has used up its share."""

    code = 15
    retryable = False


class ReplicasUnavailable(CenoteError):
    """`min_replicas` can't be met: too few failure domains with room are alive."""

    code = 16
    grpc_status = "FAILED_PRECONDITION"
    default_remedy = "start store daemons in more failure domains or lower min_replicas"


class DeadlineExceeded(CenoteError):
    """The call's deadline passed. Whether it took effect is unknown unless the message says so."""

    code = 17
    grpc_status = "DEADLINE_EXCEEDED"


class Unavailable(CenoteError):
    """The master or a store daemon can't be reached."""

    code = 18
    grpc_status = "UNAVAILABLE"
    retryable = True


class TlsFailed(Unavailable):
    """No TLS connection came to be: one side refuses the other's certificate, or speaks no TLS."""

    code = 35
    default_remedy = "compare tls_ca, tls_cert and tls_key on both sides"


class NotLeader(Unavailable):
    """This master is not the leader. `addresses` are those of the leader, and `epoch` is its
    tenure, where they are known."""

    code = 19

    def __init__(
        self,
        message: str = "",
        *,
        remedy: str | None = None,
        addresses: Sequence[str] = (),
        epoch: int = 0,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.addresses = tuple(addresses)
        self.epoch = epoch


class TenureEnded(NotLeader):
    """This master was the leader, and can't prove any more that it still is: it can't reach its
    metadata service. It answers lookups and refuses all that would change something."""

    code = 33
    default_remedy = (
        "clients look for another leader by themselves; check that the masters reach their metadata"
        " service (etcd), `cenote status` shows it"
    )


class StaleEpoch(CenoteError):
    """The request stems from an earlier leader's tenure than the one that this daemon follows."""

    code = 20
    grpc_status = "FAILED_PRECONDITION"
    retryable = True


class StaleLocation(CenoteError):
    """The bytes are no longer where the caller was told: ask the master again."""

    code = 21
    grpc_status = "FAILED_PRECONDITION"
    retryable = True


class GrantRevoked(CenoteError):
    """The writer was cut off, or its grant ended: nothing that it wrote since counts."""

    code = 22
    grpc_status = "ABORTED"
    retryable = True
    default_remedy = "put again"


class LeaseExpired(CenoteError):
    """The lease ended before the read did."""

    code = 23
    grpc_status = "FAILED_PRECONDITION"
    retryable = True
    default_remedy = "acquire again, with a longer ttl_s"


class SessionUnknown(CenoteError):
    """The master or daemon does not know this session (restarted, or expired); hello again."""

    code = 24
    grpc_status = "FAILED_PRECONDITION"
    retryable = True


class BufferInUse(CenoteError):
    """The deadline passed and a transfer may still touch this buffer: keep it until drained."""

    code = 25
    grpc_status = "ABORTED"


class Unauthenticated(CenoteError):
    """Credentials are missing or wrong."""

    code = 26
    grpc_status = "UNAUTHENTICATED"


class PermissionDenied(CenoteError):
    """The credentials are right but don't allow this."""

    code = 27
    grpc_status = "PERMISSION_DENIED"


class ClientClosed(CenoteError):
    """The client was closed."""

    code = 28
    grpc_status = "CANCELLED"
    default_remedy = "create a new Client"


class ForkedClient(CenoteError):
    """A Client made before os.fork() was used in the child."""

    code = 29
    grpc_status = "FAILED_PRECONDITION"
    default_remedy = "create the Client after the fork, in each process"


class ResourceUnavailable(CenoteError):
    """The machine can't give what was asked for (memory, a port, a lock, a file)."""

    code = 30
    grpc_status = "RESOURCE_EXHAUSTED"


class NodeSuperseded(CenoteError):
    """A later process of this store daemon has attached: what this one says is out of date."""

    code = 31
    grpc_status = "FAILED_PRECONDITION"
    default_remedy = "only one daemon can use a node's files: stop the other one, or this one"


class NodeNameTaken(CenoteError):
    """Another store daemon, which is alive, has attached under this node's name."""

    code = 32
    grpc_status = "ALREADY_EXISTS"
    default_remedy = "give each daemon a --name of its own; `cenote nodes` shows who is there"


class PoolMismatch(CenoteError):
    """A store daemon holds contents of another pool than this master's."""

    code = 34
    grpc_status = "FAILED_PRECONDITION"
    default_remedy = (
        "let the daemon's --master name the master of its pool; or, if what it holds is not wanted"
        " any more, remove the node's files and start it again"
    )


def _all_errors() -> dict[int, type[CenoteError]]:
    found: dict[int, type[CenoteError]] = {}
    todo: list[type[CenoteError]] = [CenoteError]
    while todo:
        cls = todo.pop()
        if cls.code in found:
            raise RuntimeError(f"{cls.__name__} and {found[cls.code].__name__} share a code")
        found[cls.code] = cls
        todo.extend(cls.__subclasses__())
    return found


ERRORS_BY_CODE: dict[int, type[CenoteError]] = _all_errors()


def error_from_code(code: int, message: str, remedy: str | None = None) -> CenoteError:
    """The typed error for a wire code; an unknown code (a newer peer) gives a plain CenoteError."""
    return ERRORS_BY_CODE.get(code, CenoteError)(message, remedy=remedy or None)
