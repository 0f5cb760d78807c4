"""What a command is pointed at: a configuration, a run directory, a folder of trees. A wrong one is a ConfigError that says what to give.

Invariants: a folder that is named is meant, wherever it was when its configuration was frozen; who only looks at a run whose
configuration this version reads in part is warned, never refused. Imports what it needs when it is called: `gyre --help` reads this.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gyre_hpc.errors import ConfigError

if TYPE_CHECKING:
    from gyre_hpc.config import Config
    from gyre_hpc.paths import RunPaths


def configuration(config: Path, overrides: list[str] | None) -> Config:
    """Of a file, or of a run to continue, with `a.b.c=value` laid over it."""
    from gyre_hpc.configfile import load
    from gyre_hpc.driver.rundir import frozen
    from gyre_hpc.paths import RunPaths

    if config.is_dir():
        if not (config / "config.yaml").is_file():
            raise ConfigError(f"{config} is a folder without config.yaml", "give a YAML file, or the directory of a run to continue")
        frozen(RunPaths(config))  # what is wrong without the overrides is no matter of theirs
        loaded = load(config / "config.yaml", overrides or [])
        # a copy must not run its original
        return loaded.model_copy(update={"run": loaded.run.model_copy(update={"dir": config})})
    return load(config, overrides or [])


def run_of(run_dir: Path) -> RunPaths:
    """The run that lives there."""
    from gyre_hpc.paths import RunPaths

    paths = RunPaths(run_dir)
    if not paths.config.exists():
        raise ConfigError(
            f"{run_dir} is not a run directory (no config.yaml in it)", "give the folder that `gyre run` made, for example runs/quickstart"
        )
    warn_of_version(run_dir)
    return paths


def trees_of(path: Path) -> Path:
    """The folder of trees: that of a run, or the path itself."""
    from gyre_hpc.paths import RunPaths

    inside = RunPaths(path).trees
    folder = inside if inside.is_dir() else path
    if not folder.is_dir():
        problem = "is no folder" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {problem}", "give a run directory, or a folder of trees")
    return folder


def warn_of_version(path: Path) -> None:
    """Of a run's configuration that this version reads in part only: who looks at it must not be misled."""
    from gyre_hpc.paths import RunPaths
    from gyre_hpc.viewing import see

    paths = RunPaths(path)
    warning = see(paths.config).warning if paths.config.exists() else None
    if warning is not None:
        print(f"gyre: {paths.root}: {warning}; what stands for them here are the defaults", file=sys.stderr, flush=True)
