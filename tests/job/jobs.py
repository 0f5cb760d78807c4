"""Whole jobs for tests: the real system with the built-in model, made small by the configuration only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths

ROOT = Path(__file__).parents[2]
GYRE = [sys.executable, "-m", "gyre_hpc.cli"]
SMALL: dict[str, dict[str, Any]] = {
    "run": {"steps": 3, "min_free_mb": 1},
    "harness": {"compaction": 0.3, "sub_agent": 0.3, "retry": 0.3},
    "schedule": {"groups_per_step": 2, "group_size": 4, "phi": 0.5},
    "rollout": {"capacity": 8},
    "deadlines": {"start": 240, "transfer": 30, "step": 60, "idle": 60, "stop": 5},
}


@dataclass(frozen=True)
class Job:
    """One run directory and the configuration that made it."""

    config: Path
    paths: RunPaths

    def start(self, log: Path, *overrides: str) -> subprocess.Popen[bytes]:
        """`gyre run`, its output into `log`."""
        with open(log, "ab") as out:
            return subprocess.Popen([*GYRE, "run", str(self.config), *overrides], stdout=out, stderr=out, cwd=ROOT, start_new_session=True)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.paths.events) if event["kind"] == kind]

    def steps(self) -> list[int]:
        return [event["step"] for event in self.events("step.end")]

    def wait_for_steps(self, process: subprocess.Popen[bytes], steps: int, log: Path) -> None:
        """Until so many steps are done; fails with the log if the run ends before."""
        until(f"step {steps}", lambda: len(self.steps()) >= steps or process.poll() is not None, 300)
        assert process.poll() is None, log.read_text()

    def processes(self) -> list[psutil.Process]:
        """Everything that carries this run's mark, or its name in the command line, the test's own process left out."""
        return list(_of_run(self.paths.root))


def make(folder: Path, **sections: dict[str, Any]) -> Job:
    """A small job below `folder`; `sections` are laid over SMALL key by key."""
    run = folder / "run"
    tree = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {*SMALL, *sections}}
    tree["run"]["dir"] = str(run)
    config = folder / "job.yaml"
    config.write_text(yaml.safe_dump(tree))
    return Job(config, RunPaths(run))


def until(what: str, condition: Callable[[], object], seconds: float) -> None:
    """Poll; fails by name."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what} within {seconds} s"
        time.sleep(0.1)


def gyre(*arguments: str, check: bool = True, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Another `gyre` command."""
    done = subprocess.run([*GYRE, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    assert not check or done.returncode == 0, done.stderr
    return done


def gyre_json(*arguments: str) -> Any:
    return json.loads(gyre(*arguments, "--json").stdout)


def _of_run(root: Path) -> Iterator[psutil.Process]:
    mark = f"GYRE_ATTEMPT={root}/"
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
            if mark in environment or str(root) in " ".join(process.cmdline()):
                yield process
        except (OSError, psutil.Error):
            continue
