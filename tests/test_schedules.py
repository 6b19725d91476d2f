import math

import pytest

from momentum2.schedules import Schedule, cosine, scaled_lr, scaled_weight_momentum, warmup_cosine


def test_cosine_is_the_papers_formula():
    K = 1000
    for k in (0, 1, 250, 500, 999, 1000):
        assert cosine(0.032, k, K) == pytest.approx(0.032 * (math.cos(math.pi * k / K) + 1) / 2)
    assert cosine(1.0, 0, K) == 1.0
    assert cosine(1.0, 500, K) == pytest.approx(0.5)
    assert cosine(1.0, K, K) == pytest.approx(0.0, abs=1e-15)


def test_warmup_is_linear_then_cosine():
    base, K, warmup = 0.8, 1000, 100
    assert warmup_cosine(base, 0, K, warmup, 0.001) == pytest.approx(0.0008)
    assert warmup_cosine(base, 50, K, warmup, 0.001) == pytest.approx(0.8 * (0.001 + 1) / 2)
    assert warmup_cosine(base, 100, K, warmup) == pytest.approx(base)
    assert warmup_cosine(base, 550, K, warmup) == pytest.approx(base / 2)
    assert warmup_cosine(base, 1000, K, warmup) == pytest.approx(0.0, abs=1e-12)
    values = [warmup_cosine(base, k, K, warmup) for k in range(K + 1)]
    assert values[:101] == sorted(values[:101])
    assert values[100:] == sorted(values[100:], reverse=True)


def test_milestones_take_the_place_of_the_cosine():
    """MoCo's classifier: a tenth after 60 and 80 of 100 epochs."""
    schedule = Schedule(K=1000, lr_base=30.0, milestones=(0.6, 0.8))
    lrs = [schedule.lr(k) for k in (0, 599, 600, 799, 800, 999)]
    assert lrs == pytest.approx([30.0, 30.0, 3.0, 3.0, 0.3, 0.3])
    warm = Schedule(K=1000, lr_base=30.0, warmup=100, warmup_start=0.0, milestones=(0.6, 0.8))
    assert [warm.lr(k) for k in (0, 50, 100, 600)] == pytest.approx([0.0, 15.0, 30.0, 3.0])


def test_warmup_may_fill_the_whole_run():
    assert warmup_cosine(1.0, 9, 10, 10, 0.0) == pytest.approx(0.9)


def test_joint_scaling_rule():
    """Batch × 4 means lr × 4 and m_base × 4."""
    assert scaled_lr(0.05, 1024) == pytest.approx(0.2)
    assert scaled_weight_momentum(0.01, 1024, 256) == pytest.approx(0.04)
    assert scaled_weight_momentum(0.032, 2048, 2048) == pytest.approx(0.032)
    assert scaled_weight_momentum(0.5, 1024, 256) == 1.0


@pytest.mark.parametrize("batch", [32, 256, 4096])
def test_m_stays_without_a_reference_batch(batch: int):
    assert scaled_weight_momentum(0.001, batch, None) == 0.001


def test_schedule_fixed_and_cosine():
    moving = Schedule(K=100, lr_base=1.0, m_base=0.01)
    assert (moving.alpha(0), moving.m(0)) == (1.0, 0.01)
    assert moving.alpha(50) == pytest.approx(0.5)
    assert moving.m(100) == pytest.approx(0.0, abs=1e-12)
    fixed = Schedule(K=100, lr_base=1.0, m_base=0.001, m_constant=True, alpha_fixed=0.064)
    assert {fixed.alpha(k) for k in (0, 50, 100)} == {0.064}
    assert {fixed.m(k) for k in (0, 50, 100)} == {0.001}
