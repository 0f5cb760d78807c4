"""What every program of an execution has in common, ours or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyre_hpc.config import HarnessSection
from gyre_hpc.errors import ConfigError
from gyre_hpc.executions import sandbox

SOCKET = "/run/gyre/gateway.sock"
MODEL = "policy"
"""The model's name, the same in every run: some clients tell the model its name in their prompt."""
HARNESS = "/run/gyre/harness"
"""Where a box shows our own compiled files."""


@dataclass(frozen=True)
class Start:
    """How one execution's program is started in its box."""

    argv: Sequence[str]
    env: Mapping[str, str]
    mounts: tuple[sandbox.Mount, ...]


class Program(Protocol):
    """One program, made once per node; `bundled`: its exit codes are ours."""

    @property
    def bundled(self) -> bool: ...

    async def check(self, scratch: Path) -> str:
        """That it comes up in a box at all; its version. Raises GyreError with what it said."""
        ...

    def start(self, socket: Path, secret: str, seed: int, model: str, instruction: str) -> Start:
        """`socket`: the gateway's on this node; `secret`: the execution's identity there. A socket works through a read-only mount."""
        ...

    def limits(self, base: sandbox.Limits) -> sandbox.Limits:
        """The configured limits as this program can live with them."""
        ...


def binds(settings: HarnessSection) -> tuple[sandbox.Mount, ...]:
    """Mounts of `harness.binds`."""
    return tuple(sandbox.Mount(Path(path), path) for path in settings.binds)


def check_binds(settings: HarnessSection) -> None:
    """Raises ConfigError for one that is absent here."""
    absent = [path for path in settings.binds if not Path(path).exists()]
    if absent:
        raise ConfigError(f"harness.binds has {absent[0]}, which is not on this node", "name folders that all nodes have")
