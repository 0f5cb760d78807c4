"""`gyre gateway CONFIG`: the gateway alone, before inference servers of others, as a recorder for other people's trainers.

The run directory, the trees, the events and the exit codes are those of a run. What differs: the servers are given (`upstream.urls`) and
looked at before the first call; whoever trains uses the API of trainer.py in place of controller and supervisors; and executions outlive
the gateway. Invariants: a gateway that is started again on the same directory goes on with what lives, under the same secrets, whatever
ended the last one; a call that was in flight then is lost and leaves its execution's tree incomplete; `gateway.json` (mode 0600) is there
while it listens; SIGTERM and SIGINT end it in order: calls are broken visibly and recorded, what has ended is sealed, exit code 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from gyre_hpc.config import Config
from gyre_hpc.controller.live import LiveFile
from gyre_hpc.driver.disk import check_running, check_start
from gyre_hpc.driver.rundir import prepare
from gyre_hpc.driver.runlock import RENEW, RunLock
from gyre_hpc.engines.names import connector
from gyre_hpc.engines.probe import Wanted, examine
from gyre_hpc.engines.protocol import EngineAddress
from gyre_hpc.engines.upstream import UpstreamClient, Wire, root_of
from gyre_hpc.errors import ConfigError, ExitCode, GyreError, Resumable
from gyre_hpc.events import EventLog, read_events
from gyre_hpc.executions.kinds import KINDS, Told
from gyre_hpc.failure import as_failure
from gyre_hpc.gateway.declared import Declared
from gyre_hpc.gateway.ledger import Ledger
from gyre_hpc.gateway.main import MODEL_NAME, Gateway, Parts, prepare_process, stopped_by
from gyre_hpc.gateway.pump import EventPump
from gyre_hpc.gateway.redact import LogFile, log_to
from gyre_hpc.gateway.router import Router
from gyre_hpc.gateway.text.template import TurnRenderer
from gyre_hpc.gateway.trainer import TrainerApi
from gyre_hpc.paths import RunPaths
from gyre_hpc.report.recording import Rate, Screen
from gyre_hpc.runtime import Address, write_private
from trees.errors import StoreError
from trees.store import StoreReader, StoreWriter

log = logging.getLogger(__name__)
PROMPT = "The quick brown fox jumps over the lazy dog."
"""What the servers are asked for a few tokens of, before anything else."""
Say = Callable[[str], None]
PATIENCE = 3.0
"""Seconds without a word while servers are looked at."""


class Standalone(Gateway):
    """`keys`: executions that are begun at once, one a name, for whoever records by hand; `say` prints a line for people."""

    def __init__(
        self, paths: RunPaths, attempt: int, config: Config, host: str | None, keys: Sequence[str], harness: str, say: Say
    ) -> None:
        self._declared = Declared(paths.gateway_state)
        super().__init__(paths, attempt, config, self._declared.secret("api"), host)
        self._keys, self._harness, self._say = keys, harness, say
        self._address: Address | None = None
        self._api: TrainerApi | None = None
        self._begun_here: list[int] = []

    @property
    def counts(self) -> dict[str, Any]:
        """What is true now; empty until it listens."""
        return self._api.counts() if self._api is not None and self._address is not None else {}

    def _make_grace(self) -> None:
        """No driver, nobody else's step: a signal ends it."""

    async def _make_router(self, renderer: TurnRenderer) -> Router:
        upstream = self.config.upstream
        wires = await self._unless_stopped(self._look_at_servers(renderer))
        router = Router(connector=lambda address: UpstreamClient(address, wires[address.url]))
        for number, url in enumerate(upstream.urls):
            router.set_route(number, EngineAddress(upstream.kind, url, upstream.capacity, self.config.model.window))
            router.open(number)
        return router

    async def _look_at_servers(self, renderer: TurnRenderer) -> dict[str, Wire]:
        """How to speak to each, by URL."""
        upstream, wires = self.config.upstream, {}
        prompt = renderer.tokenizer.encode(PROMPT, add_special_tokens=False).ids
        decode = renderer.tokenizer.decode
        deadline, temperature = self.config.deadlines.start, self.config.rollout.temperature
        wanted = Wanted(self.config.model.window, temperature, prompt, lambda ids: str(decode(ids, skip_special_tokens=False)), deadline)
        key = api_key(upstream.key_variable)
        for number, url in enumerate(upstream.urls):
            log.info("looking at %s", url)
            wire = Wire(upstream.kind, upstream.model, partial(self._declared.version_of, number), key)
            wires[url] = await examine(url, wire, wanted)
            log.info("%s serves %s", url, wires[url].model)
        return wires

    async def _unless_stopped(self, looking: Coroutine[Any, Any, dict[str, Wire]]) -> dict[str, Wire]:
        """A server may take its time to come up; a signal ends the wait."""
        task, stop = asyncio.create_task(looking), asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([task, stop], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                servers, deadline = ", ".join(self.config.upstream.urls), self.config.deadlines.start
                self._say(f"waiting for {servers}, up to {deadline:g} s each (deadlines.start); Ctrl-C ends it")
                await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Resumable("stopped before the servers answered", "the same command goes on")
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.wait([task, stop])

    def _make_ledger(self, store: StoreWriter, pump: EventPump) -> Ledger:
        seed, token = self.config.run.seed, self._declared.secret
        return Ledger(store, pump.emit, self.config.gateway.retries, seed, token_of=lambda execution: token(f"execution {execution}"))

    def _make_api(self, parts: Parts) -> TrainerApi:
        self._api = TrainerApi(parts, self._declared, self._url, len(self.config.upstream.urls), self.config.model.window, self.paths.trees)
        return self._api

    def _url(self) -> str:
        return self._address.url if self._address is not None else ""

    def _take_over(self, kept: StoreReader, told: list[int], parts: Parts) -> None:
        """Executions that were live go on."""
        live = parts.ledger.recover(kept, told, keep=True)
        lost = sum(parts.recorder.resume(execution) for execution in live)
        log.info("recovered %s; %d calls were in flight when the last gateway ended, and are lost", parts.ledger.counts(), lost)
        if live:
            self._say(f"{len(live)} executions go on" + (f"; {lost} of their calls were lost with the last gateway" if lost else ""))

    async def _begun(self, parts: Parts, address: Address) -> None:
        self._address = address
        servers = ", ".join(self.config.upstream.urls)
        self._say(f"gateway at {address.url} before {servers}; run {self.paths.root}; its secret is in {self.paths.gateway}")
        for name in self._keys:
            await self._begin(parts, name)
        fields = {"url": address.url, "socket": address.socket, "pid": address.pid, "secret": self._declared.secret("api")}
        write_private(self.paths.gateway, fields)

    async def _begin(self, parts: Parts, name: str) -> None:
        """One execution for a harness that somebody starts by hand; the one of that name, if it lives."""
        ledger, api = parts.ledger, self._api
        if api is None:
            raise RuntimeError("the API is made before anything is begun")
        live = next((row["group"] for row in ledger.rows() if row["task"] == name and row["state"] == "live"), None)
        made = await api.make_group(name, 1, live, dict)
        for item in made["executions"]:
            self._begun_here.append(item["execution"])
            self._say(f"\n# {name} is execution {item['execution']}; to record a harness, in its shell:")
            for line in exports(self._told(item["secret"]), self._harness, self.paths.runtime(self.attempt) / f"home-{item['execution']}"):
                self._say(line)

    def _told(self, secret: str) -> Told:
        url = f"{self._url()}/x/{secret}"
        window = self.config.model.window
        return Told(url, secret, MODEL_NAME, window, window // 4, "TASK")

    def _chores(self, parts: Parts) -> list[Coroutine[Any, Any, None]]:
        upstream = self.config.upstream
        servers = enumerate(upstream.urls) if upstream.version_path else ()
        return [self._write_live(), *(self._follow_version(number, url) for number, url in servers)]

    async def _write_live(self) -> None:
        """For `gyre status`."""
        file, rate, failing = LiveFile(self.paths.live), Rate(), False
        while True:
            now = self.counts
            executions = {name: now[name] for name in ("queued", "live", "finished", "lost")}
            calls = {name: now[name] for name in ("in_flight", "held")}
            tokens = round(rate.of(int(now["tokens"]), time.monotonic()), 1)
            told = {"attempt": self.attempt, "version": now["version"], "roles": [], "tokens_per_second": tokens}
            error = file.write({**told, "executions": executions, "calls": calls})
            if error is not None and not failing:
                log.warning("%s: %s", self.paths.live, error)
            failing = error is not None
            await asyncio.sleep(file.period)

    async def _follow_version(self, number: int, url: str) -> None:
        """Which weights a server has, from itself."""
        upstream = self.config.upstream
        where, failing = root_of(url) + upstream.version_path, False
        key = api_key(upstream.key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession(connector=connector(), timeout=aiohttp.ClientTimeout(total=10.0), headers=headers) as session:
            while True:
                try:
                    async with session.get(where) as answer:
                        self._declared.told(number, int((await answer.json(content_type=None))["weight_version"]))
                    failing = False
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError, TypeError, KeyError) as error:
                    if not failing:
                        log.warning("%s does not tell a number as weight_version (%s %s)", where, type(error).__name__, error)
                    failing = True
                await asyncio.sleep(upstream.poll)

    async def _ending(self, parts: Parts) -> None:
        """What was begun by name for this gateway ends with it, without a score."""
        for execution in self._begun_here:
            if self._api is not None:
                await self._api.finish(execution, "finished", 0.0, False, "recorded by hand, without a score")


def api_key(variable: str) -> str:
    """The servers' API key. Raises ConfigError: the variable is not set."""
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"upstream.key_variable = {variable}, and that variable is not set", f"export {variable}=... in this shell")
    return key


def exports(told: Told, harness: str, home: Path) -> Iterator[str]:
    """Shell lines with which a harness finds the gateway; files that it wants are written below `home`, private."""
    launch = KINDS[harness].launch(told)
    for name, value in launch.env.items():
        yield f"export {name}={shlex.quote(value)}"
    for name, text in launch.files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
    if ".codex/config.toml" in launch.files:
        yield f"export CODEX_HOME={shlex.quote(str(home / '.codex'))}"
    if ".config/opencode/opencode.json" in launch.files:
        yield f"export OPENCODE_CONFIG={shlex.quote(str(home / '.config/opencode/opencode.json'))}"


def check_upstream(config: Config) -> None:
    """Raises ConfigError for what can't be recorded before."""
    upstream = config.upstream
    if not upstream.urls:
        raise ConfigError("upstream.urls is empty", "give the servers to record before: upstream.urls=[http://host:8000/v1]")
    wrong = [url for url in upstream.urls if not url.startswith(("http://", "https://"))]
    if wrong or len(set(upstream.urls)) < len(upstream.urls):
        raise ConfigError(f"upstream.urls has {(wrong or upstream.urls)[0]!r}", "give http:// or https:// URLs, each once")
    if any("@" in url.split("//", 1)[1].split("/", 1)[0] for url in upstream.urls):
        raise ConfigError("upstream.urls holds a password", "put it into a variable and its name into upstream.key_variable")
    cuts = {"top_p": 1.0, "top_k": 0}
    for name, neutral in cuts.items():
        if getattr(config.rollout, name) != neutral:
            raise ConfigError(
                f"rollout.{name} = {getattr(config.rollout, name)}", "servers give log-probs after the cut, which can't be trained on"
            )
    api_key(upstream.key_variable)


def run_gateway(config: Config, host: str | None = None, keys: Sequence[str] = (), harness: str = "command", show: bool = False) -> int:
    """Serve until a signal. Returns the exit code; raises GyreError for what stops it."""
    check_upstream(config)
    paths = prepare(config, alone=True)
    check_start(paths.root, config.run.min_free_mb)
    attempt = 1 + sum(event["kind"] == "run.start" for event in read_events(paths.events))
    events, began = EventLog(paths.events), time.monotonic()
    with RunLock(paths.lock) as lock, _logging(paths, attempt):
        events.emit("run.start", attempt=attempt, launcher="gateway", job=None, nodes=[], cells=[])
        status, code = "done", ExitCode.DONE
        try:
            prepare_process()
            uvloop.run(_serve(paths, attempt, config, host, keys, harness, lock, show))
        except Exception as raised:
            error = stopped_by(raised) if isinstance(raised, StoreError) else raised
            if not isinstance(error, GyreError):
                log.exception("the gateway ends")
            failure = as_failure("gateway", error)
            status, code = "stopped" if failure.exit_code == ExitCode.RESUMABLE else "failed", ExitCode(failure.exit_code)
            with contextlib.suppress(OSError):  # the disk may be what failed; the line and the exit code still tell
                events.emit("failure", what=failure.what, remedy=failure.remedy, attempt=attempt)
            raise failure.error() from None
        finally:
            paths.gateway.unlink(missing_ok=True)
            _remove(paths.runtime(attempt))
            with contextlib.suppress(OSError):
                events.emit("run.end", attempt=attempt, status=status, exit_code=int(code), seconds=round(time.monotonic() - began, 3))
                events.forget()
    return int(code)


async def _serve(
    paths: RunPaths, attempt: int, config: Config, host: str | None, keys: Sequence[str], harness: str, lock: RunLock, show: bool
) -> None:
    if (host or config.gateway.host) not in ("127.0.0.1", "localhost", "::1"):
        log.warning("listening beyond this machine: whoever has a secret of an execution can call the servers")
    with Screen(show) as screen:
        gateway = Standalone(paths, attempt, config, host, keys, harness, screen.say)
        if (host or config.gateway.host) not in ("127.0.0.1", "localhost", "::1"):
            screen.say("warning: other machines can reach this gateway; secrets travel unencrypted")
        beside = [
            asyncio.create_task(_renew(lock, paths.root, config.run.min_free_mb)),
            asyncio.create_task(screen.follow(lambda: gateway.counts)),
        ]
        serving = asyncio.create_task(gateway.run())
        try:
            done, _ = await asyncio.wait([serving, *beside], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a lock that was lost ends the gateway
        finally:
            for task in beside:
                task.cancel()
            if not serving.done():
                gateway.stop()
            await asyncio.wait([serving, *beside])
        serving.result()


async def _renew(lock: RunLock, root: Path, needed: int) -> None:
    """Show that we live, and see that there is room."""
    while True:
        await asyncio.sleep(RENEW)
        full = check_running(root, needed)
        if full is not None:
            raise full
        try:
            lock.renew()
        except OSError as error:
            raise Resumable(f"the run's lock can't be renewed: {error.strerror}", "the same command goes on") from None


@contextlib.contextmanager
def _logging(paths: RunPaths, attempt: int) -> Iterator[None]:
    folder = paths.attempt_logs(attempt)
    folder.mkdir(parents=True, exist_ok=True)
    paths.runtime(attempt).mkdir(parents=True, exist_ok=True, mode=0o700)
    with log_to(LogFile(folder / "gateway.log")):
        yield


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
