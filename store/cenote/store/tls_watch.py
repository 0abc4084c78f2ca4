"""A daemon's certificates, looked at while it runs, so that its log says soon what became of them.

Connections of before go on, also where another CA is trusted now: to close one under a request
would cost a miss. Whom the masters refuse then loses its session there, and with it these.
"""

from __future__ import annotations

import asyncio
from typing import Final

from cenote.security.tls import Tls

__all__ = ["wait_watching"]

LOOK_S: Final = 1.0


async def wait_watching(failed: asyncio.Future[None], tls: Tls | None) -> None:
    """Until `failed`, whose error is raised."""
    while tls is not None and not failed.done():
        await asyncio.wait([failed], timeout=LOOK_S)
        tls.refresh()
    await failed
