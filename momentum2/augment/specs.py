"""What each named recipe does to an image, as plain numbers: one `ViewSpec` for every view."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from momentum2.config import DataConfig, PerView, ViewsConfig
from momentum2.errors import SettingError, called
from momentum2.settings import check

#: Views of at most this side are not blurred and are not cut from less than a fifth of the image.
SMALL = 64
#: Mean and std of each channel of ImageNet, and of all of them for channels that are no colors.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MEAN_OF_ALL, _STD_OF_ALL = 0.449, 0.226


@dataclass(frozen=True)
class ViewSpec:
    """One view: which random decisions are taken, and within which limits.

    Args:
        size: Side in pixels of the square view.
        area: Smallest and largest area of the random crop, as shares of the image.
        ratio: Narrowest and widest crop, width over height.
        center: If given, no random crop: the central square with this share of the shorter side.
        flip_p: Probability of a horizontal flip.
        jitter: Strengths of brightness, contrast, saturation and hue.
        jitter_p: Probability of the color jitter.
        gray_p: Probability of losing all color.
        blur_p: Probability of a Gaussian blur.
        blur_sigma: Smallest and largest standard deviation of the blur in pixels.
        blur_kernel: Number of taps of the blur (odd).
        solarize_p: Probability of inverting everything brighter than half.
        vertical_flip_p: Probability of a vertical flip.
        rotate90_p: Probability of a rotation by 90, 180 or 270 degrees.
        channel_drop_p: Probability of losing one channel, which becomes its mean.
        mean: Subtracted from the channels, which are in [0, 1].
        std: Divides the channels after that.
    """

    size: int
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    center: float | None = None
    flip_p: float = 0.5
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    jitter_p: float = 0.0
    gray_p: float = 0.0
    blur_p: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    blur_kernel: int = 1
    solarize_p: float = 0.0
    vertical_flip_p: float = 0.0
    rotate90_p: float = 0.0
    channel_drop_p: float = 0.0
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD


@dataclass(frozen=True)
class Normalization:
    """Mean and std of each channel, in [0, 1]; there are as many channels as values."""

    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD

    @classmethod
    def of(cls, data: DataConfig) -> "Normalization":
        """That of a config section; refuses one whose lengths do not fit its channels."""
        for name, values in (("mean", data.mean), ("std", data.std)):
            if values is not None and len(values) != data.channels:
                raise SettingError(
                    f"data.{name}", f"has {len(values)} values, but the images have {data.channels} channels."
                )
        if data.std is not None and not all(value > 0 for value in data.std):
            raise SettingError("data.std", "must be above 0.")
        colors = data.channels == 3
        mean = _MEAN if colors else (_MEAN_OF_ALL,) * data.channels
        std = _STD if colors else (_STD_OF_ALL,) * data.channels
        return cls(
            mean if data.mean is None else tuple(data.mean), std if data.std is None else tuple(data.std)
        )


def view_specs(
    views: ViewsConfig, image_size: int, normalization: Normalization | None = None
) -> tuple[ViewSpec, ...]:
    """The views of a recipe, for square views of `image_size` pixels, normalized as ImageNet is or as given.

    Hue, saturation and gray need the three channels of colors and are off where there are others.

    Every recipe follows one rule for small images: a view of at most 64 pixels is not blurred, and its
    random crop covers at least 0.2 of the image (multicrop's large crops: 0.3).
    """
    if image_size < 1:
        raise SettingError("data.image_size", f"must be at least 1, not {image_size}.")
    with called({"": "views."}):
        check(views)
    drawn = _RECIPES[views.recipe](views, image_size)
    if views.repeat > 1 and all(spec.center is not None for spec in drawn):
        raise SettingError(
            "views.repeat",
            f"must be 1 with views.recipe {views.recipe}, which draws nothing at random: all views would be the same.",
        )
    specs = tuple(_with_switches(spec, views, i) for i, spec in enumerate(drawn)) * views.repeat
    if normalization is None:
        return specs
    specs = tuple(replace(spec, mean=normalization.mean, std=normalization.std) for spec in specs)
    return specs if len(normalization.mean) == 3 else tuple(map(_without_colors, specs))


def _of_view(given: PerView, view: int) -> float:
    """The number for a view; the last one holds for all further views."""
    return given[min(view, len(given) - 1)] if isinstance(given, list) else given


def _with_switches(spec: ViewSpec, views: ViewsConfig, view: int) -> ViewSpec:
    """What a recipe has for a view, with the user's multipliers and probabilities; an evaluation has no randomness."""
    if spec.center is not None:
        return spec
    color = _of_view(views.color, view)
    brightness, contrast, saturation, hue = (strength * color for strength in spec.jitter)
    return replace(
        spec,
        jitter=(brightness, contrast, saturation, min(hue, 0.5)),
        flip_p=min(1.0, spec.flip_p * _of_view(views.flip, view)),
        jitter_p=min(1.0, spec.jitter_p * _of_view(views.jitter, view)),
        gray_p=min(1.0, spec.gray_p * _of_view(views.gray, view)),
        blur_p=min(1.0, spec.blur_p * _of_view(views.blur, view)),
        solarize_p=min(1.0, spec.solarize_p * _of_view(views.solarize, view)),
        vertical_flip_p=_of_view(views.vertical_flip, view),
        rotate90_p=_of_view(views.rotate90, view),
        channel_drop_p=_of_view(views.channel_drop, view),
    )


def _without_colors(spec: ViewSpec) -> ViewSpec:
    brightness, contrast, _, _ = spec.jitter
    return replace(spec, jitter=(brightness, contrast, 0.0, 0.0), gray_p=0.0)


def _byol(views: ViewsConfig, size: int) -> tuple[ViewSpec, ...]:
    """The paper's two views: they differ in blur (1.0, 0.1) and solarize (0, 0.2)."""
    base = replace(_colored(size, (0.4, 0.4, 0.2, 0.1)), area=_area(views, size, 0.08))
    return (
        replace(base, blur_p=_blur_p(size, 1.0)),
        replace(base, blur_p=_blur_p(size, 0.1), solarize_p=0.2),
    )


def _moco_v2(views: ViewsConfig, size: int) -> tuple[ViewSpec, ...]:
    """Two views of one kind: stronger saturation, blur half of the time, crops of at least 0.2."""
    view = replace(
        _colored(size, (0.4, 0.4, 0.4, 0.1)),
        area=_area(views, size, 0.2),
        blur_p=_blur_p(size, 0.5),
    )
    return view, view


def _simclr(views: ViewsConfig, size: int) -> tuple[ViewSpec, ...]:
    """Two views of one kind: twice the color jitter of the others, blur half of the time."""
    view = replace(
        _colored(size, (0.8, 0.8, 0.8, 0.2)),
        area=_area(views, size, 0.08),
        blur_p=_blur_p(size, 0.5),
    )
    return view, view


def _supervised(views: ViewsConfig, size: int) -> tuple[ViewSpec, ...]:
    """One view: random crop and flip."""
    return (ViewSpec(size, area=_area(views, size, 0.08)),)


def _evaluation(views: ViewsConfig, size: int) -> tuple[ViewSpec, ...]:
    """One view without randomness: the central 224/256 of the shorter side; of a small image, all of it."""
    return (ViewSpec(size, center=1.0 if size <= SMALL else 224 / 256, flip_p=0.0),)


def _multicrop(views: ViewsConfig, size: int) -> tuple[ViewSpec, ...]:
    """byol's two views from crops of at least 0.14, and small views from crops of 0.05 to 0.14.

    The small views are blurred half of the time and never solarized.
    """
    if views.small_crops and not 0 < views.small_size <= size:
        raise SettingError(
            "views.small_size", f"must be from 1 to {size}, the image size, not {views.small_size}."
        )
    area = _area(views, size, 0.14 if size > SMALL else 0.3)
    small = replace(
        _colored(views.small_size, (0.4, 0.4, 0.2, 0.1)),
        area=(area[0] * 5 / 14, area[0]),
        blur_p=_blur_p(views.small_size, 0.5),
    )
    return (*(replace(view, area=area) for view in _byol(views, size)), *[small] * views.small_crops)


_RECIPES: dict[str, Callable[[ViewsConfig, int], tuple[ViewSpec, ...]]] = {
    "byol": _byol,
    "moco_v2": _moco_v2,
    "simsiam": _moco_v2,  # SimSiam took MoCo v2's augmentation unchanged.
    "simclr": _simclr,
    "supervised": _supervised,
    "evaluation": _evaluation,
    "multicrop": _multicrop,
}


def _colored(size: int, jitter: tuple[float, float, float, float]) -> ViewSpec:
    return ViewSpec(
        size,
        jitter=jitter,
        jitter_p=0.8,
        gray_p=0.2,
        blur_kernel=size // 10 // 2 * 2 + 1,  # a tenth of the side: 23 taps at 224 pixels, 9 at 96
    )


def _area(views: ViewsConfig, size: int, smallest: float) -> tuple[float, float]:
    floor = max(smallest, 0.2) if size <= SMALL else smallest
    return (floor if views.crop_min is None else views.crop_min, 1.0)


def _blur_p(size: int, probability: float) -> float:
    return 0.0 if size <= SMALL else probability
