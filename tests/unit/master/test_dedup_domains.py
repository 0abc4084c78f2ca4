"""Namespaces that hold each other's bytes: only where an administrator says so, and for a strong
proof."""

from __future__ import annotations

import pytest

from cenote.api.contents import domain_key
from cenote.api.errors import InvalidArgument
from cenote.api.rows import CommitStatus
from cenote.master import commands as c
from cenote.master.dedup_domains import domain_of, members_of
from cenote.master.state import StateConfig
from unit.master.dedup_kit import (
    aliases_of,
    commit_aliases,
    put_bytes,
    start_bytes,
    tickets_of,
    used_units,
)
from unit.master.state_checks import check
from unit.master.state_kit import KIB, Kit, new_node, restarted

DOMAINS = "models = a, b; other=c,d"


def kit_with(domains: str) -> Kit:
    """Namespace a has bytes 5 under key 0; b is open."""
    kit = Kit(StateConfig(dedup_domains=domains, session_granted_share_max=1.0))
    kit.with_nodes(new_node(1)).with_session()
    assert put_bytes(kit, [0], [5]) == 0
    kit.namespace = kit.apply(c.OpenNamespace("b", b"g", True, 1, 2))
    return kit


def test_domains_as_they_are_written() -> None:
    assert [domain_of(DOMAINS, name) for name in "abcde"] == [
        "models",
        "models",
        "other",
        "other",
        "",
    ]
    assert members_of(DOMAINS, "a") == ("b",)
    assert members_of(DOMAINS, "e") == ()
    assert domain_of("", "a") == ""
    for wrong in ("a,b", "x=", "=a", "x=a;x=b", "x=a;y=a", "x=a,a"):
        with pytest.raises(InvalidArgument):
            domain_of(wrong, "a")


def test_without_a_word_of_the_administrators_there_is_none() -> None:
    for domains in ("", "models=a", "models=a;other=b"):
        kit = kit_with(domains)
        assert not start_bytes(kit, [1], [5]).alias_grant_id


def test_a_strong_proof_makes_it_a_reference() -> None:
    kit = kit_with(DOMAINS)
    put = aliases_of(start_bytes(kit, [1], [5]), [1], KIB)
    strong = tickets_of(kit, put, [0], strong=True)
    assert commit_aliases(kit, put, [5], tickets=strong) == [CommitStatus.DECIDED]
    assert used_units(kit, kit.nodes[1]) == KIB // 64
    check(kit.state)
    after = restarted(kit, journal=kit.durable())
    after.restart_node(kit.nodes[1])
    check(after.state)
    assert used_units(after, after.nodes[1]) == KIB // 64


def test_a_proof_that_is_not_strong_does_not() -> None:
    kit = kit_with(DOMAINS)
    put = aliases_of(start_bytes(kit, [1], [5]), [1], KIB)
    weak = tickets_of(kit, put, [0])
    assert commit_aliases(kit, put, [5], tickets=weak) == [CommitStatus.NOT_GRANTED]
    assert kit.state.counters.dedup_unproven == 1
    check(kit.state)


def test_inside_a_namespace_either_does() -> None:
    for strong in (False, True):
        kit = kit_with(DOMAINS)
        kit.namespace = kit.apply(c.OpenNamespace("a", b"f", False, 1, 1))
        put = aliases_of(start_bytes(kit, [1], [5]), [1], KIB)
        tickets = tickets_of(kit, put, [0], strong=strong)
        assert commit_aliases(kit, put, [5], tickets=tickets) == [CommitStatus.DECIDED]


def test_a_namespace_that_is_reset_leaves_the_others_their_bytes() -> None:
    kit = kit_with(DOMAINS)
    put = aliases_of(start_bytes(kit, [1], [5]), [1], KIB)
    commit_aliases(kit, put, [5], tickets=tickets_of(kit, put, [0], strong=True))
    kit.apply(c.ResetNamespace("a", 9))
    for _ in range(5):
        kit.tick(0.1)
    check(kit.state)
    (hit,) = kit.get(1)
    assert hit is not None
    assert used_units(kit, kit.nodes[1]) == KIB // 64


def test_clients_are_told_by_which_key() -> None:
    config = StateConfig(dedup_domains=DOMAINS, pool_id=b"p" * 16)
    kit = Kit(config).with_nodes(new_node(1)).with_session()
    keys = [kit.state.dedup_key(name) for name in "abcde"]
    assert keys[0] == keys[1] == domain_key(kit.state.pool_id, "models")
    assert keys[2] == keys[3] != keys[0]
    assert keys[4] == b""
