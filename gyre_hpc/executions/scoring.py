"""The score of an execution: the task's own verifier, on the preserved workspace, in a fresh box.

Invariants: the verifier's files come from the task, never from the workspace; the workspace is stacked read-only under a layer that
is thrown away, so a score can be repeated; /logs/verifier is new and empty for every run, outside the agent's reach while it lived;
the reward is read after every process of the box is dead, from a regular file, as a finite number in [0, 1]. A verifier that fails
(timeout, crash, no reward, -1, no number) says nothing about the agent: it is run again, then the execution has no valid score.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import resource
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyre_hpc.config import Config, HarnessSection
from gyre_hpc.errors import GyreError
from gyre_hpc.executions import sandbox
from gyre_hpc.executions.bounds import within
from gyre_hpc.executions.workspace import Caps, Folder, copy, remove, usage

LOGS = "/logs/verifier"
TESTS = "/tests"
_SIGNALLED = 128
_MOST = 1 << 16


class Gradable(Protocol):
    """What scoring needs to know of a task."""

    @property
    def tests(self) -> Path:
        """Folder with test.sh and what it needs."""

    @property
    def verifier_timeout(self) -> float:
        """Seconds that the task allows its verifier."""


@dataclass(frozen=True)
class Verdict:
    """`score` in [0, 1] (0 when not valid). `reason`: scored, or why not; `attempts`: how often the verifier ran."""

    score: float
    valid: bool
    reason: str
    detail: str
    attempts: int


class Unusable(Exception):
    """The verifier left no reward that can be used; the text says why."""


def limits_of(harness: HarnessSection) -> sandbox.Limits:
    """The configured limits of a box, the agent's and the verifier's alike. A process has as much CPU as all cores give in the time of an
    execution, or as the node's own limit leaves it: what ends long ones is the clock."""
    size = harness.disk_mb << 20
    cpu = within(max(sandbox.Limits.cpu, math.ceil(harness.overall_timeout) * (os.cpu_count() or 1)), resource.RLIMIT_CPU)
    return sandbox.Limits(harness.processes, harness.memory_mb << 20, file=size, cpu=cpu, scratch=size, shared=size)


def caps_of(harness: HarnessSection) -> Caps:
    return Caps(size=harness.disk_mb << 20, entries=harness.inodes)


async def score(task: Gradable, folder: Folder, config: Config) -> Verdict:
    """Score a preserved workspace by the task's verifier, run again after a failure of its own `verifier.retries` times."""
    reason = detail = ""
    attempts = config.verifier.retries + 1
    for attempt in range(1, attempts + 1):
        try:
            return Verdict(await _verify(task, folder, attempt, config), True, "scored", "", attempt)
        except Unusable as why:
            reason, _, detail = str(why).partition(": ")
        except GyreError as error:
            reason, detail = "sandbox", error.what
    return Verdict(0.0, False, reason, detail, attempts)


def grade(task: Gradable, workspace: Path, config: Config | None = None) -> float:
    """The score of any folder, for the gate of an import. Raises GyreError when the verifier gives no valid score."""
    with tempfile.TemporaryDirectory(prefix="gyre-grade-") as temporary:
        folder = Folder(Path(temporary) / "gate")
        folder.root.mkdir()
        os.symlink(workspace.resolve(), folder.work)
        verdict = asyncio.run(score(task, folder, config or Config()))
    if not verdict.valid:
        raise GyreError(f"the verifier in {task.tests} gives no score: {verdict.reason} {verdict.detail}", "mend the task")
    return verdict.score


async def _verify(task: Gradable, folder: Folder, attempt: int, config: Config) -> float:
    work = folder.work.resolve()
    os.chmod(work, 0o755)  # an agent that closed its workspace is graded like any other
    logs = folder.verifier(attempt)
    remove(logs)
    logs.mkdir()
    host = sandbox.detect()
    limits = limits_of(config.harness)
    timeout = min(config.verifier.timeout, task.verifier_timeout)
    mounts = (sandbox.Mount(task.tests.resolve(), TESTS), sandbox.Mount(logs, LOGS, writable=True))
    with contextlib.ExitStack() as stack:
        if not host.overlay:
            if usage(work, caps_of(config.harness)).over:
                return 0.0  # nobody copies that; with an overlay it would be graded
            work = _copied(work, stack, caps_of(config.harness))
        box = sandbox.Box(work, overlay=host.overlay, mounts=mounts, limits=limits)
        with open(folder.root / f"verifier-{attempt}.log", "wb") as output:
            running = sandbox.start(host, box, ["/bin/bash", f"{TESTS}/test.sh"], output)
        ended = await running.wait(timeout)
    if ended.timed_out:
        raise Unusable(f"verifier-timeout: {timeout:g} s")
    if not ended.started or ended.code is None:
        raise Unusable("sandbox: the verifier's box could not be set up")
    if ended.code >= _SIGNALLED:
        raise Unusable(f"verifier-crash: signal {ended.code - _SIGNALLED}")
    return read_reward(logs)


def _copied(work: Path, stack: contextlib.ExitStack, caps: Caps) -> Path:
    """Where the kernel offers no overlay to us: a copy that the verifier may write to."""
    temporary = Path(tempfile.mkdtemp(prefix="gyre-verify-"))
    stack.callback(remove, temporary)
    subprocess.run(["chmod", "-R", "u+rwX", "--", str(work)], capture_output=True, check=False)
    copy(work, temporary, caps)
    return temporary


def read_reward(logs: Path) -> float:
    """The number in reward.json (`reward`, `score`, or its only entry) or reward.txt. Raises Unusable."""
    text = _regular(logs / "reward.json")
    if text is not None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise Unusable("verifier-reward: reward.json is not JSON") from None
        if isinstance(value, dict):
            value = next(
                (value[key] for key in ("reward", "score") if key in value), next(iter(value.values())) if len(value) == 1 else None
            )
    else:
        text = _regular(logs / "reward.txt")
        if text is None:
            raise Unusable("verifier-missing: no reward.json or reward.txt")
        try:
            value = float(text)
        except ValueError:
            raise Unusable("verifier-reward: reward.txt is not a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= 1:
        raise Unusable(f"verifier-reward: {str(value)[:60]} is not a number from 0 to 1")
    return float(value)


def _regular(path: Path) -> str | None:
    """Text of a small regular file; None when there is none. Raises Unusable for anything else of that name."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(f"verifier-reward: {path.name}: {error.strerror}") from None
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _MOST:
            raise Unusable(f"verifier-reward: {path.name} is no small regular file")
        return file.read(_MOST).decode(errors="replace")
