"""Which pool this is, what its daemons keep of it, and how one is rebuilt that lost its metadata.

A metadata directory, or a prefix in etcd, has an id, drawn when it began. Daemons keep it, with the
namespaces (ids, names, seeds), beside what they store. One that comes with another id belongs to
another pool, and is refused: here its contents would be cleared. But a master that has never had a
daemon and never decided a put has nothing to mix these up with: most likely its metadata were lost.
It takes over what the daemon knows, keeps that pool's id as an *ancestor*, begins an epoch above
all that the daemon has followed, and adopts slots of all earlier ones.

What nobody can know then, `NOTICE` says.
"""

from __future__ import annotations

from dataclasses import replace

from cenote.api.errors import PoolMismatch, Unavailable

from .commands import Attach, PoolCopy
from .effects import NamespaceOpened, Notice, PoolKnown
from .instructions import Instruction
from .namespaces import Namespace
from .nodes import Node
from .pool import Pool

__all__ = [
    "NOTICE",
    "begin_pool",
    "check_copy",
    "known_pool",
    "name_pool",
    "notice",
    "refuse_while_blank",
    "take_in_copy",
    "tell_namespace",
    "tell_pool",
]

ANCESTORS_MAX = 16
_NAMESPACE_IDS_MASK = 0x3FFF_FFFF
_SEED_STEP = 0x9E37_79B9_7F4A_7C15
_SEED_MASK = (1 << 64) - 1
_COPY_BYTES_MAX = 128 << 10
"""Of the namespaces in one instruction."""
NOTICE = (
    "the master's metadata were lost, and rebuilt from the store daemons: keys that were removed"
    " may have come back; pins, times to live and what was used last are forgotten; what daemons"
    " hold that have not attached yet is missing"
)


def begin_pool(pool: Pool) -> None:
    """Give it an id where its metadata have none: they begin, or are of an earlier release."""
    if not pool.pool_id and pool.config.pool_id:
        name_pool(pool, pool.config.pool_id)
        pool.effects.append(known_pool(pool))


def name_pool(pool: Pool, pool_id: bytes) -> None:
    pool.pool_id = pool_id
    pool.namespaces.ids_after = int.from_bytes(pool_id[:4]) & _NAMESPACE_IDS_MASK


def notice(pool: Pool) -> str:
    """What people should know of this tenure's pool; empty where there is nothing to say."""
    fresh = pool.rebuilt_epoch == pool.epoch or pool.adoption.below
    return NOTICE if pool.rebuilt_epoch and fresh else ""


def refuse_while_blank(pool: Pool) -> None:
    """What is taken away must stay away: it can't be told yet of what. Raises Unavailable."""
    if pool.pool_id and pool.is_blank:
        raise Unavailable(
            "no store daemon has ever attached to this master: what its pool holds is not known",
            remedy="start the store daemons, or wait until they are attached",
        )


def known_pool(pool: Pool) -> PoolKnown:
    return PoolKnown(pool.pool_id, list(pool.ancestors), pool.rebuilt_epoch, pool.adoption.below)


def check_copy(pool: Pool, command: Attach) -> None:
    """See that the daemon is of this pool, or that it may be. Raises PoolMismatch."""
    copy = command.pool
    if copy is None or copy.pool_id in (b"", pool.pool_id):
        return
    if not _is_related(pool, copy) and not (pool.pool_id and pool.is_blank):
        raise PoolMismatch(
            f"node {command.node_name!r} holds contents of pool {copy.pool_id.hex()[:8]}; "
            + (
                f"this master's is pool {pool.pool_id.hex()[:8]}, and in use"
                if pool.pool_id
                else "this master's metadata have no id (memory:)"
            )
        )
    _check_namespaces(pool, command.node_name, copy)


def _is_related(pool: Pool, copy: PoolCopy) -> bool:
    return not {pool.pool_id, *pool.ancestors}.isdisjoint([copy.pool_id, *copy.ancestors])


def take_in_copy(pool: Pool, command: Attach) -> None:
    """Learn what a daemon that was checked knows of its pool before this master's metadata."""
    copy = command.pool
    if copy is None or copy.pool_id in (b"", pool.pool_id):
        return
    related = _is_related(pool, copy)
    for opened in copy.namespaces:
        _learn(pool, command.node_name, opened)
    for quota in copy.quotas:
        if quota.namespace_id in pool.namespaces.by_id and not pool.quotas.knows(quota):
            pool.quotas.apply(quota)
            pool.effects.append(quota)
    ancestors = dict.fromkeys([*pool.ancestors, copy.pool_id, *copy.ancestors])
    pool.ancestors = [one for one in ancestors if one != pool.pool_id][:ANCESTORS_MAX]
    if not related:
        pool.rebuilt_epoch = pool.adoption.below = pool.epoch
        pool.effects.append(Notice(NOTICE))
    pool.effects.append(known_pool(pool))
    # Under the names that clients opened before, other namespaces may be meant now.
    pool.tell_all = True


def _check_namespaces(pool: Pool, node_name: str, copy: PoolCopy) -> None:
    """Two daemons must not contradict each other. Raises PoolMismatch."""
    for opened in copy.namespaces:
        known = pool.namespaces.by_id.get(opened.namespace_id)
        if known is None:
            continue
        same = known.name == opened.name and (
            known.generation != opened.generation
            or (known.digest_seed, known.fingerprint) == (opened.digest_seed, opened.fingerprint)
        )
        if not same:
            raise PoolMismatch(
                f"namespace {opened.namespace_id}, {opened.name!r} at generation"
                f" {opened.generation} as node {node_name!r} has it, is {known.name!r} at"
                f" generation {known.generation} here, with another seed or fingerprint"
            )


def _learn(pool: Pool, node_name: str, opened: NamespaceOpened) -> None:
    namespaces = pool.namespaces
    known = namespaces.by_id.get(opened.namespace_id)
    if known is not None:
        if known.generation >= opened.generation:
            return
        if pool.adoption.tombstones:
            # Keys were removed in a generation that was over, and may be there in the later one,
            # under other digests: neither counts any more.
            opened = replace(
                opened,
                generation=opened.generation + 1,
                digest_seed=(opened.digest_seed * _SEED_STEP + 1) & _SEED_MASK,
            )
            pool.effects.append(
                Notice(
                    f"namespace {opened.name!r} was reset before the metadata were lost, which node"
                    f" {node_name!r} alone knew, and keys were removed since: it is empty now"
                )
            )
    else:
        other = namespaces.by_name.get(opened.name)
        if other is not None and _is_used(pool, other):
            pool.effects.append(
                Notice(
                    f"namespace {opened.name!r} was opened anew before node {node_name!r} attached:"
                    " what that node holds of it is lost"
                )
            )
            return
    namespaces.apply(opened)
    pool.effects.append(opened)
    pool.sweep_at = 1


def _is_used(pool: Pool, namespace: Namespace) -> bool:
    """Whether something was put or removed (in any namespace: which one is not kept)."""
    if pool.namespaces.objects[namespace.incarnation] or pool.adoption.tombstones:
        return True
    return any(grant.namespace is namespace for grant in pool.grants.by_id.values())


# ---- what daemons keep ----------------------------------------------------------------------


def tell_pool(pool: Pool, node: Node) -> None:
    """Have a node keep everything that a rebuilt pool would need."""
    if not pool.pool_id:
        return
    part: list[NamespaceOpened] = []
    size = 0
    for namespace in pool.namespaces.by_id.values():
        opened = namespace.opened()
        part.append(opened)
        size += len(opened.name) + len(opened.fingerprint) + 40
        if size > _COPY_BYTES_MAX:
            _tell(pool, node, part)
            part, size = [], 0
    _tell(pool, node, part)


def tell_namespace(pool: Pool, opened: NamespaceOpened) -> None:
    """Have all nodes keep a namespace that is new, or was reset."""
    for node in pool.nodes.by_id.values():
        if pool.pool_id and node.attached:
            _tell(pool, node, [opened])


def _tell(pool: Pool, node: Node, namespaces: list[NamespaceOpened]) -> None:
    ids = {opened.namespace_id for opened in namespaces}
    quotas = [quota for number, quota in pool.quotas.by_id.items() if number in ids]
    copy = PoolCopy(pool.pool_id, list(pool.ancestors), namespaces, quotas)
    pool.instruct(node, Instruction(0, keep_pool=copy))
