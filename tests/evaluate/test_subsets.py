from pathlib import Path

import numpy as np
import pytest

from momentum2.errors import UserError
from momentum2.evaluate.subsets import listed, stratified

LABELS = np.repeat([0, 1, 2], [100, 50, 3])[np.random.default_rng(0).permutation(153)]
NAMES = [f"train/n01/n01_{i}.JPEG" for i in range(5)] + [f"train/n02/n02_{i}.JPEG" for i in range(5)]


def test_every_class_gives_its_share():
    chosen = stratified(LABELS, 0.1, seed=0)
    assert np.bincount(LABELS[chosen]).tolist() == [10, 5, 1]  # at least one
    assert np.array_equal(chosen, np.unique(chosen))


def test_the_seed_decides():
    assert np.array_equal(stratified(LABELS, 0.3, seed=4), stratified(LABELS, 0.3, seed=4))
    assert not np.array_equal(stratified(LABELS, 0.3, seed=4), stratified(LABELS, 0.3, seed=5))
    assert np.isin(stratified(LABELS, 0.1, seed=4), stratified(LABELS, 0.3, seed=4)).all()
    assert np.array_equal(stratified(LABELS, 1.0, seed=4), np.arange(153))


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5])
def test_fraction_is_checked(fraction: float):
    with pytest.raises(UserError, match="above 0 and at most 1"):
        stratified(LABELS, fraction, seed=0)


def test_lists_of_file_names_and_of_paths(tmp_path: Path):
    path = tmp_path / "10percent.txt"
    path.write_text("n02_4.JPEG\n\nn01_0.JPEG\nn01_0.JPEG\nn01/n01_2.JPEG\n")
    assert listed(NAMES, path).tolist() == [0, 2, 9]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "n01_0.JPEG\nn09_0.JPEG\n",
            "1 of 2 lines .* n09_0.JPEG matches none",
        ),
        ("same.jpg\n", "same.jpg matches several"),
        ("\n\n", "is empty"),
    ],
)
def test_a_wrong_list_is_one_sentence(tmp_path: Path, content: str, sentence: str):
    path = tmp_path / "list.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=sentence):
        listed([*NAMES, "train/a/same.jpg", "train/b/same.jpg"], path)


def test_a_missing_list_is_one_sentence(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        listed(NAMES, tmp_path / "nowhere.txt")
