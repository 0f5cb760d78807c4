"""What the node where the driver runs must allow, looked at before anything of an attempt starts.

Invariants: a mistake is one ConfigError with the key, its value and what is allowed here; nothing is started, and the longest wait is the
resolver's own for a name. The submitting machine is another one: `inputs.py` looks there, at files only. Each supervisor tries a box with
the configured limits on its own node (executions/programs.py), for nodes may differ.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
from collections.abc import Sequence

from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError
from gyre_hpc.executions.bounds import check_bounds
from gyre_hpc.layout import PROCESSES_PER_CORE

LOCAL = ("127.0.0.1", "localhost", "::1")
"""With these the gateway listens on this node only."""

log = logging.getLogger("gyre.driver")


def check_node(config: Config, nodes: Sequence[str]) -> None:
    """Raises ConfigError when this node, the first of `nodes`, can't do what the configuration says."""
    check_address(config, nodes)
    check_bounds(config.harness, resource.getrlimit)
    check_threads(config, len(os.sched_getaffinity(0)))


def loose(config: Config, memory: int) -> list[str]:
    """Lines about limits of a box that bound nothing on a node with so many MiB of memory; for a person to read."""
    return [
        f"harness.{key} = {value} is more than the {memory} MiB of this node: {what} may take all of it, and what runs beside it is ended"
        for key, value, what in (
            ("memory_mb", config.harness.memory_mb, "one process of a box"),
            ("disk_mb", config.harness.disk_mb, "/tmp of a box, which is memory,"),
        )
        if value > memory
    ]


def check_address(config: Config, nodes: Sequence[str]) -> None:
    """Whether the name under which the others reach the gateway is one of this node: `gateway.host`, on several nodes the host's own."""
    if len(nodes) > 1:
        name = socket.gethostname()
        if not _addresses(name)[0]:
            raise ConfigError(
                f"this node's own name, {name}, does not resolve, and {len(nodes)} nodes are to reach the gateway by it",
                "mend /etc/hosts or the name service of the nodes",
            )
        return
    host = config.gateway.host
    if host in LOCAL:
        return
    found, why = _addresses(host)
    if not found:
        raise ConfigError(
            f"gateway.host = {host} does not resolve here ({why})", "a name or address of this node; 127.0.0.1: this node only"
        )
    if not any(map(_is_ours, found)):
        address = found[0][1][0]
        told = host if host == address else f"{host} is {address}, which"
        raise ConfigError(f"gateway.host = {told} is no address of this node", "a name or address of this node; 127.0.0.1: this node only")


def check_threads(config: Config, cores: int) -> None:
    """Some threads more than cores are slow; so many are more than a process may start."""
    most = PROCESSES_PER_CORE * cores
    for key, threads in (("rollout.threads", config.rollout.threads), ("training.threads", config.training.threads)):
        if threads > most:
            raise ConfigError(f"{key} = {threads} on a node with {cores} cores", f"at most {most} here; {cores} or fewer keep it quick")


_Found = tuple[socket.AddressFamily, tuple[str, int]]


def _addresses(name: str) -> tuple[list[_Found], str]:
    """What a name resolves to; empty with the reason."""
    try:
        told = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of it is longer than a name's may be
        return [], str(getattr(error, "strerror", None) or error)
    return [(family, (str(address[0]), 0)) for family, _, _, _, address in told], ""


def _is_ours(found: _Found) -> bool:
    family, address = found
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind(address)
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL  # what else may be in the way is told by the gateway itself
    return True
