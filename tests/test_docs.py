"""The documents are held against the code: links, commands, examples, keys, columns and event kinds.

Commands that read are run for real, against a small run directory that the real writers make here; the others are parsed by the real
command line, and their configuration and overrides are checked.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import annotated_types
import numpy as np
import pytest
import typer.main
import yaml

from gyre_hpc import configfile
from gyre_hpc.checkpoint import CoreState, RunState
from gyre_hpc.checkpoint_writer import save
from gyre_hpc.cli import app, main
from gyre_hpc.config import Config, valid_keys
from gyre_hpc.configfile import check, dump
from gyre_hpc.controller.live import LiveFile
from gyre_hpc.events import EventLog
from gyre_hpc.paths import RunPaths
from tests.trees.forests import begin, finish
from trees.records import CallEnd, Fate, Intent, Node, NodeKind, Role
from trees.segment import DESCRIPTIONS
from trees.store import StoreReader, StoreWriter

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"bash", "json", "python", "text", "yaml"}
QUICK = {"init", "status", "watch", "report", "trees"}
"""Commands that are run for real."""
RUN = Path("runs/quickstart")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[Any]:
    """Fenced blocks of one language, each a test of its own."""
    found = [(page, text) for page in PAGES for word, text in FENCE.findall(page.read_text()) if word == language]
    return [pytest.param(text, id=f"{page.stem}-{i}") for i, (page, text) in enumerate(found)]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of the bash blocks: the line, and its words."""
    for param in blocks("bash"):
        for line in str(param.values[0]).splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield line, words


def section(page: str, title: str) -> str:
    """The text below one heading of a page in docs/."""
    text = (ROOT / "docs" / page).read_text()
    return re.split(r"^## ", text.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which runs/quickstart is a small finished run, with a branched tree in a sealed segment."""
    folder = tmp_path_factory.mktemp("docs")
    paths = RunPaths(folder / RUN)
    paths.root.mkdir(parents=True)
    dump(check({"run": {"name": "quickstart", "steps": 24}}, "test"), paths.config)
    with StoreWriter(paths.trees, {"run": "test"}) as writer:
        begin(writer)
        root = writer.context_node(-1, np.array([1, 2, 3], np.int32), 0, -1, Role.MAIN)
        first = _call(writer, root, (8, 9), Fate.DELIVERED)
        broken = _call(writer, writer.context_node(first, np.array([7], np.int32), 0, -1, Role.MAIN), (5,), Fate.BROKEN)
        _call(writer, root, (6,), Fate.CANCELLED)
        _call(writer, writer.context_node(broken, np.array([7], np.int32), 0, -1, Role.MAIN), (4, 5, 6), Fate.DELIVERED)
        finish(writer, 0)
        writer.seal()
    table = [("model.norm.weight", 0, 0, 3), ("model.norm.weight", 0, 5, 2), ("w", 0, 3, 2), ("w", 0, 7, 2)]
    shards = [{"master/0": part, "rng/torch": np.zeros(9, np.uint8)} for part in np.split(np.arange(9, dtype=np.float32), [5])]
    save(paths, [CoreState(rank, 2, 9, "M", 24, shards[rank], table) for rank in range(2)], RunState(24, 24, {"schedule": {}}), 2)
    for kind, fields in examples():
        EventLog(paths.events).emit(kind, **fields)
    EventLog(paths.events).emit("run.end", attempt=2, status="done", exit_code=0, seconds=1.0)
    LiveFile(paths.live).write({key: value for key, value in live_example().items() if key != "t"})
    logs = paths.attempt_logs(1)
    logs.mkdir(parents=True)
    (logs / "driver.log").write_text("WARNING still waiting for the gateway to listen after 150 s (deadline 300 s)\n")
    return folder


def _call(writer: StoreWriter, prompt: int, tokens: tuple[int, ...], fate: Fate) -> int:
    """One call of execution 0; the node that it sampled."""
    call, node, n = writer.allocate_call(), writer.allocate_node(), len(tokens)
    writer.append(Intent(call, 0, prompt, Role.MAIN, bytes(16)))
    drawn = np.array(tokens, np.int32), -np.ones(n, np.float32), np.zeros(n, np.int32)
    writer.append(Node(node, prompt, 0, call, NodeKind.SAMPLED, Role.MAIN, *drawn))
    writer.append(CallEnd(call, 0, node, fate, "stop", "clean"))
    return node


def json_lines(title: str) -> list[dict[str, Any]]:
    (text,) = [text for word, text in FENCE.findall(section("file-formats.md", title)) if word == "json"]
    return [json.loads(line) for line in text.splitlines()]


def examples() -> list[tuple[str, dict[str, Any]]]:
    """(kind, fields) of the example events."""
    return [(e["kind"], {k: v for k, v in e.items() if k not in ("seq", "t", "kind")}) for e in json_lines("events.jsonl")]


def live_example() -> dict[str, Any]:
    (line,) = json_lines("live.json")
    return line


# -- pages ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is_and_no_page_names_a_machine(page: Path) -> None:
    text = page.read_text()
    assert text.count("\n```") == 2 * len(FENCE.findall(text))
    assert {word for word, _ in FENCE.findall(text)} <= LANGUAGES
    assert not re.search(r"(?<!\w)/(work|root|home/\w+)/", text)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_loads_as_a_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "example.yaml").write_text(text)
    for name in ("quickstart.yaml",):
        (tmp_path / name).write_text((ROOT / "configs" / name).read_text())
    assert configfile.load(tmp_path / "example.yaml")


@pytest.mark.parametrize("text", blocks("json"))
def test_json_is_json(text: str) -> None:
    assert all(isinstance(json.loads(line), dict) for line in text.splitlines())


@pytest.mark.parametrize("text", blocks("bash"))
def test_shell_lines_are_shell(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


NEEDS_A_GATEWAY = "gateway-"
"""Its example runs against a real one in tests/gateway/test_standalone.py."""


@pytest.mark.parametrize("text", [param for param in blocks("python") if not str(param.id).startswith(NEEDS_A_GATEWAY)])
def test_python_runs_against_a_segment(text: str, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text, "example", "exec"), names)
    if "weight" in names:
        assert names["weight"].tolist() == [0.0, 1.0, 2.0, 5.0, 6.0]
    if "target" in names:
        with StoreReader(made / RUN / "trees") as reader:
            tree = reader.tree(int(names["execution"]))
        leaf = max(tree.leaves)
        path = tree.path(leaf)
        assert list(names["path"]) == path
        assert names["tokens"][names["ids"]].tolist() == tree.tokens_of(path).tolist()
        assert names["target"].tolist() == [tree.is_target(node) for node in path for _ in range(tree.nodes[node].length)]
        assert 0 < names["target"].sum() < len(names["target"])


# -- commands -------------------------------------------------------------------------------------------------------------------
def parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Find the command and parse its arguments as the command line does; raises what it would say."""
    command: Any = typer.main.get_command(app)
    names = []
    while hasattr(command, "commands"):
        assert words, f"gyre {' '.join(names)} has subcommands"
        assert words[0] in command.commands, f"no command {words[0]}"
        command, names, words = command.commands[words[0]], [*names, words[0]], words[1:]
    return names[0], command.make_context(" ".join(names), list(words)).params


def test_command_lines_do_what_the_documents_say(made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran, parsed = set(), set()
    for line, words in commands():
        program, *rest = words
        match program:
            case "gyre":
                name, params = parse(rest)
                parsed.add(name)
                if name in QUICK:
                    ran.add(name)
                    assert gyre(rest, made, monkeypatch) == 0, f"{line}: {capsys.readouterr().err}"
                elif name in {"run", "submit", "sweep"}:
                    folder = ROOT if (ROOT / params["config"]).exists() else made
                    configfile.load(_file(folder / params["config"]), params["overrides"] or [])
            case "sbatch":
                script = next(word for word in rest if not word.startswith("-"))
                assert os.access(ROOT / script, os.R_OK), line
            case "h5ls" | "h5dump" | "grep" | "tail":
                done = subprocess.run(["bash", "-c", line], cwd=made, capture_output=True, text=True)
                assert done.returncode == 0, f"{line}: {done.stderr}"
            case "python":
                assert rest[:1] == ["-m"]
                assert (ROOT / (rest[1].replace(".", "/") + ".py")).exists(), line
            case "./quickstart" | "./test":
                assert os.access(ROOT / program, os.X_OK)
            case _:
                assert program in {".", "git", "cd", "srun", "vllm"}, f"no rule for {line!r}"
    assert ran == QUICK
    assert parsed >= {"run", "submit", "sweep", "doctor"}


def _file(config: Path) -> Path:
    """The YAML file that CONFIG means."""
    return config / "config.yaml" if config.is_dir() else config


def gyre(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["gyre", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_the_commands_are_named_in_the_contract() -> None:
    (item,) = re.findall(r"^\* Commands of (.*?)\. CONFIG", section("architecture.md", "Contracts"), re.MULTILINE | re.DOTALL)
    command: Any = typer.main.get_command(app)
    assert set(re.findall(r"`([a-z]+)`", item)) == {"gyre", *command.commands, *command.commands["trees"].commands}


def test_commands_in_the_text_exist() -> None:
    found = {code for page in PAGES for code in re.findall(r"`(gyre [a-z][^`\n]*)`", FENCE.sub("", page.read_text()))}
    assert len(found) > 10
    for code in found:
        words = shlex.split(code)[1:]
        if len(words) > (2 if words[0] == "trees" else 1):
            parse(words)
        else:
            assert words[0] in typer.main.get_command(app).commands, code  # type: ignore[attr-defined]


# -- configuration --------------------------------------------------------------------------------------------------------------
def rows() -> dict[str, list[str]]:
    """Key -> cells of its row in docs/configuration.md."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    lines = re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|(.*)\|$", text, re.MULTILINE)
    assert len(lines) == len(dict(lines)), "a key stands there twice"
    return {key: [cell.strip() for cell in rest.split("|")] for key, rest in lines}


def test_every_key_stands_there_with_its_default_and_its_bounds() -> None:
    table = rows()
    assert list(table) == list(valid_keys())
    defaults = Config().model_dump(mode="json")
    for key, (default, allowed, meaning) in table.items():
        part, name = key.split(".")
        written = yaml.safe_load(default.strip("`"))
        assert written == defaults[part][name], key
        assert type(written) is type(defaults[part][name]), key
        field = Config.model_fields[part].annotation.model_fields[name]  # type: ignore[union-attr]
        for bound in _bounds(field.annotation, field.metadata):
            told = f"{bound}" if isinstance(bound, int) else f"{bound:g}"
            assert re.search(rf"(?<![\d.]){told}(?![\d.])", allowed), f"{key}: {told} is not in {allowed!r}"
        for choice in _choices(field.annotation):
            assert f"`{choice}`" in allowed, f"{key}: {choice}"
        assert meaning or part == "slurm" or key == "training.weight_decay", f"{key} is not explained"


def _bounds(annotation: Any, metadata: list[Any]) -> Iterator[float]:
    for mark in metadata:
        for name in ("ge", "gt", "le", "lt"):
            if isinstance(mark, annotated_types.BaseMetadata) and getattr(mark, name, None) is not None:
                yield getattr(mark, name)
        yield from _bounds(None, getattr(mark, "metadata", []))
    for part in get_args(annotation):
        if hasattr(part, "__metadata__"):
            yield from _bounds(None, list(part.__metadata__))


def _choices(annotation: Any) -> list[str]:
    return [value for value in get_args(annotation) if isinstance(value, str)]


def test_the_keys_that_may_change_are_the_ones_that_are_named() -> None:
    from gyre_hpc.driver.rundir import FREE

    text = section("configuration.md", "Files, `extends:` and overrides")
    for key in FREE:
        assert key == "run.dir" or f"`{key}`" in text, key


# -- formats --------------------------------------------------------------------------------------------------------------------
def emitted() -> set[str]:
    """Event kinds in the code: of `emit` calls, and of what the ledger stages."""
    kinds: set[str] = set()
    for path in (ROOT / "gyre_hpc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit" and node.args:
                kinds |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
            if isinstance(node, ast.Tuple) and node.elts and isinstance(node.elts[0], ast.Constant):
                first = node.elts[0].value
                kinds |= {first} if isinstance(first, str) and first.startswith("execution.") else set()
    return kinds


def test_every_kind_of_event_is_described_with_an_example() -> None:
    described = set(re.findall(r"^\| `([a-z.]+)` \|", section("file-formats.md", "events.jsonl"), re.MULTILINE))
    assert described == emitted()
    assert {kind for kind, _ in examples()} == described
    text = section("file-formats.md", "events.jsonl")
    fields = {name for kind, fields in examples() if kind != "config.change" for name in fields}
    missing = {name for name in fields if not re.search(rf"`[^`]*\b{name}\b[^`]*`|\b{name}\b", text.split("```json")[0])}
    assert not missing


def keys_of(path: str, function: str) -> set[str]:
    """String keys of the dicts that a function writes."""
    tree = ast.parse((ROOT / path).read_text())
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    dicts = [node for node in ast.walk(found) if isinstance(node, ast.Dict)]
    return {key.value for node in dicts for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def test_every_field_of_a_step_is_described() -> None:
    text = section("file-formats.md", "events.jsonl").split("`step.end`: ", 1)[1].split("```", 1)[0]
    fields = keys_of("gyre_hpc/training/loss.py", "means") | keys_of("gyre_hpc/controller/controller.py", "_close")
    fields |= keys_of("gyre_hpc/controller/stepend.py", "trained")
    fields |= keys_of("gyre_hpc/controller/learner.py", "_step")
    assert {"grad_norm", "score_mean", "ratio_mean"} <= fields
    assert not {name for name in fields - {"schedule", "branches", "fields"} if f"`{name}`" not in text}


@pytest.mark.parametrize("command", ["status", "report", "trees stats", "trees ls", "trees show", "trees verify", "trees repair"])
def test_json_has_the_fields_that_are_named(
    command: str, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = section("file-formats.md", "What `--json` prints").splitlines()
    row = next(row for row in rows if row.startswith(f"| `gyre {command} ")).split("|")[2]
    capsys.readouterr()
    assert gyre([*command.split(), str(RUN), *(["0"] if "show" in command else []), "--json"], made, monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    keys = set(found[0] if isinstance(found, list) else found)
    if "show" in command:
        assert {"nodes", "calls", "outline"} <= keys
    else:
        assert set(re.findall(r"`([a-z_]+)`", row)) == keys


def test_every_column_of_a_segment_is_described() -> None:
    text = section("file-formats.md", "trees")
    for name in DESCRIPTIONS:
        table, _, column = name.rpartition("/")
        line = [line for line in text.splitlines() if line.startswith(f"| `/{table}/" if table else "| `/tokens`")]
        assert any(f"`{column}`" in row or f"/{column}`" in row for row in line), name


def test_every_path_of_a_run_directory_is_described() -> None:
    text = section("file-formats.md", "The run directory")
    run = RunPaths(Path("RUN"))
    for name, value in vars(RunPaths).items():
        if isinstance(value, property):
            assert f"`{getattr(run, name).relative_to('RUN')}" in text, name


# -- troubleshooting ------------------------------------------------------------------------------------------------------------
def test_the_lines_that_are_explained_are_in_the_code() -> None:
    sources = [path.read_text() for folder in ("gyre_hpc", "cells", "trees") for path in (ROOT / folder).rglob("*.py")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    cells = [line.split("|")[1] for line in section("troubleshooting.md", "What the line says").splitlines() if line.startswith("| `")]
    cells += [line.split("|")[3] for line in section("troubleshooting.md", "It hangs").splitlines() if line.startswith("| ")]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell) if not span.endswith(".log")]
    spans += re.findall(r"^\* `([^`]+)`", section("troubleshooting.md", "Slurm and requeueing"), re.MULTILINE)
    assert len(spans) > 30
    for span in spans:
        parts = re.split(r"\.\.\.|:|=|\b[A-Z][A-Z_]*\b|[A-Z]+-N+|\bN\b", span)
        for part in (part.strip() for part in parts):
            assert len(part) < 5 or part in code, f"{span!r}: {part!r} is not in the code"
