"""A run directory is made once and continued ever after: the frozen configuration decides, not what the user has in hand today.

Invariants: RUN/config.yaml appears whole or not at all; a directory that holds something else is never adopted; a run continues with the
same configuration except for keys that change how long or where it runs, never what it learns (`FREE`). A change of those is an event.
Until the first group was dispatched there is nothing to protect, and any key may change: a typo in the first try costs no second folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gyre_hpc import configfile
from gyre_hpc.config import BUILTIN_MODEL, Config
from gyre_hpc.driver import provenance
from gyre_hpc.driver.runlock import live_holder, refusal
from gyre_hpc.durable import sync
from gyre_hpc.errors import ConfigError
from gyre_hpc.events import EventLog
from gyre_hpc.paths import RunPaths, naming
from trees.errors import StoreError
from trees.reader import StoreReader

# What may differ when a run continues: dotted keys or whole sections.
FREE = (
    "run.steps",
    "run.dir",
    "run.name",
    "run.min_free_mb",
    "deadlines",
    "slurm",
    "sweep",
    "checkpoint",
    "publication",
    "upstream",
    "gateway.host",
    "gateway.port",
    "cells.standalone",
    "cells.leftover",
    "rollout.threads",
    "rollout.canary",
    "training.threads",
    "training.activation_checkpointing",
    "training.attention",
    "training.tokens_per_microstep",
)


def prepare(config: Config, *, alone: bool = False) -> RunPaths:
    """Create the run directory of `config`, or check that it may continue there. Raises ConfigError.

    `alone`: for a gateway that records before servers of others (`upstream.urls`); a run has none of those.
    """
    config = resolve(config)
    paths = RunPaths(config.run_dir)
    if config.upstream.urls and not alone:
        raise ConfigError("upstream.urls names servers of others, a run starts its own", "take it out, or record with `gyre gateway`")
    if paths.config.exists():
        if bool(frozen(paths).upstream.urls) != alone and not _untouched(paths):
            whose = "gyre run" if alone else "gyre gateway"
            raise ConfigError(f"{paths.root} was made by `{whose}`", "set run.dir to a new folder")
        _continue(paths, config)
        return paths
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run directory {paths.root}: {error.strerror}", "set run.dir to a folder that you may write") from None
    ours = {"submitit", paths.provenance.name}  # a disk that was full may have stopped us behind these
    strange = sorted(p.name for p in paths.root.iterdir() if not p.name.startswith(".") and p.name not in ours)
    if strange:
        raise ConfigError(f"run directory {paths.root} holds {', '.join(strange[:3])} but no config.yaml", "set run.dir to a new folder")
    with naming(paths.root):
        provenance.write(paths)
        _freeze(config, paths)
    return paths


def resolve(config: Config) -> Config:
    """The same configuration with absolute paths: a job starts in another folder than the command that submitted it."""
    run = config.run.model_copy(update={"dir": config.run_dir.expanduser().absolute()})
    updates: dict[str, Any] = {"run": run}
    if config.model.path != BUILTIN_MODEL:
        updates["model"] = config.model.model_copy(update={"path": str(Path(config.model.path).expanduser().absolute())})
    if not config.tasks.source.startswith("builtin:"):
        updates["tasks"] = config.tasks.model_copy(update={"source": str(Path(config.tasks.source).expanduser().absolute())})
    return config.model_copy(update=updates)


def frozen(paths: RunPaths) -> Config:
    """The configuration that a run directory was frozen with. Raises ConfigError."""
    if not paths.config.exists():
        raise ConfigError(
            f"{paths.root} is not a run directory (no config.yaml in it)",
            "give the folder that `gyre run` made, for example runs/quickstart",
        )
    if not paths.config.stat().st_size:  # else all defaults would count, in silence
        raise ConfigError(f"{paths.config} is empty, a run's has every key", "restore it from a copy, or set run.dir to a new folder")
    try:
        return configfile.load(paths.config)
    except ConfigError as error:
        remedy = f"go on with the version of gyre that began the run (provenance.json), or mend that file: {error.remedy}"
        raise ConfigError(error.what, remedy) from None


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys with another value: (old, new)."""
    before, after = dict(_flat(old.model_dump(mode="json"))), dict(_flat(new.model_dump(mode="json")))
    return {key: (before.get(key), after.get(key)) for key in sorted({*before, *after}) if before.get(key) != after.get(key)}


def is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _continue(paths: RunPaths, config: Config) -> None:
    changed = differences(frozen(paths), config)
    bound = {key: values for key, values in changed.items() if not is_free(key)}
    if bound and not _untouched(paths):
        listed = ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in list(bound.items())[:4])
        more = f" and {len(bound) - 4} more" if len(bound) > 4 else ""
        raise ConfigError(
            f"{paths.root} was started with another configuration: {listed}{more}",
            f"set run.dir to a new folder, or undo the change; `gyre run {paths.root}` continues it as it is",
        )
    if changed:
        holder = live_holder(paths.lock)
        if holder is not None:
            raise refusal(paths.lock, holder)
        if bound:
            shutil.rmtree(paths.tasks, ignore_errors=True)  # made by the old configuration, and not dispatched
        _freeze(config, paths)
        events = EventLog(paths.events)
        events.emit("config.change", changes={key: list(values) for key, values in changed.items()})
        events.forget()


def _untouched(paths: RunPaths) -> bool:
    """Whether nothing was dispatched, trained or published yet: every attempt so far ended while it started."""
    if paths.checkpoints.exists() or paths.weights.exists():
        return False
    try:
        return not StoreReader(paths.trees).groups()
    except StoreError:  # damaged: what it held can't be told
        return False


def _freeze(config: Config, paths: RunPaths) -> None:
    temporary = paths.config.with_name(f".config.{os.getpid()}.yaml")
    with naming(paths.config):
        try:
            configfile.dump(config, temporary)
            sync(temporary)  # a name that survives a crash of the node must not stand for an empty file
            os.replace(temporary, paths.config)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync(paths.root)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
