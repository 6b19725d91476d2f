"""Images as people have them, into what an encoder was trained to see."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from momentum2.augment import ViewSpec, draw, render
from momentum2.data.images import RGB, BadImage, Reading
from momentum2.data.sequence import as_values
from momentum2.errors import UserError

Picture = Image.Image | NDArray[Any] | Tensor


class Preprocess:
    """The view of evaluations: an image's central square, resized (antialiased bilinear) and normalized.

    Takes one image and gives (C, size, size) float32: a PIL image of any mode, an (H, W, C) or (H, W) array or a
    (C, H, W) tensor, where C is 3 unless the encoder was trained on another number of channels. Several images, as a
    list, an (n, H, W, C) array or an (n, C, H, W) tensor, give (n, C, size, size). Numbers of more than 8 bits are
    scaled by the window that the encoder was trained with.
    """

    def __init__(self, spec: ViewSpec, reading: Reading = RGB) -> None:
        self.spec, self.reading = spec, reading

    def __call__(self, images: Picture | list[Picture] | tuple[Picture, ...]) -> Tensor:
        if isinstance(images, list | tuple):
            return torch.stack([self(image) for image in images])
        pixels = self._pixels(images)
        batch = pixels if pixels.dim() == 4 else pixels[None]
        view = render(batch, [draw(self.spec, 0, 0, 0, len(batch))], [self.spec])[0]
        return view if pixels.dim() == 4 else view[0]

    def _pixels(self, image: Picture) -> Tensor:
        """(..., C, H, W) uint8."""
        if isinstance(image, np.ndarray | Tensor) and image.ndim == 4 and len(image):
            return torch.stack([self._pixels(one) for one in image])
        try:
            pixels = self.reading.pixels(as_values(image, self.reading.channels))
        except BadImage as reason:
            channels = self.reading.channels
            raise UserError(
                f"An image must be a PIL image, an (H, W, {channels}) array or a ({channels}, H, W) tensor of 8 bits, "
                f"or of more where the encoder was trained with a window ({reason})."
            ) from None
        return torch.from_numpy(np.ascontiguousarray(pixels)).movedim(-1, -3)
