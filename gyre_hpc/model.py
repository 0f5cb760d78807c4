"""Which directory `model.path` means: a Hugging Face causal-LM directory, or the small model that the recipe builds and caches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from gyre_hpc.config import BUILTIN_MODEL, Config
from gyre_hpc.errors import ConfigError


def model_directory(config: Config, progress: Callable[[str], None] = lambda line: None) -> Path:
    """The policy's directory; builds the built-in one if it is not cached yet. Raises ConfigError with the remedy."""
    name = config.model.path
    if name == BUILTIN_MODEL:
        from gyre_hpc.policy.recipe import ensure

        return ensure(progress)
    if name.startswith("builtin:"):
        raise ConfigError(f"model.path = {name}", f"the only built-in model is {BUILTIN_MODEL}; or give a Hugging Face causal-LM directory")
    path = Path(name).expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(f"model.path = {name} does not exist", f"give a Hugging Face causal-LM directory, or {BUILTIN_MODEL}")
    try:
        described = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        described = None
    if not isinstance(described, dict):
        raise ConfigError(f"model.path = {name} has no readable config.json", "give a Hugging Face causal-LM directory")
    longest = described.get("max_position_embeddings")
    if isinstance(longest, int) and config.model.window > longest:
        raise ConfigError(
            f"model.window = {config.model.window} is more than the model was made for",
            f"{name} has max_position_embeddings = {longest}: lower model.window, or take a model with a longer context",
        )
    return path
