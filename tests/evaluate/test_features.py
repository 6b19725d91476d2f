import os
import subprocess
import sys
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
    """They are not replaced by their neighbours, as they are in training."""
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


PROGRAM = """
import sys, torch
from momentum2 import distributed
from momentum2.augment import view_specs
from momentum2.backbones import build
from momentum2.config import DataConfig, ViewsConfig
from momentum2.data import open_dataset
from momentum2.evaluate.features import extract
from momentum2.evaluate.knn import knn_scores

torch.set_num_threads(1)
distributed.setup(torch.device("cpu"))
torch.manual_seed(0)
encoder = build("resnet18", "small", 0.25)
spec = view_specs(ViewsConfig("evaluation"), 16)[0]
train, test = (
    extract(encoder, open_dataset(DataConfig("shapes", image_size=16, split=split, train_size=n, cache="off")), spec, batch_size=10)
    for split, n in (("train", 74), ("test", 21))  # 8 batches, the last of 4; and 3, the last of 1
)
votes = knn_scores(train.features, train.labels, test.features, 10, 5)
torch.save([train.features, train.indices, train.labels, test.features, test.indices, votes], f"{sys.argv[1]}{distributed.rank()}.pt")
distributed.teardown()
"""


@pytest.mark.slow
def test_three_processes_find_what_one_finds(tmp_path: Path):
    """To the last bit, with uneven shares: 3 + 3 + 2 batches, of which the last is short."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    root = Path(__file__).parents[2]
    for command in ([sys.executable, program, tmp_path / "one"], [*start, program, tmp_path / "three"]):
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(root)}, timeout=200)
    one = torch.load(tmp_path / "one0.pt")
    assert one[1].tolist() == list(range(74))
    for rank in range(3):
        three = torch.load(tmp_path / f"three{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
