"""A hundred million images: nothing is made for each of them."""

import tracemalloc

import numpy as np

from momentum2.augment import view_specs
from momentum2.config import DataConfig, ViewsConfig
from momentum2.data import Dataset, Loader
from momentum2.data.cache import packed
from momentum2.data.dataset import Numbered
from momentum2.data.fingerprint import fingerprint
from momentum2.data.images import Array, Picture
from momentum2.data.looking import check_reading
from momentum2.data.sampler import batch_indices, chosen_order

N = 100_000_000


class Virtual(Dataset):
    """Images that are made up when they are asked for."""

    def __init__(self) -> None:
        super().__init__(Numbered(N))
        self.asked = 0

    def picture(self, index: int) -> Picture:
        self.asked += 1
        return Array(np.full((8, 8, 3), index % 251, np.uint8))

    def stamp(self, index: int) -> str:
        return str(index)


def test_a_hundred_million_images_need_no_memory_and_no_scan() -> None:
    tracemalloc.start()
    dataset = Virtual()
    check_reading(dataset)
    assert packed(dataset, "own", DataConfig().cache, None) is dataset
    assert fingerprint(dataset) == fingerprint(Virtual())
    order = chosen_order("auto", N)
    specs = view_specs(ViewsConfig(), 8)
    parts = {}
    for world in (1, 2, 4):
        seen = []
        for rank in range(world):
            own = {"rank": rank, "world": world, "order": order}
            with Loader(dataset, specs, seed=3, batch_size=64, start=10**6, stop=10**6 + 3, **own) as batches:
                seen.append([batch.indices.numpy() for batch in batches])
        parts[world] = [np.concatenate(step) for step in zip(*seen, strict=True)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(parts[1], parts[2])
    np.testing.assert_array_equal(parts[1], parts[4])
    assert peak < 50_000_000
    assert dataset.asked < 1000


def test_none_of_many_images_comes_twice() -> None:
    """Two million places of an epoch: their images are all different, and others in the next epoch."""
    batch = 1_000_000
    first, second = (batch_indices(N, 0, step, batch, "feistel") for step in (0, 99))
    assert len(np.unique(np.concatenate([first, second]))) == 2 * batch
    assert max(first.max(), second.max()) < N
    again = batch_indices(N, 0, 100, batch, "feistel")
    assert len(np.intersect1d(first, again)) < 2 * batch * batch / N
