"""Real clients, pinned, from npm and PyPI into a cache; installed once, whole or not at all.

A client that is not in the cache and whose registry does not answer skips its tests, as tests/skips.txt declares.
One that its registry knows and that can't be installed is a failure.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

DEADLINE = 240.0
"""Seconds for one installation."""
ANSWER = 20.0
"""Seconds in which a registry answers a question."""


@dataclass(frozen=True)
class Pin:
    """`package` of `registry` (npm or pypi) at `version`."""

    registry: str
    package: str
    version: str


PINS = {
    "claude-code": Pin("npm", "@anthropic-ai/claude-code", "2.1.332"),
    "codex": Pin("npm", "@openai/codex", "0.171.0"),
    "qwen-code": Pin("npm", "@qwen-code/qwen-code", "0.24.4"),
    "opencode": Pin("npm", "opencode-ai", "1.18.33"),
    "mini-swe-agent": Pin("pypi", "mini-swe-agent", "2.4.6"),
}


def cache() -> Path:
    """Below the cache folder that all of gyre_hpc uses."""
    return Path(os.environ.get("GYRE_CACHE") or Path.home() / ".cache" / "gyre_hpc") / "clients"


def installed(kind: str) -> Path:
    """The folder of a client, installed now if it is not there. Skips the test when that is not possible."""
    pin = PINS[kind]
    home = cache() / f"{kind}-{pin.version}"
    if home.is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.parent / f".{home.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # for at most DEADLINE: another test process installs it
        if not home.is_dir():
            _install(pin, home)
    return home


def _install(pin: Pin, home: Path) -> None:
    """Beside its place, then moved there whole."""
    fresh = home.parent / f".{home.name}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    for command in _commands(pin, fresh):
        failure = _failure(command, DEADLINE)
        if not failure:
            continue
        shutil.rmtree(fresh, ignore_errors=True)
        if silence := _failure(_question(pin), ANSWER):
            pytest.skip(f"{pin.package} {pin.version}: its registry does not answer: {silence}")
        pytest.fail(f"{pin.package} {pin.version} can't be installed: {failure}")
    if pin.registry == "pypi":
        _relocate(fresh, home)
    fresh.rename(home)


def _failure(command: list[str], deadline: float) -> str:
    """What went wrong, or an empty string."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else " ".join(done.stderr.split())[-300:] or f"exit {done.returncode}"


def _question(pin: Pin) -> list[str]:
    """Asks the registry for this very version."""
    if pin.registry == "npm":
        return ["npm", "view", f"{pin.package}@{pin.version}", "version"]
    return [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", f"{pin.package}=={pin.version}"]


def _commands(pin: Pin, folder: Path) -> list[list[str]]:
    spec = f"{pin.package}@{pin.version}" if pin.registry == "npm" else f"{pin.package}=={pin.version}"
    if pin.registry == "npm":
        return [["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", "--prefix", str(folder), spec]]
    return [[sys.executable, "-m", "venv", str(folder)], [str(folder / "bin" / "pip"), "install", "--quiet", spec]]


def _relocate(fresh: Path, home: Path) -> None:
    """Scripts of a venv name its interpreter by its path."""
    for script in (fresh / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            data = script.read_bytes()
            if str(fresh).encode() in data and b"\0" not in data:
                script.write_bytes(data.replace(str(fresh).encode(), str(home).encode()))
