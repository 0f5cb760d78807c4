"""What ./quickstart and ./test share (setup/env.sh), as far as nothing is installed for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def told(environment: Path, clone: Path) -> str:
    script = f". {ROOT}/setup/env.sh; tell_of_other_clone; echo after"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=clone,
        env={"PATH": "/usr/bin:/bin", "GYRE_VENV": str(environment)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.endswith("after\n")
    return done.stdout.removesuffix("after\n")


def test_an_environment_that_is_another_clones_is_told(tmp_path: Path) -> None:
    one, two, environment = tmp_path / "one", tmp_path / "two", tmp_path / "env"
    one.mkdir()
    two.mkdir()
    assert not told(environment, two)  # a new one
    info = environment / "lib" / "python3.11" / "site-packages" / "gyre_hpc-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "direct_url.json").write_text(f'{{"url":"file://{one}","dir_info":{{"editable":true}}}}')
    assert not told(environment, one)
    assert f"{environment} was {one}'s" in told(environment, two)
    one.rmdir()  # it was moved here
    assert not told(environment, two)
