"""A soak: cells change their roles hundreds of times under live agents, and nothing may fail, leak or be lost.

    python -m benchmarks.soak [--transfers 500] [--folder DIR] [--engine vllm]        (SIGTERM: stop now, judge what there is)

The whole system runs (`gyre run`: driver, gateway, supervisor, MPI ranks, engines: torch, or vLLM with hand-over of KV by nixl) with a
policy of written-down weights (tests/markov.py) whose window holds real clients. The bundled harness and, from a second supervisor on the
same gateway, Claude Code in its box take executions of the same groups. Each tool call adds a line to a file and their number is the
score, so the score says how many calls a harness was given, and the trees must hold exactly those. The run is stopped once it has seen
enough transfers, there and back.

What grows is looked at every other second: memory, descriptors, threads and sockets of every process that lives as long as the run, files
of the run, of /tmp and of /dev/shm; torch engines say at each release what of their slots is left, of vLLM's KV blocks see soak_kv.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

from benchmarks import soak_kv
from benchmarks.soak_growth import Allowed, Found, Sample, grown, look, named_by
from gyre_hpc.configfile import load
from gyre_hpc.events import read_events
from gyre_hpc.paths import RunPaths
from gyre_hpc.runtime import VARIABLE, Runtime
from tests.harness.clients.install import installed
from tests.job.jobs import GYRE, ROOT, Job, gyre_json, make, until
from tests.markov import MOST, Habits, counting_task, given, markov, offered
from trees.store import StoreReader

CELLS = {"torch": 4, "vllm": 2}
LIVE = 32
"""Executions that are live at every transfer."""
GROUPS = 34
"""Outstanding groups of two: more than LIVE executions of them are unfinished."""
START = 400
"""Seconds for engines to come up, and then for the first transfer."""
PAUSE = 2.0
"""Seconds between two looks."""
TOOLS = "Bash,Read,Write"
"""Of the real client: with all that it has its prompt is 27,000 tokens long, half a minute of work for an engine on a busy core."""
RETURN = {f"MALLOC_{what}_THRESHOLD_": str(128 << 10) for what in ("MMAP", "TRIM")}
"""glibc's first thresholds, kept: it raises them by what is freed, and then keeps tens of MB between passes, which looks like growth."""
EXPLAINED = {"clean", "retry", "compaction", "sub-agent", "edit", "side-query"}


# what keeps KV is small enough to be full early: before that its filling looks like growth
ENGINES: dict[str, dict[str, Any]] = {
    "torch": {"engine": "torch", "options": {"prefix_mb": 8}},
    "vllm": {"engine": "vllm", "handover": "nixl", "options": {"kv_gib": 1, "num_gpu_blocks_override": 4096}},
}


def job_in(folder: Path, transfers: int, engine: str) -> Job:
    """The configuration of the run."""
    counting_task(folder / "tasks" / "count")
    model = markov(folder / "model", Habits(words=60.0, calls=0.75))
    return make(
        folder,
        run={"steps": transfers + 2 * GROUPS, "min_free_mb": 1},  # a run dispatches no more groups than its steps need
        model={"path": str(model), "window": 65_536},
        tasks={"source": str(folder / "tasks")},
        harness={
            "compaction": 0.2,
            "sub_agent": 0.2,
            "retry": 0.05,
            "max_turns": 40,
            "max_tokens": 400,
            "tool_delay": 12.0,
            "timeout": 3000,
            "overall_timeout": 3300,
        },
        rollout={"capacity": 128, **ENGINES[engine]},
        cells={"count": CELLS[engine]},
        schedule={"groups_per_step": 1, "group_size": 2, "phi": GROUPS - 1},
        training={"lr": 1e-6},
        gateway={"seal_every": 64},
        deadlines={"start": START, "transfer": 120, "step": 120, "idle": 120, "stop": 5},
    )


class Soak:
    """One run, from its start to what it showed."""

    def __init__(self, folder: Path, transfers: int, clients: int, engine: str = "torch") -> None:
        self.folder, self.transfers, self.clients, self.engine = folder, transfers, clients, engine
        self._program = installed("claude-code") if clients else Path()
        self.stopped = ""
        """When the run was asked to end, as logs write it."""
        self.enough = False
        """Set from outside: it is stopped now, and judged by what there is."""
        self.job = job_in(folder, transfers, engine)
        self.samples: list[Sample] = []
        self.taken: set[int] = set()
        """Executions that the client was seen at."""
        self.log = folder / "run.log"
        self._environment = {**os.environ, **RETURN, "TMPDIR": str(folder / "tmp")}
        if engine == "vllm":
            self._environment["PYTHONPATH"] = str(ROOT)  # vLLM's workers import soak_kv.py
        (folder / "tmp").mkdir()

    def run(self, allowed: Allowed, seconds: float) -> Found:
        """All of it; AssertionError when the run does not start, ends by itself, or takes more than `seconds`."""
        began = time.monotonic()
        with open(self.log, "wb") as out:
            counting = [sys.executable, "-m", "benchmarks.soak_kv", "drive", str(self.job.config)]
            command = counting if self.engine == "vllm" else [*GYRE, "run", str(self.job.config), "--plain"]
            run = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=self._environment, start_new_session=True)
        other: subprocess.Popen[bytes] | None = None
        try:
            until("engines", lambda: run.poll() is not None or self.job.paths.live.exists(), START)
            assert run.poll() is None, self.log.read_text()
            other = self._client() if self.clients else None
            until("executions", lambda: run.poll() is not None or self._transfers() > 0, START)
            assert run.poll() is None, self.log.read_text()
            ours = {"driver": run, "client": other}
            watched = {**{name: psutil.Process(process.pid) for name, process in ours.items() if process}, **self._watched()}
            while not (self.enough or self._done()):
                assert time.monotonic() - began < seconds, f"{self._transfers()} transfers within {seconds} s"
                try:
                    self._look(watched)
                except psutil.NoSuchProcess as gone:
                    raise AssertionError(f"{gone}: {self.log.read_text()}") from None
                time.sleep(PAUSE)
            seen = self.job.events("transfer")
            if other is not None:
                self._end(other)
            self.stopped = time.strftime("%Y-%m-%d %H:%M:%S")
            run.send_signal(signal.SIGTERM)
            code = run.wait(120)
        finally:
            for process in filter(None, (other, run)):
                if process.poll() is None:
                    process.kill()
                    process.wait()
        found = Found()
        found.check(code == 75, f"the run ended with {code}: {self.log.read_text()[-500:]}")
        found.numbers["seconds"] = round(time.monotonic() - began, 1)
        self._transferred(found, seen)
        self._executed(found)
        self._answered(found)
        grown(self.samples, allowed, found)
        self._vllm(found) if self.engine == "vllm" else self._torch(found)
        return found

    # -- the client -----------------------------------------------------------------------------------------------------------------

    def _client(self) -> subprocess.Popen[bytes]:
        """A second supervisor on the run's gateway, whose harness is Claude Code."""
        mine = Runtime.read(self.job.paths.runtime(1) / "runtime.json")
        paths = RunPaths(self.folder / "client")
        tree = yaml.safe_load(self.job.paths.config.read_text())
        client = {"kind": "claude-code", "path": str(self._program), "argv": ["--tools", TOOLS], "max_tokens": 2048}
        tree["harness"] |= {**client, "slots_per_node": self.clients}
        paths.runtime(1).mkdir(parents=True)
        paths.config.write_text(yaml.safe_dump(tree))
        load(paths.config)
        where = Runtime(paths.root, 1, mine.secret, mine.gateway_url, mine.gateway_socket).write(paths.runtime(1))
        with open(self.folder / "client.log", "wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "gyre_hpc.executions.supervisor", "--node", "client"],
                env={**self._environment, VARIABLE: str(where)},
                stdout=out,
                stderr=out,
                cwd=ROOT,
            )

    def _end(self, client: subprocess.Popen[bytes]) -> None:
        assert client.poll() is None, (self.folder / "client.log").read_text()
        client.terminate()
        client.wait(30)

    # -- looking --------------------------------------------------------------------------------------------------------------------

    def _done(self) -> bool:
        if len(_loaded(self.job.events("transfer"))) < self.transfers:
            return False
        return not self.clients or bool(self.taken & {event["execution"] for event in self.job.events("execution.end")})

    def _transfers(self) -> int:
        return len(self.job.events("transfer"))

    def _watched(self) -> dict[str, psutil.Process]:
        """The processes of the run that live as long as it does, the driver left out, by name."""
        named: dict[str, psutil.Process] = {}
        for process in sorted(self.job.processes(), key=lambda p: p.pid):
            try:
                name = named_by(process.cmdline())
            except psutil.NoSuchProcess:  # a box that ended meanwhile
                continue
            if name is not None:
                count = sum(known.rpartition("-")[0] == name for known in named)
                named[f"{name}-{count}"] = process
        kinds = Counter(name.rpartition("-")[0] for name in named)
        cells = CELLS[self.engine]
        expected = Counter({"gateway": 1, "supervisor": 1, "rank": 1 + cells, "engine": cells})
        assert expected <= kinds, f"processes {kinds}, {expected} expected"
        return named

    def _look(self, watched: dict[str, psutil.Process]) -> None:
        self.taken |= {int(folder.name.partition("-")[2]) for folder in (self.folder / "client" / "workspaces").glob("*-*")}
        self.samples.append(look(watched, dict(self._places()), self._transfers()))

    def _places(self) -> Iterator[tuple[str, Path]]:
        paths = self.job.paths
        yield "tmp", self.folder / "tmp"
        yield "events", paths.events
        for folder in sorted(paths.root.iterdir()):
            if folder.is_dir():
                yield folder.name, folder

    # -- what it showed -------------------------------------------------------------------------------------------------------------

    def _transferred(self, found: Found, seen: list[dict[str, Any]]) -> None:
        loaded = _loaded(seen)
        found.check(len(loaded) >= self.transfers, f"{len(loaded)} transfers since {LIVE} executions were live")
        live = [event["live"] for event in loaded] or [0]
        found.numbers |= {
            "transfers": len(loaded),
            "transfers_before": len(seen) - len(loaded),
            "steps": len(self.job.steps()),
            "live_least": min(live),
            "live_median": median(live),
            "calls_moved": sum(event["moved"] for event in seen),
            "calls_held": sum(event["held"] for event in seen),
            "transfer_seconds_median": round(median(event["seconds"] for event in seen), 3),
            "transfer_seconds_most": max(event["seconds"] for event in seen),
        }
        found.check(min(live) >= LIVE, f"only {min(live)} executions live at a transfer")
        found.check(sum(event["moved"] for event in seen) > 0, "no call was in flight at any transfer")
        fed = [event for event in self.job.events("step.end") if event["rows"]]
        found.check(bool(fed), "nothing was trained")

    def _executed(self, found: Found) -> None:
        """Every execution that ended ended well, and every call that a harness acted upon is in its tree."""
        events = list(read_events(self.job.paths.events))
        kinds = Counter(event["kind"] for event in events)
        ends = [event for event in events if event["kind"] == "execution.end"]
        found.numbers |= {"ended": len(ends), "reasons": dict(Counter(event["reason"] for event in ends)), "events": dict(kinds)}
        found.check(all(event["valid"] for event in ends), "an execution has no valid score")
        found.check({event["reason"] for event in ends} <= {"finished", "limit"}, f"reasons {found.numbers['reasons']}")
        for kind in ("execution.lost", "warning.fork", "failure", "tasks.refused"):
            found.check(kinds[kind] == 0, f"{kinds[kind]} events {kind}: {next((e for e in events if e['kind'] == kind), None)}")
        verified = gyre_json("trees", "verify", str(self.job.paths.root))
        found.check(verified["problems"] == [], f"trees: {verified['problems']}")
        told = Counter[str]()
        with StoreReader(self.job.paths.trees) as reader:
            for event in ends:
                tree = reader.tree(event["execution"])
                calls = list(tree.calls.values())
                client = offered(tree, self.folder / "model", "Bash")  # some end between two looks at the client's folder
                found_calls = given(tree, self.folder / "model", "Bash" if client else "bash")
                done = round(event["score"] * MOST)
                found.check(found_calls == done, f"execution {event['execution']}: {done} tool calls done, {found_calls} in its tree")
                found.check(not tree.incomplete, f"execution {event['execution']} is incomplete")
                told.update([f"difference {call.difference}" for call in calls])
                told.update([f"fate {call.fate.name.lower()}" for call in calls if call.fate is not None])
                told.update({"calls": len(calls), "tool_calls": done, "client_executions": client, "client_calls": client * len(calls)})
        found.numbers |= dict(sorted(told.items()))
        found.check(not self.clients or told["client_executions"] > 0, "no execution of the real client ended")
        unknown = {name for name in told if name.startswith("difference ")} - {f"difference {name}" for name in EXPLAINED}
        found.check(not unknown, f"differences {unknown}")

    def _answered(self, found: Found) -> None:
        """By the gateway's own count. Of the run's end on, which stops the engines first, calls of those who live break."""
        lines = (self.job.paths.attempt_logs(1) / "gateway.log").read_text().splitlines()
        (line,) = [line for line in lines if "answers to harnesses" in line]
        answers = Counter(json.loads(line[line.index("{") :]))
        cut = sum("broke after" in line and line >= self.stopped for line in lines)
        found.numbers |= {"answers": dict(answers), "broken_by_the_stop": cut}
        found.check(set(answers) <= {"200", "left", "reset"} and answers["reset"] <= cut, f"harnesses saw {answers}, {cut} by the stop")

    def _vllm(self, found: Found) -> None:
        """KV blocks and leases that are left, by soak_kv.py; hand-overs as the transfers tell them."""
        lines = [json.loads(line) for line in (self.folder / soak_kv.NOTE).read_text().splitlines()]
        looks = Counter((line["engine"], line["what"]) for line in lines)
        found.numbers["looks"] = {f"engine {engine}, {what}": count for (engine, what), count in sorted(looks.items())}
        found.numbers["counters"] = {line["engine"]: line["counters"] for line in lines if line["what"] == "restore"}
        told = [event["handover"] for event in self.job.events("transfer") if event.get("handover")]
        for what in ("calls", "conversations", "tokens", "bytes"):
            found.numbers[f"handed_over_{what}"] = sum(one[what] for one in told)
        found.numbers["doubts"] = dict(sum((Counter(one["doubts"]) for one in told), Counter[str]()))
        found.problems += soak_kv.problems(lines)
        found.check({what for _, what in looks} == {"reset", "restore"}, f"looks {looks}")
        found.check(len({engine for engine, _ in looks}) == CELLS["vllm"], f"engines {looks}")
        found.check(found.numbers["handed_over_tokens"] > 0, "no KV was handed over")

    def _torch(self, found: Found) -> None:
        """What is left in an engine whose cell left rollout."""
        releases = 0
        for log in sorted(self.job.paths.attempt_logs(1).glob("engine-*.log")):
            for line in log.read_text().splitlines():
                if "released, left:" in line:
                    releases += 1
                    left = json.loads(line[line.index("{") :])
                    kept = {name: left[name] for name in ("active", "waiting", "slot_bytes", "prefix_bytes") if left[name]}
                    found.check(not kept, f"{log.name} still held {kept}")
        found.numbers["releases"] = releases
        found.check(releases > 0, "no engine was released")


def _loaded(transfers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of a run's transfers that count: from the first with LIVE executions on; harnesses take a while to come up."""
    return transfers[next((i for i, event in enumerate(transfers) if event["live"] >= LIVE), len(transfers)) :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfers", type=int, default=500, help="changes of role, there and back")
    parser.add_argument("--clients", type=int, default=2, help="executions of the real client at once, or 0")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="torch")
    parser.add_argument("--seconds", type=float, default=1200.0, help="longest time")
    parser.add_argument("--folder", type=Path, help="a new folder for all of it (default: a temporary one, kept)")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(folder, arguments.transfers, arguments.clients, arguments.engine)
    signal.signal(signal.SIGTERM, lambda *_: setattr(soak, "enough", True))
    found = soak.run(Allowed(), arguments.seconds)
    print(json.dumps({"folder": str(folder), **found.numbers, "growth": found.growth, "problems": found.problems}, indent=1))
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
