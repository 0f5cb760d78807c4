"""Addresses and the secret of one attempt, as every process but the gateway learns them: the file that GYRE_RUNTIME names.

Invariants: the gateway writes `gateway.json` once it listens; the driver then writes `runtime.json` (mode 0600), complete, before it starts
anything that reads it. Both lie in RUN/runtime/attempt-NNN/.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from gyre_hpc.errors import GyreError

VARIABLE = "GYRE_RUNTIME"
SECRET_VARIABLE = "GYRE_SECRET"
GATEWAY_FILE = "gateway.json"
RUNTIME_FILE = "runtime.json"


@dataclass(frozen=True)
class Address:
    """Where the gateway listens: `url` from every node, `socket` (a unix socket path) on its own node; its pid there."""

    url: str
    socket: str
    pid: int


@dataclass(frozen=True)
class Runtime:
    """`secret` is the bearer of the control API; `gateway_url` is "http://host:port"; `gateway_socket` is valid on the first node.

    `standalone`: how many nodes only serve, those that the allocation had over included.
    """

    run_dir: Path
    attempt: int
    secret: str
    gateway_url: str
    gateway_socket: str
    standalone: int = 0

    def write(self, folder: Path) -> Path:
        """Write `runtime.json` atomically, readable by this user only; its path."""
        path = folder / RUNTIME_FILE
        write_private(path, {**asdict(self), "run_dir": str(self.run_dir)})
        return path

    @staticmethod
    def read(path: Path) -> Runtime:
        """Raises GyreError if the file is missing or not ours."""
        try:
            fields = json.loads(path.read_text())
            return Runtime(**{**fields, "run_dir": Path(fields["run_dir"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise GyreError(f"runtime file {path}: {error}", "start the run with `gyre run`") from None

    @staticmethod
    def from_environment() -> Runtime:
        """The runtime of this process. Raises GyreError outside a run."""
        path = os.environ.get(VARIABLE)
        if not path:
            raise GyreError(f"{VARIABLE} is not set", "this program is started by `gyre run`")
        return Runtime.read(Path(path))


def write_address(folder: Path, address: Address) -> None:
    """The gateway says that it listens."""
    write_private(folder / GATEWAY_FILE, asdict(address))


def read_address(folder: Path) -> Address | None:
    """Where the gateway of this attempt listens, or None as long as it doesn't."""
    try:
        return Address(**json.loads((folder / GATEWAY_FILE).read_text()))
    except FileNotFoundError:
        return None


def write_private(path: Path, fields: Mapping[str, object]) -> None:
    """Replace a JSON file atomically and durably; only this user can read it (mode 0600)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        json.dump(fields, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
