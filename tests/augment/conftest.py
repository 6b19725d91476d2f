import pytest
import torch
from torch import Tensor


@pytest.fixture
def pictures():
    """(n, 3, H, W) uint8 of several kinds: noise, smooth colors, pure colors, gray, one color."""

    def make(n: int, height: int, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(height * 1000 + width)
        noise = torch.randint(0, 256, (n, 3, height, width), dtype=torch.uint8, generator=generator)
        rough = torch.randint(0, 256, (n, 3, 4, 4), dtype=torch.uint8, generator=generator)
        smooth = torch.nn.functional.interpolate(rough, (height, width), mode="bilinear")
        kinds = torch.stack(
            [
                noise,
                smooth,
                (noise // 128) * 255,
                smooth[:, :1].expand(-1, 3, -1, -1),
                rough[..., :1, :1].expand_as(noise),
            ]
        )
        return kinds[torch.arange(n) % len(kinds), torch.arange(n)]

    return make
