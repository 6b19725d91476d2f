"""What any result has to beat: a network that has learned nothing, and two ways to do without a network."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2 import backbones, distributed
from momentum2.augment import ViewSpec
from momentum2.backbones import Encoder
from momentum2.config import ModelConfig
from momentum2.data import Dataset
from momentum2.errors import SettingError
from momentum2.evaluate.features import shuffled_views
from momentum2.norms.recalibrate import recalibrate
from momentum2.runs.encoder import load_encoder
from momentum2.seeds import derive

#: Side to which larger views are reduced: more than 3,072 pixels classify no better, only slower.
_LARGEST = 32

#: Of whitened patches: their side, the distance between two of them, and the response that counts as none.
_PATCH, _STRIDE, _THRESHOLD = 6, 2, 0.5
FILTERS = 100  # 400 were no better for kNN on CIFAR-10 and took three times as long
_LEARNED_FROM, _PER_IMAGE, _ROUNDS = 4_000, 25, 10  # images, patches of each, and rounds of k-means
_FLAT, _FAINT = 0.003, 0.1  # added to variances: of a patch (views have about 1), and of a direction

_CALIBRATION = 10_000  # images that give a network its BN statistics


class Pixels(Encoder):
    """The view itself as features, larger ones averaged down to 32×32."""

    def __init__(self, size: int, channels: int = 3) -> None:
        super().__init__()
        self.side = min(size, _LARGEST)
        self.feature_dim = channels * self.side**2

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.side).flatten(1)


class Patches(Encoder):
    """Whitened patches: one layer of filters that are found by k-means, without labels and without a gradient.

    Patches of 6×6 pixels, 2 apart, each with its contrast normalized, are whitened (ZCA) and compared with the
    filters; what a response exceeds 0.5 by is averaged in each quadrant of the view. Coates, Lee and Ng (2011)
    showed how far this goes. Larger views are averaged down to 32×32 before, like raw pixels.

    Args:
        views: (n, c, s, s) batches to learn from; the first 4,000 images count.
        seed: Which patches, and which of them the filters start from.
        filters: Number of filters, and a quarter of the number of features.
    """

    kernel: Tensor
    bias: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, views: Iterable[Tensor], seed: int, filters: int = FILTERS) -> None:
        super().__init__()
        images = _first(views, _LEARNED_FROM)
        generator = torch.Generator().manual_seed(derive(seed, "whitened patches"))
        patches = _contrast(_some_patches(images, generator))  # n×36c
        center = patches.mean(0)
        whitening = _zca(patches - center)
        filters = min(filters, max(1, len(patches) // 10))  # of few images, few filters
        found = _spherical_kmeans((patches - center) @ whitening, filters, generator)  # k×36c
        # (contrast(p) − center)·W·dᵀ for all patches p is one convolution, divided by each patch's own deviation.
        flat = found @ whitening.T
        kernel = (flat - flat.mean(1, keepdim=True)).unflatten(1, (-1, _PATCH, _PATCH))
        self.register_buffer("kernel", kernel.contiguous(memory_format=torch.channels_last))
        self.register_buffer("bias", -(flat @ center) - _THRESHOLD)
        self.feature_dim = 4 * filters
        std, mean = torch.std_mean(torch.cat([self._pooled(x) for x in images.split(256)]), 0, correction=0)
        self.register_buffer("mean", mean)
        self.register_buffer("std", torch.where(std > 1e-6, std, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self._pooled(_reduced(x)) - self.mean) / self.std

    def _pooled(self, x: Tensor) -> Tensor:
        """(n, c, s, s) -> (n, 4k): responses above the threshold, averaged in quadrants."""
        mean, square = (F.avg_pool2d(t, _PATCH, _STRIDE).mean(1, keepdim=True) for t in (x, x * x))
        deviation = ((square - mean * mean).clamp_min(0) + _FLAT).sqrt()
        response = F.conv2d(x, self.kernel, stride=_STRIDE).div_(deviation).add_(self.bias[:, None, None])
        return F.adaptive_avg_pool2d(response.relu_(), 2).flatten(1)


def _reduced(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, _LARGEST) if x.shape[-1] > _LARGEST else x


def _first(views: Iterable[Tensor], count: int) -> Tensor:
    """The first `count` images as (n, c, s, s) on the CPU, reduced."""
    found, n = list[Tensor](), 0
    for batch in views:
        found.append(_reduced(batch[: count - n]).float().cpu())
        n += len(found[-1])
        if n == count:
            break
    return torch.cat(found)


def _some_patches(images: Tensor, generator: torch.Generator) -> Tensor:
    """(n, 36c): as many patches of each image, at random places."""
    found = []
    for part in images.split(256):
        all_of_them = F.unfold(part, _PATCH, stride=_STRIDE).transpose(1, 2)  # b×places×36c
        b, places, _ = all_of_them.shape
        chosen = torch.randint(places, (b, min(_PER_IMAGE, places)), generator=generator)
        found.append(all_of_them[torch.arange(b)[:, None], chosen].flatten(0, 1))
    return torch.cat(found)


def _contrast(patches: Tensor) -> Tensor:
    """Each patch with mean 0 and variance 1; one without contrast stays near 0."""
    patches = patches - patches.mean(1, keepdim=True)
    return patches / (patches.square().mean(1, keepdim=True) + _FLAT).sqrt()


def _zca(centered: Tensor) -> Tensor:
    """The symmetric matrix that whitens: (C + 0.1)^-½ of the covariance C."""
    values, vectors = torch.linalg.eigh((centered.T @ centered).double() / len(centered))
    whitening: Tensor = vectors * (values.clamp_min(0) + _FAINT).rsqrt() @ vectors.T
    return whitening.float()


def _spherical_kmeans(x: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k unit vectors (k×d), each the direction of the sum of the x that are nearest to it by angle."""
    unit = F.normalize(x, dim=1)

    def drawn(count: int) -> Tensor:
        return unit[torch.randperm(len(unit), generator=generator)[:count]]

    centers = drawn(k)
    for _ in range(_ROUNDS):
        cosine, nearest = (unit @ centers.T).max(1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, x * cosine[:, None])
        lost = sums.norm(dim=1) < 1e-6
        sums[lost] = drawn(int(lost.sum()))
        centers = F.normalize(sums, dim=1)
    return centers


def patch_encoder(
    dataset: Dataset,
    spec: ViewSpec,
    seed: int,
    device: torch.device,
    workers: int | None,
    filters: int = FILTERS,
) -> Encoder:
    """Whitened patches of these images, the same on every process."""
    some = shuffled_views(dataset, spec, seed=seed, limit=_LEARNED_FROM, device=device, workers=workers)
    with torch.no_grad():
        encoder = Patches(some, seed, filters).to(device)
    distributed.broadcast_(encoder.buffers())
    return encoder.eval()


def random_encoder(
    model: ModelConfig, dataset: Dataset, spec: ViewSpec, seed: int, device: torch.device, workers: int | None
) -> Encoder:
    """The network of `model` with initial weights, whose BN statistics are those of the data.

    That is what *untrained* means everywhere; with the statistics that a BN starts with it would look worse.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "initial weights"))  # those of a run with this seed
        encoder = backbones.of_config(model, len(spec.mean))
    encoder.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    calibrate(encoder, dataset, spec, seed, device, workers)
    return encoder.eval()


def calibrate(
    encoder: Encoder, dataset: Dataset, spec: ViewSpec, seed: int, device: torch.device, workers: int | None
) -> None:
    """Give an encoder the BN statistics of up to 10,000 of these images, the same on every process."""
    some = shuffled_views(dataset, spec, seed=seed, limit=_CALIBRATION, device=device, workers=workers)
    recalibrate(encoder, some)
    distributed.broadcast_(encoder.buffers())  # GPUs of other kinds sum in another order


def started_encoder(file: Path, device: torch.device, given: nn.Module | None = None) -> Encoder:
    """What a run started from, if that was not random: the encoder in its `start.safetensors`.

    `given` is the network of a run that was started with a custom one.
    """
    if not file.exists():
        raise SettingError(
            "weights", f"cannot be start: {file.parent} did not start from given weights. Choose random."
        )
    encoder = cast(Encoder, load_encoder(file, encoder=given).encoder)
    encoder.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return encoder.eval()
