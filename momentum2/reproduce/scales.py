"""What every row of a scale starts from: `smoke` (minutes), `cifar` (two CPU cores) or `paper` (a cluster)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from momentum2.config import Network
from momentum2.evaluate.protocols import ProtocolName, result_name
from momentum2.recipes import find
from momentum2.reproduce.rows import Evaluation, Flags, Pretraining, Scale


@dataclass(frozen=True)
class Base:
    """The common part of a table's rows.

    Args:
        scale: Its name.
        recipe: The recipe.
        flags: What is changed in it.
        batch: Images per step.
        samples: Images per device.
        epochs: Length.
    """

    scale: Scale
    recipe: str
    flags: Flags
    batch: int
    samples: int
    epochs: int

    @property
    def small(self) -> bool:
        """Whether it is meant for a CPU."""
        return self.scale != "paper"

    def size(self, samples: int) -> Flags:
        """The flags for other samples per device: a cluster keeps its devices, one machine its batch."""
        return size_flags(self.batch if self.small else self.batch // self.samples * samples, samples)

    def pretraining(self, changes: Flags) -> Pretraining:
        """A run with some changes; those that change nothing are left out."""
        sections = find(self.recipe).config

        def differs(name: str, value: object) -> bool:
            section, field = name.split(".")
            return bool(value != self.flags.get(name, getattr(getattr(sections, section), field)))

        changes = {"train.epochs": self.epochs, **changes}
        return Pretraining(self.recipe, self.flags, {n: v for n, v in changes.items() if differs(n, v)})


def size_flags(batch: int, samples: int) -> Flags:
    """The flags for a batch of devices with this many samples each."""
    return {"train.batch_size": batch, "train.devices": batch // samples}


def norms(student: str, teacher: str) -> Flags:
    """The flags for the norms of student and teacher."""
    return {"method.student_norm": student, "method.teacher_norm": teacher}


#: The loss that learns in minutes, with the paper's teacher.
REPULSION: Flags = {"method.repulsion": "batch", "method.predictor": False, "method.temperature": 0.1}
#: One network and one set of views for all rows of the small scales, each row on one core.
_SMALL: Flags = {
    "method.student_norm": "local",
    "train.device": "cpu",
    "train.threads": 1,
    "monitor.report": False,
    "monitor.knn_every": 0,  # measured at the end, without floors
}
#: The network and optimizer that learn the most in minutes of one core; loss and teacher stay the paper's.
_CIFAR: Flags = {
    "train.epochs": 1,
    "model.backbone": "resnet10",
    "model.stem_init": "cosines",
    "optim.name": "muon",
    "optim.lr": 0.08,
    "optim.weight_decay": 0.0,
    "optim.warmup_epochs": 0.05,
    "monitor.log_every": 20,
}


def base(scale: Scale, paper_recipe: str, epochs: int | None = None) -> Base:
    """The base at `scale`; the paper's experiments have recipes of their own.

    The small scales have 4 samples per device: their BN statistics are noisy, like those that the paper is about.
    """
    if scale == "paper":
        train = find(paper_recipe).config.train
        samples = train.batch_size // cast(int, train.devices)
        return Base(scale, paper_recipe, {}, train.batch_size, samples, epochs or train.epochs)
    batch = 64 if scale == "smoke" else 128
    flags = {**_SMALL, **size_flags(batch, 4), "method.reference_batch": batch}
    if scale == "smoke":
        flags |= {"train.epochs": 1, "data.train_size": 1280, "eval_data.train_size": 1000}
        flags |= {"optim.lr": 0.1, "optim.warmup_epochs": 0.1}
        return Base(scale, "quickstart-paper", flags, batch, 4, epochs or 1)
    return Base(scale, "cifar10-cpu-paper", {**flags, **_CIFAR}, batch, 4, epochs or 1)


#: How the small scales run methods that the paper takes from elsewhere. MoCo's teacher must hardly move while a key
#: is in the queue: 8 or 16 steps here, each of them 1 % of the way to the student.
SMALL_MOCO: Flags = {
    "method.name": "moco",
    "views.recipe": "moco_v2",
    "method.queue_size": 1024,
    "method.weight_momentum": 0.01,
    "method.weight_schedule": "constant",
    "method.alpha": 0.064,
}
SMALL_SIMSIAM: Flags = {
    "method.name": "simsiam",
    "method.student_norm": "synced",
    "views.recipe": "simsiam",
    "model.predictor_hidden": 32,
}


#: Whose encoder the numbers by a protocol are of: authors publish the one, by their own.
_NETWORKS: dict[ProtocolName, Network] = {
    "paper": "teacher",
    "moco": "student",
    "simsiam": "student",
    "byol": "student",
}


def linear(b: Base, protocol: ProtocolName) -> Evaluation:
    """Linear evaluation by the protocol, and of the network, behind a published number.

    On a CPU all rows have cached features and, where there is one, the teacher: they differ in their training alone.
    """
    if not b.small:
        return Evaluation("evaluate linear", (), result_name(protocol), _NETWORKS[protocol], protocol)
    network: Network = "student" if protocol == "simsiam" else "teacher"
    options = ("--device", "cpu", "--threads", "1")
    return Evaluation("evaluate linear", options, result_name("cached"), network, "cached")


def also(b: Base, evaluation: Evaluation) -> Mapping[str, Evaluation]:
    """What else a CPU can measure of the same network.

    Statistics that are measured again on the images divide what a norm does to training from what it leaves behind:
    those of 4 samples are as noisy in a plain BN's running averages.
    """
    if not b.small:
        return {}
    return {
        "recalibrated": replace(evaluation, recalibrate=True),
        "kNN": replace(evaluation, verb="evaluate knn", result="knn", protocol=None),
    }


def semi(b: Base, percent: int, network: Network | None) -> Evaluation:
    """Fine-tuning on a few labels: SimCLR's lists for ImageNet, else a share of each class."""
    if not b.small:
        name = f"{percent}percent"
        return Evaluation("evaluate semi", ("--list", f"{name}.txt"), f"semi {name}", network)
    fraction = f"{percent / 100:g}"
    options = ["--fraction", fraction, "--lr", "0.2", "--device", "cpu", "--threads", "1"]
    if b.scale == "smoke":
        options += ["--batch_size", "8", "--epochs", "2"]
    else:  # of all images, not of those that the other evaluations use
        options += ["--batch_size", "64" if percent >= 10 else "16", "--data.train_size", "50000"]
    return Evaluation("evaluate semi", tuple(options), f"semi {fraction}", network)


def detection(b: Base, model: str, data: str, schedule: str, network: Network | None) -> Evaluation:
    """Fine-tuning a detector: COCO or LVIS, on a CPU the embedded shapes."""
    config = None
    if not b.small:
        # Of LVIS's 56,740 images, the 90,000 steps that are 1x on COCO are the 25 epochs of 2x.
        options = ["--data.name", data, "--schedule", "1x" if data == "lvis" else schedule]
        config = "lvis" if data == "lvis" else f"{model}_{schedule}"
    else:
        options = ["--train.device", "cpu", "--train.threads", "1"]
        options += ["--train.epochs", "2" if schedule == "2x" and b.scale == "cifar" else "1"]
    if b.scale == "smoke":
        options += ["--data.train_size", "64", "--data.test_size", "16"]
    return Evaluation("detect", ("--model", model, *options), "detection", network, detectron2=config)
