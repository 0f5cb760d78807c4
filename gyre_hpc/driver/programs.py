"""The command lines of the processes of a run. Tests put small programs of their own in their place; nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc.processes import python


def _gateway(run_dir: Path, attempt: int, host: str | None) -> list[str]:
    reach = ["--host", host] if host else []
    return python("gyre_hpc.gateway.main", "--run-dir", str(run_dir), "--attempt", str(attempt), *reach)


def _supervisor(node: str) -> list[str]:
    return python("gyre_hpc.executions.supervisor", "--node", node)


def _mpi() -> list[str]:
    return python("gyre_hpc.controller.main")


def _model() -> list[str]:
    return python("gyre_hpc.driver.making")


@dataclass(frozen=True)
class Programs:
    """Builders of argv: gateway(run directory, attempt, its host's name for other nodes or None), supervisor(node),
    mpi() (the same line for every rank), model() (makes the built-in model unless it is cached)."""

    gateway: Callable[[Path, int, str | None], list[str]] = _gateway
    supervisor: Callable[[str], list[str]] = _supervisor
    mpi: Callable[[], list[str]] = _mpi
    model: Callable[[], list[str]] = _model
