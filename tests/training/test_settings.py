"""What `training.deepspeed` may and may not change."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.config import Config
from gyre_hpc.configfile import check
from gyre_hpc.errors import ConfigError
from gyre_hpc.training.settings import KNOWN, KNOWN_ZERO, deepspeed_settings, sharded


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


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            {"zero_optimisation": {"stage": 2}},
            r"unknown key training\.deepspeed\.zero_optimisation; did you mean training\.deepspeed\.zero_opt",
        ),
        ({"zero_optimization": {"stag": 2}}, r"zero_optimization\.stag; did you mean training\.deepspeed\.zero_optimization\.stage"),
        ({"zero_optimization": 2}, r"zero_optimization = 2; a section"),
        ({"gradient_predivide_factor": 4}, r"gradient_predivide_factor can't be set"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, r"offload_optimizer can't be set; .*take stage 3"),
    ],
)
def test_a_key_that_deepspeed_would_ignore_is_refused_where_the_configuration_is_read(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_deepspeed(**extra)


def test_what_we_let_through_is_what_the_installed_deepspeed_reads() -> None:
    folder = Path(str(importlib.util.find_spec("deepspeed").origin)).parent  # type: ignore[union-attr]  # read, not imported: that takes seconds
    sources = [path.read_text() for name in ("runtime", "monitor", "comm", "profiling", "utils") for path in (folder / name).rglob("*.py")]
    everything = "\n".join(sources)
    zero = (folder / "runtime/zero/config.py").read_text()
    assert [name for name in KNOWN if not re.search(rf"""["']{name}["']""", everything)] == []
    assert [name for name in KNOWN_ZERO if not re.search(rf"^    {name}: ", zero, re.MULTILINE)] == []


@pytest.mark.parametrize("stage", [0, 4, "x"])
def test_other_stages_are_refused(stage: object) -> None:
    with pytest.raises(ConfigError, match="stage"):
        deepspeed_settings(with_deepspeed(zero_optimization={"stage": stage}))


def test_stage_3_shards_the_model_and_takes_no_key_of_deepspeed() -> None:
    assert sharded(with_deepspeed(zero_optimization={"stage": 3}))
    assert not sharded(with_deepspeed(zero_optimization={"stage": 2}))
    assert not sharded(with_deepspeed())
    for extra, named in (
        ({"zero_optimization": {"stage": 3, "overlap_comm": True}}, "zero_optimization.overlap_comm"),
        ({"zero_optimization": {"stage": 3}, "dump_state": True}, "dump_state"),
    ):
        with pytest.raises(ConfigError, match=rf"training\.deepspeed\.{named} can't be set with .*stage = 3; remove it"):
            with_deepspeed(**extra)


def test_checking_needs_no_torch() -> None:
    code = "import sys, gyre_hpc.training.settings, gyre_hpc.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
