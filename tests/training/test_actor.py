"""Actors on a real model and a real DeepSpeed engine: who computes what never matters, and a resumed core is the same core."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from gyre_hpc import canary
from gyre_hpc.checkpoint import CoreState, RunState, latest, read_core
from gyre_hpc.checkpoint_writer import save
from gyre_hpc.config import Config
from gyre_hpc.configfile import check
from gyre_hpc.errors import ConfigError, GyreError
from gyre_hpc.paths import RunPaths
from gyre_hpc.training import loading
from gyre_hpc.training.actor import Core, Satellite
from gyre_hpc.training.loss import Sums
from gyre_hpc.training.published import published
from tests.ports import free_port
from tests.training.conftest import TRAINING, make_rows

EXECUTIONS = 8
ROWS = make_rows(EXECUTIONS, 11)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[tuple[Core, CoreState]]:
    """One core for all tests of this process (DeepSpeed keeps global state), and the state that it began with."""
    core = Core(model_dir, check({"training": TRAINING}, "test"), 0, 1, f"127.0.0.1:{free_port()}")
    begun = core.state()
    yield core, CoreState(**{**vars(begun), "arrays": {k: v.copy() for k, v in begun.arrays.items()}})
    core.close()


@pytest.fixture
def core(engine: tuple[Core, CoreState]) -> Core:
    """The core as it began."""
    engine[0].load_state(engine[1])
    engine[0].zero()
    return engine[0]


@pytest.fixture(scope="module")
def satellites(model_dir: Path) -> list[Satellite]:
    return [Satellite(model_dir, check({"training": {**TRAINING, "tokens_per_microstep": n}}, "test")) for n in (1, 64, 300, 4096)]


@pytest.fixture(scope="module")
def whole(satellites: list[Satellite]) -> tuple[NDArray[np.float32], Sums]:
    satellites[3].zero()
    sums = satellites[3].accumulate(ROWS)
    return satellites[3].gradient(), sums


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_split_over_micro_steps_and_satellites_gives_the_same_sum(
    data: st.DataObject, satellites: list[Satellite], whole: tuple[NDArray[np.float32], Sums]
) -> None:
    """Rows go in any order, in micro-steps of any size, to 1..4 satellites that join at any micro-step (a leaver's sum counts too)."""
    order = data.draw(st.permutations(range(len(ROWS))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ROWS) - 1), max_size=len(ROWS) - 1)))
    microsteps = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(ROWS)], strict=True)]
    total, sums, joined = np.zeros_like(whole[0]), Sums(), {0}
    snapshot = satellites[3].snapshot()
    satellites[0].zero()
    for rows in microsteps:
        claims = data.draw(st.integers(0, 3))
        if claims not in joined:
            satellites[claims].pull(snapshot)
            satellites[claims].zero()
            joined.add(claims)
        sums += satellites[claims].accumulate([ROWS[i] for i in rows])
    for k in joined:
        total += satellites[k].gradient()
    assert np.abs(total - whole[0]).max() < 1e-5 * np.abs(whole[0]).max()
    assert sums.targets == sum(int(row.targets.sum()) for row in ROWS)
    assert sums.array() == pytest.approx(whole[1].array(), rel=1e-4, abs=1e-5)


def test_a_rank_of_a_large_cell_computes_its_part_of_a_micro_step_at_once(model_dir: Path, whole: tuple[NDArray[np.float32], Sums]) -> None:
    cells = {"cells": {"ranks_per_node": 16}}
    satellite = Satellite(model_dir, check({"training": {**TRAINING, "tokens_per_microstep": 640}, **cells}, "test"))
    sizes: list[int] = []
    satellite.model.register_forward_pre_hook(lambda _model, _args, given: sizes.append(given["input_ids"].numel()), with_kwargs=True)
    satellite.accumulate(ROWS)
    assert 40 < max(sizes) <= 80
    assert np.abs(satellite.gradient() - whole[0]).max() < 1e-5 * np.abs(whole[0]).max()


def test_a_sum_over_nothing_is_zero_and_zero_forgets(satellites: list[Satellite]) -> None:
    satellites[0].zero()
    satellites[0].accumulate(ROWS)
    assert np.abs(satellites[0].gradient()).max() > 0
    satellites[0].zero()
    assert not satellites[0].gradient().any()
    assert satellites[0].accumulate([]) == Sums()


def test_core_and_satellite_compute_the_same_also_after_steps(core: Core, satellites: list[Satellite]) -> None:
    for _ in range(2):
        satellites[1].pull(core.snapshot())
        satellites[1].zero()
        core.zero()
        assert satellites[1].accumulate(ROWS).loss == pytest.approx(core.accumulate(ROWS).loss, rel=1e-4)
        assert np.abs(satellites[1].gradient() - core.gradient()).max() < 1e-5 * np.abs(core.gradient()).max()
        core.step(satellites[1].gradient(), EXECUTIONS)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_steps_equal_plain_adamw_with_clipping(core: Core, model_dir: Path, scale: float) -> None:
    """Three steps; one scale is above and one below the clipping norm. lr warms up over two steps."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)
    rng = np.random.default_rng(3)
    for lr in (5e-3, 1e-2, 1e-2):
        gradient = (scale * rng.normal(size=core.size)).astype(np.float32)
        parts = torch.from_numpy(gradient / EXECUTIONS).split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.view(p.shape).clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        assert bool(norm > 0.5) is (scale == 1.0)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        metrics = core.step(gradient, EXECUTIONS)
        assert metrics.lr == pytest.approx(lr)
        assert metrics.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert core.version == 3
    expected = torch.cat([p.detach().reshape(-1) for p in parameters]).numpy()
    assert np.abs(core.snapshot() - expected).max() < 2e-6


def test_what_is_not_finite_is_refused_and_changes_nothing(core: Core) -> None:
    before = core.snapshot()
    gradient = np.ones(core.size, np.float32)
    gradient[5] = np.nan
    with pytest.raises(GyreError, match="step 1: the gradient has 1 values"):
        core.step(gradient, EXECUTIONS)
    with pytest.raises(ValueError, match="0 executions"):
        core.step(np.ones(core.size, np.float32), 0)
    with pytest.raises(ValueError, match="flat vector"):
        core.step(np.ones(core.size - 1, np.float32), 1)
    with pytest.raises(ValueError, match="takes no weights"):
        core.pull(before)
    assert np.array_equal(core.snapshot(), before)
    assert core.version == 0


def test_export_is_a_directory_that_loads_with_tokenizer_files(core: Core, model_dir: Path, tmp_path: Path) -> None:
    core.accumulate(ROWS)
    core.step(core.gradient(), EXECUTIONS)
    for _ in range(2):  # the second replaces the first
        core.export(tmp_path / "weights" / "version-000001")
    exported = tmp_path / "weights" / "version-000001"
    assert np.array_equal(Satellite(exported, core.config).snapshot(), core.snapshot())
    assert (exported / "chat_template.jinja").read_bytes() == (model_dir / "chat_template.jinja").read_bytes()
    assert json.loads((exported / "config.json").read_text()) == json.loads((model_dir / "config.json").read_text())
    assert [child.name for child in exported.parent.iterdir()] == ["version-000001"]
    written = canary.read(exported / canary.NAME)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(exported)(torch.tensor([written.tokens])).logits[0].log_softmax(-1)
    assert written.version == core.version
    assert written.difference([float(plain[at, token]) for at, token in enumerate(written.tokens[1:])]) < 1e-5
    assert 0.0 < written.rounding < 1e-4
    assert core.canary(core.version) == written, "nothing of it stays behind"
    assert core.copied == 0, "on a CPU an offer is of the parameters themselves"


@pytest.mark.parametrize("limit", [100, 30_000])
def test_an_export_that_finds_no_room_leaves_the_old_one(core: Core, tmp_path: Path, limit: int) -> None:
    target = tmp_path / "version-000000"
    core.export(target)
    old = (target / "model.safetensors").read_bytes()
    core.accumulate(ROWS)
    core.step(core.gradient(), EXECUTIONS)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # Python ignores SIGXFSZ: writes beyond it fail as on a full disk
    try:
        with pytest.raises(GyreError, match="free some space"):
            core.export(target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (target / "model.safetensors").read_bytes() == old
    assert [child.name for child in tmp_path.iterdir()] == ["version-000000"]


def test_checkpoint_and_resume_are_bit_equal(core: Core, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)

    def advance() -> None:
        core.zero()
        core.accumulate(make_rows(EXECUTIONS, seed=core.version))
        core.step(core.gradient(), EXECUTIONS)

    advance()
    advance()
    save(paths, [core.state()], RunState(2, 2), keep=1)
    at_two = core.snapshot()
    advance()
    at_three = core.snapshot()
    found = latest(paths)
    assert found is not None
    core.load_state(read_core(found, 0))
    assert core.version == 2
    assert np.array_equal(core.snapshot(), at_two)
    advance()
    assert np.array_equal(core.snapshot(), at_three)


def test_the_parameter_table_finds_weights_in_the_file(core: Core) -> None:
    state, flat = core.state(), core.snapshot()
    names = [name for name, _ in core.model.named_parameters()]
    sizes = [p.numel() for p in core.model.parameters()]
    starts = dict(zip(names, np.cumsum([0, *sizes[:-1]]), strict=True))
    assert sorted(row[0] for row in state.table) == sorted(names)
    for name, group, offset, length in state.table:
        assert np.array_equal(state.arrays[f"master/{group}"][offset : offset + length], flat[starts[name] :][:length])


def test_a_checkpoint_of_another_model_or_cell_is_refused_with_both_numbers(core: Core) -> None:
    for change, both in (
        ({"parameters": 7}, f"parameters 7, this run has {core.size}"),
        ({"ranks": 2}, "core ranks 2, this run has 1"),
        ({"model": "Other #1"}, "model Other #1, this run has Qwen3ForCausalLM"),
    ):
        with pytest.raises(ConfigError) as caught:
            core.load_state(CoreState(**{**vars(core.state()), **change}))
        assert both in caught.value.line


def test_models_that_cannot_be_trained_are_refused(tmp_path: Path, model_dir: Path, config: Config) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Satellite(tmp_path, config)
    with pytest.raises(ConfigError, match="float16"):
        Satellite(model_dir, check({"model": {"dtype": "float16"}}, "test"))
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ConfigError, match="can't be loaded"):
        Satellite(tmp_path, config)
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])  # a copy that was cut off
    with pytest.raises(ConfigError, match="can't be loaded"):
        Satellite(tmp_path, config)


def test_a_model_that_looks_at_its_values_while_it_is_built_is_no_model_for_shards(
    model_dir: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object, **__: object) -> None:
        float(torch.ones(1))

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", build)
    with pytest.raises(ConfigError, match=r"can't be built without its weights.*ZeRO stage 1"):
        loading.skeleton(model_dir, config)


@pytest.fixture(scope="module")
def cells(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Core cells in processes of their own: two ranks straight through, two ranks stopped and resumed."""
    return ran(model_dir, tmp_path_factory.mktemp("cells"), ("straight", 2, 3, 1), ("resumed", 2, 2, 1), ("resumed", 2, 3, 1))


@pytest.fixture(scope="module")
def few(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in bfloat16, and one of two ranks with shards of the model."""
    return ran(model_dir, tmp_path_factory.mktemp("few"), ("bfloat16", 1, 1, 1), ("sharded", 2, 3, 3))


def ran(model_dir: Path, root: Path, *runs: tuple[str, int, int, int]) -> Path:
    """Runs of (name, which may be a dtype, ranks, steps, stage), in `root`."""
    names = ("run", "world", "steps", "stage", "dtype")
    jobs = [
        dict(zip(names, (str(root / name), world, steps, stage, name if name == "bfloat16" else "float32"), strict=True))
        for name, world, steps, stage in runs
    ]
    command = [sys.executable, "-m", "tests.training.core_process", str(model_dir)]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return root


def norms_of_three_steps(core: Core) -> list[float]:
    """What core_process.py does, by one rank with all rows."""
    norms = []
    for step in range(3):
        core.zero()
        core.accumulate(make_rows(EXECUTIONS, seed=step))
        norms.append(core.step(core.gradient(), EXECUTIONS).grad_norm)
    return norms


def weights(run: Path, rank: int) -> NDArray[np.float32]:
    loaded: NDArray[np.float32] = np.load(run / f"weights-rank{rank}.npy")
    return loaded


@pytest.mark.job
def test_two_core_ranks_step_like_one(core: Core, cells: Path) -> None:
    first = weights(cells / "straight", 0)
    assert np.array_equal(first, weights(cells / "straight", 1))
    norms = norms_of_three_steps(core)
    # Adam hardly sees a factor on its gradients (of a world size, say); the norm does.
    for rank in range(2):
        assert np.load(cells / "straight" / f"norms-rank{rank}.npy").tolist() == pytest.approx(norms, rel=1e-3)
    # Adam divides tiny gradients by tiny moments, so rounding grows; a lost or doubled half of the rows would be 100 times this.
    assert np.abs(first - core.snapshot()).max() < 1e-4


@pytest.mark.job
def test_two_core_ranks_resume_bit_equal(cells: Path) -> None:
    for rank in range(2):
        assert np.array_equal(weights(cells / "resumed", rank), weights(cells / "straight", 0))
    found = latest(RunPaths(cells / "resumed"))
    assert found is not None
    assert (found.step, found.core_ranks) == (3, 2)


def test_ranks_with_a_shard_each_step_like_one_with_the_whole(core: Core, few: Path) -> None:
    norms = norms_of_three_steps(core)
    for rank in range(2):
        assert np.load(few / "sharded" / f"norms-rank{rank}.npy").tolist() == pytest.approx(norms, rel=1e-3)
    found = latest(RunPaths(few / "sharded"))
    assert found is not None
    states = [read_core(found, rank) for rank in range(2)]
    joined = np.concatenate([state.arrays["master/0"] for state in states])
    assert np.array_equal(joined, np.concatenate([weights(few / "sharded", rank) for rank in range(2)]))
    pieces: dict[str, list[NDArray[np.float32]]] = {}
    for name, _, offset, length in states[1].table:
        pieces.setdefault(name, []).append(joined[offset : offset + length])
    assert list(pieces) == [name for name, _ in core.model.named_parameters()]
    assert np.abs(np.concatenate([part for parts in pieces.values() for part in parts]) - core.snapshot()).max() < 1e-4
    assert {state.parameters for state in states} == {core.size}


def test_bfloat16_trains_with_float32_masters(few: Path) -> None:
    found = latest(RunPaths(few / "bfloat16"))
    assert found is not None
    rounded = weights(few / "bfloat16", 0)
    master = read_core(found, 0).arrays["master/0"][: len(rounded)]
    assert master.dtype == np.float32
    assert np.array_equal(torch.from_numpy(master).bfloat16().float().numpy(), rounded)
    assert not np.array_equal(master, rounded)


SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SHAPE, tie_word_embeddings=True),
        Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    ],
)
def test_what_engines_receive_is_what_they_would_load_from_files(config: PretrainedConfig, tmp_path: Path) -> None:
    """Tied tensors once, fused experts apart."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "first")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "second")
    written, sent = load_file(tmp_path / "second" / "model.safetensors"), published(model)
    assert sorted(written) == sorted(name for name, _ in sent)
    for name, tensor in sent:
        assert tensor.is_contiguous()
        assert tensor.dtype == written[name].dtype == torch.bfloat16
        assert torch.equal(tensor, written[name])
