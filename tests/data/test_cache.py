"""The packed cache holds the very pixels, is whole or absent, and notices change."""

import hashlib
import json
import logging
import multiprocessing
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from momentum2.config import DataConfig
from momentum2.data import cache, open_dataset, packing
from momentum2.data.cache import Packed
from momentum2.errors import SettingError

MakeFolder = Callable[..., Path]


def caches(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir())


@pytest.mark.parametrize("varied", [True, False])
@pytest.mark.parametrize("processes", [False, True])
def test_packed_is_what_was_decoded(
    make_folder: MakeFolder, own_cache: Path, varied: bool, processes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if processes:
        monkeypatch.setattr(packing, "_INLINE_BYTES", 0)
        monkeypatch.setattr(packing, "_JOB_BYTES", 5_000)
        monkeypatch.setattr(packing, "allowed_cores", lambda: 2)
    config = DataConfig(root=str(make_folder(30, varied=varied, classes=3)), cache="on")
    plain, packed = open_dataset(replace(config, cache="off")), open_dataset(config)
    assert isinstance(packed, Packed)
    assert packed.in_memory
    assert packed.fixed_size == (None if varied else (24, 24))
    assert list(packed.names) == list(plain.names)
    np.testing.assert_array_equal(packed.labels, plain.labels)
    order = np.random.default_rng(0).permutation(30)
    for dataset in (packed, pickle.loads(pickle.dumps(packed))):
        for mine, original in zip(dataset.read(order), plain.read(order), strict=True):
            np.testing.assert_array_equal(mine, original)
    assert len(pickle.dumps(packed)) < 10_000  # a worker maps the file, it does not get a copy
    [folder] = caches(own_cache)
    assert {path.name for path in folder.iterdir()} == {"pixels.bin", "index.npy", "manifest.json"}


def test_it_is_made_once_and_again_when_a_file_changes(make_folder: MakeFolder, own_cache: Path) -> None:
    root = make_folder(10)
    config = DataConfig(root=str(root), cache="on")
    open_dataset(config)
    [folder] = caches(own_cache)
    made = folder.stat().st_mtime_ns
    open_dataset(config)
    assert [path.stat().st_mtime_ns for path in caches(own_cache)] == [made]
    os.utime(root / "000.png", ns=(1, 1))
    open_dataset(config)
    assert len(caches(own_cache)) == 2
    (root / "001.jpg").rename(root / "new.jpg")
    open_dataset(config)
    assert len(caches(own_cache)) == 3
    open_dataset(replace(config, train_size=5))
    assert len(caches(own_cache)) == 4


def test_a_damaged_or_abandoned_cache_is_made_again(make_folder: MakeFolder, own_cache: Path) -> None:
    config = DataConfig(root=str(make_folder(10)), cache="on")
    before = [image.copy() for image in open_dataset(config).read(range(10))]
    [folder] = caches(own_cache)
    with (folder / "pixels.bin").open("r+b") as file:
        file.truncate(100)
    abandoned = folder.with_name(f"{folder.name}.building")
    abandoned.mkdir()
    (abandoned / "pixels.bin").write_bytes(b"half")
    after = open_dataset(config).read(range(10))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert caches(own_cache) == [folder]


def test_a_failure_leaves_nothing(
    make_folder: MakeFolder,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing.np, "save", full)
    config = DataConfig(root=str(make_folder(10)), cache="on")
    with pytest.raises(SettingError, match="No space left") as error:
        open_dataset(config)
    assert error.value.setting == "data.cache_dir"
    assert caches(own_cache) == []
    assert not isinstance(open_dataset(replace(config, cache="auto")), Packed)  # goes on without
    assert "not cached" in caplog.text


def test_auto_packs_what_fits(make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(root=str(make_folder(10)))
    assert isinstance(open_dataset(config), Packed)
    decoded = sum(image.nbytes for image in open_dataset(config).read(range(10)))
    monkeypatch.setattr(cache, "memory", lambda: 4 * decoded - 4)
    assert not isinstance(open_dataset(config), Packed)
    monkeypatch.setattr(cache, "memory", lambda: 4 * decoded)
    assert isinstance(open_dataset(config), Packed)
    assert not isinstance(open_dataset(replace(config, cache="off")), Packed)


def test_cache_dir_is_obeyed(make_folder: MakeFolder, tmp_path: Path, own_cache: Path) -> None:
    open_dataset(DataConfig(root=str(make_folder(4)), cache="on", cache_dir=str(tmp_path / "here" / "deep")))
    assert len(caches(tmp_path / "here" / "deep")) == 1
    assert not own_cache.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="cannot be written"):
        open_dataset(DataConfig(root=str(make_folder(4)), cache="on", cache_dir=str(tmp_path / "file")))


@pytest.mark.parametrize("varied", [True, False])
def test_bad_images_have_no_pixels_and_a_neighbor(
    make_folder: MakeFolder, own_cache: Path, varied: bool
) -> None:
    root = make_folder(10, varied=varied, classes=2)
    names = list(open_dataset(DataConfig(root=str(root), cache="off")).names)
    for i in (3, 4, 9):
        (root / names[i]).write_bytes(b"junk")
    config = DataConfig(root=str(root), cache="on", max_bad_fraction=0.5)
    packed, plain = open_dataset(config), open_dataset(replace(config, cache="off"))
    neighbors = [0, 1, 2, 5, 5, 5, 6, 7, 8, 0]
    for dataset in (packed, plain):
        taken, images = dataset.fetch(range(10))
        assert taken.tolist() == neighbors
        for image, other in zip(images, neighbors, strict=True):
            np.testing.assert_array_equal(image, plain.read([other])[0])
    assert packed.bad == plain.bad == dict.fromkeys((3, 4, 9), "not an image in a known format")
    [folder] = caches(own_cache)
    assert json.loads((folder / "manifest.json").read_text())["bad"].keys() == {"3", "4", "9"}


def test_what_can_be_read_again_is_no_longer_bad(
    make_folder: MakeFolder, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that fails for a moment must not be remembered forever."""
    config = DataConfig(root=str(make_folder(10)), cache="on", max_bad_fraction=0.5)
    [path] = [path for path in Path(str(config.root)).iterdir() if path.name == "004.png"]
    content, stamp = path.read_bytes(), path.stat()
    path.write_bytes(bytes(len(content)))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert open_dataset(config).bad.keys() == {4}
    path.write_bytes(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert open_dataset(config).bad == {}
    assert len(caches(own_cache)) == 1


def test_two_processes_at_once(
    make_folder: MakeFolder, own_cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = DataConfig(root=str(make_folder(60)), cache="on")
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.SimpleQueue()

    def build() -> None:
        logging.basicConfig(level=logging.INFO, force=True)  # to stderr
        barrier.wait()
        data = open_dataset(config)
        pixels = b"".join(image.tobytes() for image in data.read(range(60)))
        results.put((type(data).__name__, hashlib.sha256(pixels).hexdigest()))

    processes = [context.Process(target=build) for _ in range(3)]
    for process in processes:
        process.start()
    outcomes = {results.get() for _ in processes}
    for process in processes:
        process.join()
    expected = open_dataset(replace(config, cache="off")).read(range(60))
    assert outcomes == {("Packed", hashlib.sha256(b"".join(i.tobytes() for i in expected)).hexdigest())}
    assert capfd.readouterr().err.count("Decoding 60 images") == 1  # the others waited for it
    assert len(caches(own_cache)) == 1


@pytest.mark.parametrize("varied", [True, False])
@pytest.mark.parametrize("name", ["pixels.bin", "index.npy", "manifest.json"])
def test_a_flipped_bit_is_noticed(
    make_folder: MakeFolder, own_cache: Path, varied: bool, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes of the index at opening; pixels when they are first used, and then the images themselves are read."""
    config = DataConfig(root=str(make_folder(10, varied=varied)), cache="on")
    before = [image.copy() for image in open_dataset(config).read(range(10))]
    [folder] = caches(own_cache)
    data = bytearray((folder / name).read_bytes())
    data[len(data) * 2 // 3] ^= 4
    (folder / name).write_bytes(data)
    for _ in range(2):  # the second time from a new cache
        for old, new in zip(before, open_dataset(config).read(range(10)), strict=True):
            np.testing.assert_array_equal(old, new)
    assert ("is damaged" in caplog.text) == (name == "pixels.bin")
    assert (folder / name).read_bytes() != bytes(data)


def test_a_cache_of_other_images_or_people_is_made_again(make_folder: MakeFolder, own_cache: Path) -> None:
    config = DataConfig(root=str(make_folder(10)), cache="on")
    before = [image.copy() for image in open_dataset(config).read(range(10))]
    [folder] = caches(own_cache)
    content = json.loads((folder / "manifest.json").read_text())
    index = np.load(folder / "index.npy")
    for wrong in (index[:3], index * 1000, -index, index.astype(np.float64), np.full_like(index, 2**62)):
        np.save(folder / "index.npy", wrong)
        sealed = hashlib.sha256((folder / "index.npy").read_bytes()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(content | {"index": sealed}))
        for old, new in zip(before, open_dataset(config).read(range(10)), strict=True):
            np.testing.assert_array_equal(old, new)
    if os.getuid() == 0:
        os.chown(folder / "pixels.bin", 12345, 12345)
        made = folder.stat().st_ino
        open_dataset(config)
        assert folder.stat().st_ino != made
