"""What `training.deepspeed` may and may not change."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from gyre_hpc.config import Config, check
from gyre_hpc.errors import ConfigError
from gyre_hpc.training.settings import deepspeed_settings


def with_deepspeed(**extra: Any) -> Config:
    return check({"training": {"deepspeed": extra, "clip_grad": 0.0}}, "test")


def test_extra_keys_are_merged_and_ours_stay() -> None:
    settings = deepspeed_settings(with_deepspeed(zero_optimization={"stage": 2, "overlap_comm": False}, wall_clock_breakdown=False))
    assert settings["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert settings["gradient_clipping"] == 0.0
    assert "bf16" not in settings


@pytest.mark.parametrize("key", ["optimizer", "gradient_clipping", "train_batch_size", "bf16", "gradient_accumulation_steps", "scheduler"])
def test_what_would_change_the_objective_is_refused_with_its_own_key(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"training\.deepspeed\.{key} can't be set; .+"):
        deepspeed_settings(with_deepspeed(**{key: 1}))


@pytest.mark.parametrize("stage", [0, 3, "x"])
def test_other_stages_are_refused(stage: object) -> None:
    with pytest.raises(ConfigError, match="stage"):
        deepspeed_settings(with_deepspeed(zero_optimization={"stage": stage}))


def test_checking_needs_no_torch() -> None:
    code = "import sys, gyre_hpc.training.settings, gyre_hpc.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
