"""Alarms are sentences, said once while they last."""

from momentum2.config import MonitorConfig
from momentum2.training.alarms import Alarms

FINE = {"z_std": 0.9, "z_rank": 20.0, "data_wait": 0.05, "step_time": 1.0}


def test_all_is_well():
    alarms = Alarms(MonitorConfig())
    assert [alarms.check(step, FINE) for step in range(50)] == [[]] * 50


def test_collapse_is_said_once_after_so_many_logged_steps():
    for low, words in ({"z_std": 0.05}, "spread"), ({"z_rank": 1.1}, "effective rank"):
        alarms = Alarms(MonitorConfig(collapse_steps=3))
        said = [alarms.check(step, FINE | low) for step in range(6)]
        assert [len(sentences) for sentences in said] == [0, 0, 1, 0, 0, 0]
        assert said[2][0].startswith("Step 2: the representation has collapsed")
        assert words in said[2][0]


def test_collapse_needs_the_steps_in_a_row():
    alarms = Alarms(MonitorConfig(collapse_steps=3))
    values = [0.05, 0.05, 0.9, 0.05, 0.05, 0.9]
    assert not any(alarms.check(step, FINE | {"z_std": value}) for step, value in enumerate(values))


def test_it_is_said_again_after_it_had_cleared():
    alarms = Alarms(MonitorConfig(collapse_steps=1))
    values = [0.05, 0.05, 0.9, 0.05]
    assert [len(alarms.check(i, FINE | {"z_std": v})) for i, v in enumerate(values)] == [1, 0, 0, 1]


def test_waiting_for_data():
    alarms = Alarms(MonitorConfig(wait_fraction=0.3))
    assert alarms.check(1, FINE | {"data_wait": 0.3}) == []
    (sentence,) = alarms.check(2, FINE | {"data_wait": 0.42})
    assert sentence == (
        "Step 2: 42% of the time is spent waiting for images. Increase data.workers, or set data.cache to on."
    )
    assert alarms.check(3, FINE | {"data_wait": 0.5}) == []


def test_a_slow_step_is_measured_against_the_runs_own_median():
    alarms = Alarms(MonitorConfig(slow_step=5.0))
    for step, seconds in enumerate([9.0, 0.2, 0.2, 0.2, 0.2]):  # the first one compiles and warms up
        assert alarms.check(step, {"step_time": seconds}) == []
    assert alarms.check(5, {"step_time": 0.9}) == []
    assert alarms.check(6, {"step_time": 2.0}) == ["Step 6: a step took 2 s, 10.0 times the median."]


def test_metrics_that_a_method_does_not_have_are_not_watched():
    assert Alarms(MonitorConfig(collapse_steps=1)).check(1, {"loss": 3.0}) == []
