"""The DeepSpeed configuration that a run gets: ours, with `training.deepspeed` merged over it.

Invariants: every value that would silently change the objective is ours and is refused from outside (accumulation, batch sizes, clipping,
precision, optimizer, schedule: `training.*` sets them). Pure; no torch, so the driver can check before anything starts.
"""

from __future__ import annotations

from typing import Any

from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError

_OURS = {
    "train_batch_size": "schedule.groups_per_step and schedule.group_size set it",
    "train_micro_batch_size_per_gpu": "training.tokens_per_microstep sets it",
    "gradient_accumulation_steps": "gradients are summed over cells before DeepSpeed sees them",
    "gradient_clipping": "set training.clip_grad",
    "optimizer": "set training.lr, training.betas and training.weight_decay",
    "scheduler": "set training.lr and training.warmup_steps",
    "fp16": "set model.dtype",
    "bf16": "set model.dtype",
}


def deepspeed_settings(config: Config) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`. Raises ConfigError."""
    extra = config.training.deepspeed
    for key, remedy in _OURS.items():
        if key in extra:
            raise ConfigError(f"training.deepspeed.{key} can't be set", remedy)
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Left out, DeepSpeed clips at 1.0; 0 means no clipping.
        "gradient_clipping": config.training.clip_grad,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if config.model.dtype == "bfloat16":
        ours["bf16"] = {"enabled": True}
    merged = _merge(ours, extra)
    stage = merged["zero_optimization"].get("stage", 1)
    if stage not in (1, 2):
        raise ConfigError(f"training.deepspeed.zero_optimization.stage = {stage!r}", "1 or 2: every core rank computes with whole weights")
    return merged


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
