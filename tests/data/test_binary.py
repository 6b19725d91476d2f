"""CIFAR and STL-10 from files written byte by byte as their authors describe them."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from momentum2.config import DataConfig
from momentum2.data import Dataset, open_dataset
from momentum2.errors import UserError

RNG = np.random.default_rng(0)
N = 4


def opened(name: str, root: Path, split: str = "train") -> Dataset:
    return open_dataset(DataConfig(name=name, root=str(root), split=split))


def images(count: int) -> np.ndarray:
    return RNG.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def planes(pictures: np.ndarray) -> np.ndarray:
    """(n, 3072): all red values row by row, then green, then blue."""
    return np.stack([np.concatenate([p[..., c].ravel() for c in range(3)]) for p in pictures])


def python2_pickle(table: dict[str, object]) -> bytes:
    """What Python 2 wrote: byte strings for text, and numpy's old names and arguments for arrays."""
    out = bytearray(b"\x80\x02}")

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    for key, value in table.items():
        out += short(key.encode())
        if isinstance(value, np.ndarray):
            out += (
                b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R"
            )
            out += b"(K\x01" + b"".join(b"M" + n.to_bytes(2, "little") for n in value.shape) + b"\x86"
            out += b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R"
            out += b"(K\x03" + short(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            data = value.tobytes()
            out += b"\x89T" + len(data).to_bytes(4, "little") + data + b"tb"
        else:
            assert isinstance(value, list)
            items = [b"K" + bytes([v]) if isinstance(v, int) else short(v.encode()) for v in value]
            out += b"](" + b"".join(items) + b"e"
        out += b"s"
    return bytes(out + b".")


def cifar10(root: Path, form: str) -> tuple[np.ndarray, list[int]]:
    pictures, labels = images(5 * N), RNG.integers(0, 10, 5 * N).tolist()
    names = [f"name{i}" for i in range(10)]
    folder = root / f"cifar-10-batches-{'bin' if form == 'bin' else 'py'}"
    folder.mkdir(parents=True)
    for batch in range(5):
        rows, their_labels = planes(pictures[batch * N :][:N]), labels[batch * N :][:N]
        stem = folder / f"data_batch_{batch + 1}"
        if form == "bin":
            stem.with_suffix(".bin").write_bytes(
                b"".join(bytes([y]) + row.tobytes() for y, row in zip(their_labels, rows, strict=True))
            )
        elif form == "python2":
            stem.write_bytes(python2_pickle({"data": rows, "labels": their_labels}))
        else:
            stem.write_bytes(pickle.dumps({"data": rows, "labels": their_labels}, protocol=2))
    (folder / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    (folder / "batches.meta").write_bytes(python2_pickle({"label_names": names}))
    return pictures, labels


@pytest.mark.parametrize("form", ["bin", "python2", "python3"])
def test_cifar10(tmp_path: Path, form: str) -> None:
    pictures, labels = cifar10(tmp_path, form)
    dataset = opened("cifar10", tmp_path)
    np.testing.assert_array_equal(dataset.read(np.arange(len(dataset))), pictures)
    assert dataset.labels is not None
    assert dataset.labels.tolist() == labels
    assert dataset.class_names == tuple(f"name{i}" for i in range(10))
    assert dataset.fixed_size == (32, 32)
    inside = next(path for path in tmp_path.iterdir() if path.is_dir())
    assert len(opened("cifar10", inside)) == len(pictures)  # the folder itself is understood too


@pytest.mark.parametrize("form", ["bin", "py"])
def test_cifar100_uses_the_fine_labels(tmp_path: Path, form: str) -> None:
    pictures, fine, coarse = images(N), [99, 0, 50, 7], [1, 2, 3, 4]
    names = [f"fine{i}" for i in range(100)]
    folder = tmp_path / ("cifar-100-binary" if form == "bin" else "cifar-100-python")
    folder.mkdir()
    rows = planes(pictures)
    if form == "bin":
        (folder / "test.bin").write_bytes(
            b"".join(bytes([c, f]) + row.tobytes() for c, f, row in zip(coarse, fine, rows, strict=True))
        )
        (folder / "fine_label_names.txt").write_text("\n".join(names))
    else:
        (folder / "test").write_bytes(
            python2_pickle({"data": rows, "fine_labels": fine, "coarse_labels": coarse})
        )
        (folder / "meta").write_bytes(python2_pickle({"fine_label_names": names}))
    dataset = opened("cifar100", tmp_path, "test")
    np.testing.assert_array_equal(dataset.read(np.arange(N)), pictures)
    assert dataset.labels is not None
    assert dataset.labels.tolist() == fine
    assert dataset.class_names == tuple(names)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["HARM"],)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    cifar10(tmp_path, "python2")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps({"data": Harmful()}))
    with pytest.raises(UserError, match=r"asks for posix\.mkdir, which is not allowed"):
        opened("cifar10", tmp_path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("damage", ["cut", "missing", "label", "objects"])
def test_damaged_cifar_is_one_sentence(tmp_path: Path, damage: str) -> None:
    cifar10(tmp_path, "python2" if damage == "objects" else "bin")
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    file = folder / ("data_batch_2" if damage == "objects" else "data_batch_2.bin")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "missing":
        file.unlink()
    elif damage == "label":
        file.write_bytes(bytes([200]) + file.read_bytes()[1:])
    else:
        file.write_bytes(pickle.dumps({"data": np.array([[1], ["x"]], object), "labels": [1]}))
    with pytest.raises(UserError, match="incomplete or corrupt"):
        opened("cifar10", tmp_path)


def stl10(root: Path) -> dict[str, np.ndarray]:
    folder = root / "stl10_binary"
    folder.mkdir()
    parts = {"train": 3, "test": 2, "unlabeled": 4}
    pictures = {}
    for part, count in parts.items():
        pictures[part] = RNG.integers(0, 256, (count, 96, 96, 3), dtype=np.uint8)
        # Channel by channel, each column by column.
        stored = [p[:, x, c].tobytes() for p in pictures[part] for c in range(3) for x in range(96)]
        (folder / f"{part}_X.bin").write_bytes(b"".join(stored))
        if part != "unlabeled":
            (folder / f"{part}_y.bin").write_bytes(bytes(range(1, count + 1)))
    (folder / "class_names.txt").write_text("\n".join(f"name{i}" for i in range(10)))
    return pictures


def test_stl10(tmp_path: Path) -> None:
    pictures = stl10(tmp_path)
    for split in ("train", "test", "unlabeled", "train+unlabeled"):
        dataset = pickle.loads(pickle.dumps(opened("stl10", tmp_path, split)))
        expected = np.concatenate([pictures[part] for part in split.split("+")])
        order = RNG.permutation(len(expected))
        np.testing.assert_array_equal(dataset.read(order), expected[order])
        if split in ("train", "test"):
            assert dataset.labels.tolist() == list(range(len(expected)))
        else:
            assert dataset.labels is None
        assert len(set(dataset.names)) == len(expected)
    (tmp_path / "stl10_binary" / "test_y.bin").write_bytes(b"\1")
    with pytest.raises(UserError, match="1 labels for 2 images"):
        opened("stl10", tmp_path, "test")
    (tmp_path / "stl10_binary" / "train_X.bin").unlink()
    with pytest.raises(UserError, match="incomplete or corrupt"):
        opened("stl10", tmp_path, "train")


@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("stl10", "stl10_binary")])
def test_what_is_not_there_says_how_to_get_it(tmp_path: Path, name: str, folder: str) -> None:
    with pytest.raises(UserError, match=f"(?s)data.root .*{folder}.* set download to true"):
        opened(name, tmp_path)
    with pytest.raises(UserError, match=r"no split 'val'. Choose one of"):
        opened(name, tmp_path, "val")


def test_download_without_a_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(
        UserError, match=r"could not be downloaded from https://www\.cs\.toronto\.edu"
    ) as error:
        open_dataset(DataConfig(name="cifar10", root=str(tmp_path / "new"), download=True))
    assert "\n" not in str(error.value)
