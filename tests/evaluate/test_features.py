from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from momentum2.augment import draw, render, view_specs
from momentum2.config import DataConfig, ViewsConfig
from momentum2.data import open_dataset
from momentum2.evaluate.features import extract

SPEC = view_specs(ViewsConfig("evaluation"), 16)[0]


def by_hand(encoder: nn.Module, images: list[np.ndarray]) -> torch.Tensor:
    """Each image on its own."""
    rows = []
    for image in images:
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
        rows.append(encoder.eval()(render(pixels, [draw(SPEC, 0, 0, 0, 1)], [SPEC])[0]))
    return torch.cat(rows).detach()


def test_every_image_once_and_in_order(encoder: nn.Module, shapes: DataConfig):
    dataset = open_dataset(shapes)
    found = extract(encoder, dataset, SPEC, batch_size=64)  # 300 images: the last batch is short
    assert found.indices.tolist() == list(range(300))
    assert found.labels is not None
    assert np.array_equal(found.labels.numpy(), dataset.labels)
    assert found.features.dtype == torch.float32
    assert torch.allclose(found.features, by_hand(encoder, list(dataset.read(range(300)))), atol=1e-5)


def test_what_is_given_is_left_as_it_was(encoder: nn.Module, shapes: DataConfig):
    encoder.train()
    encoder.layers[1].eval()  # a mode of its own
    modes = [m.training for m in encoder.modules()]
    state = {name: value.clone() for name, value in encoder.state_dict().items()}
    random = torch.get_rng_state()
    numpy_random = np.random.get_state()[1].copy()  # noqa: NPY002  (the global one is what is watched)
    extract(encoder, open_dataset(shapes), SPEC)
    assert [m.training for m in encoder.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in encoder.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert np.array_equal(np.random.get_state()[1], numpy_random)  # noqa: NPY002
    assert all(p.grad is None and p.requires_grad for p in encoder.parameters())


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_left_out(encoder: nn.Module, tmp_path: Path, workers: int):
    """They are not replaced by their neighbors, as they are in training."""
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8) for i in range(7)]
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    (tmp_path / "3.png").write_bytes(b"no image")
    data = DataConfig("folder", str(tmp_path), max_bad_fraction=0.5, cache="off")
    found = extract(encoder, open_dataset(data), SPEC, batch_size=2, workers=workers)
    assert found.indices.tolist() == [0, 1, 2, 4, 5, 6]
    assert found.labels is None
    expected = by_hand(encoder, [image for i, image in enumerate(images) if i != 3])
    assert torch.allclose(found.features, expected, atol=0.02)  # crops of loose files are resized in uint8
