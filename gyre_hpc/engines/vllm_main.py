"""vLLM's own server, `python -m gyre_hpc.engines.vllm_main` with its own arguments, and in all of its processes two waits mended.

- Engine core and worker wait for each other's messages in shared memory by `sched_yield` in a loop, for a second after the last one. Where
  threads outnumber cores, Linux makes who yields that often wait for its turn afterwards (6.18: a worker was runnable for 50 s and got
  0.2 s, in a hand-over that took 72 s). On CPUs they take naps instead; a GPU node has cores to spare, and spinning is the faster there.
- They wake each other by a ping that may get lost; the reader then looks again after 5 s (0.32.0). An engine that only waits for KV
  exchanges few messages, and every lost ping is 5 s of a hand-over: it looks more often.

Invariant: the top level runs in every process of the server before anything else of vLLM: those that it spawns import the main module anew.
"""

from __future__ import annotations

import logging
import runpy
import time

from gyre_hpc.importing import uncollected

with uncollected():
    import vllm.engine.arg_utils  # noqa: F401  # most of what each of the processes imports sooner or later
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

log = logging.getLogger(__name__)

SERVER = "vllm.entrypoints.openai.api_server"
LOOK = 20
"""Milliseconds until a reader looks whether a ping got lost."""
NAP = 2e-4
"""Seconds between two looks for a message that is about to come; a forward pass on a CPU takes ten times as long."""
_INTERVAL, _YIELD = "SHM_READER_RECHECK_INTERVAL_MS", "sched_yield"


def mend(cpu: bool) -> None:
    """How this process waits for messages of engine core or worker, from now on."""
    known = vars(shm_broadcast)
    if missing := {_INTERVAL, _YIELD} - set(known):
        log.warning("this vLLM has no %s: it may stall for seconds where threads outnumber cores", ", ".join(sorted(missing)))
    known[_INTERVAL] = LOOK
    if cpu:
        known[_YIELD] = _nap


def _nap() -> None:
    time.sleep(NAP)


mend(current_platform.is_cpu())

if __name__ == "__main__":
    runpy.run_module(SERVER, run_name="__main__")
