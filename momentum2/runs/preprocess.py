"""Images as people have them, into what an encoder was trained to see."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from momentum2.augment import ViewSpec, draw, render
from momentum2.data.images import upright_rgb
from momentum2.errors import UserError

Picture = Image.Image | NDArray[np.uint8] | Tensor


class Preprocess:
    """The view of evaluations: an image's central square, resized (antialiased bilinear) and normalized.

    Takes one image and gives (3, size, size) float32: a PIL image of any mode, an (H, W, 3) uint8 array or a
    (3, H, W) uint8 tensor. Several images, as a sequence, an (n, H, W, 3) array or an (n, 3, H, W) tensor,
    give (n, 3, size, size).
    """

    def __init__(self, spec: ViewSpec) -> None:
        self.spec = spec

    def __call__(self, images: Picture | Sequence[Picture]) -> Tensor:
        if isinstance(images, Sequence):
            return torch.stack([self(image) for image in images])
        pixels = _pixels(images)
        batch = pixels if pixels.dim() == 4 else pixels[None]
        view = render(batch, [draw(self.spec, 0, 0, 0, len(batch))], [self.spec])[0]
        return view if pixels.dim() == 4 else view[0]


def _pixels(image: Picture) -> Tensor:
    """(..., 3, H, W) uint8."""
    if isinstance(image, Image.Image):
        image = upright_rgb(image)
    pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.ascontiguousarray(image))
    if pixels.dim() in (3, 4) and not isinstance(image, Tensor):
        pixels = pixels.movedim(-1, -3)
    if pixels.dtype != torch.uint8 or pixels.dim() not in (3, 4) or pixels.shape[-3] != 3:
        raise UserError("An image must be a PIL image, an (H, W, 3) uint8 array or a (3, H, W) uint8 tensor.")
    return pixels
