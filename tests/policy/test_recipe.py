"""The recipe: an ordinary Hugging Face directory, the same every time, whole or not at all."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gyre_hpc.errors import GyreError
from gyre_hpc.policy import recipe as recipes
from gyre_hpc.policy.recipe import Encoder, Recipe, digest, ensure
from gyre_hpc.policy.transcripts import Habits

QUICK = Recipe(steps=2, batch=4, hidden=32, layers=1, heads=1, kv_heads=1, ffn=32, vocabulary=768)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GYRE_CACHE", str(cache))
        return ensure(recipe=QUICK)


def test_directory_is_an_ordinary_one(built: Path) -> None:
    names = {path.name for path in built.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    config = json.loads((built / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert config["max_position_embeddings"] >= 4096
    tokenizer = AutoTokenizer.from_pretrained(built)
    model = AutoModelForCausalLM.from_pretrained(built)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == config["eos_token_id"]
    assert tokenizer.chat_template
    assert tokenizer.decode(tokenizer("1. Copy maple.txt to\n").input_ids) == "1. Copy maple.txt to\n"
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 768)


def test_again_is_free_and_leaves_nothing_else(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_CACHE", str(built.parent))
    monkeypatch.setattr(recipes, "build", lambda *arguments: pytest.fail("built again"))
    assert ensure(recipe=QUICK) == built
    assert [path.name for path in built.parent.iterdir()] == [built.name]


def test_same_bytes_again_and_the_first_builder_wins(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path))
    lines: list[str] = []
    ensure(lines.append, QUICK)
    assert (tmp_path / built.name / "model.safetensors").read_bytes() == (built / "model.safetensors").read_bytes()
    assert any("warm-up step 2 of 2" in line for line in lines)
    late = tmp_path / ".late"
    late.mkdir()
    (late / "model.safetensors").write_bytes(b"")
    recipes._publish(late, tmp_path / built.name)
    assert (tmp_path / built.name / "config.json").exists()


def test_caller_keeps_its_random_state_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path))
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    ensure(recipe=QUICK)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_broken_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path))

    def broken(recipe: Recipe, directory: Path, say: object) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recipes, "build", broken)
    with pytest.raises(GyreError, match=r"can't be kept in.*No space left.*; free some space"):
        ensure(recipe=QUICK)
    assert list(tmp_path.iterdir()) == []


def test_cache_that_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path / "file"))
    with pytest.raises(GyreError, match="can't be kept in"):
        ensure(recipe=QUICK)


def test_digest_follows_every_number() -> None:
    assert digest(Recipe()) == digest(Recipe())
    others = [replace(Recipe(), seed=8), replace(Recipe(), steps=451), replace(Recipe(), habits=Habits(care=0.5))]
    assert len({digest(r) for r in [Recipe(), *others]}) == 4


def test_size_is_within_the_promise() -> None:
    class Ids:
        eos_token_id, pad_token_id = 2, 0

    model = recipes.make_model(Recipe(), Ids())
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    assert model.config.head_dim in (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def test_targets_are_what_the_assistant_says(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built)
    conversation = [
        {"role": "system", "content": "Do."},
        {"role": "user", "content": "Say assistant."},
        {"role": "assistant", "content": "One."},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "Done."},
    ]
    ids, marks = Encoder(tokenizer).encode(conversation)
    assert tokenizer.decode([i for i, mark in zip(ids, marks, strict=True) if mark]) == "One.<|im_end|>Done.<|im_end|>"
