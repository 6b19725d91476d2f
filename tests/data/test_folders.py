"""Folders, ImageNet's layout, archives and lists: the right images, names and labels, or one sentence."""

import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from momentum2.config import DataConfig
from momentum2.data import Dataset, archive, open_dataset
from momentum2.data.images import BadImage
from momentum2.errors import SettingError, UserError

MakeFolder = Callable[..., Path]


def opened(name: str, root: Path, **more: object) -> Dataset:
    return open_dataset(DataConfig(name=name, root=str(root), cache="off", **more))


def put(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), shade).save(path)


def shades(dataset: Dataset) -> list[int]:
    return [int(image[0, 0, 0]) for image in dataset.read(range(len(dataset)))]


def test_flat_folder_has_no_labels(tmp_path: Path) -> None:
    put(tmp_path / "b.png", 2)
    put(tmp_path / "a.PNG", 1)
    put(tmp_path / "deep" / "er" / "c.png", 3)
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden.png").write_bytes(b"junk")
    put(tmp_path / ".thumbnails" / "x.png")
    put(tmp_path / "__MACOSX" / "x.png")
    dataset = opened("folder", tmp_path)
    assert list(dataset.names) == ["a.PNG", "b.png", "deep/er/c.png"]
    assert shades(dataset) == [1, 2, 3]
    assert dataset.labels is None
    assert dataset.class_names is None


def test_one_folder_of_all_images_is_no_class(tmp_path: Path) -> None:
    put(tmp_path / "DCIM" / "1.png")
    put(tmp_path / "DCIM" / "2.png")
    dataset = opened("folder", tmp_path)
    assert list(dataset.names) == ["DCIM/1.png", "DCIM/2.png"]
    assert dataset.labels is None


def test_folders_beside_a_split_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for place in ("train/a", "train/b", "boat", "plane"):
        put(tmp_path / place / "1.png")
    assert len(opened("folder", tmp_path)) == 2
    assert f'Using only the "train" folder of {tmp_path}; ignoring boat, plane.' in caplog.text


def test_class_folders_give_labels(tmp_path: Path) -> None:
    put(tmp_path / "dog" / "1.png")
    put(tmp_path / "cat" / "deep" / "2.png")
    put(tmp_path / "dog" / "3.png")
    dataset = opened("folder", tmp_path)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.labels is not None
    assert dataset.labels.dtype == np.int64
    assert dataset.labels.tolist() == [0, 1, 1]


def test_splits_share_one_numbering(tmp_path: Path) -> None:
    for place in ("train/ant", "train/bee", "train/cow", "test/cow", "test/ant"):
        put(tmp_path / place / "x.png")
    train, test = (
        opened("folder", tmp_path),
        open_dataset(DataConfig(root=str(tmp_path), cache="off"), "test"),
    )
    assert train.class_names == test.class_names == ("ant", "bee", "cow")
    assert test.labels is not None
    assert list(zip(test.names, test.labels.tolist(), strict=True)) == [
        ("test/ant/x.png", 0),
        ("test/cow/x.png", 2),
    ]


def test_links_back_up_are_not_followed(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1.png")
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "a", target_is_directory=True)
    assert list(opened("folder", tmp_path).names) == ["a/1.png", "elsewhere/1.png"]


def test_a_ladder_of_links_is_not_climbed(tmp_path: Path) -> None:
    """Thirty folders, each with two links to the next: a thousand million ways to the last."""
    for i in range(30):
        (tmp_path / f"{i:02d}").mkdir()
        for link in "ab":
            (tmp_path / f"{i:02d}" / link).symlink_to(f"../{i + 1:02d}")
    (tmp_path / "30").mkdir()
    (tmp_path / "itself").symlink_to("itself")
    Image.new("RGB", (9, 9)).save(tmp_path / "30" / "only.png")
    with pytest.raises(UserError, match="in more than 100 ways"):
        open_dataset(DataConfig(root=str(tmp_path), cache="off"))


def test_odd_files_are_bad_and_do_not_block(tmp_path: Path) -> None:
    put(tmp_path / "a.png", 9)
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(2 << 30)  # sparse
    dataset = opened("folder", tmp_path, max_bad_fraction=0.9)
    assert shades(dataset) == [9] * 4
    assert dataset.bad == {
        1: "not a regular file",
        2: "No such file or directory",
        3: "2,147,483,648 bytes, larger than the limit of 1,073,741,824",
    }


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    put(tmp_path / "a.png", 5)
    os.rename(tmp_path / "a.png", os.fsencode(tmp_path) + b"/caf\xe9.png")
    dataset = opened("folder", tmp_path)
    assert os.fsencode(dataset.names[0]) == b"caf\xe9.png"
    assert shades(dataset) == [5]


def test_imagenet_layout(tmp_path: Path) -> None:
    for place in ("train/n01", "train/n02", "val/n02"):
        put(tmp_path / place / "x.JPEG")
    assert opened("imagenet", tmp_path).class_names == ("n01", "n02")
    for split in ("val", "test"):  # there is no labeled test set: val stands for it
        dataset = open_dataset(DataConfig(name="imagenet", root=str(tmp_path), cache="off"), split)
        assert list(dataset.names) == ["val/n02/x.JPEG"]
        assert dataset.labels is not None
        assert dataset.labels.tolist() == [1]
    put(tmp_path / "train" / "stray.JPEG")
    with pytest.raises(UserError, match="not in ImageNet's layout"):
        opened("imagenet", tmp_path)


def packed_up(folder: Path, kind: str) -> Path:
    target = folder.with_suffix(f".{kind}")
    files = sorted(path for path in folder.rglob("*"))
    if kind == "zip":
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
            for path in files:
                file.write(path, path.relative_to(folder.parent))
    else:
        with tarfile.open(target, "w") as file:
            file.add(folder, folder.name)
    return target


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_archive_is_the_folder_it_was_made_of(tmp_path: Path, kind: str, split: str) -> None:
    root = tmp_path / "set"
    for i, place in enumerate(("train/dog", "train/cat", "test/dog")):
        put(root / place / "x.png", 50 + i)
    (root / "readme.txt").write_text("hello")
    (root / "train" / "dog" / "bad.png").write_bytes(b"junk")
    folder = open_dataset(DataConfig(root=str(root), cache="off", max_bad_fraction=0.5), split)
    config = DataConfig(name="archive", root=str(packed_up(root, kind)), cache="off", max_bad_fraction=0.5)
    archive = pickle.loads(pickle.dumps(open_dataset(config, split)))
    assert [f"set/{name}" for name in folder.names] == list(archive.names)
    assert archive.class_names == folder.class_names == ("cat", "dog")
    assert archive.labels.tolist() == folder.labels.tolist()
    assert shades(archive) == shades(folder)
    assert archive.bad == folder.bad
    assert archive.stamp(0) != archive.stamp(len(archive) - 1) or len(archive) == 1
    shades(archive)
    pickle.dumps(archive)  # also after it has opened its file


def test_hard_links_in_a_tar(tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.png", 7)
    os.link(tmp_path / "in" / "a.png", tmp_path / "in" / "b.png")
    assert shades(opened("archive", packed_up(tmp_path / "in", "tar"))) == [7, 7]


def test_a_cut_tar_and_a_damaged_zip(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "in").mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(tmp_path / "in" / name)
    tar = packed_up(tmp_path / "in", "tar")
    dataset = opened("archive", tar, max_bad_fraction=0.5)
    with tar.open("r+b") as file:
        file.truncate(int(dataset.places[1, 0]) + 100)
    dataset.read([1])
    assert "ends before" in dataset.bad[1]
    archive = packed_up(tmp_path / "in", "zip")
    dataset = opened("archive", archive, max_bad_fraction=0.5)
    with archive.open("r+b") as file:
        file.seek(200)
        file.write(b"\0" * 50)
    dataset.read([0])
    assert 0 in dataset.bad


def test_a_bomb_in_a_zip_is_not_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_HARMLESS", 1 << 16)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/bomb.png", bytes(1 << 20))
        file.writestr("a/small.png", bytes(1 << 15))
    dataset = open_dataset(DataConfig(name="archive", root=str(tmp_path / "a.zip"), cache="off"))
    with pytest.raises(BadImage, match="decompression bomb"):
        dataset.picture(0)
    dataset.picture(1)  # as small as this it does no harm, and is no picture


@pytest.mark.parametrize("compression", ["gz", "xz"])
def test_a_compressed_tar_is_explained(tmp_path: Path, compression: str) -> None:
    put(tmp_path / "a.png")
    with tarfile.open(tmp_path / "x.tar", f"w:{compression}") as file:
        file.add(tmp_path / "a.png", "a.png")
    with pytest.raises(UserError, match="decompress a"):
        opened("archive", tmp_path / "x.tar")


def test_list_of_paths(tmp_path: Path) -> None:
    for i, name in enumerate(("a.png", "sub/b c.png", "d.png")):
        put(tmp_path / name, i)
    (tmp_path / "list.txt").write_text(f"sub/b c.png\n\n{tmp_path}/d.png\na.png\n")
    dataset = opened("list", tmp_path / "list.txt")
    assert shades(dataset) == [1, 2, 0]
    assert dataset.labels is None


def test_list_with_labels(tmp_path: Path) -> None:
    for name in ("a.png", "b c.png", "d.png"):
        put(tmp_path / name)
    (tmp_path / "words.txt").write_text("a.png dog\nb c.png\tbig cat\nd.png dog\n")
    dataset = opened("list", tmp_path / "words.txt")
    assert dataset.class_names == ("big cat", "dog")
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [1, 0, 1]
    (tmp_path / "numbers.txt").write_text("a.png 10\nb c.png 9\nd.png 2\n")
    dataset = opened("list", tmp_path / "numbers.txt")
    assert dataset.class_names == ("2", "9", "10")
    assert dataset.labels is not None
    assert dataset.labels.tolist() == [2, 1, 0]
    (tmp_path / "mixed.txt").write_text("a.png 1\nd.png\n")
    with pytest.raises(UserError, match="Label all of them or none"):
        opened("list", tmp_path / "mixed.txt")


def test_lists_of_several_splits(tmp_path: Path) -> None:
    put(tmp_path / "a.png")
    (tmp_path / "train.txt").write_text("a.png ant\na.png bee\n")
    (tmp_path / "test.txt").write_text("a.png bee\n")
    config = DataConfig(name="list", root=str(tmp_path), cache="off")
    test = open_dataset(config, "test")
    assert test.labels is not None
    assert test.labels.tolist() == [1]
    with pytest.raises(UserError, match="found: test, train"):
        open_dataset(config, "val")
    with pytest.raises(UserError, match="split 'test'"):
        open_dataset(DataConfig(name="list", root=str(tmp_path / "train.txt"), cache="off"), "test")


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (DataConfig(), "data.root"),
        (DataConfig(root="no/such/place"), "data.root"),
        (DataConfig(name="none"), "data.name"),
        (DataConfig(name="folder", root=".", download=True), "data.download"),
        (DataConfig(name="cifar10", download=True), "data.root"),
        (DataConfig(name="shapes", image_size=8, train_size=20_001), "data.train_size"),
        (DataConfig(name="shapes", image_size=8, train_size=0), "data.train_size"),
    ],
)
def test_a_mistake_carries_its_setting(config: DataConfig, setting: str) -> None:
    with pytest.raises(SettingError) as error:
        open_dataset(config)
    assert error.value.setting == setting
    assert "\n" not in str(error.value)


def test_a_split_that_is_not_there() -> None:
    with pytest.raises(UserError, match="Choose one of train, test"):
        open_dataset(DataConfig(name="shapes", split="val"))


def test_mistakes_about_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the folder is empty"):
        opened("folder", tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"contains no images \(found notes.txt\)"):
        opened("folder", tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        opened("folder", tmp_path / "notes.txt")
    with pytest.raises(UserError, match="cannot be read in place"):
        opened("archive", tmp_path / "notes.txt")
    with pytest.raises(UserError, match="is empty"):
        opened("list", tmp_path / "notes.txt")
    put(tmp_path / "cat" / "a.png")
    with pytest.raises(UserError, match="is not divided into splits"):
        opened("folder", tmp_path, split="test")
    put(tmp_path / "val" / "a.png")
    with pytest.raises(UserError, match=r"no split 'train'. Choose one of val"):
        opened("folder", tmp_path)


def test_shares_of_an_undivided_folder_do_not_overlap(make_folder: MakeFolder) -> None:
    root = make_folder(40, classes=4)
    whole = set(opened("folder", root).names)
    learn, test = opened("folder", root, split="80%"), opened("folder", root, split="-20%")
    assert (len(learn), len(test)) == (32, 8)
    assert set(learn.names) | set(test.names) == whole
    assert learn.labels is not None
    assert list(learn.names) != sorted(whole)[:32]  # of a shuffled order


def test_train_size_is_a_nested_seeded_choice(make_folder: MakeFolder) -> None:
    root = make_folder(40, classes=4)

    def names(size: int, seed: int) -> set[str]:
        dataset = open_dataset(DataConfig(root=str(root), train_size=size, cache="off"), seed=seed)
        assert len(dataset) == size
        whole = opened("folder", root)
        assert whole.labels is not None
        assert dataset.labels is not None
        table = dict(zip(whole.names, whole.labels.tolist(), strict=True))
        assert [table[name] for name in dataset.names] == dataset.labels.tolist()
        position = list(whole.names).index(dataset.names[3])
        np.testing.assert_array_equal(dataset.read([3])[0], whole.read([position])[0])
        return set(dataset.names)

    assert names(10, 0) < names(20, 0)
    assert names(10, 0) == names(10, 0)
    assert names(10, 0) != names(10, 1)


def test_train_size_leaves_the_test_split_alone() -> None:
    config = DataConfig(name="shapes", image_size=8, train_size=100, cache="off")
    assert len(open_dataset(config)) == 100
    assert len(open_dataset(config, "test")) == 4_000


def test_shapes_is_balanced_and_fixed() -> None:
    dataset = open_dataset(DataConfig(name="shapes", image_size=16, cache="off"), seed=3)
    assert (len(dataset), dataset.fixed_size) == (20_000, (16, 16))
    assert dataset.labels is not None
    assert np.bincount(dataset.labels).tolist() == [2_000] * 10
    same = open_dataset(DataConfig(name="shapes", image_size=16, cache="off"), seed=4)
    np.testing.assert_array_equal(dataset.read([5, 19_999]), same.read([5, 19_999]))
