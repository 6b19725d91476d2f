"""Maps, neighbors and votes, against independent computations."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA
from sklearn.metrics import confusion_matrix

from momentum2.config import DataConfig
from momentum2.errors import UserError
from momentum2.evaluate.knn import knn_scores
from momentum2.report.learned import (
    ReportOptions,
    check_map,
    confusion,
    look,
    nearest,
    project,
    queries,
    vote,
)
from momentum2.runs.handle import read_run

x = F.normalize(torch.randn(1100, 12, generator=torch.Generator().manual_seed(0)), dim=1)


def test_neighbors_are_the_nearest_others():
    order, similarity = nearest(x, 8)
    distances = np.linalg.norm(x.numpy()[:, None] - x.numpy()[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    np.testing.assert_array_equal(order.numpy(), np.argsort(distances, axis=1)[:, :8])
    rows = np.arange(len(x))[:, None]
    np.testing.assert_allclose(similarity.numpy(), 1 - distances[rows, order.numpy()] ** 2 / 2, atol=1e-5)


def test_votes_are_those_of_knn_without_the_image_itself(run: Path):
    few, files = x[:60], read_run(run)
    labels = torch.arange(60) % 4
    order, similarity = nearest(few, 5)
    voted = vote(labels, order, similarity, files)
    for i in range(60):
        others = torch.arange(60) != i
        scores = knn_scores(
            few[others], labels[others], few[i : i + 1], 4, 5, files.config.monitor.knn_temperature
        )
        assert voted[i] == scores.argmax()


def test_pca_is_sklearns():
    places, words = project(x, "pca")
    reference = PCA(2).fit(x.double().numpy())
    theirs = reference.transform(x.double().numpy())
    for column in range(2):
        assert abs(np.corrcoef(places[:, column], theirs[:, column])[0, 1]) == pytest.approx(1, abs=1e-9)
    assert f"{reference.explained_variance_ratio_.sum():.0%}" in words
    assert (places.min(), places.max()) == (0, 1)


def test_features_that_are_all_the_same_have_a_map():
    places, _ = project(torch.ones(5, 3), "pca")
    assert np.isfinite(places).all()


def test_tsne_keeps_groups_together():
    pytest.importorskip("openTSNE")
    centers = torch.eye(3).repeat_interleave(20, 0)
    places, _ = project(
        F.normalize(centers + 0.05 * torch.randn(60, 3, generator=torch.Generator().manual_seed(1))), "tsne"
    )
    groups = places.reshape(3, 20, 2)
    spread = np.linalg.norm(groups - groups.mean(1, keepdims=True), axis=2).max()
    apart = min(np.linalg.norm(groups[i].mean(0) - groups[j].mean(0)) for i in range(3) for j in range(i))
    assert spread < apart / 2


def test_tsne_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "openTSNE", None)
    with pytest.raises(UserError, match=r"momentum2\[tsne\]"):
        check_map("tsne")
    check_map("pca")


def test_a_run_looks_at_its_test_images(run: Path):
    found = look(read_run(run), ReportOptions(points=20))
    assert found.what == "20 of the 30 test images"
    assert found.xy.shape == (20, 2)
    assert found.neighbors.shape == (20, 8)
    assert found.k == 5
    assert all(name.startswith("test/<img") for name in found.names)
    assert found.labels is not None
    assert found.class_names is not None
    expected = confusion_matrix(found.labels, found.predicted, labels=range(len(found.class_names)))
    np.testing.assert_array_equal(confusion(found), expected)
    chosen = queries(found, 6)
    assert sorted(found.labels[chosen]) == [0, 0, 1, 1, 2, 2]


def test_without_test_images_those_of_the_training_are_shown(run: Path):
    files = read_run(run)
    config = replace(files.config, eval_data=DataConfig(name="none"))
    found = look(replace(files, config=config), ReportOptions())
    assert found.what == "24 of the 24 training images"


def test_images_that_are_gone_are_a_sentence(run: Path):
    files = read_run(run)
    config = replace(files.config, eval_data=replace(files.config.eval_data, root="/nowhere"))
    with pytest.raises(UserError, match=r"eval_data\.root /nowhere does not exist"):
        look(replace(files, config=config), ReportOptions())
