"""A folder with every kind of good and bad file: right pixels, right list, the same from every process."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from momentum2.augment import render, view_specs
from momentum2.config import DataConfig, ViewsConfig
from momentum2.data import Dataset, Loader, iterate, open_dataset
from momentum2.errors import UserError

SPECS = view_specs(ViewsConfig(), 8)
RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (12, 16, 3), dtype=np.uint8)
DEEP = RNG.integers(0, 65536, (12, 16)).astype(np.uint16)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.fromarray(RGB), "PNG", exif=exif)


def good_files() -> dict[str, tuple[bytes, np.ndarray, int]]:
    """Content, right pixels, and how far off they may be."""
    gray = RGB[..., 0]
    share = gray[..., None] / 255
    jpeg = encoded(Image.fromarray(RGB), "JPEG")
    palette = Image.fromarray(RGB).quantize(8)
    three = [1, 1, 3]
    return {
        "alpha.png": (
            encoded(Image.fromarray(np.dstack([RGB, gray])), "PNG"),
            RGB * share + 255 * (1 - share),
            1,
        ),
        "animation.gif": (
            encoded(Image.new("RGB", (16, 12), "lime"), "GIF", save_all=True, append_images=[palette]),
            np.full((12, 16, 3), [0, 255, 0]),
            0,
        ),
        "cmyk.jpg": (
            encoded(Image.new("CMYK", (16, 12), (0, 255, 0, 0)), "JPEG"),
            np.full((12, 16, 3), [255, 0, 255]),
            2,
        ),
        "exif.png": (rotated(), np.rot90(RGB, -1), 0),
        "float.tif": (
            encoded(Image.fromarray((gray * 257.0).astype(np.float32)), "TIFF"),
            np.tile(gray[..., None], three),
            0,
        ),
        "gray.png": (encoded(Image.fromarray(gray), "PNG"), np.tile(gray[..., None], three), 0),
        "palette.png": (encoded(palette, "PNG"), np.asarray(palette.convert("RGB")), 0),
        "plain.jpg": (jpeg, np.asarray(Image.open(io.BytesIO(jpeg))), 0),
        "sixteen.png": (
            encoded(Image.fromarray(DEEP), "PNG"),
            np.tile(np.round(DEEP / 257)[..., None], three),
            0,
        ),
    }


def bad_files() -> dict[str, tuple[bytes, str]]:
    """Content and a word of the reason. Sorted by name they lie between the good ones."""
    jpeg, png = encoded(Image.fromarray(RGB), "JPEG"), encoded(Image.fromarray(RGB), "PNG")
    bomb = bytearray(encoded(Image.new("RGB", (1, 1)), "BMP"))
    bomb[18:26] = (30_000).to_bytes(4, "little") * 2
    return {
        "bomb.bmp": (bytes(bomb), "bomb"),
        "empty.jpg": (b"", "empty file"),
        "flipped.png": (png[:50] + bytes([png[50] ^ 255]) + png[51:], "Error"),
        "text.png": (b"hello", "not an image"),
        "truncated.jpg": (jpeg[: len(jpeg) * 2 // 3], "truncated"),
        "zcut.png": (png[: len(png) // 2], "truncated"),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    root.mkdir()
    for name, (content, *_) in (good_files() | bad_files()).items():
        (root / name).write_bytes(content)
    (root / "notes.txt").write_text("no image and not meant to be one")
    return root


def opened(folder: Path, cache: str, max_bad_fraction: float = 0.5) -> Dataset:
    return open_dataset(
        DataConfig(root=str(folder), cache=cache, max_bad_fraction=max_bad_fraction, window=[0, 65535])
    )


@pytest.mark.parametrize("cache", ["on", "off"])
def test_right_pixels_and_neighbors(folder: Path, cache: str) -> None:
    dataset = opened(folder, cache)
    names = sorted(good_files() | bad_files())
    assert list(dataset.names) == names
    good = [i for i, name in enumerate(names) if name in good_files()]
    taken, images = dataset.fetch(range(len(names)))
    assert taken.tolist() == [min((i for i in good if i >= k), default=good[0]) for k in range(len(names))]
    for index, image in zip(taken, images, strict=True):
        _, expected, tolerance = good_files()[names[index]]
        assert image.shape == expected.shape, names[index]
        assert np.abs(image.astype(float) - expected).max() <= tolerance, names[index]
    assert {names[i] for i in dataset.bad} == set(bad_files())


@pytest.mark.parametrize("cache", ["on", "off"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_list_names_each_once_with_its_reason(
    folder: Path, tmp_path: Path, cache: str, workers: int
) -> None:
    listed = tmp_path / "bad_images.txt"
    plain: list[torch.Tensor] = []
    for world in (1, 3):
        seen = []
        for rank in range(world):
            dataset = opened(folder, cache)
            with Loader(
                dataset, SPECS, seed=1, batch_size=15, stop=3, rank=rank, world=world,
                workers=workers, bad_images=listed,
            ) as batches:  # fmt: skip
                seen.append([torch.stack(render(batch.images, batch.draws, SPECS), 1) for batch in batches])
        whole = [torch.cat(parts) for parts in zip(*seen, strict=True)]
        plain = plain or whole
        assert all(torch.equal(a, b) for a, b in zip(whole, plain, strict=True))
        lines = dict(line.split("\t") for line in listed.read_text().splitlines())
        assert len(lines) == len(listed.read_text().splitlines())
        assert lines.keys() == bad_files().keys()
        for name, reason in lines.items():
            assert bad_files()[name][1].lower() in reason.lower()


def test_the_first_is_said_and_the_others_are_listed(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = tmp_path / "bad_images.txt"
    with Loader(opened(folder, "off"), SPECS, seed=1, batch_size=15, stop=3, bad_images=listed) as batches:
        list(batches)
    assert len(listed.read_text().splitlines()) > 1
    (line,) = caplog.messages
    assert line.endswith(f"Unreadable images are listed in {listed}.")
    with (
        pytest.raises(UserError),
        Loader(
            opened(folder, "off", 0.0), SPECS, seed=1, batch_size=15, stop=3, bad_images=tmp_path / "again"
        ) as batches,
    ):
        list(batches)
    assert len(caplog.messages) == 1  # the error says it


def test_labels_follow_the_image_that_was_taken(tmp_path: Path) -> None:
    for name, shade in (("a/0.png", 10), ("a/1.png", None), ("b/2.png", 20), ("c/3.png", 30)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"junk" if shade is None else encoded(Image.new("L", (9, 9), shade), "PNG"))
    for cache in ("on", "off"):
        with Loader(opened(tmp_path, cache), SPECS, seed=0, batch_size=4, stop=1) as batches:
            [batch] = batches
        assert sorted(batch.indices.tolist()) == [0, 2, 2, 3]
        first = batch.images if isinstance(batch.images, torch.Tensor) else batch.images[0]
        shades = first[:, 0, 0, 0].tolist()
        assert batch.labels is not None
        assert list(zip(batch.labels.tolist(), shades, strict=True)) == [
            ((0, 10), (0, 0), (1, 20), (2, 30))[i] for i in batch.indices.tolist()
        ]


@pytest.mark.parametrize("cache", ["on", "off"])
def test_evaluation_leaves_them_out(folder: Path, cache: str) -> None:
    dataset = opened(folder, cache)
    [spec] = view_specs(ViewsConfig(recipe="evaluation"), 8)
    for _ in "12":  # the second time they are known
        batches = list(iterate(dataset, spec, 4))
        kept = torch.cat([batch.indices for batch in batches]).tolist()
        assert [dataset.names[i] for i in kept] == sorted(good_files())
        assert all(len(batch.draws[0]) == len(batch.images[0]) == len(batch) for batch in batches)


@pytest.mark.parametrize("cache", ["on", "off"])
@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_stop_the_run_with_one_sentence(
    folder: Path, tmp_path: Path, cache: str, workers: int
) -> None:
    listed = tmp_path / "bad_images.txt"
    dataset = opened(folder, cache, max_bad_fraction=0.2)
    with (
        Loader(dataset, SPECS, seed=0, batch_size=15, stop=9, workers=workers, bad_images=listed) as batches,
        pytest.raises(
            UserError, match=r"data\.max_bad_fraction is 0\.2, but \d+ of 15 images cannot be read"
        ) as error,
    ):
        list(batches)
    assert str(listed) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(listed.read_text().splitlines()) > 0.2 * 15


@pytest.mark.parametrize("cache", ["on", "off"])
def test_nothing_but_bad_images(folder: Path, cache: str) -> None:
    for name in good_files():
        (folder / name).write_bytes(b"")
    dataset = opened(folder, cache, max_bad_fraction=1.0)
    with pytest.raises(UserError, match="15 of 15 images cannot be read"):
        dataset.read([3])
    with (
        Loader(dataset, SPECS, seed=0, batch_size=5, stop=1) as batches,
        pytest.raises(UserError, match="15 of 15"),
    ):
        list(batches)


def test_the_default_tolerates_one_in_a_hundred(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"{i:03d}.png").write_bytes(encoded(Image.new("L", (9, 9), i), "PNG"))
    (tmp_path / "050.png").write_bytes(b"")
    dataset = open_dataset(DataConfig(root=str(tmp_path), cache="off"))
    assert dataset.read([50])[0][0, 0, 0] == 51
    shutil.copy(tmp_path / "050.png", tmp_path / "070.png")
    with pytest.raises(UserError, match=r"2 of 100 .* such as 050\.png \(empty file\)"):
        dataset.read([70])
