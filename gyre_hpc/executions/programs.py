"""The harness as a program in a box: our own small one here, real clients in foreign.py. What is in it, nothing else here knows.

Invariant: a program reaches the gateway through the unix socket alone; the secret in the URL is all that says who it is.
"""

from __future__ import annotations

import json
import py_compile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gyre_hpc import harness
from gyre_hpc.config import Config, HarnessSection
from gyre_hpc.errors import ConfigError, GyreError, Resumable
from gyre_hpc.executions import sandbox, scoring
from gyre_hpc.executions.foreign import Foreign
from gyre_hpc.executions.program import HARNESS, SOCKET, Program, Start, binds, check_binds

_MODULES = ("main", "wire", "tools", "texts")
_TRIAL = "import json, _socket, subprocess; subprocess.run(['/bin/sh', '-c', 'true | true'], check=True)"
"""What an agent does at the least: it comes up, and a tool of it is a shell with two programs."""
_PATIENCE = 60.0
"""Seconds for that: a file system where a thousand nodes start at once is slow."""


def build(folder: Path, config: Config, run: Path | None = None) -> Program:
    """The configured program; what has to be compiled for it goes into `folder`. `run`: the run's directory, which no box may show.
    Raises ConfigError."""
    for name, paths in (("path", [config.harness.path]), ("binds", config.harness.binds)):
        for path in filter(None, paths):
            if run is not None and run.resolve().is_relative_to(Path(path).resolve()):
                raise ConfigError(
                    f"harness.{name} has {path}, which holds the run's directory {run}",
                    "executions would see each other's work and the run's secrets: name a folder beside it",
                )
    if config.harness.kind == "bundled":
        return Bundled.build(folder, config.harness)
    return Foreign.build(folder, config.harness, config.model.window)


@dataclass(frozen=True)
class Bundled:
    """Our own small harness. `folder`: its compiled modules on this node (compiling at every start would cost more than running)."""

    folder: Path
    settings: HarnessSection

    bundled = True

    @staticmethod
    def build(folder: Path, settings: HarnessSection) -> Bundled:
        """Compile the harness into `folder`."""
        source = Path(harness.__file__).parent
        for name in _MODULES:
            py_compile.compile(str(source / f"{name}.py"), str(folder / f"{name}.pyc"), dfile=f"harness/{name}.py", doraise=True)
        return Bundled(folder, settings)

    async def check(self, scratch: Path) -> str:
        """Whether it comes up in a box as configured. Raises GyreError with what it said, ConfigError for an absent bind, and for limits
        that leave no room; Resumable where it takes too long, which no limit is to blame for."""
        check_binds(self.settings)
        said = await self._tried(scratch, scoring.limits_of(self.settings))
        if not said:
            return "bundled"
        if not await self._tried(scratch, sandbox.Limits()):
            s = self.settings
            raise ConfigError(
                f"harness.processes = {s.processes}, harness.memory_mb = {s.memory_mb}, harness.disk_mb = {s.disk_mb}: "
                f"nothing starts in such a box on this node: {said}",
                f"more of what lacks; the defaults do: {_defaults()}",
            )
        raise GyreError(
            f"{sandbox.interpreter()} does not start in a box: {said}",
            "name the folders that it needs (libraries of a module system, say) in harness.binds",
        )

    async def _tried(self, scratch: Path, limits: sandbox.Limits) -> str:
        """Empty, or what was said instead of starting."""
        box = sandbox.Box(scratch, overlay=sandbox.detect().overlay, mounts=binds(self.settings), limits=limits)
        with tempfile.TemporaryFile() as output:
            argv = [sandbox.interpreter(), "-I", "-S", "-c", _TRIAL]
            ended = await sandbox.start(sandbox.detect(), box, argv, output).wait(_PATIENCE)
            output.seek(0)
            said = " ".join(output.read().decode(errors="replace").split())[-300:]
        if ended.timed_out:
            raise Resumable(
                f"{sandbox.interpreter()} did not come up in a box within {_PATIENCE:.0f} s: {said or 'it said nothing'}",
                "see this node's load and the file systems in the box (harness.binds); the same command resumes",
            )
        return "" if ended.code == 0 else said or str(ended)

    def start(self, socket: Path, secret: str, seed: int, model: str, instruction: str) -> Start:
        """See Program."""
        argv = [sandbox.interpreter(), "-I", "-S", f"{HARNESS}/main.pyc", instruction]
        return Start(argv, self.environment(secret, seed, model), self.mounts(socket))

    def limits(self, base: sandbox.Limits) -> sandbox.Limits:
        """See Program."""
        return base

    def environment(self, secret: str, seed: int, model: str) -> Mapping[str, str]:
        """What the harness finds in its environment."""
        s = self.settings
        options = {
            "seed": seed,
            "compaction": s.compaction,
            "sub_agent": s.sub_agent,
            "retry": s.retry,
            "max_turns": s.max_turns,
            "max_tokens": s.max_tokens,
            "tool_delay": s.tool_delay,
            "tool_spread": s.tool_spread,
            "tool_timeout": s.tool_timeout,
            "tool_output": s.tool_output,
        }
        return {
            "ANTHROPIC_BASE_URL": f"http://gateway/x/{secret}",
            "ANTHROPIC_API_KEY": secret,
            "ANTHROPIC_MODEL": model,
            "GYRE_GATEWAY_SOCKET": SOCKET,
            "GYRE_HARNESS": json.dumps(options),
            **s.env,
        }

    def mounts(self, socket: Path) -> tuple[sandbox.Mount, ...]:
        """What it sees besides the system and its workspace. A socket can be connected to through a read-only mount."""
        return (*binds(self.settings), sandbox.Mount(self.folder, HARNESS), sandbox.Mount(socket, SOCKET))


def _defaults() -> str:
    """The limits of a box that a configuration has by itself."""
    return ", ".join(f"{name} {HarnessSection.model_fields[name].default}" for name in ("processes", "memory_mb", "disk_mb"))
