"""The recipes' numbers, as the papers give them."""

from dataclasses import replace

import pytest

from momentum2.augment import Normalization, view_specs
from momentum2.config import DataConfig, ViewsConfig
from momentum2.errors import SettingError, UserError


def test_byol_at_224():
    first, second = view_specs(ViewsConfig("byol"), 224)
    for spec in (first, second):
        assert spec.size == 224
        assert spec.area == (0.08, 1.0)
        assert spec.ratio == (3 / 4, 4 / 3)
        assert (spec.flip_p, spec.jitter_p, spec.gray_p) == (0.5, 0.8, 0.2)
        assert spec.jitter == (0.4, 0.4, 0.2, 0.1)
        assert (spec.blur_kernel, spec.blur_sigma) == (23, (0.1, 2.0))
        assert spec.mean == (0.485, 0.456, 0.406)
        assert spec.std == (0.229, 0.224, 0.225)
    assert (first.blur_p, second.blur_p) == (1.0, 0.1)
    assert (first.solarize_p, second.solarize_p) == (0.0, 0.2)


@pytest.mark.parametrize("recipe", ["moco_v2", "simsiam"])
def test_moco_v2_and_simsiam(recipe):
    first, second = view_specs(ViewsConfig(recipe), 224)
    assert first == second
    assert first.area == (0.2, 1.0)
    assert first.jitter == (0.4, 0.4, 0.4, 0.1)
    assert (first.jitter_p, first.gray_p, first.blur_p, first.solarize_p) == (0.8, 0.2, 0.5, 0.0)


def test_simclr():
    first, second = view_specs(ViewsConfig("simclr"), 224)
    assert first == second
    assert first.area == (0.08, 1.0)
    assert first.jitter == (0.8, 0.8, 0.8, 0.2)
    assert (first.jitter_p, first.gray_p, first.blur_p, first.solarize_p) == (0.8, 0.2, 0.5, 0.0)


def test_supervised_and_evaluation():
    (view,) = view_specs(ViewsConfig("supervised"), 224)
    assert (view.area, view.flip_p, view.center) == ((0.08, 1.0), 0.5, None)
    assert view.jitter_p == view.gray_p == view.blur_p == view.solarize_p == 0
    (view,) = view_specs(ViewsConfig("evaluation"), 224)
    assert view.center == 0.875
    assert view_specs(ViewsConfig("evaluation"), 32)[0].center == 1.0
    assert view.flip_p == view.jitter_p == view.gray_p == view.blur_p == view.solarize_p == 0


def test_repeat_draws_each_view_of_the_recipe_again():
    once = view_specs(ViewsConfig("byol", solarize=0.5), 96)
    assert view_specs(ViewsConfig("byol", solarize=0.5, repeat=3), 96) == once * 3
    turned = view_specs(ViewsConfig("byol", color=[1.0, 0.5], repeat=2), 96)
    assert [view.jitter[0] for view in turned] == pytest.approx(
        [0.4, 0.2, 0.4, 0.2]
    )  # one number per view of it
    with pytest.raises(SettingError, match=r"views\.repeat"):
        view_specs(ViewsConfig("byol", repeat=0), 96)
    with pytest.raises(SettingError, match=r"views\.repeat must be 1 with views\.recipe evaluation"):
        view_specs(ViewsConfig("evaluation", repeat=2), 96)


def test_multicrop():
    views = view_specs(ViewsConfig("multicrop", small_crops=6), 224)
    assert [view.size for view in views] == [224] * 2 + [96] * 6
    assert [view.area for view in views[:2]] == [(0.14, 1.0)] * 2
    assert views[2].area == pytest.approx((0.05, 0.14))
    assert [view.blur_p for view in views] == [1.0, 0.1] + [0.5] * 6
    assert views[2].blur_kernel == 9


@pytest.mark.parametrize("recipe", ["byol", "moco_v2", "simsiam", "simclr", "supervised", "multicrop"])
def test_small_images_are_not_blurred_and_not_cut_small(recipe):
    for size in (32, 64):
        for view in view_specs(ViewsConfig(recipe), size):
            assert view.blur_p == 0
            assert view.area[0] >= 0.2
    assert view_specs(ViewsConfig("byol"), 96)[0].blur_p == 1


def test_strengths():
    config = ViewsConfig("byol", crop_min=0.5, color=10, blur=0.5, solarize=10)
    first, second = view_specs(config, 224)
    assert first.area == (0.5, 1.0)
    assert first.jitter == (4.0, 4.0, 2.0, 0.5)
    assert (first.blur_p, second.blur_p) == (0.5, 0.05)
    assert second.solarize_p == 1.0


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (ViewsConfig(), 0, "data.image_size"),
        (ViewsConfig(crop_min=0.0), 224, "crop_min"),
        (ViewsConfig(crop_min=1.5), 224, "crop_min"),
        (ViewsConfig(color=-1), 224, "views.color"),
        (ViewsConfig("multicrop", small_crops=-1), 224, "small_crops"),
        (ViewsConfig("multicrop", small_crops=2, small_size=96), 64, "small_size"),
    ],
)
def test_bad_settings_are_one_sentence(config, size, message):
    with pytest.raises(UserError, match=message):
        view_specs(config, size)


SWITCHES = {
    "flip": "flip_p",
    "jitter": "jitter_p",
    "gray": "gray_p",
    "blur": "blur_p",
    "solarize": "solarize_p",
    "vertical_flip": "vertical_flip_p",
    "rotate90": "rotate90_p",
    "channel_drop": "channel_drop_p",
}


@pytest.mark.parametrize("name", SWITCHES)
def test_every_operation_can_be_switched_off_for_each_view(name: str) -> None:
    added = name in ("vertical_flip", "rotate90", "channel_drop")
    usual = view_specs(ViewsConfig(**({name: 0.5} if added else {})), 224)
    for off in ([0.0, 1.0], [1.0, 0.0]):
        numbers = [0.5 * value for value in off] if added else off
        specs = view_specs(ViewsConfig(**{name: numbers}), 224)
        for spec, plain, value in zip(specs, usual, off, strict=True):
            assert spec == (plain if value else replace(plain, **{SWITCHES[name]: 0.0}))
    small = view_specs(ViewsConfig("multicrop", small_crops=3, small_size=96, **{name: [0.25, 0.0]}), 224)
    assert [getattr(spec, SWITCHES[name]) for spec in small[1:]] == [
        0.0
    ] * 4  # the last number holds for the rest
    evaluation = view_specs(ViewsConfig("evaluation", **{name: 1.0}), 224)[0]
    assert (evaluation.flip_p, evaluation.rotate90_p, evaluation.channel_drop_p) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rotate90", 1.5, "from 0 to 1, not 1.5"),
        ("flip", [1.0, -1.0], "at least 0, not -1"),
        ("gray", [], "must have from 1 to 100 values, not 0"),
        ("vertical_flip", float("inf"), "from 0 to 1"),
    ],
)
def test_switches_out_of_their_limits(name: str, value: object, words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        view_specs(ViewsConfig(**{name: value}), 32)  # type: ignore[arg-type]
    assert caught.value.setting == f"views.{name}"


@pytest.mark.parametrize("channels", [1, 4, 13])
def test_channels_that_are_no_colors_lose_hue_saturation_and_gray(channels: int) -> None:
    data = DataConfig(channels=channels, mean=[0.3] * channels)
    for spec, plain in zip(
        view_specs(ViewsConfig(), 96, Normalization.of(data)), view_specs(ViewsConfig(), 96), strict=True
    ):
        assert spec.jitter == (0.4, 0.4, 0.0, 0.0)
        assert (spec.gray_p, spec.mean, len(spec.std)) == (0.0, (0.3,) * channels, channels)
        assert (spec.blur_p, spec.solarize_p, spec.jitter_p) == (
            plain.blur_p,
            plain.solarize_p,
            plain.jitter_p,
        )
    with pytest.raises(SettingError, match="has 2 values"):
        Normalization.of(DataConfig(channels=channels, std=[1.0, 2.0]))
    with pytest.raises(SettingError, match="above 0"):
        Normalization.of(DataConfig(std=[1.0, 0.0, 1.0]))
