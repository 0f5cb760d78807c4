"""`gyre init`: a configuration to start from, made of the defaults, so that it can't be out of date."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import yaml

from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError

HEAD = """\
# A run of gyre: every key with its default. Remove what you don't change; `gyre run {file} a.b=c` overrides single values.
# The run directory is runs/{name} unless run.dir says otherwise. Resumes when it is run again.
"""


def render(name: str) -> str:
    """The text: each section with the first line of its description above it."""
    parts = [HEAD.format(file=f"{name}.yaml", name=name)]
    defaults = Config().model_dump(mode="json")
    defaults["run"]["name"] = name
    for section, info in Config.model_fields.items():
        kind: Any = info.annotation
        about = (kind.__doc__ or "").strip().splitlines()
        parts.append(f"# {about[0]}\n" if about else "")
        parts.append(yaml.safe_dump({section: defaults[section]}, sort_keys=False) + "\n")
    return "".join(parts)


def write_template(name: str, folder: Path, force: bool) -> Path:
    """Write `NAME.yaml`; `name` may have that ending. Raises ConfigError for a bad name or an existing file.

    The file is there whole or not at all: a disk that is full leaves nothing, and an older file as it was.
    """
    name = name.removesuffix(".yaml")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{name!r} is no name for a run", "use letters, digits, dot, dash and underscore")
    path = folder / f"{name}.yaml"
    if path.exists() and not force:
        raise ConfigError(f"{path} exists", "choose another name, or --force")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(render(name))
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ConfigError(f"{path}: {error.strerror}", "free some space" if full else "go to a folder that you may write") from None
    return path
