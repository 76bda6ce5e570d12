"""The network that is simulated: InfiniBand HDR, as its vendor publishes it, in LogGP's terms.

The latency of an adapter is below 0.6 us end to end (ConnectX-6 VPI, product brief), here an
overhead of 0.3 us at each end. A switch takes less than 130 ns (QM8700, product brief), and a
message in a fat tree of three levels passes five of them. A port moves 200 Gb/s. The cost of one
look at MPI is our own estimate. LogGP is by Alexandrov et al., SPAA 1995.
"""

from __future__ import annotations

OVERHEAD = 0.3e-6  # seconds, o: per message at the sender and at the receiver
LATENCY = 5 * 0.13e-6  # seconds, L
BYTES_PER_SECOND = 25e9  # 1 / G
POLL = 0.2e-6  # seconds: one MPI_Test or MPI_Iprobe
#: Where ranks wait for seconds, a look may cost more: it only has to be short beside 50 ms.
LONG_POLL = 5e-6

__all__ = ["BYTES_PER_SECOND", "LATENCY", "LONG_POLL", "OVERHEAD", "POLL", "flight"]


def flight(size: int) -> float:
    """Return the seconds that a message of so many bytes is under way."""
    return LATENCY + size / BYTES_PER_SECOND
