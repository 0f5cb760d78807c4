"""Ports for programs that can't choose one themselves and bind it a while after it was chosen.

Below the kernel's ephemeral range (32768 and up), so that neither a client's own end of a connection nor a server that asks for any port
gets it meanwhile; each process of tests begins at a place of its own and never gives one twice.
"""

from __future__ import annotations

import os
import socket

_FIRST, _LAST = 10_000, 19_999  # the virtual Slurm cluster's are above (tests/slurm/cluster.py)
_next = _FIRST + os.getpid() * 101 % (_LAST - _FIRST)


def free_port() -> int:
    """One that nobody on this machine listens at."""
    global _next
    for _ in range(_LAST - _FIRST):
        port, _next = _next, _next + 1 if _next < _LAST else _FIRST
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise OSError(f"no free port from {_FIRST} to {_LAST}")
