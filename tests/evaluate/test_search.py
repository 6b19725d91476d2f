"""Search: the nearest images by plain arithmetic, refusals in one sentence, and a page that needs nothing else."""

import json
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import momentum2 as m2
from momentum2.cli.main import main
from momentum2.config import DataConfig
from momentum2.evaluate.embed import Embeddings, read_embeddings
from momentum2.evaluate.search import SearchOptions, nearest_rows
from momentum2.evaluate.subject import SubjectOptions

ONE = SubjectOptions(device="cpu", threads=1)
FIVE = SearchOptions(count=5, device="cpu", threads=1)


@pytest.fixture(scope="module")
def run(finished_run: Path) -> Path:
    """A run; a search writes nothing to it."""
    return finished_run


@pytest.fixture(scope="module")
def features(run: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("features") / "f.npz"
    m2.embed(run, data=str(pictures), out=path, subject=ONE)
    return path


def test_nearest_rows_by_hand():
    rng = np.random.default_rng(0)
    x, queries = rng.normal(size=(300, 7)).astype(np.float32), rng.normal(size=(4, 7)).astype(np.float32)
    x[200] = 2 * x[100]  # the same direction: the first counts
    queries[0] = x[100]
    similarity, order = nearest_rows(torch.from_numpy(queries), torch.from_numpy(x), 6)
    for q, s, found in zip(queries.astype(float), similarity.tolist(), order.tolist(), strict=True):
        cosines = [float(q @ row / np.linalg.norm(q) / np.linalg.norm(row)) for row in x.astype(float)]
        assert found == sorted(range(300), key=lambda i: (-round(cosines[i], 6), i))[:6]
        assert s == pytest.approx([cosines[i] for i in found], abs=1e-6)
    assert order[0, :2].tolist() == [100, 200]


def test_an_image_finds_itself_and_what_python_says(run: Path, features: Path, pictures: Path):
    seen = read_embeddings(features)
    names = [seen.names[3], seen.names[150]]
    found = m2.search(run, [pictures / name for name in names], features, options=FIVE)
    x = seen.features.astype(np.float64)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    for name, one in zip(names, found, strict=True):
        assert one.image == str(pictures / name)
        assert one.names[0] == name
        assert one.similarity[0] == pytest.approx(1, abs=1e-5)
        cosines = x @ x[seen.names.index(name)]
        assert one.similarity == pytest.approx(np.sort(cosines)[::-1][:5], abs=1e-5)
        assert [seen.names[i] for i in one.indices] == one.names
    again = m2.search(run, pictures / names[0], seen, options=replace(FIVE, count=1000))
    assert len(again[0].names) == len(seen.names)


@pytest.mark.parametrize("kind", ["files", "arrays", "one size"])
def test_a_large_photo_finds_itself_however_it_was_read(run: Path, kind: str, tmp_path: Path):
    """A JPEG may be decoded at an eighth of its size, and not when it comes from a cache: features differ then."""
    rng = np.random.default_rng(0)
    for i in range(4):
        size = (300, 200) if i == 0 and kind != "one size" else (300, 240)
        pixels = rng.integers(0, 256, (size[1] // 4, size[0] // 4, 3), np.uint8)
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(tmp_path / f"{i}.jpg")
    data = DataConfig("folder", str(tmp_path), image_size=16, cache="off" if kind == "files" else "on")
    data = replace(data, cache_dir=str(tmp_path / ".cache"))
    seen = m2.embed(run, subject=replace(ONE, data=data))
    assert seen.origin is not None
    assert seen.origin.reading == kind
    for i, name in enumerate(seen.names):
        (found,) = m2.search(run, tmp_path / name, seen, options=FIVE)
        assert found.indices[0] == i
        assert found.similarity[0] > 1 - 1e-5


def test_the_page_has_the_images_and_asks_for_nothing(run: Path, features: Path, pictures: Path):
    seen = read_embeddings(features)
    page = features.with_name("search.html")
    m2.search(run, pictures / seen.names[0], features, options=FIVE, out=page)
    text = page.read_text(encoding="utf-8")
    assert text.count('<img src="data:image/webp;base64,') == 6
    assert "not shown" not in text
    assert seen.names[0] in text
    assert not re.search(r"https?://|<script|url\(", text)
    assert len(text) < 100_000


def test_images_that_are_gone_are_a_note(run: Path, features: Path, pictures: Path, tmp_path: Path):
    seen = read_embeddings(features)
    query = pictures / seen.names[0]
    assert seen.origin is not None
    moved = replace(seen, origin=replace(seen.origin, root=str(tmp_path / "gone")))
    m2.search(run, query, moved, options=FIVE, out=tmp_path / "a.html")
    assert "gone does not exist" in (tmp_path / "a.html").read_text()
    m2.search(run, query, moved, options=FIVE, out=tmp_path / "b.html", data=str(pictures))
    assert (tmp_path / "b.html").read_text().count("<img") == 6
    for name in ("none", "https", "hf"):  # whatever a file names, only what is on this machine is opened
        odd = replace(seen, origin=replace(seen.origin, name=name, root="https://example.org"))
        m2.search(run, query, odd, options=FIVE, out=tmp_path / "c.html")
        assert "do not say where the images are" in (tmp_path / "c.html").read_text()


def test_names_cannot_write_html(run: Path, features: Path, pictures: Path, tmp_path: Path):
    seen = read_embeddings(features)
    names = ["</figcaption><script>alert(1)</script>\n\x1b[31m", *seen.names[1:]]
    m2.search(
        run, pictures / seen.names[0], replace(seen, names=names), options=FIVE, out=tmp_path / "a.html"
    )
    text = (tmp_path / "a.html").read_text()
    assert "<script" not in text
    assert "\x1b" not in text


def test_features_of_other_weights_are_refused(run: Path, features: Path, pictures: Path):
    seen = read_embeddings(features)
    image = pictures / seen.names[0]
    with pytest.raises(m2.UserError, match="made with different weights"):
        m2.search(run, image, features, options=replace(FIVE, network="student"))
    unknown = Embeddings(seen.features[:, :3], seen.names, None, None)
    with pytest.raises(m2.UserError, match="have 3 numbers per image, but this encoder makes 64"):
        m2.search(run, image, unknown, options=FIVE)


def test_old_files_without_an_origin_still_serve(run: Path, features: Path, pictures: Path):
    arrays = np.load(features)
    old = features.with_name("old.npz")
    np.savez(old, features=arrays["features"], paths=arrays["paths"])
    found = m2.search(run, pictures / str(arrays["paths"][7]), old, options=FIVE)
    assert found[0].names[0] == arrays["paths"][7]


def test_parquet_is_read_back(run: Path, features: Path, pictures: Path):
    m2.embed(run, data=str(pictures), out=features.with_suffix(".parquet"), subject=ONE)
    a, b = read_embeddings(features), read_embeddings(features.with_suffix(".parquet"))
    assert np.array_equal(a.features, b.features)
    assert (a.names, a.origin) == (b.names, b.origin)
    assert a.labels is not None
    assert b.labels is not None
    assert a.class_names is not None
    assert b.class_names is not None
    assert [a.class_names[i] for i in a.labels] == [b.class_names[i] for i in b.labels]


def _npz(path: Path, **arrays: object) -> None:
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"paths": np.array(["a"])}, "is not a file of features"),
        ({"features": np.ones((2, 3)), "paths": np.array(["a"])}, "one path for each row"),
        ({"features": np.full((1, 3), np.nan), "paths": np.array(["a"])}, "not finite"),
        ({"features": np.array([[{}]], object), "paths": np.array(["a"])}, "is not a file of features"),
        ({"features": np.ones(3), "paths": np.array(["a"])}, "rows and columns"),
        (
            {"features": np.ones((1, 3)), "paths": np.array(["a"]), "origin": np.array("[" * 9999)},
            "is not a file of features",
        ),
        (
            {
                "features": np.ones((1, 3)),
                "paths": np.array(["a"]),
                "origin": np.array(json.dumps({"encoder": 5})),
            },
            "no proper encoder",
        ),
        (
            {
                "features": np.ones((1, 3)),
                "paths": np.array(["a"]),
                "labels": np.array([4]),
                "class_names": np.array(["x"]),
            },
            "no class name",
        ),
    ],
)
def test_a_file_that_is_no_features_is_one_sentence(tmp_path: Path, arrays: dict[str, object], sentence: str):
    _npz(tmp_path / "f.npz", **arrays)
    with pytest.raises(m2.UserError, match=sentence):
        read_embeddings(tmp_path / "f.npz")


def test_broken_files_are_one_sentence(tmp_path: Path):
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").touch()
    (tmp_path / "text.parquet").write_text("hello")
    os.mkfifo(tmp_path / "pipe.npz")
    with zipfile.ZipFile(tmp_path / "short.npz", "w") as file:  # a header that promises more than there is
        file.writestr(
            "features.npy",
            b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (99, 9), }".ljust(128),
        )
    for name in ("text.npz", "empty.npz", "text.parquet", "pipe.npz", "short.npz", "none.npz", "f.csv"):
        with pytest.raises(m2.UserError):
            read_embeddings(tmp_path / name)


def test_the_command(run: Path, features: Path, pictures: Path, capsys: pytest.CaptureFixture[str]):
    seen = read_embeddings(features)
    image, page = str(pictures / seen.names[0]), str(features.with_name("search.html"))
    assert main(["search", str(run), image, "--in", str(features), "--count", "2", "--out", page]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{image}:"
    assert lines[1] == f"   1.000  {seen.names[0]}"
    assert lines[-1] == f"Wrote {page}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["RUN"], "Missing argument IMAGE."),
        (["RUN", "IMAGE"], "with --in FILE"),
        (["RUN", "IMAGE", "--in", "none.npz"], "none.npz cannot be read"),
        (["RUN", "no.jpg", "--in", "FEATURES"], "no.jpg cannot be read as an image"),
        (["RUN", "IMAGE", "--in", "FEATURES", "--out", "a.png"], "--out must be a file that ends in .html"),
        (["RUN", "IMAGE", "--in", "FEATURES", "--out", "no/a.html"], "--out no/a.html is in a folder"),
        (["RUN", "IMAGE", "--in", "FEATURES", "--count", "0"], "--count must be at least 1"),
    ],
)
def test_mistakes(
    words: list[str],
    sentence: str,
    run: Path,
    features: Path,
    pictures: Path,
    capsys: pytest.CaptureFixture[str],
):
    image = next(pictures.rglob("*.png"))
    given = {"RUN": str(run), "IMAGE": str(image), "FEATURES": str(features)}
    assert main(["search", *(given.get(word, word) for word in words)]) == 2
    assert sentence in capsys.readouterr().err


def test_small_and_large_images_become_thumbnails(tmp_path: Path):
    from momentum2.data.images import Encoded
    from momentum2.report.gallery import _small

    for size, expected in (((8, 8), (192, 192)), ((1600, 400), (192, 48)), ((150, 100), (150, 100))):
        Image.new("RGB", size, (200, 10, 10)).save(tmp_path / "a.jpg")
        (tmp_path / "b.webp").write_bytes(_small(Encoded((tmp_path / "a.jpg").read_bytes())))
        with Image.open(tmp_path / "b.webp") as small:
            assert small.size == expected
