"""Every path of a run directory in one class (contract: docs/file-formats.md).

Invariant: no other module joins a run directory with a literal; a reader finds everything from the run directory alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """The files of one run below `root`."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def provenance(self) -> Path:
        return self.root / "provenance.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def live(self) -> Path:
        """A small JSON file, replaced atomically about once a second, with what is true now (roles, counters)."""
        return self.root / "live.json"

    @property
    def trees(self) -> Path:
        return self.root / "trees"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    @property
    def weights(self) -> Path:
        """Published weights, a Hugging Face directory per version; the newest two are kept."""
        return self.root / "weights"

    def weights_of(self, version: int) -> Path:
        return self.weights / f"version-{version:06d}"

    @property
    def workspaces(self) -> Path:
        return self.root / "workspaces"

    @property
    def tasks(self) -> Path:
        """Generated tasks in Harbor format, one directory each."""
        return self.root / "tasks"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt:03d}"

    @property
    def gateway(self) -> Path:
        """Address and secret of a gateway that runs alone (`gyre gateway`), while it does; mode 0600."""
        return self.root / "gateway.json"

    @property
    def gateway_state(self) -> Path:
        """Its key, from which all its secrets are derived, and the weight version that was declared last; mode 0600."""
        return self.root / "gateway.state"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def lock(self) -> Path:
        """Held by the driver that runs this directory now; names its host, pid and job."""
        return self.root / "driver.lock"

    def runtime(self, attempt: int) -> Path:
        """Addresses and secrets of one attempt's processes; mode 0700, removed at its end."""
        return self.root / "runtime" / f"attempt-{attempt:03d}"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of a write names no file (a full disk): whoever writes `path` names it for the line that the user reads."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
