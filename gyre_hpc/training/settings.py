"""How a cell holds the model, and the DeepSpeed configuration that a run gets: ours, with `training.deepspeed` merged over it.

ZeRO stages 1 and 2 are DeepSpeed's. Stage 3 is asked for in the same place and done by torch's FSDP2 (training/sharded.py says why), so no
other key of DeepSpeed means anything with it, and each is refused by its name.
Invariants: every value that would silently change the objective is ours and is refused from outside (accumulation, batch sizes, clipping,
precision, optimizer, schedule: `training.*` sets them); so is a key that DeepSpeed would ignore without a word, as it does at the top
level. Pure; no torch, so a configuration is checked where it is read. `KNOWN` and `KNOWN_ZERO` are among what the pinned DeepSpeed reads (a
test says so).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
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
    "prescale_gradients": "the sum of gradients is divided once, by the number of executions",
    "gradient_predivide_factor": "the sum of gradients is divided once, by the number of executions",
    "gradient_allreduce_op": "every rank hands in the finished gradient",
}
KNOWN = frozenset(
    {
        "aio",
        "comms_logger",
        "communication_data_type",
        "csv_monitor",
        "disable_python_gc",
        "dump_state",
        "flops_profiler",
        "log_level",
        "memory_breakdown",
        "steps_per_print",
        "tensorboard",
        "wall_clock_breakdown",
        "wandb",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)
KNOWN_ZERO = frozenset(
    {
        "allgather_bucket_size",
        "allgather_partitions",
        "allgather_sequential",
        "contiguous_gradients",
        "elastic_checkpoint",
        "ignore_unused_parameters",
        "load_from_fp32_weights",
        "overlap_comm",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "stage",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
    }
)
"""Of ZeRO 1 and 2: the others are of stage 3, or of optimizers that we don't use."""
SHARDED = 3
"""The stage in which parameters and gradients are sharded over a cell's ranks as well."""


def sharded(config: Config) -> bool:
    """Whether a training cell's ranks hold a shard of the model each, and not the whole."""
    return stage(config) == SHARDED


def stage(config: Config) -> int:
    """ZeRO's: 1 where nothing else is asked for."""
    zero = config.training.deepspeed.get("zero_optimization", {})
    asked = zero.get("stage", 1) if isinstance(zero, dict) else 1
    return asked if asked in (2, SHARDED) else 1


def check(config: Config) -> None:
    """Raises ConfigError for what can't be trained with."""
    if sharded(config):
        _require_nothing_else(config.training.deepspeed)
    else:
        deepspeed_settings(config)


def _require_nothing_else(extra: dict[str, Any]) -> None:
    """With stage 3 there is no DeepSpeed that would read them."""
    others = [f"training.deepspeed.{key}" for key in extra if key != "zero_optimization"]
    others += [f"training.deepspeed.zero_optimization.{key}" for key in extra["zero_optimization"] if key != "stage"]
    if others:
        raise ConfigError(
            f"{others[0]} can't be set with zero_optimization.stage = {SHARDED}",
            "remove it: torch's FSDP2 shards the model, and reads no key of DeepSpeed; or take stage 1 or 2",
        )


def deepspeed_settings(config: Config) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`, of stages 1 and 2. Raises ConfigError."""
    extra = config.training.deepspeed
    for key, remedy in _OURS.items():
        if key in extra:
            raise ConfigError(f"training.deepspeed.{key} can't be set", remedy)
    _require_known("training.deepspeed", extra, KNOWN)
    zero = extra.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError(f"training.deepspeed.zero_optimization = {zero!r}", "a section, for example {stage: 2}")
    if "offload_optimizer" in zero:
        # DeepSpeed's reload_states would bring them back to the device, where its step does not look for them
        raise ConfigError(
            "training.deepspeed.zero_optimization.offload_optimizer can't be set",
            "masters and moments leave the device with the cell's role; where they don't fit in training, take stage 3 over more ranks",
        )
    _require_known("training.deepspeed.zero_optimization", zero, KNOWN_ZERO)
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
        raise ConfigError(f"training.deepspeed.zero_optimization.stage = {stage!r}", "1, 2, or 3: the model is sharded too")
    return merged


def _require_known(where: str, names: Iterable[str], known: frozenset[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), sorted(known), 1, 0.5)
            guess = f"did you mean {where}.{near[0]}? " if near else ""
            raise ConfigError(f"unknown key {where}.{name}", f"{guess}valid here: {', '.join(sorted(known))}")


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
