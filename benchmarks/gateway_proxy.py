"""The gateway as a proxy: what a streamed call costs beside a plain pass-through, and how many are recorded durably in a second.

    python -m benchmarks.gateway_proxy [--calls 400] [--connections 32] [--chunks 24] [--wire frames|openai] [--profile]

A fake engine answers at once: 24 KB of text (6,000 tokens) in `--chunks` pieces. A load generator calls it over loopback, on one
connection, then on many: straight (*direct*), through a plain aiohttp pass-through that copies the same text (*plain*), and through the
gateway (dialect, recorder, store with its fsyncs, router, the real client of that engine). What stands in the middle has one core, the
load generator and the fake engine, each a process of its own, have another. Each call is a new conversation of 2 KB. *added* is the p50
beyond that of *direct*; CPU is that of the process in the middle, all of its threads; *disk* is what a commit of such a reply takes on the
same disk at that time. The gateway's engine speaks as `--wire` says (frames: 8 bytes a token, from our engines, vLLM among them; openai:
JSON of completions, from servers of others); the engine of the other two sends text alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import itertools
import os
import pstats
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import orjson
import uvloop
from aiohttp import web
from numpy.typing import NDArray

from benchmarks import vocabulary
from gyre_hpc.engines import frames
from gyre_hpc.engines.factory import connect
from gyre_hpc.engines.protocol import EngineAddress, EngineClient, TokenChunk
from gyre_hpc.engines.upstream import OPENAI, UpstreamClient, Wire
from gyre_hpc.gateway.app import HarnessApi, build_app
from gyre_hpc.gateway.recorder import Recorder, RecorderSettings
from gyre_hpc.gateway.router import Router
from gyre_hpc.gateway.text.template import TurnRenderer
from trees.records import Execution, Group
from trees.store import StoreWriter

REPLY = 24_000
"""Characters of a reply."""
SYSTEM = "You are an agent that works on software. " * 20
WINDOW = 32_768
EXECUTIONS = 64
START = 180.0
"""Seconds in which a process must listen: it reads a vocabulary."""
CORES = sorted(os.sched_getaffinity(0))
MIDDLE, EDGES = 0, -1
ROUNDS = 8
Row = dict[str, float]
Spent = NDArray[np.float64]
Bodies = Iterator[bytes]


def engine(port: int, chunks: int) -> None:
    """Fake of an inference server: the same reply to everything, at once."""
    tokenizer = TurnRenderer(vocabulary.directory()).tokenizer
    ids: list[int] = tokenizer.encode(vocabulary.corpus(REPLY) + "<|im_end|>", add_special_tokens=False).ids
    size = -(-len(ids) // chunks)
    parts = [ids[at : at + size] for at in range(0, len(ids), size)]
    answers: dict[str, list[bytes]] = {"frames": [], "openai": [], "text": []}
    for part in parts:
        finish = "stop" if part is parts[-1] else None
        logprobs = [-0.123456789 * (i % 7 + 1) for i in part]
        columns = np.array(part, np.int32), np.array(logprobs, np.float32), np.ones(len(part), np.int32)
        named = {"tokens": [f"token_id:{token}" for token in part], "token_logprobs": logprobs}
        choice = {"index": 0, "text": tokenizer.decode(part), "logprobs": named, "finish_reason": finish}
        answers["frames"].append(frames.frame(TokenChunk(*columns, finish)))
        answers["openai"].append(b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n")
        answers["text"].append(b"data: " + orjson.dumps({"delta": {"text": tokenizer.decode(part)}}) + b"\n\n")

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        wire = {"/generate": "frames", "/v1/completions": "openai"}.get(request.path, "text")
        kind = {"Content-Type": frames.MEDIA} if wire == "frames" else {}
        response = web.StreamResponse(headers=kind)
        await response.prepare(request)
        for event in answers[wire]:
            await response.write(event)
        await response.write_eof()
        return response

    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.post(path, answer) for path in ("/generate", "/v1/completions", "/x/{secret}/v1/messages", "/v1/messages")])
    app.add_routes([web.get("/cpu", _cpu)])
    _serve(app, port)


def plain(port: int, behind: int) -> None:
    """The pass-through."""

    async def forward(request: web.Request) -> web.StreamResponse:
        async with session[0].post(f"http://127.0.0.1:{behind}/v1/messages", data=await request.read()) as upstream:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def started(app: web.Application) -> None:
        session.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

    async def ended(app: web.Application) -> None:
        await session[0].close()

    session: list[aiohttp.ClientSession] = []
    app = web.Application(client_max_size=1 << 28)
    app.on_startup.append(started)
    app.on_cleanup.append(ended)
    app.add_routes([web.post("/x/{secret}/v1/messages", forward), web.get("/cpu", _cpu)])
    _serve(app, port)


class Secrets:
    """Fake of the ledger: executions by their number."""

    def execution_of(self, secret: str) -> int | None:
        """See gyre_hpc.gateway.app.Executions."""
        return int(secret)


def gateway(port: int, behind: int, wire: str, folder: Path, profile: bool) -> None:
    """The gateway, without control API and supervisors."""
    store = StoreWriter(folder)
    store.append(Group(0, "task", EXECUTIONS, 0, 0))
    for index in range(EXECUTIONS):
        store.append(Execution(store.allocate_execution(), 0, index, 0))
    renderer = TurnRenderer(vocabulary.directory())
    profiler = cProfile.Profile(time.thread_time)

    async def cpu(request: web.Request) -> web.Response:
        if profile:
            profiler.enable()
        return await _cpu(request)

    def client(address: EngineAddress) -> EngineClient:
        return connect(address) if wire == "frames" else UpstreamClient(address, Wire(OPENAI, "policy", lambda: 1))

    async def made() -> web.Application:
        router = Router(connector=client)
        router.set_route(0, EngineAddress("torch" if wire == "frames" else wire, f"http://127.0.0.1:{behind}", EXECUTIONS, WINDOW))
        router.open(0)
        recorder = Recorder(store, renderer, router, RecorderSettings(seed=1, window=WINDOW, max_calls=1 << 30), print)
        return build_app(HarnessApi(recorder, Secrets(), "policy"), [web.get("/cpu", cpu)])

    _serve(made(), port)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(32)


async def _cpu(request: web.Request) -> web.Response:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return web.Response(body=orjson.dumps([spent.ru_utime + spent.ru_stime, spent.ru_stime]))


def _serve(app: Any, port: int) -> None:
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, loop=uvloop.new_event_loop())


async def load(url: str, connections: int, calls: int, bodies: Bodies) -> Row:
    """Of the process at `url`: milliseconds of CPU a call (and of these in the kernel), latency (p50, ms), calls in a second.

    Each is that of the best of several rounds: what else runs on the machine can only make it worse.
    """
    times: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def cpu() -> Spent:
            async with session.get(f"{url}/cpu") as answer:
                return np.array(orjson.loads(await answer.read()))

        async def client(number: int, calls: int) -> None:
            for _ in range(calls):
                began = time.perf_counter()
                async with session.post(f"{url}/x/{number % EXECUTIONS}/v1/messages", data=next(bodies)) as answer:
                    got = await answer.read()
                times.append(time.perf_counter() - began)
                if answer.status != 200 or len(got) < REPLY:
                    raise SystemExit(f"{url}: {answer.status} {got[:200]!r}")

        await asyncio.gather(*(client(number, 2) for number in range(connections)))
        rounds: list[Row] = []
        for _ in range(ROUNDS):
            times.clear()
            before, began = await cpu(), time.perf_counter()
            await asyncio.gather(*(client(number, max(1, calls // connections // ROUNDS)) for number in range(connections)))
            seconds, (spent, kernel) = time.perf_counter() - began, (await cpu() - before) / len(times) * 1e3
            rounds.append({"cpu": float(spent), "kernel": float(kernel), "p50": median(times) * 1e3, "rate": len(times) / seconds})
    best = {"cpu": min, "kernel": min, "p50": min, "rate": max}
    return {name: pick(row[name] for row in rounds) for name, pick in best.items()}


def requests() -> Bodies:
    """Each a new conversation."""
    for number in itertools.count():
        message = {"role": "user", "content": f"Task {number}. " + "Say what you see in the folder and go on. " * 25}
        yield orjson.dumps({"model": "policy", "messages": [message], "system": SYSTEM, "max_tokens": 20_000, "stream": True})


@contextlib.contextmanager
def process(role: str, port: int, *more: str) -> Iterator[str]:
    """One of the three, in a process of its own."""
    pin(MIDDLE if role in ("plain", "gateway") else EDGES)  # a child inherits it
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.gateway_proxy", "--role", role, "--port", str(port), *more])
    pin(EDGES)
    try:
        until = time.monotonic() + START
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if child.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{role} ended, or did not listen within {START:.0f} s")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait(20)


def pin(place: int) -> None:
    """Run on one core from now on: the first or the last of those that we may use."""
    os.sched_setaffinity(0, {CORES[place]})


def disk(folder: Path, size: int) -> float:
    """Milliseconds (p50) of writing `size` bytes over room that is there and fdatasync."""
    times: list[float] = []
    with (folder / "probe").open("w+b") as file:
        file.write(bytes(64 * size))
        os.fsync(file.fileno())
        for at in range(64):
            began = time.perf_counter()
            os.pwrite(file.fileno(), bytes(size), at * size)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    (folder / "probe").unlink()
    return median(times) * 1e3


def free_port() -> int:
    """One that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(options: argparse.Namespace) -> None:
    """Measure both and print the table."""
    behind, bodies = free_port(), requests()
    rows: list[tuple[str, int, Row]] = []
    shared = ["--behind", str(behind), "--wire", options.wire]
    with process("engine", behind, "--chunks", str(options.chunks)) as direct, tempfile.TemporaryDirectory(dir=options.store) as folder:
        for connections in (1, options.connections):
            rows.append(("direct", connections, uvloop.run(load(direct, connections, options.calls, bodies))))
        for role in ("plain", "gateway"):
            more = ["--folder", folder, *(["--profile"] if options.profile and role == "gateway" else [])]
            with process(role, free_port(), *shared, *more) as url:
                for connections in (1, options.connections):
                    rows.append((role, connections, uvloop.run(load(url, connections, options.calls, bodies))))
        commits = [disk(Path(folder), size) for size in (600, 72_000)]
    print(f"\n{options.wire} wire, replies of {REPLY // 1000} KB in {options.chunks} pieces; cores {CORES[MIDDLE]} and {CORES[EDGES]}")
    print(f"disk: {commits[0]:.2f} ms for an intent, {commits[1]:.2f} ms for a reply\n")
    print(f"{'':>9} {'connections':>12} {'p50 ms':>8} {'added ms':>9} {'CPU ms a call':>14} {'in kernel':>10} {'calls/s':>9}")
    base = {connections: row["p50"] for role, connections, row in rows if role == "direct"}
    for role, connections, row in rows:
        added = f"{row['p50'] - base[connections]:.2f}" if role != "direct" else ""
        print(f"{role:>9} {connections:>12} {row['p50']:>8.2f} {added:>9} {row['cpu']:>14.2f} {row['kernel']:>10.2f} {row['rate']:>9.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--wire", choices=["frames", "openai"], default="frames")
    parser.add_argument("--store", help="a folder on the disk to record on, where temporary files are elsewhere")
    parser.add_argument("--profile", action="store_true", help="print where the gateway's time goes")
    for name in ("--role", "--port", "--behind", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.role == "engine":
        engine(int(asked.port), asked.chunks)
    elif asked.role == "plain":
        plain(int(asked.port), int(asked.behind))
    elif asked.role == "gateway":
        gateway(int(asked.port), int(asked.behind), asked.wire, Path(asked.folder), asked.profile)
    else:
        main(asked)
