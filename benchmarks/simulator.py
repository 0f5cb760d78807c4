"""How fast the simulator is: CPU seconds of 12 steps of the 122B case, and of 10,000 cells with 1,000,000 executions.

    python benchmarks/simulator.py [--cells 10000] [--profile]

The large case is made to load the kernel, not to be sensible: ten slots a node, eight steps, a million executions of eight a group, one
transfer after the other through 10,000 cells.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

from cells.events import Schedule
from gyre_hpc.simulation.kernel import simulate
from gyre_hpc.simulation.paper import paper_122b
from gyre_hpc.simulation.scenario import HOUR, Scenario, cut
from gyre_hpc.simulation.workload import Limits, LogNormal

STEPS, SIZE, SLOTS = 8, 8, 10.0


def large(cells: int) -> Scenario:
    """100 executions a cell, one node each."""
    schedule = Schedule((1,), cells * 100 // (STEPS * SIZE), SIZE, phi=0.5, mu=2, steps=STEPS, join_late=True)
    work = LogNormal(1.8 * HOUR, 0.2, 0.335, Limits(harness=4.4 * HOUR))
    return cut(schedule, cells, cells, SLOTS, HOUR, work, beta=0.04)


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    simulate(paper_122b().rows[5].scenario, 99)  # what is imported and allocated once
    for row in paper_122b().rows:
        began = time.process_time()
        found = simulate(row.scenario, 0)
        print(f"{row.id}, 12 steps of 122B: {time.process_time() - began:.3f} s, {found.executions} executions")
    profile = cProfile.Profile()
    scenario = large(options.cells)
    began = time.process_time()
    if options.profile:
        profile.enable()
    found = simulate(scenario, 0)
    profile.disable()
    print(f"{options.cells} cells: {time.process_time() - began:.1f} s, {found.executions} executions, {found.transfers} transfers")
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
