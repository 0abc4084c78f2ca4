"""Store daemons as the master knows them, and what each was told to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from .commands import EndpointInfo
from .effects import NodeKnown
from .instructions import Instruction
from .node_counters import NodeCounters

__all__ = ["Node", "NodeState", "Nodes", "rdma_trouble"]


class NodeState(IntEnum):
    """Numbers of NodeState in common.proto. SUSPECT is per host: a node's own state never is."""

    ALIVE = 1
    SUSPECT = 2
    DEAD = 3
    DRAINING = 4
    DETACHED = 5


@dataclass(slots=True)
class Node:
    node_id: int
    uuid: bytes
    name: str
    boot_id: str
    failure_domain: str
    endpoints: list[EndpointInfo] = field(default_factory=list)
    state: NodeState = NodeState.ALIVE
    draining: bool = False
    """It is to be left: given nothing new, and what it holds moves elsewhere."""
    drain_bandwidth: int = 0
    drained: bool = False
    """It holds nothing more, and is committed nothing any more."""
    attached: bool = False
    """In this epoch. Until then its segments can be read, but nothing in them be reused."""
    unanswered: bool = False
    """It is hidden since it did not answer a probe: it comes back when it answers one."""
    heard_s: float = 0.0
    process_id: int = 0
    start_number: int = 0
    """Of the process that attached last in this epoch."""
    ticket_key: bytes = b""
    """By which tickets of that process are known; see `aliases`."""
    last_seq: int = 0
    first_grant_id: int = 0
    """When that process attached first; see AttachReply."""
    server_version: str = ""
    segment_ids: list[int] = field(default_factory=list)
    unverified: frozenset[int] = frozenset()
    """Indexes of its segments whose contents no lease proves: they outlived a daemon or a leader,
    and their checksums are being taken anew."""
    suspect_until_s: dict[str, float] = field(default_factory=dict)
    """By boot id of the host that reported it."""
    counters: NodeCounters = field(default_factory=NodeCounters)
    quarantined_session_ids: list[bytes] = field(default_factory=list)
    """Sessions that it could not cut off yet (a stopped process)."""
    instructions: list[Instruction] = field(default_factory=list)
    """Not reported as done, oldest first."""
    cutting: set[bytes] = field(default_factory=set)
    """Sessions that these tell it to cut off."""
    last_instruction: int = 0

    @property
    def domain(self) -> str:
        return self.failure_domain or self.boot_id or self.name

    @property
    def up_state(self) -> NodeState:
        """Its state while it is heard of."""
        return NodeState.DRAINING if self.draining else NodeState.ALIVE

    @property
    def is_readable(self) -> bool:
        return self.state in (NodeState.ALIVE, NodeState.DRAINING)

    def instruct(self, instruction: Instruction) -> None:
        """Queue an instruction; its number is set here."""
        self.last_instruction += 1
        instruction.number = self.last_instruction
        self.instructions.append(instruction)
        self.cutting.update(instruction.cut_sessions or ())

    def done(self, number: int) -> None:
        """Instructions up to this one were carried out."""
        if number > self.last_instruction:
            return
        self._keep([i for i in self.instructions if i.number > number])

    def forget_instructions(self) -> None:
        """What they were about is gone."""
        self._keep([])

    def forget_copies(self) -> None:
        """Copies that it was told to make have no place any more."""
        self._keep([i for i in self.instructions if i.copies is None and i.pulls is None])

    def _keep(self, instructions: list[Instruction]) -> None:
        if len(instructions) == len(self.instructions):
            return
        self.instructions = instructions
        self.cutting = {s for i in instructions for s in i.cut_sessions or ()}

    def known(self) -> NodeKnown:
        return NodeKnown(self.node_id, self.uuid, self.name, self.boot_id, self.failure_domain)


class Nodes:
    __slots__ = ("_ids_max", "by_id", "by_uuid", "suspects")

    def __init__(self) -> None:
        self.by_id: dict[int, Node] = {}
        self.by_uuid: dict[bytes, Node] = {}
        self.suspects = 0
        """Pairs of node and host under suspicion (ended ones until the next tick)."""
        self._ids_max = 0

    def new_id(self) -> int:
        return self._ids_max + 1

    def apply(self, known: NodeKnown) -> Node:
        node = self.by_uuid.get(known.node_uuid)
        if node is None:
            node = Node(
                known.node_id, known.node_uuid, known.name, known.boot_id, known.failure_domain
            )
            self.by_uuid[node.uuid] = node
            self.by_id[node.node_id] = node
            self._ids_max = max(self._ids_max, node.node_id)
        else:
            node.name = known.name
            node.boot_id = known.boot_id
            node.failure_domain = known.failure_domain
        return node

    def suspected_by(self, boot_id: str, now_s: float) -> set[int]:
        """Ids of nodes that this host should not use just now."""
        if not self.suspects:
            return set()
        return {
            node.node_id
            for node in self.by_id.values()
            if node.suspect_until_s.get(boot_id, now_s) > now_s
        }

    def end_suspicions(self, now_s: float) -> None:
        left = 0
        for node in self.by_id.values():
            if node.suspect_until_s:
                node.suspect_until_s = {
                    host: until for host, until in node.suspect_until_s.items() if until > now_s
                }
                left += len(node.suspect_until_s)
        self.suspects = left


def rdma_trouble(nodes: Iterable[Node]) -> str:
    """What is wrong with RDMA: of the first node that says so, and how many do besides; else ''."""
    found = [n for n in nodes if n.attached and n.is_readable and n.counters.rdma_trouble]
    if not found:
        return ""
    others = f" (and {len(found) - 1} more nodes)" if len(found) > 1 else ""
    return f"{found[0].name}: {found[0].counters.rdma_trouble}{others}"
