"""What a table of the paper is made of: rows, each with its commands and the paper's numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from momentum2.config import Network
from momentum2.evaluate.protocols import ProtocolName
from momentum2.recipes import find
from momentum2.reproduce.verdicts import Claim
from momentum2.runs.results import RANDOM, recalibrated

Scale = Literal["smoke", "cifar", "paper"]
Flags = Mapping[str, object]  # overrides, by the names of the config's fields
Numbers = Mapping[str, float]  # by column: {"top-1": 88.18, "seconds": 0.25}


#: The evaluations that measure floors unless they are told not to.
_WITH_FLOORS = ("evaluate linear", "evaluate knn")

_OLD = {
    "devices": "virtual_devices",
    "local": "split",
    "quickstart-paper": "quickstart",
    "cifar10-cpu-paper": "cifar10-cpu",
}


@dataclass(frozen=True)
class Pretraining:
    """A run of `momentum2 pretrain`. Rows whose changes are the same share it, whatever their table.

    Args:
        recipe: The recipe it starts from.
        common: Overrides that all rows of the scale have.
        changes: Overrides that make this run what it is.
    """

    recipe: str
    common: Flags = field(default_factory=dict)
    changes: Flags = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What distinguishes it, such as `cifar10-cpu student_norm=synced teacher_norm=momentum`.

        In the words of version 0.1, so that what was finished then is not run again.
        """
        words = {k.split(".")[-1]: _word(v) for k, v in self.changes.items()}
        return " ".join(
            [
                _OLD.get(self.recipe, self.recipe),
                *(f"{_OLD.get(k, k)}={_OLD.get(v, v)}" for k, v in words.items()),
            ]
        )

    @property
    def epochs(self) -> int:
        """Its length."""
        flags = {**self.common, **self.changes}
        return cast(int, flags.get("train.epochs", find(self.recipe).config.train.epochs))

    @property
    def method(self) -> str:
        """The name of its method."""
        flags = {**self.common, **self.changes}
        return str(flags.get("method.name", find(self.recipe).config.method.name))

    def run(self, out: Path, seed: int) -> Path:
        """Its run directory."""
        return out / "runs" / self.name.replace(" ", ",") / f"seed-{seed}"

    def settings(self, seed: int, root: str | None) -> dict[str, object]:
        """What is changed in the recipe; `root` is where the images are."""
        settings = {**self.common, **self.changes, "train.seed": seed}
        if root is not None:
            settings |= {"data.root": root, "eval_data.root": root}
        return settings

    def flags(self, seed: int, root: str | None) -> list[str]:
        """The same as words."""
        settings = self.settings(seed, root)
        return [word for name, value in settings.items() for word in (f"--{name}", _word(value))]

    def command(self, out: Path, seed: int, root: str | None) -> list[str]:
        """The words after `momentum2`."""
        return ["pretrain", self.recipe, *self.flags(seed, root), "--out", str(self.run(out, seed))]


@dataclass(frozen=True)
class Evaluation:
    """What is done with a pretrained encoder.

    Args:
        verb: The command: `evaluate linear`, `evaluate knn`, `evaluate semi` or `detect`.
        options: What follows RUN.
        result: Its name in results.json.
        network: Whose encoder it is; None where the network starts from random initialization instead.
        protocol: That of a linear evaluation.
        detectron2: The config of the same detector in an export for detectron2, where there is one.
        recalibrate: Whether the batch-norm statistics are measured again first.
    """

    verb: str
    options: tuple[str, ...]
    result: str
    network: Network | None
    protocol: ProtocolName | Literal["cached"] | None = None
    detectron2: str | None = None
    recalibrate: bool = False

    @property
    def subject(self) -> str:
        """The name of its network in results.json."""
        name = self.network or RANDOM
        return recalibrated(name) if self.recalibrate else name

    @property
    def scratch(self) -> bool:
        """Whether the network starts from random initialization."""
        return self.network is None

    @property
    def detects(self) -> bool:
        return self.verb == "detect"

    def command(self, run: Path, out: Path, seed: int, floors: bool, root: str | None) -> list[str]:
        """The words after `momentum2`; `out` is the run directory of a detector, `root` the place of its images."""
        words = [*self.verb.split(), str(run)]
        words += ["--protocol", self.protocol] if self.protocol else []
        words += ["--network", self.network] if self.network else []
        words += self.options
        if self.detects:
            words += ["--data.root", root] if root else []
            words += ["--init", "random"] if self.scratch else []
            return [*words, "--train.seed", str(seed), "--out", str(out)]
        words += ["--recalibrate", "true"] if self.recalibrate else []
        floors = floors and not self.recalibrate  # which have none to measure again
        words += ["--floors", "false"] if self.verb in _WITH_FLOORS and not floors else []
        words += ["--weights", "random"] if self.scratch else []
        return [*words, "--seed", str(seed)]


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Args:
        key: Its short name, for `--rows`.
        label: What it is, as the table says it.
        pretraining: How the encoder is made (for one from scratch: whose architecture it has).
        evaluation: How it is measured.
        also: Further columns, each the top-1 of another evaluation of the same encoder.
        paper: The paper's numbers, where this row has any.
        note: A footnote about them.
    """

    key: str
    label: str
    pretraining: Pretraining
    evaluation: Evaluation
    paper: Numbers = field(default_factory=dict)
    note: str | None = None
    also: Mapping[str, Evaluation] = field(default_factory=dict)

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """All of them."""
        return (self.evaluation, *self.also.values())

    def detector(self, out: Path, seed: int) -> Path:
        """The run directory of a row that fine-tunes a detector."""
        run = self.pretraining.run(out, seed)
        return out / "detectors" / run.parent.name / self.key / run.name


@dataclass(frozen=True)
class Cited:
    """One line of a table that the paper took from elsewhere and that is not run here, only printed.

    Args:
        key: Its short name.
        label: What it is, as the table says it.
        paper: The paper's numbers.
        note: A footnote about them.
    """

    key: str
    label: str
    paper: Numbers
    note: str | None = None


@dataclass(frozen=True)
class Table:
    """One table of the paper at one scale.

    Args:
        name: What `momentum2 reproduce` calls it.
        scale: Its scale.
        title: Its headline.
        question: What it answers.
        rows: Its lines that are run.
        columns: The columns of numbers, the headline first.
        epochs: Length of the (shortest) pretraining, if it is not the scale's own.
        cited: Its lines that are only printed, under the others.
        claims: What the paper says about its rows.
        variant: How all its runs differ from the scale's own, in words for file names.
    """

    name: str
    scale: Scale
    title: str
    question: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...] = ("top-1", "recalibrated", "kNN", "seconds")
    epochs: int | None = None
    cited: tuple[Cited, ...] = ()
    claims: tuple[Claim, ...] = ()
    variant: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The name of its files."""
        length = () if self.epochs is None else (f"{self.epochs}-epochs",)
        return "-".join((self.name, *length, *self.variant))

    def varied(self, changes: Flags, words: tuple[str, ...]) -> "Table":
        """The same table with other settings in all its runs; what makes a row what it is stays."""

        def vary(run: Pretraining) -> Pretraining:
            new = {name: value for name, value in changes.items() if run.common.get(name) != value}
            return replace(run, changes={**new, **run.changes})

        rows = tuple(replace(row, pretraining=vary(row.pretraining)) for row in self.rows)
        return replace(self, rows=rows, variant=words)


def duration(epochs: int) -> str:
    """In words: `20 epochs`."""
    return f"{epochs} epoch" + "s" * (epochs != 1)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
