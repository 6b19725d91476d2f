"""The promise of the loader: a sample's views depend on (seed, step, sample) and on nothing else."""

import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from momentum2.augment import ViewSpec, crop_boxes, render, resized_crop_one, view_specs
from momentum2.config import DataConfig, ViewsConfig
from momentum2.data import Batch, Dataset, Loader, batch_indices, iterate, open_dataset
from momentum2.data.workers import Workers
from momentum2.errors import SettingError, UserError

MakeFolder = Callable[..., Path]
SPECS = view_specs(ViewsConfig(), 16)
BATCH, STEPS = 8, 7  # more than two epochs of 24 images


def opened(root: Path, cache: str = "off", **more: object) -> Dataset:
    return open_dataset(DataConfig(root=str(root), cache=cache, **more))


def views(dataset: Dataset, **how: object) -> list[Tensor]:
    """The two rendered views of every step, joined."""
    settings = {"seed": 5, "batch_size": BATCH, "stop": STEPS} | how
    with Loader(dataset, SPECS, **settings) as batches:
        return [torch.cat(render(batch.images, batch.draws, SPECS)) for batch in batches]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def alone() -> bool:
    return not multiprocessing.active_children() and not any(
        "momentum2" in t.name for t in threading.enumerate()
    )


@pytest.fixture(params=["whole", "crops", "packed crops"])
def dataset(request: pytest.FixtureRequest, make_folder: MakeFolder) -> Dataset:
    """Each of the ways that images can take."""
    root = make_folder(24, varied=request.param != "whole", classes=3)
    return opened(root, "off" if request.param == "crops" else "on")


def test_batches_are_what_the_parts_say(dataset: Dataset) -> None:
    """Order from the sampler, crops from the draws, labels and pixels from the data set, put together."""
    with Loader(dataset, SPECS, seed=5, batch_size=BATCH, stop=STEPS) as batches:
        assert len(batches) == STEPS
        for step, batch in enumerate(batches):
            assert batch.step == step
            assert batch.wait >= 0
            indices = batch_indices(24, 5, step, BATCH)
            np.testing.assert_array_equal(batch.indices, indices)
            assert batch.labels is not None
            assert dataset.labels is not None
            np.testing.assert_array_equal(batch.labels, dataset.labels[indices])
            originals = dataset.read(indices)
            if isinstance(batch.images, Tensor):
                np.testing.assert_array_equal(batch.images.permute(0, 2, 3, 1), originals)
                continue
            for images, draws, spec in zip(batch.images, batch.draws, SPECS, strict=True):
                for i, original in enumerate(originals):
                    box = crop_boxes(draws[i : i + 1], *original.shape[:2])[0].tolist()
                    crop = resized_crop_one(original, tuple(box), spec.size)
                    np.testing.assert_array_equal(images[i].permute(1, 2, 0), crop)
    assert alone()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_same_batch(dataset: Dataset, world: int) -> None:
    whole = views(dataset)
    shares = [views(dataset, rank=rank, world=world) for rank in range(world)]
    local = BATCH // world
    for step, both in enumerate(whole):
        first, second = both.chunk(2)
        for rank in range(world):
            mine = slice(rank * local, (rank + 1) * local)
            assert torch.equal(shares[rank][step], torch.cat([first[mine], second[mine]]))


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_change_nothing(dataset: Dataset, workers: int) -> None:
    assert_equal(views(dataset, workers=workers), views(dataset))
    assert_equal(views(dataset, workers=workers, rank=1, world=2), views(dataset, rank=1, world=2))
    assert alone()


@pytest.mark.parametrize("start", [1, 3, 6])
def test_resuming_changes_nothing(dataset: Dataset, start: int) -> None:
    assert_equal(views(dataset, start=start), views(dataset)[start:])


def test_another_seed_changes_order_and_draws(dataset: Dataset) -> None:
    assert not any(torch.equal(a, b) for a, b in zip(views(dataset), views(dataset, seed=6), strict=True))


@pytest.mark.parametrize("varied", [True, False])
def test_a_cache_made_again_changes_nothing(make_folder: MakeFolder, tmp_path: Path, varied: bool) -> None:
    root = make_folder(24, varied=varied)
    first = views(opened(root, "on", cache_dir=str(tmp_path / "a")))
    assert_equal(views(opened(root, "on", cache_dir=str(tmp_path / "b"))), first)
    if varied:  # images too small for reduced decoding: streaming them is the same
        assert_equal(views(opened(root, "off")), first)


def test_each_sample_and_step_has_its_own_draws(make_folder: MakeFolder) -> None:
    root = make_folder(4)
    dataset = opened(root)
    with Loader(dataset, SPECS, seed=0, batch_size=4, stop=50) as batches:
        boxes = torch.cat([torch.cat([crop_boxes(draws, 500, 500) for draws in b.draws]) for b in batches])
    assert len(boxes.unique(dim=0)) == len(boxes) == 400


def test_chunks_are_consecutive_slices(dataset: Dataset) -> None:
    with Loader(dataset, SPECS, seed=5, batch_size=BATCH, stop=1) as batches:
        [batch] = batches
    parts = [batch.chunk(i, 4) for i in range(4)]
    assert [len(part) for part in parts] == [2] * 4
    joined = [torch.cat([torch.stack(render(p.images, p.draws, SPECS)) for p in parts], 1)]
    assert torch.equal(joined[0], torch.stack(render(batch.images, batch.draws, SPECS)))
    assert torch.equal(torch.cat([part.indices for part in parts]), batch.indices)
    labels = [part.labels for part in parts if part.labels is not None]
    assert batch.labels is not None
    assert torch.equal(torch.cat(labels), batch.labels)


EVALUATION = view_specs(ViewsConfig(recipe="evaluation"), 16)[0]


def joined(batches: list[Batch]) -> tuple[list[int], Tensor]:
    pixels = [render(batch.images, batch.draws, (EVALUATION,))[0] for batch in batches]
    return torch.cat([batch.indices for batch in batches]).tolist(), torch.cat(pixels)


@pytest.mark.parametrize("workers", [0, 2])
def test_iterate_gives_every_image_once(dataset: Dataset, workers: int) -> None:
    indices, pixels = joined(list(iterate(dataset, EVALUATION, 7, workers=workers)))
    assert indices == list(range(24))
    parts = [joined(list(iterate(dataset, EVALUATION, 5, rank=rank, world=3))) for rank in range(3)]
    assert list(chain.from_iterable(part[0] for part in parts)) == indices
    assert torch.equal(torch.cat([part[1] for part in parts]), pixels)
    some, chosen = joined(list(iterate(dataset, EVALUATION, 4, indices=np.array([20, 3, 7, 7, 1]))))
    assert some == [20, 3, 7, 7, 1]
    assert torch.equal(chosen, pixels[some])
    assert list(iterate(dataset, EVALUATION, 4, rank=2, world=3, indices=np.array([1, 2]))) == []
    assert alone()


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_left_behind(make_folder: MakeFolder, workers: int) -> None:
    dataset = opened(make_folder(24))
    loader = Loader(dataset, SPECS, seed=0, batch_size=4, stop=10**6, workers=workers)

    def fail_at_step_two() -> None:
        with loader:
            for batch in loader:
                _ = 1 // (batch.step - 2)

    with pytest.raises(ZeroDivisionError):
        fail_at_step_two()
    assert alone()
    for _ in iterate(dataset, EVALUATION, 2, workers=workers):
        break
    assert alone()
    again = iter(loader)
    assert next(again).step == 0
    assert next(iter(loader)).step == 0  # a second start ends the first
    loader.close()
    assert alone()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_the_loader_computes_with_one_thread() -> None:
    """In a process of its own: OpenMP's threads are never given back."""
    code = """
import os, torch
from momentum2.augment import view_specs
from momentum2.config import DataConfig, ViewsConfig
from momentum2.data import Loader, open_dataset

dataset = open_dataset(DataConfig(name="shapes", image_size=32, train_size=512))
torch.set_num_threads(2)
torch.rand(1 << 20).exp()
before = len(os.listdir("/proc/self/task"))
with Loader(dataset, view_specs(ViewsConfig(), 32), seed=0, batch_size=256, stop=8) as batches:
    for batch in batches:
        batch.images.float().exp()
        print(len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())
        break
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "2"]  # the loader without a team; we keep our two


def test_a_killed_worker_is_noticed(make_folder: MakeFolder) -> None:
    with Loader(opened(make_folder(24)), SPECS, seed=0, batch_size=8, stop=10**6, workers=2) as batches:
        running = iter(batches)
        next(running)
        victim = multiprocessing.active_children()[0]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=f"pid {victim.pid}.* exit code -9 at step .*[.](png|jpg)"):
            for _ in running:
                pass
    assert alone()


def test_a_stopped_worker_is_noticed(make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    class Watched(Workers):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pids.extend(child.pid for child in multiprocessing.active_children())

    monkeypatch.setattr("momentum2.data.loader.Workers", Watched)
    loader = Loader(opened(make_folder(24)), SPECS, seed=0, batch_size=8, stop=10**6, workers=2, timeout=2.0)

    def stop_them() -> None:
        for _ in loader:  # on a busy machine perhaps not even one batch, and the same error
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)

    with pytest.raises(UserError, match="has been busy with step") as error:
        stop_them()
    assert any(f"pid {pid}" in str(error.value) for pid in pids)
    assert alone()


def test_batches_that_cannot_be(make_folder: MakeFolder) -> None:
    dataset = opened(make_folder(24))
    with pytest.raises(SettingError, match=r"train.batch_size must be from 1 to 24"):
        Loader(dataset, SPECS, seed=0, batch_size=25, stop=1)
    with pytest.raises(SettingError, match=r"train.batch_size 8 .* Choose a multiple of 3"):
        Loader(dataset, SPECS, seed=0, batch_size=8, stop=1, rank=0, world=3)


def test_large_jpegs_are_decoded_small(tmp_path: Path) -> None:
    """Crops out of a reduced decoding show the same as crops out of the full one."""
    rng = np.random.default_rng(0)
    for i in range(4):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        coarse.resize((640 + i, 480), Image.Resampling.BICUBIC).save(tmp_path / f"{i}.jpg", quality=95)
    specs = (ViewSpec(32, area=(0.3, 1.0)),)
    read: list[int] = []
    dataset = opened(tmp_path)
    original = type(dataset.picture(0)).pixels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(dataset.picture(0)),
            "pixels",
            lambda self, reduce=1: read.append(reduce) or original(self, reduce),
        )
        with Loader(dataset, specs, seed=0, batch_size=4, stop=5) as batches:
            found = list(batches)
    assert set(read) >= {4, 8}
    for batch in found:
        for i, full in enumerate(dataset.read(batch.indices.tolist())):
            box = crop_boxes(batch.draws[0][i : i + 1], *full.shape[:2])[0].tolist()
            expected = resized_crop_one(full, tuple(box), 32).astype(int)
            assert np.abs(expected - batch.images[0][i].permute(1, 2, 0).numpy()).mean() < 1.5


def test_memory_does_not_grow_with_epochs(make_folder: MakeFolder) -> None:
    with Loader(opened(make_folder(24)), SPECS, seed=0, batch_size=8, stop=300) as batches:
        peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss for b in batches if b.step in (60, 299)]
    assert peaks[1] - peaks[0] < 4096  # kilobytes over 80 epochs


def test_a_hundred_thousand_names_are_cheap_to_send(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("".join(f"some/folder/{i:06d}.jpg\n" for i in range(100_000)))
    dataset = open_dataset(DataConfig(name="list", root=str(tmp_path / "list.txt"), cache="off"))
    assert len(pickle.dumps(dataset)) < 4_000_000
    assert dataset.names[99_999] == "some/folder/099999.jpg"
    assert dataset.names[-1] == dataset.names[99_999]
    assert dataset.names[1:3] == ["some/folder/000001.jpg", "some/folder/000002.jpg"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_the_gpu(dataset: Dataset) -> None:
    def images(device: str) -> list[Tensor]:
        batches = Loader(dataset, SPECS, seed=5, batch_size=8, stop=3, device=device)
        return [batch.images if isinstance(batch.images, Tensor) else batch.images[1] for batch in batches]

    assert {image.device.type for image in images("cuda")} == {"cuda"}
    assert_equal([image.cpu() for image in images("cuda")], images("cpu"))
