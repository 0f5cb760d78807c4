"""What a node allows its boxes, against the limits of the configuration: arithmetic on the kernel's own hard limits.

A box lowers its limits from the inside (sandbox.py); one above the hard limit of the process that starts it can't be set, and every box
would fail by it, one after the other. Slurm hands the hard limits of the machine that submitted on to the job (PropagateResourceLimits).
Invariant: what the user set is refused with the key; what we chose ourselves (CPU seconds, descriptors) follows the node.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

from gyre_hpc.config import HarnessSection
from gyre_hpc.errors import ConfigError

Hard = Callable[[int], tuple[int, int]]
"""As resource.getrlimit: (soft, hard), RLIM_INFINITY for none."""


def check_bounds(harness: HarnessSection, limit: Hard = resource.getrlimit) -> None:
    """Raises ConfigError for the first limit that no box on this node could have."""
    memory = resource.RLIMIT_AS if harness.kind == "bundled" else resource.RLIMIT_DATA
    for key, value, unit, kind in (
        ("processes", harness.processes, 1, resource.RLIMIT_NPROC),
        ("memory_mb", harness.memory_mb, 1 << 20, memory),
        ("disk_mb", harness.disk_mb, 1 << 20, resource.RLIMIT_FSIZE),
    ):
        hard = limit(kind)[1]
        if hard != resource.RLIM_INFINITY and value * unit > hard:
            raise ConfigError(
                f"harness.{key} = {value} is above this node's own limit",
                f"at most {hard // unit} here, or raise the node's hard limit ({_NAMES[kind]})",
            )


def within(wanted: int, kind: int, limit: Hard = resource.getrlimit) -> int:
    """`wanted`, or the node's hard limit where that is lower."""
    hard = limit(kind)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


_NAMES = {
    resource.RLIMIT_NPROC: "ulimit -Hu",
    resource.RLIMIT_AS: "ulimit -Hv",
    resource.RLIMIT_DATA: "ulimit -Hd",
    resource.RLIMIT_FSIZE: "ulimit -Hf",
}
