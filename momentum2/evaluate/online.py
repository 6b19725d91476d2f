"""kNN accuracy while a run trains, beside what needs no training."""

import copy
import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.augment import Normalization, view_specs
from momentum2.backbones import Encoder
from momentum2.config import OWN, Config, Network, ViewsConfig
from momentum2.data import Dataset, open_dataset
from momentum2.data.dataset import Subset
from momentum2.data.sampler import seeded_subset
from momentum2.distributed.together import on_first
from momentum2.errors import called
from momentum2.evaluate.accuracy import top1_top5
from momentum2.evaluate.features import Features, extract
from momentum2.evaluate.floors import Pixels, patch_encoder, random_encoder, started_encoder
from momentum2.evaluate.knn import knn_scores
from momentum2.runs.card import resolved_model
from momentum2.runs.metrics import FLOORS, read_metrics
from momentum2.runs.names import METRICS, START
from momentum2.training.build import Score

#: Neighbors and test images at most, so that the pixels of all of them fit into memory beside a training.
BANK, QUERIES = 50_000, 10_000

#: Test images by which floors are measured at most: pixels have many dimensions, and a training is waiting.
_FLOOR_TESTS = 5_000


def online_knn(config: Config, run: Path, steps: int) -> Score | None:
    """A function from a method's encoders and the steps done to what kNN finds of the first of them, or None.

    None if `config` asks for no kNN, or if its evaluation data has no labels. The data is opened here, once.
    It scores a copy, on all processes with process 0's statistics: the encoder that a run exports. After the last
    of `steps` the neighbors are all labeled training images (at most 50,000, and 10,000 test images), before it
    `monitor.knn_images` of them. What it returns goes to the metrics of the directory `run`:

        knn_top1        percent of the test images that are classified correctly
        knn_interval    half of the 95% interval of that, from the number of test images
        knn_tests       the number of test images
        knn_images      the number of neighbors to choose from
        chance          percent that always guessing the most frequent class would get
        floor_...       knn_top1 of what needs no training, with the same neighbors and at most 5,000 test images

    Floors are measured once for each number of neighbors; a run that resumes finds them in its metrics. At step 0 a
    network with initial weights is the untrained one among the floors.
    """
    data, monitor, seed = config.eval_data, config.monitor, config.train.seed
    if data.name == "none" or monitor.knn_every == 0:
        return None
    with called({"data.": "eval_data."}):
        train, test = open_dataset(data, seed=seed), open_dataset(data, data.test_split)
    if train.labels is None or test.labels is None:
        return None
    classes = 1 + int(max(train.labels.max(), test.labels.max()))
    test = _some(test, QUERIES, seed)
    # Bad images are counted where they are trained on; of a small part one is many.
    for part in (train, test):
        part.max_bad_fraction = 1.0
    chance = 100 * float(torch.from_numpy(test.labels).bincount().max()) / len(test)
    spec = view_specs(ViewsConfig("evaluation"), data.image_size, Normalization.of(config.data))[0]
    untrained_start = not (config.model.weights or config.model.pretrained or config.model.backbone == OWN)
    known: dict[int, dict[str, float]] = {}

    def features(encoder: Encoder, dataset: Dataset, device: torch.device) -> Features:
        precision, batch = config.train.precision, min(config.train.batch_size, 256)
        return extract(
            encoder, dataset, spec, batch_size=batch, device=device, precision=precision, workers=data.workers
        )

    def accuracy(bank: Features, queries: Features, columns: slice, device: torch.device) -> float:
        assert bank.labels is not None
        assert queries.labels is not None
        x, q = bank.features[:, columns], queries.features[:, columns].to(device)
        votes = knn_scores(x, bank.labels, q, classes, min(monitor.knn_k, len(x)), monitor.knn_temperature)
        return top1_top5(votes, queries.labels.to(device))[0]

    def measure_floors(neighbors: Dataset, device: torch.device) -> dict[str, float]:
        encoders: dict[str, Encoder] = {
            "floor_pixels": Pixels(spec.size, data.channels),
            "floor_patches": patch_encoder(train, spec, seed, device, data.workers),
        }
        if config.model.backbone != OWN:  # there is no untrained copy of a custom network
            model = resolved_model(config)
            encoders["floor_random"] = random_encoder(model, train, spec, seed, device, data.workers)
            if (run / START).exists():
                encoders["floor_start"] = started_encoder(run / START, device)
        all_in_one = SideBySide(encoders.values()).to(device)
        bank, queries = (features(all_in_one, d, device) for d in (neighbors, _some(test, _FLOOR_TESTS)))
        found, start = {}, 0
        for name, encoder in encoders.items():
            columns = slice(start, start + encoder.feature_dim)
            found[name] = accuracy(bank, queries, columns, device)
            start = columns.stop
        return {name: found[name] for name in FLOORS if name in found}

    def floors(neighbors: Dataset, device: torch.device) -> dict[str, float]:
        n = len(neighbors)
        if n < 2:  # batch norm needs two
            return {}
        if n not in known:
            found = json.loads(on_first(lambda: [json.dumps(_floors_before(run / METRICS, n)).encode()])[0])
            known[n] = found or measure_floors(neighbors, device)
        return known[n]

    def score(encoders: dict[Network, Encoder], done: int) -> dict[str, float]:
        encoder = copy.deepcopy(next(iter(encoders.values())))
        distributed.broadcast_(encoder.buffers())  # local statistics differ; process 0's are exported
        device = next(encoder.parameters()).device
        most = BANK if done == steps or monitor.knn_images is None else min(monitor.knn_images, BANK)
        neighbors, tests = _some(train, most, seed), len(test)
        beside = floors(neighbors, device)
        if done == 0 and untrained_start and "floor_random" in beside:
            top1, tests = beside["floor_random"], min(tests, _FLOOR_TESTS)
        else:
            bank, queries = (features(encoder, images, device) for images in (neighbors, test))
            top1 = accuracy(bank, queries, slice(None), device)
        found = {"knn_top1": top1, "knn_interval": interval(top1, tests), "knn_tests": tests}
        return {**found, "knn_images": len(neighbors), "chance": chance, **beside}

    return score


def interval(percent: float, images: int) -> float:
    """Half of the 95% interval of an accuracy on so many test images: 1.96 standard errors."""
    share = percent / 100
    return 196 * math.sqrt(share * (1 - share) / images)


class SideBySide(Encoder):
    """Several encoders as one: their features in one row, from one reading of the images."""

    def __init__(self, encoders: Iterable[Encoder]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.feature_dim = sum(encoder.feature_dim for encoder in encoders)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([encoder(x).float() for encoder in self.encoders], dim=1)


def _some(dataset: Dataset, most: int, seed: int = 0) -> Dataset:
    """At most so many images, a seeded choice."""
    return dataset if len(dataset) <= most else Subset(dataset, seeded_subset(len(dataset), seed, most))


def _floors_before(metrics: Path, neighbors: int) -> dict[str, float]:
    """The floors that a run has measured with so many neighbors; empty if it has not."""
    if metrics.exists():
        for record in reversed(read_metrics(metrics)):
            if record.get("knn_images") == neighbors:
                return {name: record[name] for name in FLOORS if name in record}
    return {}
