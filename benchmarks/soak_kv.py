"""What a soak on vLLM looks at: KV blocks and leases that are left in engines which no call is in.

    python -m benchmarks.soak_kv drive CONFIG        (`gyre run`, whose ranks write RUN/../kv.jsonl; used by benchmarks/soak.py)

Three looks, all of them by vLLM itself:
- its prefix cache is dropped at each release and each load of weights. vLLM refuses that as long as one block of the pool is not free, so
  one that succeeds has counted all blocks; at the same moment its workers say which leases and pulls their NIXL connectors know;
- after a restore the engine serves one canary and no other call yet: the share of blocks in use that its metrics then tell must be 0;
- counters of leases that ended by their time, and of pulls and notifications that failed, are kept from every restore.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from gyre_hpc.engines import vllm_engine
from gyre_hpc.engines.control import text
from gyre_hpc.engines.vllm_engine import VllmEngine
from gyre_hpc.engines.vllm_worker import WorkerExtension

EXTENSION = "benchmarks.soak_kv.Leases"
NOTE = "kv.jsonl"
"""Beside the run directory: one line for each look."""
GAUGES = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
COUNTERS = tuple(f"vllm:nixl_num_{name}_total" for name in ("kv_expired_reqs", "failed_transfers", "failed_notifications"))
_DEADLINE = 30.0


class Leases(WorkerExtension):
    """Runs in vLLM's workers."""

    def soak_left(self) -> dict[str, int]:
        """Entries that the NIXL connector of this worker keeps for requests; all 0 when nobody hands over."""
        from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()
        worker = connector.connector_worker
        kept = {
            "leases": worker._reqs_to_send,
            "batch": worker._reqs_to_process,
            "pulls": worker._recving_transfers,
            "pulls_told": worker._recving_metadata,
            "failures": worker._recv_failures,
            "notices": worker._pending_recv_notifs,
        }
        return {name: len(entries) for name, entries in kept.items()}


def total(metrics: str, name: str) -> float | None:
    """Sum of a metric's samples in the text of a server's `/metrics`; None where it isn't told."""
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, found)) if found else None


def problems(lines: list[dict[str, Any]]) -> list[str]:
    """What the looks of one run found that should not be."""
    found = []
    for line in lines:
        kept = {name: value for name, value in line["left"].items() if value != 0}
        if kept:
            found.append(f"KV of engine {line['engine']} at {line['what']}: {kept}")
    return found


def _note(root: Path, engine: VllmEngine, what: str, left: dict[str, Any], counters: dict[str, float | None]) -> None:
    with (root / NOTE).open("a") as file:
        file.write(json.dumps({"engine": engine.pid, "what": what, "left": left, "counters": counters}) + "\n")


def hook(root: Path) -> None:
    """Engines of this process count from now on, into `root`."""
    real_command, real_reset, real_restore = vllm_engine.command, VllmEngine._reset_prefixes, VllmEngine.restore

    def command(*arguments: Any) -> list[str]:
        ours = "--worker-extension-cls="
        return [f"{ours}{EXTENSION}" if part.startswith(ours) else part for part in real_command(*arguments)]

    def reset(self: VllmEngine, deadline: float) -> None:
        real_reset(self, deadline)  # EngineFault where a block is in use
        for left in self._workers("soak_left", _DEADLINE):
            _note(root, self, "reset", left, {})

    def restore(self: VllmEngine, *arguments: Any) -> None:
        real_restore(self, *arguments)
        told = text(f"{self.address.url}/metrics", _DEADLINE)
        _note(root, self, "restore", {name: total(told, name) for name in GAUGES}, {name: total(told, name) for name in COUNTERS})

    vllm_engine.command = command
    VllmEngine._reset_prefixes, VllmEngine.restore = reset, restore  # type: ignore[method-assign]


def main() -> int:
    if sys.argv[1] == "rank":
        from gyre_hpc.controller import main as ranks

        hook(Path(sys.argv[2]))
        sys.argv[1:] = sys.argv[3:]
        return ranks.main()
    from gyre_hpc.configfile import load
    from gyre_hpc.driver import driver, rundir
    from gyre_hpc.driver.programs import Programs
    from gyre_hpc.driver.signals import Signals

    made = rundir.prepare(load(Path(sys.argv[2])))
    rank = [sys.executable, "-m", "benchmarks.soak_kv", "rank", str(made.root.parent)]
    return int(driver.drive(made.root, programs=Programs(mpi=lambda: rank), signals=Signals(last=True)))


if __name__ == "__main__":
    sys.exit(main())
