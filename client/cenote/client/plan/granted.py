"""What a batch was granted: by the answer to its PutStart, or ahead of it."""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import EXTENT, PUT, PUT_STRUCT, PutStatus
from cenote.v1 import master_pb2 as pb

from .asking import ask_master
from .grants import Grant
from .pieces import Placement, place_replicas, place_single
from .spares import SpareRun
from .state import Call
from .steps import Plan

__all__ = ["ONE_GRANTED", "Granted", "give_spares_back"]

I64 = NDArray[np.int64]

ONE_GRANTED: Final = PUT_STRUCT.pack(PutStatus.GRANTED, 1, 1, 0)
"""The PUT row of one replica in one extent: what all are, nearly always."""


@final
class Granted:
    """Places for some objects, and the right to fill them."""

    __slots__ = ("chain", "epoch", "grant", "key", "named", "placement", "positions", "replicas")

    def __init__(
        self,
        grant: Grant,
        epoch: int,
        placement: Placement,
        replicas: I64,
        positions: I64,
    ) -> None:
        self.grant = grant
        self.epoch = epoch
        self.placement = placement
        self.replicas = replicas
        """Per object."""
        self.positions = positions
        """Of each object in its grant."""
        self.key: object = grant.grant_id
        """Among the grants of its call."""
        self.named = True
        """Whether the master knows the keys; where not, the commit names them."""
        self.chain = False
        """What such a commit says of the keys."""

    @classmethod
    def by_answer(
        cls, call: Call, reply: pb.PutStartResponse, granted: I64, lengths: I64
    ) -> Granted:
        """`granted`: rows of the answer; `lengths`: of those, payload and key tail."""
        extents = np.frombuffer(reply.extents, EXTENT)
        count = len(lengths)
        placement: Placement
        if reply.puts == ONE_GRANTED * count and len(extents) == count:
            replicas = np.ones(count, np.int64)
            placement = place_single(extents, extents["length"].astype(np.int64), lengths)
        else:
            puts = np.frombuffer(reply.puts, PUT)[granted]
            replicas = puts["replicas"].astype(np.int64)
            placement = place_replicas(extents, puts["extents"].astype(np.int64), replicas, lengths)
        grant = Grant(reply.grant_id, call.state.session_id)
        return cls(grant, reply.epoch, placement, replicas, granted)

    @classmethod
    def ahead(cls, run: SpareRun, lengths: I64, *, chain: bool) -> Granted:
        """Spare extents for objects that fit them."""
        extents = run.grant.extents[run.start : run.stop].copy()
        extents["length"] = lengths
        placement = place_single(extents, lengths, lengths)
        replicas = np.ones(len(lengths), np.int64)
        positions = np.arange(run.start, run.stop)
        made = cls(run.as_grant(), run.grant.epoch, placement, replicas, positions)
        made.key = run
        made.named = False
        made.chain = chain
        return made

    def names(self, call: Call, digests: bytes, sizes: I64, tails: I64 | None) -> pb.SpareNames:
        """Of objects in spare extents, for their commit."""
        if not np.count_nonzero(sizes != sizes[0]):
            sizes = sizes[:1]
        return pb.SpareNames(
            keys=call.key_batch(digests),
            sizes=sizes.astype("<u8").tobytes(),
            tail_lengths=b"" if tails is None else tails.astype("<u2").tobytes(),
            chain=self.chain,
        )


def give_spares_back(call: Call) -> Plan[None]:
    """All spare extents, now: what is put needs the room."""
    for run in call.space.spares.take_all():
        grant = call.grants[run] = run.as_grant()
        request = pb.PutAbortRequest(
            grant_id=grant.grant_id, indexes=grant.indexes, session_id=grant.session_id
        )
        yield from ask_master(call, "put_abort", request, pb.PutAbortResponse)
        del call.grants[run]
