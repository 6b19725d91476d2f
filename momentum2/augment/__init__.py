"""Augmentation in batches on the device, every sample with its own, replayable draws."""

from momentum2.augment.crop import resized_crop, resized_crop_one
from momentum2.augment.draws import Draws, crop_boxes, draw, draw_at
from momentum2.augment.rendering import render
from momentum2.augment.specs import Normalization, ViewSpec, view_specs

__all__ = [
    "Draws",
    "Normalization",
    "ViewSpec",
    "crop_boxes",
    "draw",
    "draw_at",
    "render",
    "resized_crop",
    "resized_crop_one",
    "view_specs",
]
