"""Bounds and counters of a lane server."""

from __future__ import annotations

from dataclasses import dataclass

from .frames import BODY_BYTES_MAX_DEFAULT

__all__ = ["LaneLimits", "LaneStats"]


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """Bounds of a lane server; all of them per connection unless the comment says otherwise."""

    connections_max: int = 4096  # of the server
    body_bytes_max: int = BODY_BYTES_MAX_DEFAULT  # of a request and of a reply
    partial_bytes_max: int = 256 << 20  # unfinished frames of all connections together
    inflight_max: int = 256  # requests whose reply is awaited; further ones wait unparsed
    frames_per_tick_max: int = 128  # then other connections have their turn
    tick_ms_max: float = 2.0  # likewise
    write_buffer_high_bytes: int = 1 << 20  # unsent replies beyond which no request is parsed
    write_buffer_bytes_max: int = 64 << 20  # beyond which the connection is cut
    deadline_ms_default: int = 5000  # for requests that name none
    hello_timeout_s: float = 5.0  # with TLS: for the handshake, and for the hello after it
    handshakes_max: int = 1024  # of the server, under way at once
    frame_timeout_s: float = 30.0  # for a frame to arrive whole once it has begun
    slow_reader_timeout_s: float = 10.0  # unsent replies above the mark for so long: cut
    spin_s: float = 0.0  # of the server: how long it looks for another request before it sleeps
    linger_s: float = 1.0  # for the peer to read a final error before the socket is closed


@dataclass(slots=True)
class LaneStats:
    """Plain counters, read by a metrics collector at scrape."""

    connections: int = 0  # now
    connections_total: int = 0
    connections_refused: int = 0  # over connections_max
    hellos_refused: int = 0
    handshakes_failed: int = 0  # of TLS
    handshakes_refused: int = 0  # over handshakes_max
    requests: int = 0
    errors: int = 0  # ERROR frames sent
    protocol_errors: int = 0  # connections closed for what they sent
    cut: int = 0  # connections cut for not reading
    spins: int = 0  # how often the loop began to look for a request before sleeping
    requests_spun_for: int = 0  # requests that came while it did
