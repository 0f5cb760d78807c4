"""The file of a configuration: `extends:`, overrides, a round trip, and every mistake one line with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_hpc.config import Config
from gyre_hpc.configfile import dump, load
from gyre_hpc.errors import ConfigError, ExitCode


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_an_empty_file_is_all_defaults_named_after_the_file(tmp_path: Path) -> None:
    config = load(write(tmp_path, ""))
    assert config.run.name == "c"
    assert config.run_dir == Path("runs/c")
    assert config.schedule == Config().schedule


def test_what_is_dumped_is_loaded_equal(tmp_path: Path) -> None:
    config = load(write(tmp_path, "run: {steps: 3, dir: /somewhere}\ntraining: {betas: [0.8, 0.9]}\nsweep: {grid: {run.seed: [1, 2]}}"))
    dump(config, tmp_path / "d.yaml")
    assert load(tmp_path / "d.yaml") == config


def test_overrides_win_and_may_name_sections_that_the_file_lacks(tmp_path: Path) -> None:
    config = load(write(tmp_path, "training: {lr: 0.1}"), ["training.lr=1e-4", "schedule.mu=2", "tasks.difficulty=[1]"])
    assert (config.training.lr, config.schedule.mu, config.tasks.difficulty) == (1e-4, 2, [1])


def test_a_file_may_extend_another(tmp_path: Path) -> None:
    write(tmp_path, "run: {steps: 7, seed: 3}\ntraining: {lr: 0.1}", "base.yaml")
    config = load(write(tmp_path, "extends: base.yaml\nrun: {seed: 4}"))
    assert (config.run.steps, config.run.seed, config.training.lr) == (7, 4, 0.1)


@pytest.mark.parametrize(
    ("text", "overrides", "parts"),
    [
        ("schedule: {groups_per_stp: 3}", [], ["unknown key schedule.groups_per_stp", "did you mean schedule.groups_per_step?"]),
        ("lr: 3", [], ["unknown key lr", "did you mean training.lr?"]),
        ("nonsense: 3", [], ["unknown key nonsense", "valid here: run, model"]),
        ("run: {steps: many}", [], ["run.steps = 'many'", "valid integer"]),
        ("schedule: {mu: 0}", [], ["schedule.mu = 0", "greater than or equal to 1"]),
        ("rollout: {engine: vlm}", [], ["rollout.engine = 'vlm'", "'torch' or 'vllm'"]),
        ("run: {steps: 0}\nschedule: {mu: 0}", [], ["(and 1 more)"]),
        ("[1, 2]", [], ["holds a list"]),
        ("run: [", [], ["is not YAML"]),
        ("", ["run.steps"], ["has no `=`"]),
        ("", ["=3"], ["'=3' has no `=` behind a key"]),
        ("", ["training.activation_checkpointing=maybe"], ["training.activation_checkpointing = 'maybe'; auto, true, false or offload"]),
        ("", ["deadlines.phases.restroe=4"], ["unknown key deadlines.phases.restroe; valid here: 'unroute', ", "'restore'"]),
        ("run: 3", ["run.steps=4"], ["run is not a section"]),
        ("extends: nowhere.yaml", [], ["nowhere.yaml: No such file"]),
        ("extends: c.yaml", [], ["extends itself"]),
        ("extends: 3", [], ["extends = 3"]),
        ("rollout: {handover: mooncake}", [], ["rollout.handover = 'mooncake'", "'recompute' or 'nixl'"]),
        ("run: {steps: 3}\nmodel: {window: 600}\nrun: {seed: 1}", [], ["not YAML", "'run' stands there twice", "line 3"]),
        ("run: {steps: 3, steps: 4}", [], ["'steps' stands there twice"]),
        ("model:\nrun: {steps: 3}", [], ["model = None; take the section out, or write keys below it: path, dtype"]),
        ("", ["publication=broadcast"], ["publication = 'broadcast'; take the section out, or write keys below it: path"]),
        ("training: {betas: [2, 3]}", [], ["training.betas.0 = 2", "less than 1"]),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(tmp_path: Path, text: str, overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text), overrides)
    line = caught.value.line
    assert "\n" not in line
    assert caught.value.remedy
    assert caught.value.exit_code == ExitCode.USAGE
    for part in parts:
        assert part in line, line


@pytest.mark.parametrize(
    ("override", "glued"), [("harness.env={A:1}", "A:1"), ("run={steps:3}", "steps:3"), ("slurm.additional={a: 1, b:2}", "b:2")]
)
def test_a_colon_without_a_blank_is_told(tmp_path: Path, override: str, glued: str) -> None:
    key, value = glued.split(":")
    with pytest.raises(ConfigError, match=f"{glued} is one key without a value; write a blank after the colon: {key}: {value}$"):
        load(write(tmp_path, ""), [override])


def test_a_colon_in_a_key_that_has_a_value_is_nobodys_business(tmp_path: Path) -> None:
    assert load(write(tmp_path, "slurm: {additional: {'a:b': 1, c: null}}")).slurm.additional == {"a:b": 1, "c": None}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("? [a, b]\n: 1\n", "is not YAML: .*unhashable key"),
        ("run: &a {name: *a}\n", "nested too deeply, or has an alias inside what it names; write sections"),
        ("run: " + "{a: " * 3000 + "1" + "}" * 3000, "nested too deeply"),
        ("1: 2\n", "keys should be strings"),
        ("run:\n  name: 2026-02-30\n", "'2026-02-30' can't be read .day is out of range.*line 2"),
        ("run: {seed: " + "9" * 5000 + "}", "can't be read .Exceeds the limit"),
        ('run: {dir: "a\\0b"}', "'a.x00b' has a null character in it; take it out"),
        ('harness: {env: {"A\\0": b}}', "has a null character in it"),
        ('harness: {argv: ["a", "\\0"]}', "has a null character in it"),
        ('extends: "a\\0b"', "extends = 'a.x00b'; give the path"),
    ],
    ids=["key", "alias", "depth", "number", "date", "digits", "null", "null-key", "null-item", "null-extends"],
)
def test_odd_yaml_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(write(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.name=2026-02-30", "override run.name: '2026-02-30' is not a YAML value; quote it"),
        ("run.name=" + "[" * 1000, "override run.name is nested too deeply"),
        ("run={steps: 1, steps: 2}", "is not a YAML value"),
    ],
    ids=["date", "depth", "twice"],
)
def test_an_odd_override_is_one_line(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(write(tmp_path, ""), [override])


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*give the path"):
        load(tmp_path / "none.yaml")


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(tmp_path / "c.yaml")


def test_merge_keys_may_be_overlaid(tmp_path: Path) -> None:
    text = "run: &r {steps: 3, name: a}\nsweep: {grid: {x: [&d {a: 1}, {<<: *d, a: 2}]}}"
    assert load(write(tmp_path, text)).sweep.grid["x"] == [{"a": 1}, {"a": 2}]


def test_files_are_utf8_whatever_the_locale_is(tmp_path: Path) -> None:
    """In a locale of one byte a character a chat template would be read as other text, and a report could not be written."""
    write(tmp_path, "run: {name: lauf-ü}")
    (tmp_path / "chat_template.jinja").write_text("<｜end▁of▁sentence｜>", encoding="utf-8")
    code = """if True:
        import sys
        from pathlib import Path
        from gyre_hpc.configfile import dump, load
        from gyre_hpc.gateway.text.files import load_template
        from gyre_hpc.paths import RunPaths
        from gyre_hpc.report import html
        assert open(sys.executable).encoding.lower() != "utf-8"
        folder = Path(sys.argv[1])
        dump(load(folder / "c.yaml"), folder / "config.yaml")
        html.write(RunPaths(folder))
        print(ascii(load(folder / "config.yaml").run.name), ascii(load_template(folder)))
    """
    bare = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=bare, capture_output=True, text=True)
    assert done.stdout == ascii("lauf-ü") + " " + ascii("<｜end▁of▁sentence｜>") + "\n", done.stderr
    assert "<h1>lauf-ü" in (tmp_path / "report.html").read_text(encoding="utf-8")
