"""The first thing that runs in every process the driver starts, on whatever node: leave a mark, ignore stray signals, become the program.

`python -I -S step.py FOLDER NAME -- argv...` writes FOLDER/started-NAME[.RANK].json {pid, node, rank} and execs argv: the driver then
knows that the step did start (a step may wait in Slurm for ever) and where. SIGUSR1 and SIGUSR2 are Slurm's warnings before the time
limit, meant for the driver but sent to every process of the batch step; ignored here, they stay ignored over exec. Standard library only,
no import of ours.
"""

import json
import os
import signal
import sys


def main() -> None:
    folder, name, separator, *argv = sys.argv[1:]
    if separator != "--" or not argv:
        sys.exit("usage: step.py FOLDER NAME -- argv...")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    rank = os.environ.get("PMI_RANK")
    path = os.path.join(folder, f"started-{name}{'' if rank is None else '.' + rank}.json")
    with open(path + ".tmp", "w") as f:
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
        json.dump({"pid": os.getpid(), "node": node, "rank": None if rank is None else int(rank)}, f)
    os.replace(path + ".tmp", path)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
