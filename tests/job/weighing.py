"""Writes down what every trainer and every engine of a real run has for weights, after each step and each publication.

`python -m tests.job.weighing drive CONFIG` is `gyre run` whose ranks are the real ones, with a look after `Close`, `Update` and a pull of
weights; with `late` in place of `drive` the first pull of cell 1 counts as too late, so that it fails.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from cells.reduce import Pending, start_receive
from cells.waiting import DeadlineExceeded
from gyre_hpc.configfile import load
from gyre_hpc.controller import main as ranks
from gyre_hpc.controller import snapshots
from gyre_hpc.controller.cell import CellRank
from gyre_hpc.controller.learner import Learner
from gyre_hpc.controller.messages import Close, Message, Update
from gyre_hpc.driver import driver, rundir
from gyre_hpc.driver.programs import Programs
from gyre_hpc.engines.control import call


def _note(rank: CellRank | Learner, what: str, version: int, digest: str) -> None:
    with (rank.paths.root.parent / "weights.jsonl").open("a") as file:
        file.write(json.dumps({"cell": rank.place.cell, "what": what, "version": version, "digest": digest}) + "\n")


def _never_in_time(*arguments: Any) -> Pending:
    """A real receive whose first wait finds nothing; what comes must be there for the next."""
    snapshots.start_receive = start_receive
    pending = start_receive(*arguments)

    def wait(name: str, deadline: float, log: Any) -> None:
        del pending.wait  # type: ignore[method-assign]
        raise DeadlineExceeded(name, 0.0)

    pending.wait = wait  # type: ignore[method-assign]
    return pending


def hook(late: bool) -> None:
    real_close, real_restore, real_handle = Learner.close, Learner.restore, CellRank._handle
    failed = False

    def restore(self: Learner, deadline: float) -> None:
        nonlocal failed
        if late and not failed and self.place.cell == 1:
            failed = True
            snapshots.start_receive = _never_in_time
        real_restore(self, deadline)
        _note(self, "pulled", -1, hashlib.blake2b(self.actor.snapshot().tobytes(), digest_size=16).hexdigest())

    def close(self: Learner, message: Close, *hear: Any) -> dict[str, Any]:
        report = real_close(self, message, *hear)
        if self.place.cell < message.prefix:
            _note(self, "trainer", message.step, hashlib.blake2b(self.actor.snapshot().tobytes(), digest_size=16).hexdigest())
        return report

    def handle(self: CellRank, message: Message) -> dict[str, Any]:
        report = real_handle(self, message)
        for engine in report.get("engines", {}).values() if isinstance(message, Update) else ():
            found = call(f"{engine['url']}/digest", 10.0, method="GET")
            _note(self, "engine", found["version"], found["digest"])
        return report

    Learner.close, Learner.restore, CellRank._handle = close, restore, handle  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1].startswith("rank-"):
        hook(late=sys.argv[1] == "rank-late")
        sys.exit(ranks.main())
    made = rundir.prepare(load(Path(sys.argv[2])))
    sys.exit(
        int(driver.drive(made.root, programs=Programs(mpi=lambda: [sys.executable, "-m", "tests.job.weighing", f"rank-{sys.argv[1]}"])))
    )
