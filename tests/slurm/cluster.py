"""A real Slurm cluster of N virtual nodes on this machine: own munged, slurmctld and slurmd daemons, own ports, all files in one folder.

Invariants: nothing outside the folder is read or written (the machine's own Slurm and munge keep running beside it); daemons are stopped
by their own pid files only; state is never deleted while a daemon lives. Works as root and as a plain user.

By hand: `python -m tests.slurm.cluster --nodes 4 --dir D` starts one, prints the `export SLURM_CONF=...` line and waits for Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
REMEDY = "apt-get install --no-install-recommends slurm-wlm slurmctld slurmd slurm-client munge libpmi2-0"

# Every line was needed or measured: cred_expire makes a requeue take 6 s instead of 121 s, requeue_delay and the scheduler intervals
# take the remaining waits away, %n keeps the daemons of one host apart.
CONF = """\
ClusterName=gyre
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={dir}/munge.sock,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
TmpFS={dir}/tmp
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=pmi2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
SlurmdTimeout=10
KillWait=5
SwitchType=switch/none
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1,requeue_delay=1
{gres_types}
{topology}
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs={cpus} RealMemory={memory}{gres}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class ClusterError(Exception):
    """The virtual cluster could not be started; says which daemon and where its log is."""


@dataclass(frozen=True)
class Spec:
    """What the cluster pretends to have. `gpus` are files like /dev/zero: something to be allocated, nothing to compute on."""

    nodes: int = 4
    cpus: int = 8
    memory: int = 16000
    gpus: int = 0
    topology: str = ""
    """Lines of a topology.conf (plugin tree); empty: no topology."""


def missing() -> list[str]:
    """The daemons that this machine lacks."""
    return [name for name in DAEMONS if _find(name) is None]


class Cluster:
    """Started by `start`, stopped by `stop`; `environment` is what a client needs."""

    def __init__(self, directory: Path, spec: Spec | None = None) -> None:
        self.dir = directory.resolve()
        self.spec = spec or Spec()
        self.conf = self.dir / "slurm.conf"
        if len(str(self.dir)) > 80:
            raise ClusterError(f"{self.dir}: too long a path for the socket inside it; give a folder like /tmp/cluster")

    @property
    def environment(self) -> dict[str, str]:
        """What must be added to the environment of sbatch, srun, scontrol... to talk to this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    def start(self, deadline: float = 60.0) -> None:
        """Start every daemon and wait until all nodes are idle. Raises ClusterError with the log to read."""
        lacking = missing()
        if lacking:
            raise ClusterError(f"{', '.join(lacking)} not found: {REMEDY}")
        self._write()
        try:
            self._start_munged()
            _call([_need("slurmctld"), "-c", "-f", str(self.conf)], self._log("slurmctld"))
            for name in self.names:
                _call([_need("slurmd"), "-c", "-N", name, "-f", str(self.conf)], self._log(f"slurmd-{name}"))
            self._wait_idle(deadline)
        except BaseException:
            self.stop()
            raise

    @property
    def names(self) -> list[str]:
        return [f"n{i}" for i in range(1, self.spec.nodes + 1)]

    def stop(self, deadline: float = 30.0) -> None:
        """Cancel every job, then end every daemon, each by the pid in its own file."""
        if self._alive("slurmctld"):
            with contextlib.suppress(subprocess.SubprocessError):
                self.run("scancel", "--state=RUNNING", timeout=10)
                self.run("scancel", "--state=PENDING", timeout=10)
                self._wait_empty(15.0)
        for names in ([f"slurmd-{n}" for n in self.names], ["slurmctld"], ["munged"]):
            pids = [pid for pid in map(self._pid, names) if pid is not None]
            for pid in pids:
                _signal(pid, signal.SIGTERM)
            if not _wait_gone(pids, deadline):
                for pid in pids:
                    _signal(pid, signal.SIGKILL)

    def kill_node(self, name: str) -> None:
        """Lose a node: its daemon and everything it runs die at once (steps and tasks are its children or share its name)."""
        pid = self._pid(f"slurmd-{name}")
        if pid is not None:
            _signal(pid, signal.SIGKILL)

    def start_node(self, name: str) -> None:
        """Bring a node back."""
        _call([_need("slurmd"), "-N", name, "-f", str(self.conf)], self._log(f"slurmd-{name}"))

    def run(self, *argv: str, timeout: float = 60.0, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Run a client command against this cluster; its standard output. Raises CalledProcessError with both outputs."""
        environment = {**os.environ, **self.environment, **(env or {})}
        done = subprocess.run(argv, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
        return done.stdout

    # -- files ----------------------------------------------------------------------------------------------------------------
    def _write(self) -> None:
        for name in ("state", "spool", "tmp"):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        for name in self.names:
            (self.dir / "spool" / name).mkdir(exist_ok=True)
        os.chmod(self.dir, 0o755)
        ctld, first = _free_ports(1 + self.spec.nodes)
        fake = self.spec.gpus > 0
        self.conf.write_text(
            CONF.format(
                dir=self.dir,
                host=socket.gethostname().split(".")[0],
                user=getpass.getuser(),
                ctld_port=ctld,
                first_port=first,
                last_port=first + self.spec.nodes - 1,
                nodes=self.spec.nodes,
                cpus=self.spec.cpus,
                memory=self.spec.memory,
                gres_types="GresTypes=gpu" if fake else "",
                topology="TopologyPlugin=topology/tree" if self.spec.topology else "",
                gres=f" Gres=gpu:{self.spec.gpus}" if fake else "",
            )
        )
        if fake:
            self._write_gres()
        if self.spec.topology:
            (self.dir / "topology.conf").write_text(self.spec.topology)

    def _write_gres(self) -> None:
        lines = []
        for i in range(self.spec.gpus):
            device = self.dir / f"gpu{i}"
            if not device.exists():
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
            lines.append(f"NodeName=n[1-{self.spec.nodes}] Name=gpu File={device}\n")
        (self.dir / "gres.conf").write_text("".join(lines))

    def _start_munged(self) -> None:
        key = self.dir / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        options = {
            "socket": "munge.sock",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munged.seed",
            "key-file": "munge.key",
        }
        argv = [_need("munged"), "--force", *(f"--{key}={self.dir / name}" for key, name in options.items())]
        _call(argv, self._log("munged"))

    def _log(self, daemon: str) -> Path:
        return self.dir / f"{daemon}.start.log"

    # -- daemons --------------------------------------------------------------------------------------------------------------
    def _pid(self, daemon: str) -> int | None:
        try:
            return int((self.dir / f"{daemon}.pid").read_text())
        except (OSError, ValueError):
            return None

    def _alive(self, daemon: str) -> bool:
        pid = self._pid(daemon)
        return pid is not None and _lives(pid)

    def _wait_idle(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        state = ""
        while time.monotonic() < end:
            with contextlib.suppress(subprocess.SubprocessError):
                state = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", timeout=20)
                if sorted(state.split("\n")[:-1]) == sorted(f"{name} idle" for name in self.names):
                    return
            time.sleep(0.2)
        raise ClusterError(f"after {deadline:.0f} s the nodes are not idle ({state.strip()!r}); read {self.dir}/slurmctld.log")

    def _wait_empty(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            if not self.run("squeue", "--noheader", "--format=%i", timeout=10).strip():
                return
            time.sleep(0.2)


@contextlib.contextmanager
def cluster(directory: Path, spec: Spec | None = None) -> Iterator[Cluster]:
    """A started cluster that is stopped at the end, whatever happens inside."""
    made = Cluster(directory, spec)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _need(name: str) -> str:
    found = _find(name)
    if found is None:
        raise ClusterError(f"{name} not found: {REMEDY}")
    return found


def _call(argv: list[str], log: Path) -> None:
    """Start a daemon, which goes to the background by itself."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "PMI", "SBATCH"))}
    with open(log, "ab") as out:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, timeout=60, check=False)
    if done.returncode:
        raise ClusterError(f"{argv[0]} ended with {done.returncode}; read {log}: {log.read_text()[-300:]}")


def _free_ports(count: int) -> tuple[int, int]:
    """A free port, and the first of `count - 1` free neighbours, outside the kernel's ephemeral range where possible."""
    base = 20000 + (os.getpid() * 37) % 10000
    for first in range(base, base + 2500, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first, first + 1
    raise ClusterError(f"no {count} neighbouring free ports above {base}")


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait_gone(pids: list[int], deadline: float) -> bool:
    end = time.monotonic() + deadline
    while any(map(_lives, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def main() -> None:
    """Start a cluster by hand and keep it until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description="start a virtual Slurm cluster on this machine")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cpus", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with cluster(args.dir, Spec(nodes=args.nodes, cpus=args.cpus, gpus=args.gpus)) as made:
        print(f"export SLURM_CONF={made.conf}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
