"""Keys of a configuration that must fit each other, each of them right by itself (config.py).

Ordering key: `_CHECKS`; the first that does not fit is told. Invariants: every mistake is a `ConfigError` with the keys, their values and
what is allowed; a check starts and imports nothing heavy, since every process of a run reads its configuration.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from gyre_hpc import layout
from gyre_hpc.config import Config
from gyre_hpc.errors import ConfigError
from gyre_hpc.gateway.text.parsers import check_names
from gyre_hpc.training import settings

OUTSTANDING = 1_000_000
"""Executions that may be outstanding at once: far above what any machine holds, far below what fills its disk with tasks."""


def cross_check(config: Config, origin: str) -> None:
    """Raises ConfigError for the first mistake; `origin`: where the values come from, for the message."""
    for check in _CHECKS:
        try:
            check(config)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error.what}", error.remedy) from None


def _clipping(config: Config) -> None:
    low, high = config.training.clip_low, config.training.clip_high
    if low > 1.0 or high < 1.0:
        raise ConfigError(
            f"training.clip_low = {low}, training.clip_high = {high}", "the range must contain 1, for example 0.995 and 1.005"
        )


def _parsers(config: Config) -> None:
    check_names(config.model.tool_parser, config.model.reasoning_parser)


def _sampling(config: Config) -> None:
    cuts = [name for name, neutral in (("top_p", 1.0), ("top_k", 0)) if getattr(config.rollout, name) != neutral]
    if config.rollout.engine == "vllm" and cuts:
        raise ConfigError(
            f"rollout.{cuts[0]} = {getattr(config.rollout, cuts[0])} with rollout.engine = vllm",
            "vLLM gives log-probs after the cut, which can't be trained on: take it out, or use rollout.engine = torch",
        )


def _handover(config: Config) -> None:
    """NIXL is for those who ask for it: nobody else needs it installed."""
    rollout = config.rollout
    if rollout.handover != "nixl":
        return
    if rollout.engine != "vllm":
        raise ConfigError(
            f"rollout.handover = nixl with rollout.engine = {rollout.engine}", "rollout.engine = vllm, or rollout.handover = recompute"
        )
    if importlib.util.find_spec("nixl") is None:
        raise ConfigError("rollout.handover = nixl, but NIXL is not installed", "pip install nixl, or rollout.handover = recompute")


def _harness(config: Config) -> None:
    harness = config.harness
    if harness.kind == "command":
        if not harness.argv:
            raise ConfigError("harness.kind = command without harness.argv", "give its command line, with {instruction} in it")
    elif harness.kind != "bundled" and not Path(harness.path).is_absolute():
        raise ConfigError(
            f"harness.path = {harness.path!r} with harness.kind = {harness.kind}", "give the absolute path of its installation"
        )


def _binds(config: Config) -> None:
    relative = [path for path in config.harness.binds if not Path(path).is_absolute()]
    if relative:
        raise ConfigError(f"harness.binds has {relative[0]!r}", "give absolute paths: boxes show a folder at its own path")


def _window(config: Config) -> None:
    if config.harness.max_tokens >= config.model.window:
        raise ConfigError(
            f"harness.max_tokens = {config.harness.max_tokens} leaves no prompt in model.window = {config.model.window}",
            "raise model.window or lower harness.max_tokens",
        )


def _outstanding(config: Config) -> None:
    """Groups are dispatched one by one, each with a folder: a few zeros too many would fill the disk before the first one starts."""
    schedule = config.schedule
    each = schedule.groups_per_step * schedule.group_size
    if schedule.mu * each > OUTSTANDING or (schedule.phi + schedule.mu) * each > OUTSTANDING:
        raise ConfigError(
            f"schedule.phi = {schedule.phi}, mu = {schedule.mu}, groups_per_step = {schedule.groups_per_step}, "
            f"group_size = {schedule.group_size}: (phi + mu) x groups_per_step x group_size executions would be outstanding at once",
            f"at most {OUTSTANDING}",
        )


def _staleness(config: Config) -> None:
    bound, mu = config.schedule.staleness_bound, config.schedule.mu
    if bound is not None and bound < mu - 1:
        raise ConfigError(
            f"schedule.staleness_bound = {bound} can't be kept in bursts of schedule.mu = {mu} steps", f"{mu - 1} or more, or a smaller mu"
        )


def _shuffle(config: Config) -> None:
    schedule = config.schedule
    if schedule.shuffle and (schedule.mu > 1 or schedule.streaming):
        raise ConfigError(
            f"schedule.shuffle with schedule.mu = {schedule.mu}, schedule.streaming = {str(schedule.streaming).lower()}: "
            "a step's groups are not all known before its training begins",
            "schedule.mu = 1 and schedule.streaming = false, or no shuffle",
        )


def _deepspeed(config: Config) -> None:
    settings.check(config)


_CHECKS: tuple[Callable[[Config], None], ...] = (
    _clipping,
    _parsers,
    _sampling,
    _handover,
    _harness,
    _binds,
    _window,
    _outstanding,
    _staleness,
    _shuffle,
    layout.check,
    _deepspeed,
)
