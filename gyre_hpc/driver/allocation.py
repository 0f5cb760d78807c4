"""Which nodes a run has, and which process goes where: pure functions of the scheduler's answers and the configuration.

Invariants: the driver, the gateway and rank 0 are on the first node; cells get whole nodes, by the network's topology where Slurm knows one
(topology.py), else in the order of the allocation; with one node more than the cells and the standalone ones need the controller has the
first node for itself; nodes beyond that are standalone ones as well, unless `cells.leftover` is off. The allocation is what `scontrol`
says now, not what SLURM_JOB_NODELIST said at the start (that one still lists dead nodes). Each question to Slurm is a pair: a command and a
parser.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gyre_hpc.config import CellsSection
from gyre_hpc.driver.topology import Topology, cut, parse_partition, parse_topology, partition_command, topology_command
from gyre_hpc.errors import ConfigError, GyreError

SCONTROL_TIMEOUT = 30.0

log = logging.getLogger("gyre.driver")


@dataclass(frozen=True)
class Allocation:
    """The nodes of this run in order. `job` is None without Slurm; `end` is in seconds since the epoch; `restarts` counts requeues."""

    nodes: tuple[str, ...]
    job: str | None = None
    restarts: int = 0
    end: float | None = None
    partition: str | None = None

    @property
    def launcher(self) -> str:
        """How processes are started here: "slurm" (srun) or "local" (mpiexec and plain children)."""
        return "local" if self.job is None else "slurm"


@dataclass(frozen=True)
class Placement:
    """The node of every MPI rank (rank 0 the controller, then the cells' ranks in order, then one for each standalone node).

    `cells`: the nodes of each; `switches`: those that each cell hangs on, empty without a topology; `idle` nodes only run agents.
    """

    ranks: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    standalone: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    topology: str = "none"
    switches: tuple[tuple[str, ...], ...] = ()

    @property
    def straddling(self) -> int:
        """Cells that hang on several switches."""
        return sum(len(switches) > 1 for switches in self.switches)

    def facts(self) -> dict[str, Any]:
        """Fields of the event `run.start`."""
        known = {"topology": self.topology, "switches": [list(names) for names in self.switches]} if self.topology != "none" else {}
        return {"cells": [list(nodes) for nodes in self.cells], "standalone": list(self.standalone), "idle": list(self.idle), **known}


def inside_slurm(env: Mapping[str, str] | None = None) -> bool:
    """Whether this process runs in an allocation."""
    return "SLURM_JOB_ID" in (os.environ if env is None else env)


def find_allocation() -> Allocation:
    """The allocation around this process, or this machine alone. Raises GyreError when Slurm doesn't answer."""
    if not inside_slurm():
        return Allocation((node_name(),))
    job = os.environ["SLURM_JOB_ID"]
    facts = parse_job(ask(job_command(job)))
    nodes = parse_hostnames(ask(hostnames_command(facts["NodeList"])))
    return Allocation(
        nodes, job, int(os.environ.get("SLURM_RESTART_COUNT", "0")), parse_time(facts.get("EndTime", "")), facts.get("Partition")
    )


def find_topology(partition: str | None) -> Topology:
    """What Slurm says of the job's partition; without an answer the allocation's order has to do, and the log says so."""
    try:
        name = parse_partition(ask(partition_command(partition))) if partition else None
        return parse_topology(ask(topology_command(name)))
    except GyreError as error:
        log.warning("no topology: %s", error.line)
        return Topology()


def node_name(env: Mapping[str, str] | None = None) -> str:
    """This node's name: Slurm's, since virtual nodes share one hostname, or the short hostname."""
    return (os.environ if env is None else env).get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def place(nodes: tuple[str, ...], cells: CellsSection, local: bool, topology: Topology | None = None) -> Placement:
    """Map ranks to nodes. Raises ConfigError if the allocation is too small; a single machine without Slurm holds everything."""
    width = cells.nodes_per_cell
    needed = cells.count * width + cells.standalone
    if local:
        groups, pool = (nodes[:1] * width,) * cells.count, nodes[:1] * cells.standalone
        return _placed(nodes[0], groups, pool, (), cells, Topology())
    if len(nodes) < needed:
        beside = f" and cells.standalone = {cells.standalone}" if cells.standalone else ""
        raise ConfigError(
            f"cells.count = {cells.count} with cells.nodes_per_cell = {width}{beside} needs {needed} nodes, "
            f"the allocation has {len(nodes)}",
            f"ask for --nodes={needed} (or {needed + 1}: the controller then has a node of its own), or lower cells.count",
        )
    topology = topology or Topology()
    own = nodes[1:] if len(nodes) > needed else nodes
    groups = cut(own, cells.count, width, topology, first=nodes[0])
    taken = {node for group in groups for node in group}
    rest = tuple(node for node in own if node not in taken)
    pool = rest if cells.leftover else rest[: cells.standalone]
    return _placed(nodes[0], groups, pool, rest[len(pool) :], cells, topology)


def _placed(
    first: str,
    groups: tuple[tuple[str, ...], ...],
    pool: tuple[str, ...],
    idle: tuple[str, ...],
    cells: CellsSection,
    topology: Topology,
) -> Placement:
    ranks = [node for group in groups for node in group for _ in range(cells.ranks_per_node)]
    switches = tuple(topology.leaves(group) for group in groups) if topology.kind != "none" else ()
    return Placement((first, *ranks, *pool), groups, pool, idle, topology.kind, switches)


# -- questions to Slurm -------------------------------------------------------------------------------------------------------
def job_command(job: str) -> list[str]:
    return ["scontrol", "--oneliner", "show", "job", job]


def parse_job(text: str) -> dict[str, str]:
    """`Key=value` pairs of `scontrol --oneliner show job`; the first line only (an array's id lists several)."""
    first = text.strip().split("\n")[0]
    return dict(pair.split("=", 1) for pair in re.findall(r"(?:^|(?<=\s))[A-Za-z][A-Za-z0-9/:_]*=\S*", first))


def hostnames_command(nodelist: str) -> list[str]:
    return ["scontrol", "show", "hostnames", nodelist]


def parse_hostnames(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def parse_time(text: str) -> float | None:
    """Slurm's local ISO time as seconds since the epoch; None for Unknown and the like."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def ask(command: list[str]) -> str:
    """Run a short Slurm client command with a deadline. Raises GyreError with what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_TIMEOUT, check=False)
    except FileNotFoundError:
        raise GyreError(f"{command[0]} is not on PATH, but SLURM_JOB_ID is set", "unset SLURM_JOB_ID to run without Slurm") from None
    except subprocess.TimeoutExpired:
        raise GyreError(
            f"`{' '.join(command)}` gave no answer in {SCONTROL_TIMEOUT:.0f} s", "the Slurm controller may be down; try again"
        ) from None
    if done.returncode:
        raise GyreError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}", "check SLURM_CONF and the job id")
    return done.stdout
