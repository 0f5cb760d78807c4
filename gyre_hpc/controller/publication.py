"""New weights for every engine that serves: written by the core, taken and checked by the engines while their calls are held.

They load the files, or receive the same weights from the core's memory (`publication.path`), each by itself or all in one broadcast; the
files are there before in all cases.

Ordering key: write, close, load, verify, reopen; the phases' seconds are told in that order. Invariants: no route is open while its engine
loads; routes open when every engine has told its version, those of later cells first: what waits goes there, and they stay in rollout
longest.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

from gyre_hpc.config import Config, DeadlinesSection
from gyre_hpc.controller.asking import Asking
from gyre_hpc.controller.messages import Command, Export, Update
from gyre_hpc.controller.transfers import set_routes
from gyre_hpc.engines.options import vllm_transfers
from gyre_hpc.errors import GyreError
from gyre_hpc.gateway.client import ControlClient
from gyre_hpc.paths import RunPaths

logger = logging.getLogger(__name__)


class Publisher:
    """Versions of one attempt, one after the other, by the path that the configuration names."""

    def __init__(self, asking: Asking, client: ControlClient, config: Config, paths: RunPaths, base_model: Path) -> None:
        self._asking, self._client, self._deadlines, self._paths = asking, client, config.deadlines, paths
        self.weights = base_model
        """The directory of the newest version that engines have."""
        self._offer, why = path_of(config.publication.path, config.rollout.engine, vllm_transfers())
        self._auto, self._chances = config.publication.path == "auto", 1
        logger.info("weights get into engines by %s (%s)", self._offer or "files", why)

    def publish(self, version: int, serving: Sequence[int], engines: int) -> Generator[None, None, dict[str, float]]:
        """See `publish`; of older versions only the last stays on disk."""
        directory = self._paths.weights_of(version)
        told = self._asking, self._client, self._deadlines, version, directory, serving, self._offer, engines, self._heard
        phases = yield from publish(*told)
        self.weights = directory
        for old in sorted(self._paths.weights.glob("version-*"))[:-2]:
            if old != directory:
                shutil.rmtree(old, ignore_errors=True)
        return phases

    def _heard(self, received: int) -> None:
        """How many engines took what was offered.

        What nobody can, as where NCCL finds no way, costs every publication its time, or its engines. So `auto` gives it up: at the first
        failure if it never went well, else at the second in a row (an engine may have died in it).
        """
        self._chances = 2 if received else self._chances - 1
        if self._auto and not self._chances:
            self._offer = ""
            logger.warning("no engine received the weights: from now on all of them load files (publication.path = auto)")


def publish(
    asking: Asking,
    client: ControlClient,
    deadlines: DeadlinesSection,
    version: int,
    directory: Path,
    serving: Sequence[int],
    offer: str = "",
    engines: int = 0,
    heard: Callable[[int], None] = lambda received: None,
) -> Generator[None, None, dict[str, float]]:
    """The core's weights to `directory`, then into every engine of the cells `serving`. Seconds of each phase; raises Resumable.

    `offer`, as in `Export`: the engines receive them from the core's memory (`receive`; `send` as the core saw it, in a broadcast `meet`
    before it; none where that can't be done). `engines`: how many serve in those cells. `heard` is told how many engines received
    them, once the offer is over (what the core has sent it counts by workers).
    """
    phases, clock = {}, time.monotonic()

    def lap(name: str) -> None:
        nonlocal clock
        phases[name], clock = round(time.monotonic() - clock, 4), time.monotonic()

    reports = yield from asking.agree(Export(version, str(directory), offer, engines), f"export of version {version}", deadlines.transfer)
    source = next((str(report["source"]) for report in reports if report.get("source")), "")
    lap("write")
    yield from asking.call(partial(client.close_routes, serving, deadlines.transfer))
    lap("close")
    # an engine that has to be started again may take so much longer
    patience = 1.5 * deadlines.transfer + deadlines.start
    reports = yield from asking.agree(Update(version, str(directory), tuple(serving), source), f"update to version {version}", patience)
    lap("load")
    for name in ("receive", "verify") if source else ("verify",):
        phases[name] = round(max((float(report.get(name, 0.0)) for report in reports), default=0.0), 4)
        phases["load"] = round(max(0.0, phases["load"] - phases[name]), 4)
    for cell in serving:
        yield from set_routes(asking, client, cell, reports[cell])
    yield from open_routes(asking, client, serving)
    lap("reopen")
    if source:
        answer = yield from asking.ask(0, Command("withdraw", version, "", deadlines.transfer), "end of the offer", deadlines.transfer)
        sent = (answer or {}).get("sent", {})
        received, fell_back = (sum(int(report.get(name, 0)) for report in reports) for name in ("received", "fell_back"))
        if engines:
            heard(received)
        phases["send"] = round(float(sent.get("seconds", 0.0)), 4)
        if offer == "broadcast":
            phases["meet"] = round(float(sent.get("meet", 0.0)), 4)
        if fell_back:
            logger.warning("version %d: %d engines loaded it from files, %d received it", version, fell_back, received)
    return phases


def path_of(wanted: str, engine: str, transfers: bool) -> tuple[str, str]:
    """(`Export.offer`, why) for `publication.path` and the kind of engine; `transfers`: vLLM is one for GPUs that has its own transfer."""
    if wanted != "auto":
        return "" if wanted == "files" else wanted, f"publication.path = {wanted}"
    if engine == "vllm" and transfers:
        return "broadcast", "auto: vLLM is on GPUs and has its weight transfer over NCCL"
    return "", f"auto: {engine} without GPUs, or without a weight transfer of its own over NCCL"


def hold_calls(asking: Asking, client: ControlClient, cells: Sequence[int], deadline: float) -> Generator[None, None, None]:
    """At the end: calls wait from here on. Their engines go before the agents do; each call would be moved, blamed and at last reset."""
    try:
        yield from asking.call(partial(client.close_routes, cells, deadline))
    except GyreError as error:  # the end does not depend on it
        logger.warning("calls go on while their engines end: %s", error.line)


def open_routes(asking: Asking, client: ControlClient, cells: Sequence[int]) -> Generator[None, None, None]:
    """Calls may go to these cells' engines."""
    yield from asking.calls([partial(client.open_route, cell) for cell in reversed(cells)])
