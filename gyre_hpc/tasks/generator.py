"""Writes chores as task folders in Harbor format.

Invariants: a folder appears whole or not at all (written beside, then renamed) and is a function of (seed, index, difficulty); one that
is there is used as it is, so a resumed run sees the same task; before it is written its chore is checked: doing nothing scores 0, the
reference 1.

The verifier is plain bash builtins (about 2 ms, one process). It trusts nothing about the workspace: it opens regular files only, reads at
most 64 characters of each, and follows no symbolic link.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from gyre_hpc.errors import GyreError, Resumable
from gyre_hpc.tasks.chores import Chore, Part, draw
from gyre_hpc.tasks.harbor import Task, load

_TOML = """version = "1.0"

[metadata]
category = "chores"
difficulty = {difficulty}

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0
"""

_TEST = """#!/bin/bash
# The score is the fraction of the parts that work. Overrides are for use without a box.
cd "${{GYRE_WORKSPACE:-/workspace}}" || exit 1
holds() {{ # FILE TEXT: a regular file of fewer than 64 characters with this text, up to line ends (read succeeds only when there is more)
  local text=
  [[ -f $1 && ! -L $1 ]] || return 1
  IFS= read -r -d '' -n 64 text < "$1" && return 1
  while [[ $text == *$'\\n' ]]; do text=${{text%$'\\n'}}; done
  [[ $text == "$2" ]]
}}
gone() {{ [[ ! -e $1 && ! -L $1 ]]; }}
good=0
{checks}
printf '{{"reward": %d.%06d}}\\n' $((good / {count})) $((good % {count} * 1000000 / {count})) > "${{GYRE_LOGS:-/logs/verifier}}/reward.json"
"""


def generate(seed: int, index: int, difficulty: int, directory: Path) -> Task:
    """Task `index` of a seed as a folder below `directory`; written unless it is there. Raises GyreError, ValueError (difficulty)."""
    path = directory / f"chore-{seed}-{index:06d}"
    if not path.is_dir():
        chore = draw(seed, index, difficulty)
        check(chore)
        write(chore, path)
    return load(path)


def check(chore: Chore) -> None:
    """The gate of a generated task, in Python. Raises GyreError when doing nothing scores or the reference does not."""
    from gyre_hpc.policy.shell import Shell

    shell = Shell(chore.initial)
    nothing = chore.score(shell.files)
    for part in chore.parts:
        shell.call("bash", {"command": part.shell})
    if nothing != 0.0 or chore.score(shell.files) != 1.0:
        raise GyreError(f"generated chore {chore.instruction!r} fails its gate", "report this as a defect of the generator")


def write(chore: Chore, path: Path) -> None:
    """Write a chore as the folder `path`. Raises Resumable when the file system refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            for name, text in _files(chore).items():
                (building / name).parent.mkdir(exist_ok=True)
                (building / name).write_text(text)
            building.chmod(0o755)
            os.rename(building, path)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        if not path.is_dir():  # otherwise somebody else wrote the same task first
            raise Resumable(
                f"task {path} can't be written: {error.strerror}", "free some space or inodes there; the same command resumes"
            ) from None


def _files(chore: Chore) -> dict[str, str]:
    files = {
        "task.toml": _TOML.format(difficulty=len(chore.parts)),
        "instruction.md": f"{chore.instruction}\n",
        "tests/test.sh": _TEST.format(checks="\n".join(map(_check_of, chore.parts)), count=len(chore.parts)),
        "solution/solve.sh": "#!/bin/bash\nset -e\n" + "".join(f"{part.shell}\n" for part in chore.parts),
        "environment/Dockerfile": _dockerfile(chore),
    }
    return files | {f"environment/{name}": text for name, text in chore.initial.items()}


def _dockerfile(chore: Chore) -> str:
    copies = "".join(f"COPY {name} ./\n" for name in chore.initial)
    return f"FROM debian:12-slim\nWORKDIR /workspace\n{copies}"


def _check_of(part: Part) -> str:
    tests = []
    for name, text in part.wanted.items():
        quoted = "" if text is None else text.replace("\n", "\\n")
        tests.append(f"gone {name}" if text is None else f"holds {name} $'{quoted}'")
    return f"{' && '.join(tests)} && good=$((good + 1))"
