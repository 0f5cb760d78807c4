"""The harness as a program in a box."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import pytest

from gyre_hpc.config import HarnessSection
from gyre_hpc.configfile import check
from gyre_hpc.errors import ConfigError, GyreError, Resumable
from gyre_hpc.executions import foreign, programs, sandbox
from gyre_hpc.executions.program import SOCKET
from gyre_hpc.executions.programs import Bundled
from gyre_hpc.harness import main


def test_every_setting_of_the_harness_is_given(tmp_path: Path) -> None:
    environment = Bundled(tmp_path, HarnessSection(retry=0.25)).environment("s3cret", 7, "policy")
    assert set(json.loads(environment["GYRE_HARNESS"])) == set(main.DEFAULTS)
    assert json.loads(environment["GYRE_HARNESS"])["retry"] == 0.25
    assert environment["ANTHROPIC_BASE_URL"].endswith("/x/s3cret")


def test_built_without_sources_and_mounted_read_only(tmp_path: Path) -> None:
    program = Bundled.build(tmp_path, HarnessSection(binds=["/opt/modules"]))
    assert {path.suffix for path in tmp_path.iterdir()} == {".pyc"}
    mounts = program.mounts(tmp_path / "g.sock")
    assert not any(mount.writable for mount in mounts)
    assert {mount.target for mount in mounts} >= {SOCKET, "/opt/modules"}


async def test_an_interpreter_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Bundled.build(tmp_path, HarnessSection())
    await program.check(tmp_path)
    monkeypatch.setattr(sandbox, "interpreter", lambda: "/opt/modules/bin/python3")
    with pytest.raises(GyreError, match=r"/opt/modules/bin/python3.*harness.binds"):
        await program.check(tmp_path)


@pytest.mark.parametrize("limits", [{"memory_mb": 1}, {"processes": 2}])
async def test_limits_that_leave_no_room_are_a_mistake_in_the_configuration(tmp_path: Path, limits: dict[str, int]) -> None:
    program = Bundled.build(tmp_path, HarnessSection(**limits))
    ((key, value),) = limits.items()
    with pytest.raises(ConfigError, match=rf"harness\.{key} = {value}\b.*nothing starts in such a box.*the defaults do: processes 128, "):
        await program.check(tmp_path)


async def test_a_box_that_comes_up_too_slowly_is_no_limit_s_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_PATIENCE", 0.0)
    with pytest.raises(Resumable, match=r"did not come up in a box within 0 s: it said nothing; .*the same command resumes"):
        await Bundled.build(tmp_path, HarnessSection(processes=2)).check(tmp_path)


async def test_a_bind_that_is_not_there_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    program = Bundled.build(tmp_path, HarnessSection(binds=["/usr", "/opt/no such folder"]))
    with pytest.raises(ConfigError, match=r"harness\.binds has /opt/no such folder"):
        await program.check(tmp_path)


def installation(folder: Path) -> Path:
    """What npm leaves of a native client, with a script in its place."""
    program = folder / "node_modules" / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 9.9.9 || { echo "$@"; cat; env; }\n')
    program.chmod(0o755)
    return folder


async def test_a_client_is_found_and_tells_its_version(tmp_path: Path) -> None:
    harness = {"kind": "claude-code", "path": str(installation(tmp_path / "i")), "argv": ["--more", "{instruction}!"], "env": {"A": "b"}}
    program = programs.build(tmp_path, check({"harness": harness, "model": {"window": 50_000}}, "test"))
    assert not program.bundled
    assert await program.check(tmp_path) == "9.9.9"
    start = program.start(tmp_path / "g.sock", "s3cret", 1, "policy", "task")
    assert list(start.argv[-2:]) == ["--more", "task!"]
    assert (start.env["A"], start.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]) == ("b", "50000")
    assert start.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9747/x/s3cret"
    assert not any(mount.writable for mount in start.mounts)
    assert str(tmp_path / "i") in {mount.target for mount in start.mounts}


async def test_a_client_behind_a_link_is_there_by_both_names(tmp_path: Path) -> None:
    program = installation(tmp_path / "real") / "node_modules" / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
    (tmp_path / "link").symlink_to(tmp_path / "real")
    named = str(program).replace("/real/", "/link/")
    program.write_text(f"#!/bin/sh\ntest -x {named} && echo by both names\n")
    harness = {"kind": "claude-code", "path": str(tmp_path / "link")}
    built = programs.build(tmp_path, check({"harness": harness, "model": {"window": 50_000}}, "test"))
    assert await built.check(tmp_path) == "by both names"


async def test_a_client_that_does_not_start_is_named(tmp_path: Path) -> None:
    program = installation(tmp_path) / "node_modules" / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
    program.write_text("#!/bin/sh\necho no such library; exit 3\n")
    harness = {"kind": "claude-code", "path": str(program)}
    built = programs.build(tmp_path, check({"harness": harness, "model": {"window": 50_000}}, "test"))
    with pytest.raises(GyreError, match="claude does not start in a box: no such library"):
        await built.check(tmp_path)


async def test_a_window_without_room_for_the_clients_own_prompt_is_refused(tmp_path: Path) -> None:
    installation(tmp_path)
    sections = {"harness": {"kind": "claude-code", "path": str(tmp_path), "max_tokens": 4096}, "model": {"window": 24_000}}
    with pytest.raises(ConfigError, match=r"model.window = 24000 has no room for claude-code.*a window of 64000 or more"):
        await programs.build(tmp_path, check(sections, "test")).check(tmp_path)


@pytest.mark.parametrize(
    ("harness", "said"),
    [
        ({"kind": "codex"}, "harness.path = ''"),
        ({"kind": "codex", "path": "codex"}, "harness.path = 'codex'"),
        ({"kind": "codex", "path": "/no/such/folder"}, "not on this node"),
        ({"kind": "codex", "path": "/usr/share"}, "no codex in harness.path"),
        ({"kind": "command"}, "without harness.argv"),
    ],
)
def test_what_is_not_installed_is_a_mistake_in_the_configuration(tmp_path: Path, harness: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        programs.build(tmp_path, check({"harness": harness}, "test"))


def test_big_runtimes_get_room(tmp_path: Path) -> None:
    built = programs.build(tmp_path, check({"harness": {"kind": "command", "argv": ["true"]}}, "test"))
    limits = built.limits(sandbox.Limits(processes=16, files=16, scratch=1, file=1, shared=1))
    assert limits.reserving
    assert min(limits.processes, limits.files, limits.scratch, limits.file) > 500
    assert limits.shared == 1


def test_their_room_ends_where_the_node_s_own_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell refuses to set a limit above its hard one, and every box would fail by it."""
    built = programs.build(tmp_path, check({"harness": {"kind": "command", "argv": ["true"]}}, "test"))
    node = {resource.RLIMIT_NPROC: 300, resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_FSIZE: 1 << 20}
    monkeypatch.setattr(foreign, "within", lambda wanted, kind: min(wanted, node[kind]))
    limits = built.limits(sandbox.Limits())
    assert (limits.processes, limits.files, limits.file) == (300, 1024, 1 << 20)


@pytest.mark.parametrize("name", ["path", "binds"])
def test_no_box_may_show_the_runs_directory(tmp_path: Path, name: str) -> None:
    installation(tmp_path)
    harness = {"kind": "claude-code", "path": str(tmp_path)} if name == "path" else {"binds": ["/usr", str(tmp_path)]}
    config = check({"harness": harness}, "test")
    assert programs.build(tmp_path, config, tmp_path.parent / "runs" / "one")
    with pytest.raises(ConfigError, match=rf"harness\.{name} .* holds the run's directory"):
        programs.build(tmp_path, config, tmp_path / "runs" / "one")


@pytest.mark.parametrize(("place", "shown"), [("node-20/bin/node", "node-20"), ("bin/node", "bin/node"), ("tools/node", "tools/node")])
def test_of_node_the_installation_is_shown_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, shown: str
) -> None:
    home = tmp_path / "home"
    node = home / place
    node.parent.mkdir(parents=True)
    node.touch(mode=0o755)
    script = tmp_path / "i" / "node_modules" / "@qwen-code" / "qwen-code" / "cli.js"
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(node.parent))
    built = programs.build(tmp_path, check({"harness": {"kind": "qwen-code", "path": str(tmp_path / "i")}}, "test"))
    mounts = built.start(tmp_path / "g.sock", "s", 1, "policy", "task").mounts
    assert str(home / shown) in {mount.target for mount in mounts}
    assert not any(home.is_relative_to(mount.target) for mount in mounts)


def test_a_task_that_begins_with_a_dash_is_no_option(tmp_path: Path) -> None:
    harness = {"kind": "claude-code", "path": str(installation(tmp_path / "i"))}
    built = programs.build(tmp_path, check({"harness": harness}, "test"))
    assert "\n- do it" in built.start(tmp_path / "g.sock", "s", 1, "policy", "- do it").argv
