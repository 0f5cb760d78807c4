"""The pretended workspace against the harness's real tools in real bash."""

from pathlib import Path
from typing import Any

import pytest

from gyre_hpc.harness import texts, tools
from gyre_hpc.policy.shell import Shell

FILES = {"a.txt": "10\n", "b.txt": "20\n"}


def bash(command: str) -> tuple[str, dict[str, Any]]:
    return "bash", {"command": command}


@pytest.mark.parametrize(
    "call",
    [
        bash("echo 48 > a.txt"),
        bash("echo 48 > new.txt"),
        bash("echo 48 >> a.txt"),
        bash("echo 48 >> new.txt"),
        bash("cp a.txt b.txt"),
        bash("cp a.txt new.txt"),
        bash("cp none.txt a.txt"),
        bash("cp a.txt a.txt"),
        bash("mv a.txt b.txt"),
        bash("mv none.txt a.txt"),
        bash("mv a.txt a.txt"),
        bash("rm a.txt b.txt"),
        bash("rm a.txt none.txt"),
        bash("rm none.txt other.txt"),
        bash("rm a.txt a.txt"),
        ("write_file", {"path": "a.txt", "content": "48"}),
        ("write_file", {"path": "new.txt", "content": "48"}),
    ],
)
def test_as_the_real_tools(call: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", "C")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    shell = Shell(FILES)
    output, code = tools.run(*call, 1000, 10.0)
    assert shell.call(*call) == texts.tool_result(output, code)
    assert shell.files == {path.name: path.read_text() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("call", [("fly", {}), ("write_file", {"path": "a.txt"}), bash("make all"), ("bash", {})])
def test_what_it_does_not_know_fails(call: tuple[str, dict[str, Any]]) -> None:
    shell = Shell(FILES)
    assert shell.call(*call).endswith("exit 1")
    assert shell.files == FILES
