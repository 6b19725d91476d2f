"""Settings in the words of version 0.1 mean what they meant."""

from dataclasses import replace

import pytest

from momentum2.config import Config, MethodConfig, TrainConfig
from momentum2.errors import SettingError
from momentum2.settings import override
from momentum2.spelling import inexact, old_words, translate

BASE = {"train.devices": "auto", "train.accumulate": 1}


@pytest.mark.parametrize(
    ("old", "world", "devices", "norm"),
    [
        ({"train.virtual_devices": 8, "method.student_norm": "split"}, None, 8, "local"),
        ({"train.virtual_devices": "8", "method.student_norm": "split"}, 2, 8, "local"),
        ({"train.virtual_devices": 8, "train.accumulate": 4, "method.student_norm": "split"}, 1, 2, "local"),
        ({"train.virtual_devices": 1, "method.student_norm": "batch"}, None, "auto", "local"),
        ({"train.virtual_devices": 1, "method.student_norm": "batch"}, 4, 4, "local"),
        ({"train.virtual_devices": 8, "method.student_norm": "batch"}, 1, 8, "synced"),
        ({"train.devices": 8, "method.student_norm": "synced"}, None, 8, "synced"),
    ],
)
def test_old_words(old, world, devices, norm):
    new = translate(old, BASE, world)
    assert (new["train.devices"], new["method.student_norm"]) == (devices, norm)
    assert "train.virtual_devices" not in new


def test_they_reach_the_settings():
    base = Config(train=TrainConfig(accumulate=2))
    found = override(base, {"train.virtual_devices": "8", "method.teacher_norm": "split"})
    assert found == replace(
        base, train=replace(base.train, devices=4), method=MethodConfig(teacher_norm="local")
    )


def test_a_renamed_setting():
    assert override(Config(), {"views.colour": "0.5"}).views.color == 0.5
    assert override(Config(), {"views.colour": "0.5", "views.color": "0.25"}).views.color == 0.25
    assert list(old_words({"views.colour": "0.5"})) == ["views.colour is now views.color."]
    assert not list(old_words({"views.color": "0.5"}))


@pytest.mark.parametrize("value", ["x", "0", "-1", "1.5", True, None])
def test_a_number_that_is_none(value):
    with pytest.raises(SettingError, match=r"train\.virtual_devices must be a whole number"):
        override(Config(), {"train.virtual_devices": value})


def test_a_norm_of_one_process_among_several_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    old = {"train.virtual_devices": 8, "method.student_norm": "batch"}
    with pytest.raises(SettingError, match="no longer possible"):
        translate(old, BASE, None)
    assert translate(old, BASE, 2)["method.student_norm"] == "local"  # to read such a run is no mistake


RUN = {
    "method.name": "byol",
    "method.student_norm": "batch",
    "method.teacher_norm": "momentum",
    "model.backbone": "resnet18",
    "train.virtual_devices": 1,
    "train.accumulate": 1,
}


@pytest.mark.parametrize(
    ("changes", "world", "why"),
    [
        ({}, 1, None),
        ({}, 4, None),
        ({"train.virtual_devices": 4, "method.student_norm": "split"}, 4, None),
        ({"train.virtual_devices": 4, "method.student_norm": "split"}, 2, "shared one history"),
        (
            {"train.virtual_devices": 8, "train.accumulate": 2, "method.student_norm": "split"},
            4,
            "whole batch is divided",
        ),
        (
            {"train.virtual_devices": 8, "method.student_norm": "split", "method.teacher_norm": "split"},
            2,
            None,
        ),
        ({"train.accumulate": 2}, 1, None),
        ({"train.accumulate": 2}, 2, "whole batch is divided"),
        (
            {"train.accumulate": 2, "method.name": "simclr", "method.student_norm": "split"},
            2,
            "whole batch is divided",
        ),
        ({"train.accumulate": 2, "method.teacher_norm": "split"}, 2, None),
        ({"method.name": "simclr"}, 1, "projector"),
        ({"train.virtual_devices": 4, "method.teacher_norm": "split"}, 2, "kind batch"),
        ({"model.backbone": "efficientnet_b0"}, 1, "random layers"),
        ({"model.backbone": "efficientnet_b0", "method.name": "simsiam"}, 1, None),
    ],
)
def test_which_old_runs_can_be_resumed(changes, world, why):
    reason = inexact({**RUN, **changes}, world, first=True)
    assert reason is None if why is None else why in str(reason)


def test_a_setting_that_is_gone():
    given = {"method.joint_views": True, "optim.lr": 0.1}
    assert translate(given, {}, None) == {"optim.lr": 0.1}
    assert [*old_words(given)] == [
        "method.joint_views no longer exists: each view has its own call, and its own CPU thread."
    ]
    assert "shared" in inexact({**RUN, "method.joint_views": True}, 1, first=False)
    assert inexact({**RUN, "method.joint_views": False}, 1, first=False) is None
