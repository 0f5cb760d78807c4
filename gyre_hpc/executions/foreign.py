"""A real client as the program of an execution: found where it is installed, started in a box behind a forwarder to the gateway.

Invariants: the client reaches the gateway at 127.0.0.1:PORT of its own box and nothing else anywhere; its HOME holds the files of
its kind only and is gone with the box; its installation is read-only at its own path (scripts name their interpreter by it).
"""

from __future__ import annotations

import json
import py_compile
import resource
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gyre_hpc import harness
from gyre_hpc.config import HarnessSection
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.executions import sandbox
from gyre_hpc.executions.bounds import within
from gyre_hpc.executions.kinds import INSTRUCTION, KINDS, Kind, Launch, Told
from gyre_hpc.executions.program import HARNESS, SOCKET, Start, binds, check_binds

PORT = 9747
"""Of the forwarder, in every box: below the ephemeral range, and none that a task's own servers are likely to want."""
_START = 60.0
"""Seconds in which a client tells its version: most read some hundred MiB for it."""
_FILES = 4096
_PROCESSES = 512
"""At least: threads count, and a client has some dozens before its first tool runs."""
_SCRATCH = 1 << 30
"""Bytes of /tmp at least: clients unpack libraries there and keep their sessions in HOME."""
_FILE = 1 << 30


@dataclass(frozen=True)
class Foreign:
    """`folder`: where the compiled forwarder is; `program`: the client's file, with node before it where node runs it."""

    settings: HarnessSection
    window: int
    folder: Path
    program: tuple[str, ...]
    mounted: tuple[sandbox.Mount, ...]

    bundled = False

    @staticmethod
    def build(folder: Path, settings: HarnessSection, window: int) -> Foreign:
        """Find the client and compile the forwarder into `folder`. Raises ConfigError when it is not installed there."""
        source = Path(harness.__file__).parent / "forward.py"
        py_compile.compile(str(source), str(folder / "forward.pyc"), dfile="harness/forward.py", doraise=True)
        kind = KINDS[settings.kind]
        check_binds(settings)
        mounted = list(binds(settings))
        program: tuple[str, ...] = ()
        if settings.path:
            root = Path(settings.path).resolve()
            if not root.exists():
                raise ConfigError(f"harness.path = {settings.path} is not on this node", "install the program where all nodes see it")
            mounted.append(sandbox.Mount(root, str(root)))
            if Path(settings.path) != root and Path(settings.path).is_absolute() and not settings.path.startswith("/usr/"):
                mounted.append(sandbox.Mount(root, settings.path))  # a link, as homes are: scripts may know it by this name
            program = (str(root),) if root.is_file() else _found(root, kind, settings.kind)
        if kind.node and program and not program[0].endswith("node"):
            node = _node()
            program = (str(node), *program)
            if not node.is_relative_to("/usr"):
                mounted.append(_installed(node))
        return Foreign(settings, window, folder, program, tuple(mounted))

    async def check(self, scratch: Path) -> str:
        """Its version, asked of it in a box. Raises GyreError with what it said instead, ConfigError where its prompt has no room."""
        kind = KINDS[self.settings.kind]
        if self.window < kind.prompt + self.settings.max_tokens:
            raise ConfigError(
                f"model.window = {self.window} has no room for {self.settings.kind}: its own prompt has about {kind.prompt} tokens, "
                f"an answer up to harness.max_tokens = {self.settings.max_tokens}",
                "a window of 64000 or more, and a model that was made for it",
            )
        version = kind.version
        if not version:
            return self.settings.argv[0]
        limits = self.limits(sandbox.Limits(processes=self.settings.processes, memory=self.settings.memory_mb << 20))
        box = sandbox.Box(scratch, overlay=sandbox.detect().overlay, mounts=self.mounted, limits=limits)
        with tempfile.TemporaryFile() as output:
            ended = await sandbox.start(sandbox.detect(), box, [*self.program, *version], output).wait(_START)
            output.seek(0)
            said = " ".join(output.read().decode(errors="replace").split())
        if ended.code != 0:
            raise GyreError(
                f"{self.program[-1]} does not start in a box: {said[-300:] or ended}",
                "name the folders that it needs in harness.binds, or raise harness.memory_mb",
            )
        return said[:100]

    def start(self, socket: Path, secret: str, seed: int, model: str, instruction: str) -> Start:
        """See Program."""
        s = self.settings
        url = f"http://127.0.0.1:{PORT}/x/{secret}"
        # Clients would take a text that begins with a dash (a list, say) for options of theirs.
        instruction = f"\n{instruction}" if instruction.startswith("-") else instruction
        told = Told(url, secret, model, self.window, s.max_tokens, instruction, s.stable)
        launch = KINDS[s.kind].launch(told)
        argv = [*self.program, *launch.argv, *(part.replace(INSTRUCTION, instruction) for part in s.argv)]
        forward = [sandbox.interpreter(), "-I", "-S", f"{HARNESS}/forward.pyc"]
        mounts = (*self.mounted, sandbox.Mount(self.folder, HARNESS), sandbox.Mount(socket, SOCKET))
        return Start([*forward, *argv], {**_environment(launch), **s.env}, mounts)

    def limits(self, base: sandbox.Limits) -> sandbox.Limits:
        """Big runtimes reserve address space, open many files and unpack themselves."""
        return replace(
            base,
            reserving=True,
            processes=within(max(base.processes, _PROCESSES), resource.RLIMIT_NPROC),
            files=within(max(base.files, _FILES), resource.RLIMIT_NOFILE),
            scratch=max(base.scratch, _SCRATCH),
            file=within(max(base.file, _FILE), resource.RLIMIT_FSIZE),
        )


def _environment(launch: Launch) -> Mapping[str, str]:
    spec = {"port": PORT, "socket": SOCKET, "files": dict(launch.files)}
    return {**launch.env, "GYRE_FORWARD": json.dumps(spec)}


def _found(root: Path, kind: Kind, name: str) -> tuple[str, ...]:
    for pattern in kind.programs:
        for path in sorted(root.glob(pattern)):
            if path.is_file():
                return (str(path),)
    raise ConfigError(f"no {name} in harness.path = {root}", f"install it there: none of {', '.join(kind.programs)} is found")


def _node() -> Path:
    node = shutil.which("node")
    if node is None:
        raise ConfigError("this harness needs node, which is not in PATH", "load or install Node.js on all nodes")
    return Path(node).resolve()


def _installed(node: Path) -> sandbox.Mount:
    """Node with the libraries beside it (PREFIX/bin/node); alone where PREFIX has more in it than an installation (a home, or /)."""
    prefix = node.parents[1]
    shown = node if node.parent.name != "bin" or Path.home().resolve().is_relative_to(prefix) else prefix
    return sandbox.Mount(shown, str(shown))
