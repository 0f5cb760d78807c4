"""A whole gateway (store, recorder, ledger, router, HTTP on TCP and a unix socket) around scripted engines, and clients in real boxes.

What is checked of every tree, whatever the scenario: the prompts that the engine saw are the paths of the tree; every token that was said
is in it, once, under the call that said it; nothing is missing, and no difference is `drift`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from gyre_hpc.config import Config
from gyre_hpc.configfile import check
from gyre_hpc.engines.factory import connect
from gyre_hpc.engines.protocol import EngineAddress, GenerateRequest, Sampling
from gyre_hpc.executions import programs, sandbox, scoring
from gyre_hpc.gateway.app import HarnessApi, build_app
from gyre_hpc.gateway.control import ControlApi
from gyre_hpc.gateway.ledger import Ledger
from gyre_hpc.gateway.main import MODEL_NAME, listening, settings_of
from gyre_hpc.gateway.recorder import Recorder
from gyre_hpc.gateway.router import Router
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.runtime import Address
from tests.harness.clients.install import installed
from tests.harness.clients.script import OTHERS, Script, ScriptedEngine
from trees.records import Fate, Group, Role
from trees.store import StoreReader, StoreWriter
from trees.tree import Call, Tree

CELLS = 2
CAPACITY = 8
OTHER_EXECUTIONS = 1_000_000
"""Ids of executions that no record knows begin here."""
SECRET = "control"
"""Bearer of the control API."""
FAULTS = 4
"""Engine faults in a row that the router bears on one call."""
DEADLINE = 150.0
"""Seconds that a client may take."""


@dataclass(frozen=True)
class Ran:
    """How a client ended. `code` None: it was stopped at the deadline."""

    code: int | None
    output: str
    work: Path
    execution: int
    seconds: float

    def file(self, name: str) -> str:
        """What the client left in its workspace; "" when there is no such file."""
        path = self.work / name
        return path.read_text() if path.is_file() else ""


@dataclass(frozen=True)
class Seen:
    """One request at the gateway: what a client really sends."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Bench:
    """The gateway's parts, for scenarios to move, and what came of it."""

    folder: Path
    config: Config
    script: Script
    engines: list[ScriptedEngine]
    router: Router
    ledger: Ledger
    recorder: Recorder
    address: Address
    requests: list[Seen] = field(default_factory=list)
    crowds: int = 0
    """Those behind which a call of a client waited."""

    async def run(
        self, instruction: str, files: Mapping[str, str] | None = None, deadline: float = DEADLINE, stop: asyncio.Event | None = None
    ) -> Ran:
        """Run the configured client on one execution, to its end (or until `stop`); then the execution is ended at the gateway."""
        self.ledger.dispatch([Group(len(list(self.folder.glob("work-*"))), "task", 1, 0, 0)])
        given, *_ = self.ledger.work("node", 1, [])
        record, secret = int(given["execution"]), str(given["secret"])
        root = self.folder / f"work-{record}"
        work, compiled = root / "w", root / "compiled"
        work.mkdir(parents=True)
        compiled.mkdir()
        for name, text in (files or {}).items():
            (work / name).write_text(text)
        program = programs.build(compiled, self.config)
        start = program.start(Path(self.address.socket), secret, 1, MODEL_NAME, instruction)
        limits = program.limits(scoring.limits_of(self.config.harness))
        box = sandbox.Box(work, mounts=start.mounts, env=start.env, limits=limits)
        with open(root / "output", "wb") as output:
            running = sandbox.start(sandbox.detect(), box, start.argv, output)
            if stop is not None:
                self.script.act(lambda: _kill(running, stop))
            ended = await running.wait(deadline)
        calls, tokens = await self.recorder.finish(record)
        self.ledger.end(record, "finished", 0.0, ended.code == 0 and calls > 0, ended.seconds, "", calls, tokens)
        await self.recorder.committer.commit()
        return Ran(ended.code, (root / "output").read_text(errors="replace"), work, record, ended.seconds)

    async def move(self, closed: int, opened: int) -> None:
        """A transfer of roles in mid-stream: one cell closes, the other opens when nothing runs on the first any more."""
        await self.router.close(closed, 10.0)
        self.router.open(opened)

    async def crowd(self, seconds: float) -> None:
        """The first engine is full with calls of other executions until a client's call has waited behind them for so long."""

        async def other(number: int) -> None:
            call = GenerateRequest(f"{OTHERS}{number}", [1], Sampling(1))
            async with contextlib.aclosing(self.router.generate(call, OTHER_EXECUTIONS + number)) as chunks:
                async for _ in chunks:
                    raise AssertionError("it is never answered")

        others = [asyncio.create_task(other(number)) for number in range(CAPACITY)]
        async with asyncio.timeout(DEADLINE):
            while self.engines[0].others < CAPACITY or self.router.counts()["held"] == 0:
                await asyncio.sleep(0.05)
        await asyncio.sleep(seconds)
        self.crowds += 1
        for task in others:
            task.cancel()
        await asyncio.wait(others)

    def tree(self, execution: int) -> Tree:
        """What a reader finds on the disk now."""
        return StoreReader(self.folder / "trees").tree(execution)

    def calls(self, ran: Ran) -> list[Call]:
        """The calls of an execution in order."""
        return [call for _, call in sorted(self.tree(ran.execution).calls.items())]

    def exact(self, ran: Ran, explained: tuple[str, ...] = ("clean",), unexpected: int = 0) -> Tree:
        """Check what must hold of every scenario (see above); `explained`: the differences that this one may have."""
        tree = self.tree(ran.execution)
        calls = {f"call-{call.call}": call for call in tree.calls.values()}
        assert not tree.incomplete
        assert calls.keys() == self.script.said.keys()
        for name, call in calls.items():
            said = self.script.said[name]
            assert tree.tokens_of(tree.path(call.prompt)).tolist() == said.asked.request.prompt
            sampled = tree.tokens_of([call.sampled]).tolist() if call.sampled >= 0 else []
            kept = len(sampled) if call.fate is Fate.CANCELLED else said.said  # a last chunk may be under way when it is cancelled
            assert sampled == said.tokens[:kept]
            assert kept <= said.said
            assert call.fate is not Fate.DELIVERED or said.said == len(said.tokens)
            assert call.sampled < 0 or tree.is_target(call.sampled) == (call.fate is Fate.DELIVERED)
        kinds = Counter(call.difference for call in calls.values())
        assert set(kinds) <= set(explained), f"differences {kinds}: {self.told(tree)}"
        assert len(self.script.unexpected) == unexpected, [asked.last[:300] for asked in self.script.unexpected]
        assert self.script.left == {}
        return tree

    def roles(self, ran: Ran) -> dict[str, list[Role]]:
        """Roles of the calls of each conversation of the script, in order."""
        found: dict[str, list[Role]] = {}
        for call in self.calls(ran):
            found.setdefault(self.script.said[f"call-{call.call}"].conversation, []).append(call.role)
        return found

    def usage(self, ran: Ran) -> list[tuple[int, int]]:
        """(tokens of the prompt, tokens sampled) of every call in order, by the tree."""
        tree = self.tree(ran.execution)
        return [(tree.path_length(call.prompt), tree.nodes[call.sampled].length) for call in self.calls(ran) if call.sampled >= 0]

    def told(self, tree: Tree) -> str:
        """All calls in a few words, for a look at a failure."""
        rows = sorted(tree.calls.items())
        return "\n".join(
            f"{n} {self.script.said[f'call-{n}'].conversation} {c.role.name} {c.difference} {c.fate} at {c.prompt}" for n, c in rows
        )


async def _kill(running: sandbox.Running, stop: asyncio.Event) -> None:
    await stop.wait()
    running.kill()


@contextlib.asynccontextmanager
async def bench(
    folder: Path,
    renderer: TurnRenderer,
    kind: str,
    tree: Mapping[str, Any] | None = None,
    faults: int = FAULTS,
    real: EngineAddress | None = None,
) -> AsyncIterator[Bench]:
    """`kind`: of the client, installed if need be; `tree`: further configuration, section by section; `faults`: see FAULTS.

    `real`: an engine that is none of ours here, in place of the scripted ones.
    """
    sections: dict[str, dict[str, Any]] = {
        "model": {"window": 200_000},
        "gateway": {"ping": 0.5},
        "harness": {"kind": kind, "path": str(installed(kind)), "max_tokens": 8192},
    }
    for name, values in (tree or {}).items():
        sections[name] = {**sections.get(name, {}), **values}
    config = check(sections, "test")
    script = Script(renderer)
    engines = [ScriptedEngine(script) for _ in range(CELLS)]
    addresses = [EngineAddress("scripted", str(cell), CAPACITY, config.model.window) for cell in range(CELLS)]
    router = Router(faults, cool_down=0.01, connector=connect if real else lambda address: engines[int(address.url)])
    for cell, address in enumerate([real] if real else addresses):
        router.set_route(cell, address)
    router.open(0)
    store = StoreWriter(folder / "trees")
    fatal: list[Exception] = []
    recorder = Recorder(store, renderer, router, settings_of(config), fatal.append)
    ledger = Ledger(store, lambda kind, fields: None)
    seen: list[Seen] = []
    control = ControlApi(ledger, router, recorder, SECRET, recorder.committer.commit)
    app = build_app(HarnessApi(recorder, ledger, MODEL_NAME, config.gateway.ping), control.routes())
    app.middlewares.insert(0, _looking(seen))
    async with listening(app, "127.0.0.1", 0, folder) as listens:
        try:
            yield Bench(folder, config, script, engines, router, ledger, recorder, listens, seen)
        finally:
            control.stop()
            for task in script.tasks:
                task.cancel()
            await recorder.close()
            await router.aclose()
            store.close()
    assert not fatal


def _looking(seen: list[Seen]) -> Any:
    @web.middleware
    async def look(request: web.Request, handler: Any) -> web.StreamResponse:
        seen.append(Seen(request.method, request.path_qs, dict(request.headers), await request.read()))
        response: web.StreamResponse = await handler(request)
        return response

    return look
