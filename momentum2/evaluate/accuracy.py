"""From class scores to the numbers that are printed and kept in `results.json`."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from momentum2 import distributed
from momentum2.runs.names import RESULTS
from momentum2.runs.results import FLOORS, Accuracy, Result, below_floors, read_results, write_result
from momentum2.seeds import derive

RESAMPLES = 10_000

log = logging.getLogger("momentum2")


def top1_top5(scores: Tensor, labels: Tensor) -> tuple[float, float]:
    """Percentages of rows whose label has the highest score, or one of the five highest.

    Of classes with equal scores, the lower one comes first.
    """
    ranks = _ranks(scores, labels)
    return 100 * float((ranks < 1).double().mean()), 100 * float((ranks < 5).double().mean())


def measure(scores: Tensor, labels: Tensor, class_names: Sequence[str], seed: int = 0) -> Accuracy:
    """Accuracy of scores (m, classes) against labels (m,)."""
    top1, top5 = top1_top5(scores, labels)
    hits = (_ranks(scores, labels) < 1).cpu().numpy()
    low, high = bootstrap_interval(hits, seed)
    classes = labels.cpu().numpy()
    per_class = {
        name: round(100 * float(hits[classes == c].mean()), 4)
        for c, name in enumerate(class_names)
        if (classes == c).any()
    }
    five = round(top5, 4) if len(class_names) > 5 else None
    chance = round(100 * float(np.bincount(classes).max()) / len(classes), 4)
    return Accuracy(round(top1, 4), five, round(low, 4), round(high, 4), per_class, len(labels), chance)


def bootstrap_interval(hits: "np.ndarray[tuple[int], np.dtype[np.bool_]]", seed: int) -> tuple[float, float]:
    """95% percentile bootstrap of the mean of `hits`, in percent.

    Resampling m zeros and ones with replacement gives a binomial number of ones, so that is what is drawn.
    """
    rng = np.random.Generator(np.random.PCG64(derive(seed, "bootstrap")))
    means = rng.binomial(len(hits), hits.mean(), RESAMPLES) / len(hits)
    low, high = np.quantile(means, [0.025, 0.975])
    return 100 * float(low), 100 * float(high)


def _ranks(scores: Tensor, labels: Tensor) -> Tensor:
    """Number of classes before the right one, (m,); NaN comes before everything."""
    right = scores.gather(1, labels[:, None])
    columns = torch.arange(scores.shape[1], device=scores.device)
    before = ~(scores <= right) | ((scores == right) & (columns < labels[:, None]))
    before.scatter_(1, labels[:, None], right.isnan())
    return before.sum(1)


def report(result: Result, directory: Path) -> Result:
    """Say a result and keep it in `results.json`; returns it with the floors of this evaluation that are kept there."""
    if not distributed.is_main():
        return result
    path = directory / RESULTS
    before = [
        entry
        for entry in read_results(path).values()
        if (entry.get("evaluation"), entry.get("data")) == (result.evaluation, result.data)
        and entry["network"] in FLOORS - {result.network}
    ]
    floors = {entry["network"]: entry["accuracy"]["top1"] for entry in before}
    floors |= result.floors
    verdict = "" if result.network in FLOORS else below_floors(result.accuracy.top1, floors)
    result = replace(result, floors=floors, verdict=verdict)
    say_result(result)
    write_result(path, result)
    log.info("Written to %s", path)
    if verdict:  # last, so that it is what stays on the screen
        log.info(verdict)
    return result


def say_result(result: Result) -> None:
    """Say a result in words."""
    a, say = result.accuracy, log.info
    say(f"{result.evaluation} of the {result.network} on {result.data}, {a.images:,} images")
    say(f"top-1  {a.top1:.2f}%  (95% interval {a.low:.2f} to {a.high:.2f})")
    if a.top5 is not None:
        say(f"top-5  {a.top5:.2f}%")
    for floor, top1 in result.floors.items():
        say(f"floor  {top1:.2f}%  {floor}")
    if a.chance is not None:
        say(f"chance {a.chance:.2f}%  always the most frequent class")
    if len(a.per_class) <= 20:
        say("class  " + ", ".join(f"{name} {value:.1f}" for name, value in a.per_class.items()))
    else:
        ordered = sorted(a.per_class.items(), key=lambda item: item[1])
        say("worst  " + ", ".join(f"{name} {value:.1f}" for name, value in ordered[:5]))
        say("best   " + ", ".join(f"{name} {value:.1f}" for name, value in ordered[-5:]))
    say("with   " + ", ".join(f"{name} {value}" for name, value in result.settings.items()))
