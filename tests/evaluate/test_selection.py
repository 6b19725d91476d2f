"""Selections, against loops that are plain to see."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

import momentum2 as m2
from momentum2.cli.main import main
from momentum2.config import DataConfig
from momentum2.data import open_dataset
from momentum2.evaluate import selection
from momentum2.evaluate.embed import Embeddings, Origin
from momentum2.evaluate.selection import SelectOptions, diverse, duplicates, outliers


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_TILE", 7)  # several of them, the last one not full


def unit(n: int, seed: int, d: int = 3) -> Tensor:
    x = np.random.default_rng(seed).normal(size=(n, d))
    return torch.from_numpy((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32))


@settings(max_examples=30)
@given(n=st.integers(1, 40), seed=st.integers(0, 10_000), threshold=st.sampled_from([0.5, 0.8, 0.95]))
def test_duplicates(n: int, seed: int, threshold: float):
    x = unit(n, seed)
    cosines = (x.double() @ x.double().T).numpy()
    kept: list[int] = []
    expected = {}
    for i in range(n):
        near = [j for j in kept if cosines[i, j] >= threshold]
        if near:
            expected[i] = max(near, key=lambda j: (cosines[i, j], -j))
        else:
            kept.append(i)
    found, similarity, like = duplicates(x, threshold)
    assert dict(zip(found.tolist(), like.tolist(), strict=True)) == expected
    assert similarity.tolist() == pytest.approx([cosines[i, j] for i, j in expected.items()], abs=1e-6)


@settings(max_examples=30)
@given(n=st.integers(4, 40), seed=st.integers(0, 10_000), k=st.integers(1, 3))
def test_outliers(n: int, seed: int, k: int):
    x = unit(n, seed)
    cosines = (x.double() @ x.double().T).numpy()
    ranked = [sorted((j for j in range(n) if j != i), key=lambda j: -cosines[i, j])[k - 1] for i in range(n)]
    scores = [cosines[i, ranked[i]] for i in range(n)]
    expected = sorted(range(n), key=lambda i: scores[i])[:5]
    found, similarity, like = outliers(x, k, min(5, n))
    assert similarity.tolist() == pytest.approx([scores[i] for i in expected], abs=1e-6)
    assert [ranked[i] for i in found.tolist()] == like.tolist()
    assert set(found.tolist()) == set(expected)


@settings(max_examples=30)
@given(n=st.integers(1, 30), seed=st.integers(0, 10_000), count=st.integers(1, 30))
def test_diverse(n: int, seed: int, count: int):
    count, x = min(n, count), unit(n, seed)
    cosines = (x.double() @ x.double().T).numpy()
    chosen = [seed % n]
    while len(chosen) < count:
        rest = [i for i in range(n) if i not in chosen]
        chosen.append(min(rest, key=lambda i: max(cosines[i, j] for j in chosen)))
    found, similarity, like = diverse(x, count, seed % n)
    assert found.tolist() == chosen
    for place in range(1, count):
        nearest = max(cosines[chosen[place], j] for j in chosen[:place])
        assert float(similarity[place]) == pytest.approx(nearest, abs=1e-6)
        assert cosines[chosen[place], int(like[place])] == pytest.approx(nearest, abs=1e-6)


def test_diverse_covers_within_twice_the_best():
    """Of all choices of 3 out of 12, none has less than half of our largest distance (Gonzalez, 1985)."""
    from itertools import combinations

    for seed in range(5):
        x = unit(12, seed)
        distance = torch.cdist(x.double(), x.double())

        def radius(rows: tuple[int, ...], distance: Tensor = distance) -> float:
            return float(distance[:, list(rows)].amin(1).max())

        best = min(radius(rows) for rows in combinations(range(12), 3))
        ours = radius(tuple(diverse(x, 3, 0)[0].tolist()))
        assert best <= ours <= 2 * best + 1e-9


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six photos: 1 repeats 0, and 5 repeats 3."""
    for i in range(6):
        folder = tmp_path / "photos" / ("cats" if i < 3 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20), (40 * {1: 0, 5: 3}.get(i, i), 0, 0)).save(folder / f"photo {i}.png")
    return tmp_path / "photos"


@pytest.fixture
def features(photos: Path) -> Embeddings:
    names = [str(p.relative_to(photos)) for p in sorted(photos.rglob("*.png"))]
    x = np.eye(6, dtype=np.float32)
    x[1], x[5] = x[0], 2 * x[3]
    labels = np.array([0, 0, 0, 1, 1, 1])
    return Embeddings(
        x, names, labels, ("cats", "dogs"), Origin("", 16, "folder", str(photos), "train", "files")
    )


def test_duplicates_as_table_page_and_list(photos: Path, features: Embeddings, tmp_path: Path):
    (tmp_path / "lists").mkdir()
    found = m2.select(features, "duplicates", out=tmp_path / "d.csv", keep=tmp_path / "lists" / "clean.txt")
    assert found.names == ["cats/photo 1.png", "dogs/photo 5.png"]
    with (tmp_path / "d.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[1] == {"path": "dogs/photo 5.png", "similarity": "1.000000", "like": "dogs/photo 3.png"}
    clean = open_dataset(
        DataConfig("list", str(tmp_path / "lists" / "clean.txt"), image_size=16, cache="off")
    )
    assert [Path(name).name for name in clean.names] == [f"photo {i}.png" for i in (0, 2, 3, 4)]
    assert clean.class_names == ("cats", "dogs")
    assert clean.labels is not None
    assert clean.labels.tolist() == [0, 0, 1, 1]
    assert clean.picture(1).size == (20, 30)
    m2.select(features, "duplicates", out=tmp_path / "d.html")
    text = (tmp_path / "d.html").read_text()
    assert text.count("<img") == 4
    assert text.count(">kept<") == 2


@pytest.mark.parametrize("by", ["outliers", "diverse"])
def test_other_selections_write_too(by: selection.By, features: Embeddings, tmp_path: Path):
    options = SelectOptions(count=2, k=1)
    found = m2.select(features, by, options=options, out=tmp_path / "d.html", keep=tmp_path / "c.txt")
    assert (tmp_path / "d.html").read_text().count("<img") == 2
    kept = (tmp_path / "c.txt").read_text().splitlines()
    assert len(kept) == (2 if by == "diverse" else 4)
    assert sorted([*found.indices, *found.rest]) == list(range(6))


def test_the_seed_chooses_the_first_and_nothing_else_does(features: Embeddings):
    def first(seed: int) -> list[str]:
        return m2.select(features, "diverse", options=SelectOptions(seed=seed, count=3)).names

    assert first(1) == first(1)
    assert len({first(seed)[0] for seed in range(20)}) > 1


def test_what_cannot_stand_in_a_list_is_refused(features: Embeddings, tmp_path: Path):
    from dataclasses import replace

    odd = replace(features, names=["a\nb.png", *features.names[1:]])
    with pytest.raises(m2.UserError, match=r"a\\nb.png cannot be written to a list"):
        m2.select(odd, "duplicates", keep=tmp_path / "c.txt")
    drawn = replace(features, origin=Origin("", 16, "shapes", None, "train", "files"))
    with pytest.raises(m2.SettingError, match="keep needs features of image files"):
        m2.select(drawn, "duplicates", keep=tmp_path / "c.txt")
    assert not (tmp_path / "c.txt").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Choose what to select with --by"),
        (["--by", "beauty"], "--by"),
        (["--by", "outliers", "--k", "6"], "--k must be from 1 to 5"),
        (["--by", "duplicates", "--out", "d.png"], "--out must be a file that ends in .csv or .html"),
        (["--by", "duplicates", "--keep", "d.csv"], "--keep must be a file that ends in .txt"),
        (["--by", "duplicates", "--similarity", "2"], "--similarity"),
    ],
)
def test_mistakes(
    words: list[str],
    sentence: str,
    features: Embeddings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    np.savez(tmp_path / "f.npz", features=features.features, paths=np.array(features.names))
    assert main(["select", str(tmp_path / "f.npz"), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_the_command(features: Embeddings, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    np.savez(tmp_path / "f.npz", features=features.features, paths=np.array(features.names))
    assert main(["select", str(tmp_path / "f.npz"), "--by", "duplicates"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 of 6 images: duplicates",
        "   1.000  cats/photo 1.png",
        "   1.000  dogs/photo 5.png",
    ]
