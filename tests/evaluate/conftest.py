import torch
from torch import Tensor, nn

import pytest

from momentum2.config import DataConfig


class TinyEncoder(nn.Module):
    """Two convolutions with batch norm: quick, but as dependent on mode and statistics as a large one."""

    feature_dim = 12

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))


@pytest.fixture
def encoder() -> TinyEncoder:
    torch.manual_seed(0)
    return TinyEncoder()


@pytest.fixture
def shapes() -> DataConfig:
    """A few hundred of the drawn images, and no cache on disk."""
    return DataConfig("shapes", image_size=16, train_size=300, cache="off")
