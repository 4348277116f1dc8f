"""A scale model of a slower link: what one rank sends obeys a given number of bytes per second.

The link is a queue. A message of n bytes occupies it for n / rate after the message before; whoever
waits for the message sleeps until the link has carried it. Compute that runs in between hides it,
as on a real network. Only the sender's side is modelled: exchanges here are symmetric.
"""

from __future__ import annotations

import time

from megatron_dcp.errors import ConfigError


class LinkPacer:
    """Install as `engine.world.wire.pacer`. bytes_per_s: rate of this rank's link."""

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ConfigError(f"link rate is {bytes_per_s!r} bytes/s; it must be above 0")
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def post(self, nbytes: int) -> float:
        """Queue a message; returns the time (perf_counter seconds) at which it has been sent."""
        now = time.perf_counter()
        self._free_at = max(now, self._free_at) + nbytes / self.bytes_per_s
        return self._free_at

    def wait(self, deadline: float) -> None:
        """Sleep until the link has carried a message."""
        left = deadline - time.perf_counter()
        if left > 0:
            time.sleep(left)
