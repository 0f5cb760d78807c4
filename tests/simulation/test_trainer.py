from __future__ import annotations

import pytest

from gyre_hpc.simulation.trainer import Trainer


def test_all_nodes_in_training_do_the_work_together_and_a_late_one_helps_at_once() -> None:
    trainer = Trainer()
    assert trainer.empty_at() is None
    trainer.set_nodes(2, 0.0)
    trainer.feed(100.0, 10.0)
    assert trainer.empty_at() == pytest.approx(60.0)
    trainer.set_nodes(4, 30.0)  # 60 are left
    assert trainer.empty_at() == pytest.approx(45.0)
    trainer.feed(40.0, 35.0)
    assert trainer.empty_at() == pytest.approx(55.0)
    trainer.advance(100.0)
    assert trainer.left == 0.0
    assert trainer.done == pytest.approx(140.0)


def test_what_an_attempt_leaves_is_lost() -> None:
    trainer = Trainer()
    trainer.set_nodes(1, 0.0)
    trainer.feed(100.0, 0.0)
    trainer.drop(30.0)
    trainer.advance(50.0)
    assert (trainer.left, trainer.done, trainer.empty_at()) == (0.0, 30.0, None)
