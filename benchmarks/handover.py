"""Pins and pulls between two vLLM servers on this machine: seconds of each, and what the engines' threads did meanwhile.

    python -m benchmarks.handover [--pulls 100] [--tokens 1500]

For a pull slower than `--slow` seconds it says of each process how long it ran and how long it was runnable without a core (Linux's
schedstat, of its main thread): who computes, who only waits for another process, and who waits for a core.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from gyre_hpc.engines.factory import connect
from gyre_hpc.engines.handover_nixl import NixlLink
from gyre_hpc.engines.protocol import EngineServer, GenerateRequest, Sampling
from tests.engines.models import VOCABULARY
from tests.engines.vllm_servers import Servers, processes_of, small_model

PATIENCE = 60.0


def ran(engines: list[EngineServer]) -> dict[str, tuple[float, float]]:
    """Of the main thread of each process: seconds on a core, seconds runnable and without one."""
    found = {}
    for name, engine in zip("ab", engines, strict=True):
        for process in processes_of(engine):
            on, off = Path(f"/proc/{process.pid}/task/{process.pid}/schedstat").read_text().split()[:2]
            title = " ".join(process.cmdline()).removeprefix("VLLM::").split()[0].rsplit("/", 1)[-1]
            found[f"{name} {title} {process.pid}"] = (int(on) / 1e9, int(off) / 1e9)
    return found


async def measure(engines: list[EngineServer], pulls: int, tokens: int, slow: float) -> None:
    links = [NixlLink(engine.address, PATIENCE) for engine in engines]
    clients = [connect(engine.address) for engine in engines]
    seconds: dict[str, list[float]] = {"pin": [], "pull": []}
    for i in range(pulls):
        source, destination = i % 2, 1 - i % 2
        rng = random.Random(i)
        prompt = [rng.randrange(VOCABULARY) for _ in range(tokens)]
        async for _ in clients[source].generate(GenerateRequest("warm", prompt, Sampling(1, 0.0))):
            pass
        before, began = ran(engines), time.monotonic()
        ticket = await links[source].pin(prompt)
        pinned = time.monotonic()
        async for _ in clients[destination].generate(GenerateRequest("pull", prompt, Sampling(1, 0.0), 0, ticket)):
            pass
        ended = time.monotonic()
        seconds["pin"].append(pinned - began)
        seconds["pull"].append(ended - pinned)
        if ended - pinned > slow:
            print(f"pull {i} from {'ab'[source]}: {ended - pinned:.2f} s")
            for name, (on, off) in ran(engines).items():
                print(f"    {name}: ran {on - before[name][0]:.2f} s, waited for a core {off - before[name][1]:.2f} s")
    for name, those in seconds.items():
        print(f"{name}: median {median(those):.3f} s, p90 {quantiles(those, n=10)[-1]:.3f} s, at most {max(those):.3f} s of {len(those)}")
    for link, client in zip(links, clients, strict=True):
        print(await link.counters())
        await link.close()
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pulls", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--slow", type=float, default=0.5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(small_model(Path(folder) / "model", 0))
        try:
            asyncio.run(measure(servers.start("a", "b"), asked.pulls, asked.tokens, asked.slow))
        finally:
            servers.stop()


if __name__ == "__main__":
    main()
