"""What the configuration points at, looked at before anything is submitted or started.

Invariants: nothing here starts a process, imports torch or takes longer than some looks at the file system; every check is the same that a
process of the run makes later, with the same words, only not after a night in the queue. What is a matter of each node (`harness.path`,
`harness.binds`) is not looked at here: the submitting machine may lack it.
"""

from __future__ import annotations

from pathlib import Path

from gyre_hpc.config import BUILTIN_MODEL, Config
from gyre_hpc.engines.options import torch_options, vllm_options
from gyre_hpc.errors import ConfigError
from gyre_hpc.tasks.source import check_source


def check_inputs(config: Config) -> None:
    """Raises ConfigError if the run can't begin with what its configuration names."""
    _model(config)
    check_source(config)
    known = torch_options if config.rollout.engine == "torch" else vllm_options
    known(config.rollout.options)


def _model(config: Config) -> None:
    if config.model.dtype == "float16":
        raise ConfigError("model.dtype = float16 can't be trained (its gradients underflow)", "use bfloat16 or float32")
    path = Path(config.model.path)
    if config.model.path == BUILTIN_MODEL or (path / "config.json").is_file():
        return
    problem = "has no config.json" if path.is_dir() else "is no folder" if path.exists() else "does not exist"
    raise ConfigError(f"model.path = {path} {problem}", f"give a Hugging Face model directory, or {BUILTIN_MODEL}")
