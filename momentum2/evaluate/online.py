"""kNN accuracy while a run trains."""

import copy
import logging

import torch

from momentum2 import distributed
from momentum2.augment import view_specs
from momentum2.backbones import Encoder
from momentum2.config import Config, Network, ViewsConfig
from momentum2.data import Dataset, open_dataset
from momentum2.data.dataset import Subset
from momentum2.data.sampler import seeded_subset
from momentum2.errors import called
from momentum2.evaluate.accuracy import top1_top5
from momentum2.evaluate.features import Features, extract
from momentum2.evaluate.knn import knn_scores
from momentum2.training.build import Score

log = logging.getLogger("momentum2")


#: Images of online kNN at most. All of ImageNet would take 19 GB of every GPU, beside what is trained.
BANK, QUERIES = 50_000, 10_000


def online_knn(config: Config) -> Score | None:
    """A function from a method's encoders to `{"knn_top1": percent}` of the first of them, or None.

    None if `config` asks for no kNN, or if its evaluation data has no labels. The data is opened here, once.
    It scores a copy, on all processes with process 0's statistics: the encoder that a run exports. Of more than `BANK`
    training or `QUERIES` test images, a seeded choice is used.
    """
    data, monitor = config.eval_data, config.monitor
    if data.name == "none" or monitor.knn_every == 0:
        return None
    with called({"data.": "eval_data."}):
        train, test = open_dataset(data, seed=config.train.seed), open_dataset(data, data.test_split)
    if train.labels is None or test.labels is None:
        return None
    classes = 1 + int(max(train.labels.max(), test.labels.max()))
    train, test = _at_most(train, BANK, config.train.seed), _at_most(test, QUERIES, config.train.seed)
    # Bad images are counted where they are trained on; of a small part one is many.
    for part in (train, test):
        part.max_bad_fraction = 1.0
    spec = view_specs(ViewsConfig("evaluation"), data.image_size)[0]

    def features(encoder: Encoder, dataset: Dataset, device: torch.device) -> Features:
        precision, batch = config.train.precision, min(config.train.batch_size, 256)
        return extract(
            encoder, dataset, spec, batch_size=batch, device=device, precision=precision, workers=data.workers
        )

    def score(encoders: dict[Network, Encoder]) -> dict[str, float]:
        encoder = copy.deepcopy(next(iter(encoders.values())))
        distributed.broadcast_(encoder.buffers())  # local statistics differ; process 0's are exported
        device = next(encoder.parameters()).device
        bank, queries = features(encoder, train, device), features(encoder, test, device)
        assert bank.labels is not None
        assert queries.labels is not None
        votes = knn_scores(
            bank.features.to(device),
            bank.labels,
            queries.features.to(device),
            classes,
            min(monitor.knn_k, len(bank.features)),
            monitor.knn_temperature,
        )
        return {"knn_top1": top1_top5(votes, queries.labels.to(device))[0]}

    return score


def _at_most(images: Dataset, limit: int, seed: int) -> Dataset:
    if len(images) <= limit:
        return images
    if distributed.is_main():
        log.info("Online kNN uses %s of %s images.", f"{limit:,}", f"{len(images):,}")
    return Subset(images, seeded_subset(len(images), seed, limit))
