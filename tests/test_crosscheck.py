"""Keys of a configuration that must fit each other: a mistake is one line with the keys and the remedy."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gyre_hpc.configfile import load
from gyre_hpc.errors import ConfigError


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rollout: {engine: vllm, top_p: 0.9}", ["rollout.top_p = 0.9", "rollout.engine = vllm"]),
        ("rollout: {handover: nixl}", ["rollout.handover = nixl with rollout.engine = torch", "rollout.engine = vllm"]),
        ("harness: {binds: [/usr, lib]}", ["harness.binds has 'lib'", "absolute"]),
        ("training: {clip_low: 1.1}", ["training.clip_low = 1.1", "must contain 1"]),
        ("schedule: {mu: 3, staleness_bound: 1}", ["schedule.staleness_bound = 1", "schedule.mu = 3", "2 or more"]),
        ("schedule: {groups_per_step: 10000000000000}", ["groups_per_step = 10000000000000", "outstanding at once", "at most 1000000"]),
        ("schedule: {phi: 1.0e+300, mu: 2}", ["schedule.phi = 1e+300, mu = 2", "at most 1000000"]),
        (f"schedule: {{mu: 1{'0' * 400}}}", ["outstanding at once"]),
        ("harness: {kind: command}", ["harness.kind = command without harness.argv", "{instruction}"]),
        ("model: {window: 64}\nharness: {max_tokens: 64}", ["harness.max_tokens = 64", "model.window = 64"]),
    ],
)
def test_keys_that_do_not_fit_are_one_line_with_the_remedy(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert caught.value.line.startswith(f"{tmp_path / 'c.yaml'}: ")
    assert "\n" not in caught.value.line
    assert caught.value.remedy
    for part in parts:
        assert part in caught.value.line


@pytest.mark.parametrize("installed", [True, False])
def test_nixl_is_wanted_only_by_those_who_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: (object() if installed else None) if name == "nixl" else find(name, *rest)
    )
    assert load(write(tmp_path, "rollout: {engine: vllm}")).rollout.handover == "recompute"
    asking = write(tmp_path, "rollout: {engine: vllm, handover: nixl}")
    if installed:
        assert load(asking).rollout.handover == "nixl"
    else:
        with pytest.raises(ConfigError, match=r"NIXL is not installed; pip install nixl, or rollout\.handover = recompute"):
            load(asking)


@pytest.mark.parametrize("override", ["schedule.mu=2", "schedule.streaming=true"])
def test_a_step_whose_groups_are_not_all_known_is_not_shuffled(tmp_path: Path, override: str) -> None:
    config = write(tmp_path, "schedule:\n  shuffle: true\n  streaming: false\n")
    assert load(config).schedule.shuffle
    with pytest.raises(ConfigError, match=r"schedule\.shuffle with schedule\.mu = \d.*schedule\.mu = 1 and schedule\.streaming = false"):
        load(config, [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.trainers=4"], r"schedule.trainers = 4 with cells.count = 3; 1 to 3"),
        (
            ["schedule.mode=async"],
            r"schedule.mode = async with schedule.trainers = null, cells.count = 3; async needs cells that only roll out",
        ),
        (["schedule.mode=async", "schedule.trainers=3"], r"schedule.trainers = 3, cells.count = 3"),
    ],
)
def test_cells_that_can_not_be_shared_out_are_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("run: {name: x}\n")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "c.yaml", overrides)
