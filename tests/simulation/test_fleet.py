from __future__ import annotations

import random

import pytest

from gyre_hpc.simulation.fleet import Execution, Fleet


def ends(fleet: Fleet) -> list[float]:
    return sorted(found[0] for found in (fleet.next_end(e.index) for e in fleet.engines) if found is not None)


def test_a_full_engine_is_slower_by_beta_and_an_end_speeds_the_rest_up() -> None:
    fleet = Fleet([2], beta=0.5)
    one, two = Execution(0, 0, 30.0), Execution(1, 0, 60.0)
    fleet.add(one, 0.0)
    fleet.add(two, 0.0)
    assert ends(fleet) == [45.0]  # both slots in use: speed 1 / 1.5
    fleet.remove(one, 45.0)
    assert two.ends - fleet.engines[0].clock == pytest.approx(30.0)
    assert ends(fleet) == [pytest.approx(45.0 + 30.0 * 1.25)]


def test_new_ones_go_to_the_emptiest_and_moved_ones_to_the_last_with_room() -> None:
    fleet = Fleet([2, 2, 3], beta=0.0)
    executions = [Execution(n, 0, 10.0) for n in range(5)]
    for execution in executions:
        assert fleet.add(execution, 0.0)
    assert [e.engine for e in executions] == [2, 1, 0, 2, 1]
    moved = fleet.close(0, 4.0, cost=1.0)
    assert [e.number for e in moved] == [2]
    assert executions[2].engine == 2
    assert fleet.next_end(0) is None
    fleet.remove(executions[0], 10.0)
    assert executions[2].ends - fleet.engines[2].clock == pytest.approx(1.0)  # at time 4 it had 6 left, and lost 1


def test_the_queue_is_served_in_order_of_dispatch() -> None:
    fleet = Fleet([1], beta=0.0)
    executions = [Execution(n, 0, 10.0) for n in range(3)]
    assert [fleet.add(e, 0.0) for e in executions] == [True, False, False]
    assert fleet.remove(executions[0], 10.0) is executions[1]
    fleet.close(0, 12.0, 0.0)
    assert [e.number for e in fleet.queue] == [1, 2]  # no room elsewhere: it waits, with 8 left, before who waited
    assert fleet.open(0, 20.0) == [executions[1]]
    assert ends(fleet) == [28.0]


def test_a_pause_stops_every_clock_and_a_restart_begins_again() -> None:
    fleet = Fleet([2], beta=0.0)
    one = Execution(0, 0, 10.0)
    fleet.add(one, 0.0)
    fleet.pause(4.0, 100.0)
    assert ends(fleet) == [106.0]
    fleet.restart(200.0)
    assert ends(fleet) == []
    fleet.open(0, 200.0)
    assert (ends(fleet), one.began) == ([210.0], 200.0)


@pytest.mark.parametrize("seed", range(30))
def test_in_any_order_nobody_is_lost_and_no_engine_is_overfull(seed: int) -> None:
    chance = random.Random(seed)
    fleet = Fleet([chance.randint(1, 4) for _ in range(4)], beta=0.3)
    alive: dict[int, Execution] = {}
    now, number = 0.0, 0
    for _ in range(300):
        now += chance.random()
        what = chance.randrange(4)
        running = [e for e in alive.values() if e.engine >= 0]
        if what == 0:
            alive[number] = Execution(number, 0, 1 + chance.random())
            fleet.add(alive[number], now)
            number += 1
        elif what == 1 and running:
            gone = chance.choice(running)
            fleet.remove(alive.pop(gone.number), now)
        else:
            index = chance.randrange(4)
            if fleet.engines[index].open:
                fleet.close(index, now, 0.0)
            else:
                fleet.open(index, now)
        held = [e.number for engine in fleet.engines for e in engine.running.values()] + [e.number for e in fleet.queue]
        assert sorted(held) == sorted(alive)
        assert all(len(engine.running) <= engine.slots for engine in fleet.engines)
        assert fleet.live == sum(len(engine.running) for engine in fleet.engines)
        room = any(engine.open and len(engine.running) < engine.slots for engine in fleet.engines)
        assert not (room and fleet.queue and fleet._choose() is None)


def test_supervisors_that_run_fewer_than_engines_hold_make_the_rest_wait() -> None:
    fleet = Fleet([2, 2], beta=0.0, at_once=3)
    executions = [Execution(n, 0, 10.0) for n in range(5)]
    assert [fleet.add(execution, 0.0) for execution in executions] == [True, True, True, False, False]
    assert fleet.remove(executions[1], 4.0) is executions[3]
    fleet.close(0, 5.0, cost=0.0)
    fleet.open(0, 6.0)
    assert (fleet.live, len(fleet.queue)) == (3, 1)


def test_supervisors_that_run_more_than_engines_hold_let_them_share() -> None:
    fleet = Fleet([2, 0], beta=0.0, nodes=(1.0, 0.0), at_once=5, shared=True)
    executions = [Execution(n, 0, 10.0 + n) for n in range(6)]
    assert [fleet.add(execution, 0.0) for execution in executions] == [True] * 5 + [False]
    assert fleet.busy == 1.0  # of one node, however many share it
    assert fleet.remove(executions[0], 10.0) is executions[5]
    for execution in executions[1:5]:
        fleet.remove(execution, 15.0)
    assert fleet.busy == 0.5
