"""Views per second of the byol recipe on one core, against the usual ways to make them.

    python benchmarks/augment.py --images FOLDER

Every pipeline makes the same two views (crop, flip, color jitter, gray, blur, solarize, normalize) of the
same decoded images and ends with one float32 batch for each view. The pipelines take turns, and the best of
all turns counts, in CPU time, so that a busy machine disturbs the comparison little: read the ratios, not the
numbers. Peers that are not installed are left out (`pip install momentum2[benchmark]`).

The second table says what each operation costs, done to every view, here and in albumentations.

The last one is what remains for worker processes when a GPU does the rest: decoding JPEGs and cutting
both views' crops, against decoding and the whole recipe in Pillow and torchvision.
"""

import argparse
import importlib.util
import io
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from momentum2._torchvision import torchvision  # noqa: F401  (before its transforms are imported)
from momentum2.augment import ViewSpec, crop_boxes, draw, render, resized_crop_one, view_specs
from momentum2.config import ViewsConfig
from momentum2.training.device import keep_large_blocks

Images = list[np.ndarray]  # (H, W, 3) uint8, all of one size
Pipeline = Callable[[], Sequence[Tensor]]


def momentum2(images: Images, specs: Sequence[ViewSpec]) -> Pipeline:
    batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    step = iter(range(2**31))

    def run() -> list[Tensor]:
        k = next(step)
        draws = [draw(spec, 0, k, view, len(batch)) for view, spec in enumerate(specs)]
        return render(batch, draws, specs)

    return run


def torchvision_pil(images: Images, specs: Sequence[ViewSpec]) -> Pipeline:
    from torchvision import transforms as T

    def transform(spec: ViewSpec) -> Callable[[Image.Image], Tensor]:
        # Pillow's own blur: torchvision's would turn the image into a tensor and back.
        def blur(image: Image.Image) -> Image.Image:
            return image.filter(ImageFilter.GaussianBlur(random.uniform(*spec.blur_sigma)))

        return T.Compose(
            [
                T.RandomResizedCrop(spec.size, spec.area, spec.ratio),
                T.RandomHorizontalFlip(spec.flip_p),
                T.RandomApply([T.ColorJitter(*spec.jitter)], spec.jitter_p),
                T.RandomGrayscale(spec.gray_p),
                T.RandomApply([blur], spec.blur_p),
                T.RandomSolarize(128, spec.solarize_p),
                T.ToTensor(),
                T.Normalize(spec.mean, spec.std),
            ]
        )

    return _one_by_one([Image.fromarray(image) for image in images], [transform(spec) for spec in specs])


def torchvision_v2(images: Images, specs: Sequence[ViewSpec]) -> Pipeline:
    from torchvision.transforms import v2 as T

    def transform(spec: ViewSpec) -> Callable[[Tensor], Tensor]:
        blur = [T.RandomApply([T.GaussianBlur(spec.blur_kernel, spec.blur_sigma)], spec.blur_p)]
        return T.Compose(
            [
                T.RandomResizedCrop(spec.size, spec.area, spec.ratio, antialias=True),
                T.RandomHorizontalFlip(spec.flip_p),
                T.RandomApply([T.ColorJitter(*spec.jitter)], spec.jitter_p),
                T.RandomGrayscale(spec.gray_p),
                *(blur if spec.blur_p else []),
                T.RandomSolarize(128, spec.solarize_p),
                T.ToDtype(torch.float32, scale=True),
                T.Normalize(spec.mean, spec.std),
            ]
        )

    tensors = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
    return _one_by_one(tensors, [transform(spec) for spec in specs])


def kornia(images: Images, specs: Sequence[ViewSpec]) -> Pipeline:
    import kornia.augmentation as K

    def transform(spec: ViewSpec) -> Callable[[Tensor], Tensor]:
        side = (spec.size, spec.size)
        kernel = (spec.blur_kernel, spec.blur_kernel)
        return K.AugmentationSequential(
            K.RandomResizedCrop(side, scale=spec.area, ratio=spec.ratio),
            K.RandomHorizontalFlip(p=spec.flip_p),
            K.ColorJitter(*spec.jitter, p=spec.jitter_p),
            K.RandomGrayscale(p=spec.gray_p),
            *([K.RandomGaussianBlur(kernel, spec.blur_sigma, p=spec.blur_p)] if spec.blur_p else []),
            *([K.RandomSolarize(0.0, 0.0, p=spec.solarize_p)] if spec.solarize_p else []),
            K.Normalize(torch.tensor(spec.mean), torch.tensor(spec.std)),
        )

    batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    transforms = [transform(spec) for spec in specs]
    return lambda: [transform(batch.float() / 255) for transform in transforms]


def albumentations(images: Images, specs: Sequence[ViewSpec]) -> Pipeline:
    import albumentations as A
    from albumentations.pytorch import ToTensorV2

    def transform(spec: ViewSpec) -> Callable[[np.ndarray], Tensor]:
        brightness, contrast, saturation, hue = spec.jitter
        jitter = [(1 - strength, 1 + strength) for strength in (brightness, contrast, saturation)]
        blur = A.GaussianBlur((spec.blur_kernel, spec.blur_kernel), spec.blur_sigma, p=spec.blur_p)
        compose = A.Compose(
            [
                A.RandomResizedCrop((spec.size, spec.size), spec.area, spec.ratio),
                A.HorizontalFlip(p=spec.flip_p),
                A.ColorJitter(*jitter, (-hue, hue), p=spec.jitter_p),
                A.ToGray(p=spec.gray_p),
                *([blur] if spec.blur_p else []),
                A.Solarize((0.5, 0.5), p=spec.solarize_p),
                A.Normalize(spec.mean, spec.std),
                ToTensorV2(),
            ]
        )
        return lambda image: compose(image=image)["image"]

    return _one_by_one(images, [transform(spec) for spec in specs])


def lightly(images: Images, specs: Sequence[ViewSpec]) -> Pipeline:
    from lightly.transforms.byol_transform import BYOLView1Transform, BYOLView2Transform

    def transform(kind: Callable[..., Callable[[Image.Image], Tensor]], spec: ViewSpec):
        return kind(
            input_size=spec.size,
            min_scale=spec.area[0],
            gaussian_blur=spec.blur_p,
            solarization_prob=spec.solarize_p,
        )

    transforms = [
        transform(*pair) for pair in zip((BYOLView1Transform, BYOLView2Transform), specs, strict=True)
    ]
    return _one_by_one([Image.fromarray(image) for image in images], transforms)


PIPELINES = [momentum2, torchvision_pil, torchvision_v2, kornia, albumentations, lightly]


def _one_by_one(images: Sequence, transforms: Sequence[Callable]) -> Pipeline:
    return lambda: [torch.stack([transform(image) for image in images]) for transform in transforms]


def recipe_table(sources: list[Image.Image], size: int, count: int, repeats: int) -> None:
    """Prints views/s of every pipeline that is installed, for views of one size."""
    side = size if size < 200 else size * 256 // 224
    images = [np.asarray(image.resize((side, side), Image.Resampling.BILINEAR)) for image in sources[:count]]
    specs = view_specs(ViewsConfig(), size)
    runs: dict[str, Pipeline] = {}
    for pipeline in PIPELINES:
        peer = pipeline.__name__.split("_")[0]
        try:
            importlib.import_module(peer)
        except ImportError as missing:
            print(f"  {peer} is left out: {missing}")
            continue
        runs[pipeline.__name__] = pipeline(images, specs)
    seconds = best_seconds(runs, repeats)
    print(f"\n{size} px views of {len(images)} images of {side} px")
    print(f"  {'':16} {'views/s':>9} {'momentum2 is':>13}")
    for name, value in sorted(seconds.items(), key=lambda item: item[1]):
        times = f"{value / seconds['momentum2']:12.1f}x" if name != "momentum2" else ""
        print(f"  {name:16} {2 * len(images) / value:9.0f} {times:>13}")


def operation_table(sources: list[Image.Image], size: int, count: int, repeats: int) -> None:
    """Prints what each operation costs a view, done to all views, in two pipelines."""
    side = size if size < 200 else size * 256 // 224
    images = [np.asarray(image.resize((side, side), Image.Resampling.BILINEAR)) for image in sources[:count]]
    plain = replace(view_specs(ViewsConfig(), size)[0], jitter_p=0, gray_p=0, blur_p=0, solarize_p=0)
    cases = {
        "crop, flip, normalize": plain,
        **{name: replace(plain, **{f"{name}_p": 1.0}) for name in ("jitter", "gray", "blur", "solarize")},
    }
    pipelines = [p for p in (momentum2, albumentations) if importlib.util.find_spec(p.__name__)]
    runs = {
        f"{pipeline.__name__} {name}": pipeline(images, [spec])
        for pipeline in pipelines
        for name, spec in cases.items()
    }
    seconds = best_seconds(runs, repeats)
    print(f"\n{size} px, µs a view; of an operation, beside the first row")
    print(" " * 26 + "".join(f"{p.__name__:>16}" for p in pipelines))
    for name in cases:
        cells = []
        for pipeline in pipelines:
            base = 0 if name == next(iter(cases)) else seconds[f"{pipeline.__name__} {next(iter(cases))}"]
            cells.append((seconds[f"{pipeline.__name__} {name}"] - base) / len(images) * 1e6)
        print(f"  {name:<24}" + "".join(f"{cell:16.0f}" for cell in cells))


def worker_table(sources: list[Image.Image], size: int, count: int, repeats: int) -> None:
    """Prints the cost of a worker's part beside that of decoding and augmenting with Pillow."""
    files = []
    for image in sources[:count]:
        buffer = io.BytesIO()
        image.resize((500, 375)).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    specs = view_specs(ViewsConfig(), size)
    draws = [draw(spec, 0, 0, view, len(files)) for view, spec in enumerate(specs)]

    def worker() -> list[Tensor]:
        images = [simplejpeg.decode_jpeg(file) for file in files]
        heights, widths = (torch.tensor([image.shape[axis] for image in images]) for axis in (0, 1))
        views = []
        for own in draws:
            boxes = crop_boxes(own, heights, widths).tolist()
            crops = [resized_crop_one(*pair, size) for pair in zip(images, boxes, strict=True)]
            views.append(torch.from_numpy(np.stack(crops)))
        return views

    def pillow() -> Sequence[Tensor]:
        images = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
        return torchvision_pil(images, specs)()

    seconds = best_seconds({"worker": worker, "pillow": pillow}, repeats)
    print(f"\nJPEG files of 500 x 375 to two views of {size} px, ms an image")
    print(f"  decode + two crops (worker part)      {seconds['worker'] / len(files) * 1e3:6.2f}")
    print(f"  decode + whole recipe (torchvision PIL) {seconds['pillow'] / len(files) * 1e3:4.2f}")
    print(f"  the worker's part is {seconds['pillow'] / seconds['worker']:.1f}x cheaper")


def best_seconds(runs: dict[str, Pipeline], repeats: int) -> dict[str, float]:
    """Least CPU time of each pipeline over turns in which all of them run once."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats + 1):  # one more for warming up
        for name, run in runs.items():
            begin = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - begin)
    return best


def load(folder: Path | None, count: int) -> list[Image.Image]:
    """The first images of a folder, or noise of several scales."""
    if folder is not None:
        files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in (".jpg", ".jpeg", ".png"))
        images = [Image.open(file).convert("RGB") for file in files[:count]]
        return [images[i % len(images)] for i in range(count)]
    noise = np.random.default_rng(0).integers(0, 256, (count, 24, 24, 3), dtype=np.uint8)
    return [Image.fromarray(image).resize((256, 256), Image.Resampling.BICUBIC) for image in noise]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, help="folder of images (default: smooth noise)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[32, 96, 224], help="sides of the views in pixels"
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns of each pipeline")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_large_blocks()  # for all pipelines alike, as in training
    sources = load(arguments.images, 256)
    for size in arguments.sizes:
        recipe_table(sources, size, max(16, min(256, 2**20 // size**2)), arguments.repeats)
    operation_table(sources, max(arguments.sizes), 24, arguments.repeats)
    worker_table(sources, max(arguments.sizes), 16, arguments.repeats)


if __name__ == "__main__":
    main()
