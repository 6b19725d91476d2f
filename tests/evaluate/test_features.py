import os
import socket
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
import sys
import torch
from momentum2 import distributed
from momentum2.augment import view_specs
from momentum2.config import DataConfig, ViewsConfig
from momentum2.data import open_dataset
from momentum2.evaluate.features import extract

torch.set_num_threads(1)
distributed.setup(torch.device("cpu"))
torch.manual_seed(0)
encoder = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.Conv2d(32, 48, 3),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(48, 64),
)
encoder.feature_dim = 64
spec = view_specs(ViewsConfig("evaluation"), 16)[0]
found = []
for images in (74, 21, 1):
    data = DataConfig("shapes", image_size=16, train_size=images, cache="off")
    f = extract(encoder, open_dataset(data), spec, batch_size=10)
    found += [f.features, f.indices, f.labels]
torch.save(found, f"{sys.argv[1]}-{distributed.rank()}.pt")
distributed.teardown()
"""


@pytest.mark.slow
def test_three_processes_find_what_one_finds(tmp_path: Path):
    """To the last bit, with uneven shares: 8 batches, the last of 4; 3, the last of 1; and only one."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def start(name: str, rank: int, world: int) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        return subprocess.Popen([sys.executable, str(program), str(tmp_path / name)], env=environment)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start("one", 0, 1), *(start("three", rank, 3) for rank in range(3))]
    assert [process.wait(200) for process in processes] == [0] * 4
    one = torch.load(tmp_path / "one-0.pt")
    assert [one[i].tolist() for i in (1, 4, 7)] == [list(range(n)) for n in (74, 21, 1)]
    for rank in range(3):
        three = torch.load(tmp_path / f"three-{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
