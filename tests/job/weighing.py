"""Writes down what every trainer and every engine of a real run has for weights, after each step and each publication.

`python -m tests.job.weighing drive CONFIG` is `gyre run` whose ranks are the real ones, with a look after `Close` and `Update`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from gyre_hpc.config import load
from gyre_hpc.controller import main as ranks
from gyre_hpc.controller.cell import CellRank
from gyre_hpc.controller.messages import Close, Update
from gyre_hpc.driver import driver, rundir
from gyre_hpc.driver.programs import Programs
from gyre_hpc.engines.control import call
from gyre_hpc.processes import python


def _note(rank: CellRank, what: str, version: int, digest: str) -> None:
    with (rank.paths.root.parent / "weights.jsonl").open("a") as file:
        file.write(json.dumps({"cell": rank.place.cell, "what": what, "version": version, "digest": digest}) + "\n")


def hook() -> None:
    real_close, real_update = CellRank._close, CellRank._update

    def close(self: CellRank, message: Close) -> dict[str, Any]:
        report = real_close(self, message)
        if self.place.cell < message.prefix:
            assert self._actor is not None
            _note(self, "trainer", message.step, hashlib.blake2b(self._actor.snapshot().tobytes(), digest_size=16).hexdigest())
        return report

    def update(self: CellRank, message: Update) -> dict[str, Any]:
        report = real_update(self, message)
        for engine in report.get("engines", {}).values():
            found = call(f"{engine['url']}/digest", 10.0, method="GET")
            _note(self, "engine", found["version"], found["digest"])
        return report

    CellRank._close, CellRank._update = close, update  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        hook()
        sys.exit(ranks.main())
    made = rundir.prepare(load(Path(sys.argv[2])))
    sys.exit(int(driver.drive(made.root, programs=Programs(mpi=lambda: python("tests.job.weighing", "rank")))))
