"""Real JPEGs, if an archive of CIFAR-10 images lies beside the repository."""

import io
import tarfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from momentum2.augment import render, view_specs
from momentum2.config import DataConfig, ViewsConfig
from momentum2.data import Loader, open_dataset

ARCHIVE = Path(__file__).parents[3] / "shared" / "data" / "cifar10.tar.xz"


@pytest.mark.skipif(not ARCHIVE.is_file(), reason="no CIFAR-10 archive beside the repository")
def test_a_slice_of_cifar(tmp_path: Path) -> None:
    target = tmp_path / "slice.tar"
    contents = {}
    with tarfile.open(ARCHIVE, "r|xz") as source, tarfile.open(target, "w") as file:
        for member in islice((m for m in source if m.name.endswith(".jpg")), 300):
            data = source.extractfile(member)
            assert data is not None
            contents[member.name] = data.read()
            file.addfile(member, io.BytesIO(contents[member.name]))
    config = DataConfig(name="archive", root=str(target), split="test", cache="on")
    dataset = open_dataset(config)
    assert (len(dataset), dataset.fixed_size, dataset.bad) == (300, (32, 32), {})
    for name, image in zip(dataset.names, dataset.read(range(300)), strict=True):
        with Image.open(io.BytesIO(contents[name])) as expected:
            np.testing.assert_array_equal(image, np.asarray(expected.convert("RGB")))
    specs = view_specs(ViewsConfig(), 32)
    with Loader(dataset, specs, seed=0, batch_size=100, stop=3) as batches:
        for batch in batches:
            for view in render(batch.images, batch.draws, specs):
                assert view.shape == (100, 3, 32, 32)
                assert view.isfinite().all()
                assert 0.5 < view.std() < 2  # normalized
