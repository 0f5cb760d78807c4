"""The doctor: what it says of a working machine, and of broken things."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gyre_hpc import doctor
from gyre_hpc.configfile import check
from gyre_hpc.doctor import Finding, exit_code, render
from gyre_hpc.errors import ExitCode


def test_two_real_ranks_are_one_world() -> None:
    found = doctor.mpi()
    assert found.ok
    assert "world size 2 of 2" in found.detail


def test_singletons_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gyre_hpc.driver.launcher.mpiexec_command", lambda argv, ranks, labelled: ["sh", "-c", "echo 1 1 lib; echo 1 1 lib"]
    )
    found = doctor.mpi()
    assert not found.ok
    assert "two ranks answered '1 1 lib" in found.detail


def test_hdf5_sandbox_and_file_system_work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for found in (doctor.hdf5(), doctor.sandbox(), doctor.file_system()):
        assert found.ok, found
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_breaks_is_a_finding_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEEPSPEED_PROBE", "import no_such_module")
    found = doctor._guarded(doctor.deepspeed)
    assert (found.ok, found.required) == (False, True)
    assert "ModuleNotFoundError: No module named 'no_such_module'" in found.detail
    assert found.remedy


def test_a_configuration_is_looked_at_as_its_job_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all checks only those of the configuration run here."""
    for name in ("python_version", "mpi", "slurm", "hdf5", "deepspeed", "vllm", "sandbox", "file_system", "model_cache"):
        monkeypatch.setattr(doctor, name, doctor.named(name, lambda: Finding("other", True, "")))
    good, bad = check({"run": {"name": "mine"}}, "test"), check({"gateway": {"host": "x" * 70}}, "test")
    assert [finding.detail for finding in doctor.examine(good)][9:] == ["mine: what it names is here, and fits this node"]
    (found,) = doctor.examine(bad)[9:]
    assert (found.name, found.ok, found.required) == ("configuration", False, True)
    assert "does not resolve here" in found.detail
    monkeypatch.setattr(doctor, "OPTIONS_PROBE", "import sys; sys.exit('unrecognized arguments: ' + ' '.join(sys.argv[1:]))")
    options = check({"rollout": {"engine": "vllm", "options": {"device": "tpu", "enforce_eager": True}}}, "test")
    found = doctor.examine(options)[-1]
    assert (found.name, found.ok) == ("engine options", False)
    assert found.detail.endswith("unrecognized arguments: --device=tpu --enforce-eager")


@pytest.mark.vllm
def test_vllms_own_command_line_says_what_it_does_not_take() -> None:
    taken = doctor.engine_options(check({"rollout": {"engine": "vllm", "options": {"kv_gib": 1, "block_size": 32}}}, "test"))
    assert taken.ok, taken
    refused = doctor.engine_options(check({"rollout": {"engine": "vllm", "options": {"device": "tpu"}}}, "test"))
    assert not refused.ok
    assert "--device=tpu" in refused.detail


def test_only_required_things_decide_the_exit_code_and_each_is_one_line() -> None:
    findings = [Finding("a", True, "x"), Finding("b", False, "y", "do z", required=False)]
    assert exit_code(findings) == ExitCode.DONE
    assert render(findings).splitlines() == ["ok      a  x", "missing b  y; do z"]
    assert exit_code([*findings, Finding("c", False, "y")]) == ExitCode.FAILED


def test_no_mpiexec_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor._guarded(doctor.mpi)
    assert "mpiexec not found" in found.detail


def test_a_child_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEADLINE", 0.2)
    with pytest.raises(doctor.GyreError, match="gave no answer"):
        doctor._child(["sleep", "30"])
