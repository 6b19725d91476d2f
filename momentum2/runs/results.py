"""`results.json`: what evaluations of a run found."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from momentum2.errors import UserError, shown
from momentum2.files import locked, read_json, write_whole
from momentum2.runs.names import RESULTS_LOCK

log = logging.getLogger("momentum2")

#: What needs no training, which any result has to beat: an untrained network, and two ways to do without one; of a run
#: that did not begin with random weights, those that it began with.
RANDOM, PIXELS, PATCHES = "random initialization", "raw pixels", "whitened patches"
STARTED = "starting weights"
FLOORS = frozenset({RANDOM, PIXELS, PATCHES, STARTED})

_OLD_RANDOM = "random initialisation"  # as version 0.1 wrote it

Settings = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on a test set, in percent.

    Args:
        top1: Share of the images whose first guess is right.
        top5: Share whose right class is among the first five guesses; None with five classes or fewer.
        low: Lower end of the 95% bootstrap interval of top1.
        high: Upper end of it.
        per_class: top1 of each class that has test images.
        images: Number of test images.
        chance: What always guessing the most frequent class would get; None in results of earlier versions.
    """

    top1: float
    top5: float | None
    low: float
    high: float
    per_class: dict[str, float]
    images: int
    chance: float | None = None


@dataclass(frozen=True)
class Result:
    """One evaluation of one network.

    Args:
        evaluation: What was done, such as `knn` or `linear`; with data and network it names the result.
        data: The test images.
        network: Whose features: `teacher`, `student`, `random initialization`, `raw pixels`, `whitened patches`,
            `starting weights`.
        accuracy: The headline.
        floors: top1 of the built-in baselines, by the same evaluation unless the name says otherwise.
        settings: What the numbers depend on, and further numbers such as the best epoch.
        verdict: A sentence if the network is below a floor, else empty.
    """

    evaluation: str
    data: str
    network: str
    accuracy: Accuracy
    floors: dict[str, float] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    verdict: str = ""

    @property
    def name(self) -> str:
        """The key in `results.json`: evaluating the same thing again replaces it."""
        return f"{self.evaluation} | {self.data} | {self.network}"


def recalibrated(network: str) -> str:
    """What a network with batch-norm statistics that were measured again is called in results."""
    return f"{network}, recalibrated"


def below_floors(top1: float, floors: Mapping[str, float]) -> str:
    """A sentence that names the floors above `top1`, the highest first; empty if there is none."""
    above = sorted(((value, name) for name, value in floors.items() if value > top1), reverse=True)
    if not above:
        return ""
    *first, last = (f"{name} ({value:.1f}%)" for value, name in above)
    named = f"{', '.join(first)} and {last}" if first else last
    return f"At {top1:.1f}% it is below {named}, which need no training."


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """What a `results.json` holds; nothing if there is none. An entry that is not a result is left out, and named."""
    results = {}
    for name, entry in _read_all(path).items():
        if _is_result(entry):
            results[name] = entry
        else:
            log.warning("%s: ignoring %s, which is not a result.", path, shown(name))
    return results


def _read_all(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Move it away.") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a results file. Move it away.")
    return {_renamed(name): _in_todays_words(entry) for name, entry in found.items()}


def _is_result(entry: Any) -> bool:
    """Whether an entry has what those who read results rely on."""
    if not isinstance(entry, dict) or not isinstance(entry.get("accuracy"), dict):
        return False
    accuracy, tables = entry["accuracy"], [entry.get("floors", {}), entry.get("settings", {})]
    if not all(isinstance(table, dict) for table in [*tables, accuracy.get("per_class", {})]):
        return False
    words = [entry.get(name) for name in ("evaluation", "data", "network")]
    numbers = [accuracy.get(name) for name in ("top1", "low", "high", "images")]
    numbers += [*tables[0].values(), *accuracy.get("per_class", {}).values()]
    numbers += [accuracy["top5"]] if accuracy.get("top5") is not None else []
    return all(isinstance(word, str) for word in words) and all(
        isinstance(number, int | float) and math.isfinite(number) for number in numbers
    )


def _in_todays_words(entry: Any) -> Any:
    if not _is_result(entry):
        return entry
    floors = {_renamed(name): value for name, value in entry.get("floors", {}).items()}
    return entry | {"network": _renamed(entry["network"]), "floors": floors}


def _renamed(name: str) -> str:
    return name.replace(_OLD_RANDOM, RANDOM)


def write_result(path: Path, result: Result) -> None:
    """Add a result to `results.json`, in place of an earlier one of the same name, atomically."""
    try:
        with locked(path.with_name(RESULTS_LOCK)):  # another evaluation may add its own at the same time
            found = {**_read_all(path), result.name: asdict(result)}
            text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
            # A name that is not UTF-8 becomes an escape of JSON's, and is read back as it was.
            write_whole(path, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}). Make it writable.") from None
