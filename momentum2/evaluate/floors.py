"""What any result has to beat: a network that has learned nothing, and no network at all."""

import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2 import backbones, distributed
from momentum2.augment import ViewSpec
from momentum2.backbones import Encoder
from momentum2.data import Dataset
from momentum2.evaluate.features import shuffled_views
from momentum2.norms.recalibrate import recalibrate
from momentum2.runs.encoder import EncoderCard
from momentum2.seeds import derive

_LARGEST = (
    32  # side to which raw pixels are reduced: more dimensions than 3,072 classify no better, only slower
)

_CALIBRATION = 10_000  # images that give a random network its BN statistics


class Pixels(Encoder):
    """The view itself as features, larger ones averaged down to 32×32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.side = min(size, _LARGEST)
        self.feature_dim = 3 * self.side**2

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.side).flatten(1)


def random_encoder(
    card: EncoderCard, dataset: Dataset, spec: ViewSpec, seed: int, device: torch.device, workers: int
) -> Encoder:
    """The same architecture with initial weights, whose BN statistics are those of the data: a fair floor."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "random initialisation"))  # a part of the seed, so its spelling stays
        encoder = backbones.of(card.architecture)
    encoder.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    some = shuffled_views(dataset, spec, seed=seed, limit=_CALIBRATION, device=device, workers=workers)
    recalibrate(encoder, some)
    distributed.broadcast_(encoder.buffers())  # GPUs of other kinds sum in another order
    return encoder.eval()
