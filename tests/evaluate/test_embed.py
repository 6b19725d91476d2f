import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from momentum2.config import DataConfig
from momentum2.errors import UserError
from momentum2.evaluate.embed import EmbedOptions, embed
from momentum2.evaluate.subject import SubjectOptions, open_subject

ONE = SubjectOptions(threads=1)


def test_npz_and_parquet_hold_the_same(run: Path, tmp_path: Path):
    with open_subject(run, ONE) as subject:
        assert len(embed(subject, EmbedOptions(str(tmp_path / "f.npz"))).features) == 184
        assert len(embed(subject, EmbedOptions(str(tmp_path / "f.parquet"))).features) == 184
        expected = subject.features(subject.images)
        names = list(subject.images.names)
    arrays = np.load(tmp_path / "f.npz", allow_pickle=False)
    assert np.array_equal(arrays["features"], expected.features.numpy())
    assert arrays["paths"].tolist() == names
    assert np.array_equal(arrays["labels"], expected.labels)
    table = pq.read_table(tmp_path / "f.parquet")
    assert table["path"].to_pylist() == names
    assert np.array_equal(np.array(table["features"].to_pylist(), np.float32), arrays["features"])
    assert table["class"].to_pylist() == arrays["class_names"][arrays["labels"]].tolist()
    assert sorted(p.name for p in tmp_path.glob("f.*")) == ["f.npz", "f.parquet"]


def test_images_without_labels(run: Path, tmp_path: Path):
    for i in range(3):
        Image.new("RGB", (20, 30), (80 * i, 0, 0)).save(tmp_path / f"{i}.jpg")
    data = DataConfig("folder", str(tmp_path), image_size=16, cache="off")
    with open_subject(run, replace(ONE, data=data)) as subject:
        embed(subject, EmbedOptions(str(tmp_path / "f.npz")))
        embed(subject, EmbedOptions(str(tmp_path / "f.parquet")))
    arrays = np.load(tmp_path / "f.npz", allow_pickle=False)
    assert sorted(arrays) == ["features", "origin", "paths"]
    assert arrays["paths"].tolist() == ["0.jpg", "1.jpg", "2.jpg"]
    assert pq.read_table(tmp_path / "f.parquet").column_names == ["path", "features"]


def test_names_that_are_not_utf8(run: Path, tmp_path: Path):
    for name in (b"caf\xe9", b"tea"):
        (tmp_path / "images" / os.fsdecode(name)).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "images" / os.fsdecode(name) / "0.png")
    data = DataConfig("folder", str(tmp_path / "images"), image_size=16, cache="off")
    with open_subject(run, replace(ONE, data=data)) as subject:
        assert len(embed(subject, EmbedOptions(str(tmp_path / "f.npz"))).features) == 2
        assert len(embed(subject, EmbedOptions(str(tmp_path / "f.parquet"))).features) == 2
    table = pq.read_table(tmp_path / "f.parquet")
    assert table["class"].to_pylist() == ["caf\\udce9", "tea"]


def test_the_same_command_gives_the_same_file(run: Path, tmp_path: Path):
    for name in ("a", "b"):
        with open_subject(run, ONE) as subject:
            embed(subject, EmbedOptions(str(tmp_path / f"{name}.npz")))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        (None, "^out must be a file that ends in"),
        ("f.csv", "^out must be a file that ends in"),
        ("no/f.npz", "does not exist"),
    ],
)
def test_mistakes_are_one_sentence(run: Path, out: str | None, sentence: str):
    with open_subject(run, ONE) as subject, pytest.raises(UserError, match=sentence):
        embed(subject, EmbedOptions(out))
