"""The tables of the paper as data. The paper's numbers are those of its LaTeX source."""

from typing import Protocol

from momentum2.reproduce.rows import Flags, Row, Scale, Table, duration
from momentum2.reproduce.scales import SMALL_MOCO, SMALL_SIMSIAM, Base, base, linear, norms, semi, size_flags
from momentum2.reproduce.transfer import coco, lvis

#: The columns of tables in which the paper has top-5 as well.
_WITH_TOP5 = ("top-1", "top-5", "kNN", "seconds")


def _row(
    b: Base,
    key: str,
    label: str,
    changes: Flags,
    top1: float | None = None,
    seconds: float | None = None,
    top5: float | None = None,
) -> Row:
    """A row that is pretrained with `changes` and evaluated linearly."""
    published = {"top-1": top1, "top-5": top5, "seconds": seconds}
    paper = {name: value for name, value in published.items() if value is not None}
    return Row(key, label, b.pretraining(changes), linear(b), paper)


def bn_statistics(scale: Scale, epochs: int | None = None) -> Table:
    b = base(scale, "stl10", epochs)
    names = {"synced": "Synced BN", "local": "BN", "momentum": "Momentum BN"}
    published = {
        ("synced", "synced"): (88.06, 1.1),
        ("local", "synced"): (87.80, 0.39),
        ("synced", "local"): (87.12, 0.49),
        ("local", "local"): (84.16, 0.24),
        ("local", "momentum"): (88.18, 0.25),
        ("synced", "momentum"): (88.25, 0.50),
    }
    rows = [
        _row(b, f"{s}-{t}", f"student {names[s]}, teacher {names[t]}", norms(s, t), *numbers)
        for (s, t), numbers in published.items()
    ]
    return Table(
        "bn-statistics",
        scale,
        "Table 1: BN statistics in student and teacher",
        "Is it the teacher's statistics that need many samples, and does Momentum BN give them without?",
        tuple(rows),
    )


def byol_vs_m2(scale: Scale, epochs: int | None = None) -> Table:
    b = base(scale, "imagenet-128gpu", epochs)
    large = 4 * b.samples
    return Table(
        "byol-vs-m2",
        scale,
        "BYOL and Momentum² Teacher",
        "Does a Momentum BN teacher replace synced BN?",
        (
            _row(
                b, "byol-synced", f"BYOL, synced BN ({b.batch})", norms("synced", "synced"), 72.5, 5.25, 87.6
            ),
            _row(b, "byol", f"BYOL, BN ({b.samples})", norms("local", "local"), 61.5, 0.6, 84.6),
            _row(b, "m2", f"Momentum² Teacher ({b.samples})", norms("local", "momentum"), 72.0, 0.6, 90.6),
            _row(
                b,
                "m2-large",
                f"Momentum² Teacher ({large})",
                {**norms("local", "momentum"), **b.size(large)},
                72.9,
                top5=90.6,
            ),
        ),
        _WITH_TOP5,
    )


def moco(scale: Scale, epochs: int | None = None) -> Table:
    b = base(scale, "moco-v2", epochs)
    extra = SMALL_MOCO if b.small else {}
    return Table(
        "moco",
        scale,
        "MoCo v2 with shuffling BN and with Momentum BN",
        "Can Momentum BN take the place of shuffling?",
        (
            _row(b, "shuffle", "shuffling BN", {**extra, **norms("local", "shuffle")}, 66.8, 0.65, 87.6),
            _row(b, "momentum", "Momentum BN", {**extra, **norms("local", "momentum")}, 67.8, 0.35, 88.0),
        ),
        _WITH_TOP5,
    )


def bn_batch_size(scale: Scale, epochs: int | None = None) -> Table:
    b = base(scale, "imagenet-128gpu", epochs)
    ours = {16: 68.3, 32: 72.0, 48: 72.5, 64: 72.6, 128: 72.9}
    byol = {64: 59.7, 128: 69.6, 256: 71.8, 512: 72.2}
    sizes: dict[str, dict[int, float | None]] = {"local": {**byol}, "momentum": {**ours}}
    if b.small:
        sizes = {teacher: dict.fromkeys((4, 8, 16, 32)) for teacher in sizes}

    def row(key: str, label: str, teacher: str, samples: int, top1: float | None) -> Row:
        # The paper's devices stay 128, with more samples each; BYOL's numbers are of one batch, divided.
        size = b.size(samples) if teacher == "momentum" else size_flags(b.batch, samples)
        flags = {**norms("local", teacher), **size}
        return _row(b, f"{key}-{samples}", f"{label}, BN over {samples}", flags, top1)

    return Table(
        "bn-batch-size",
        scale,
        "Samples per BN",
        "How few samples can share BN statistics?",
        (
            *(row("byol", "BYOL", "local", n, top1) for n, top1 in sizes["local"].items()),
            *(row("m2", "Momentum² Teacher", "momentum", n, top1) for n, top1 in sizes["momentum"].items()),
        ),
    )


def single_machine(scale: Scale, epochs: int | None = None) -> Table:
    ours, simsiam = base(scale, "imagenet-1node", epochs), base(scale, "simsiam", epochs)

    def row(b: Base, method: str, times: int, length: int, changes: Flags, top1: float) -> Row:
        batch, epochs = b.batch * times, b.epochs * length
        size = {**size_flags(batch, b.samples * times), "train.epochs": epochs}
        label = f"{method}, batch {batch}, {duration(epochs)}"
        key = f"{'m2' if b is ours else 'simsiam'}-{batch}-{epochs}"
        return _row(b, key, label, {**changes, **size}, top1)

    siamese = SMALL_SIMSIAM if simsiam.small else {}
    return Table(
        "single-machine",
        scale,
        "Small batches on one machine",
        "How good can one machine be, and what do larger batches and longer schedules give?",
        (
            row(ours, "Momentum² Teacher", 1, 1, {}, 70.4),
            row(ours, "Momentum² Teacher", 4, 1, {}, 70.7),
            row(ours, "Momentum² Teacher", 4, 2, {}, 72.7),
            row(ours, "Momentum² Teacher", 4, 3, {}, 73.8),
            row(simsiam, "SimSiam", 1, 1, siamese, 68.1),
            row(simsiam, "SimSiam", 1, 2, siamese, 70.0),
        ),
    )


def alpha(scale: Scale, epochs: int | None = None) -> Table:
    b = base(scale, "imagenet-128gpu", epochs)
    published = {
        "cosine": (72.0, 90.6),
        1: (61.6, 84.6),
        0.5: (71.2, 90.0),
        0.2: (69.1, 89.1),
        0.1: (69.8, 89.2),
        0.01: (68.9, 88.4),
    }
    return Table(
        "alpha",
        scale,
        "Varying α, the weight of the current batch",
        "Should the teacher trust the current batch or the history, and when?",
        tuple(
            _row(
                b,
                f"alpha-{a}",
                "α 1 → 0" if a == "cosine" else f"α {a}",
                {"method.alpha": a},
                top1,
                top5=top5,
            )
            for a, (top1, top5) in published.items()
        ),
        _WITH_TOP5,
    )


def alpha_base(scale: Scale, epochs: int | None = None) -> Table:
    b = base(scale, "imagenet-128gpu", epochs)
    published = {
        1: (72.0, 90.6),
        0.75: (71.6, 90.4),
        0.5: (71.2, 90.1),
        0.2: (69.7, 89.0),
        0.1: (69.5, 89.0),
        0.05: (69.6, 88.8),
    }
    return Table(
        "alpha-base",
        scale,
        "Varying the start of α's schedule",
        "Where should α start?",
        tuple(
            _row(b, f"alpha-base-{a:g}", f"α {a:g} → 0", {"method.alpha_base": a}, top1, top5=top5)
            for a, (top1, top5) in published.items()
        ),
        _WITH_TOP5,
    )


def linear_classification(scale: Scale, epochs: int | None = None) -> Table:
    b = base(scale, "imagenet-128gpu", epochs)
    longer = round(b.epochs * 10 / 3)
    large = b.size(4 * b.samples)  # the paper's best: 128 samples a device
    return Table(
        "linear",
        scale,
        "Linear classification",
        "How good are the frozen features?",
        (
            _row(
                b,
                "byol",
                f"BYOL, synced BN, {duration(b.epochs)}",
                norms("synced", "synced"),
                72.5,
                top5=90.8,
            ),
            _row(b, "m2", f"Momentum² Teacher, {duration(b.epochs)}", large, 72.9, top5=91.2),
            _row(
                b,
                "m2-long",
                f"Momentum² Teacher, {duration(longer)}",
                {**large, "train.epochs": longer},
                74.5,
                top5=91.7,
            ),
        ),
        _WITH_TOP5,
    )


def semi_supervised(scale: Scale, epochs: int | None = None) -> Table:
    b = base(scale, "imagenet-128gpu", epochs)
    longer = round(b.epochs * 10 / 3)
    large = b.size(4 * b.samples)
    short, long = b.pretraining(large), b.pretraining({**large, "train.epochs": longer})
    rows = []
    published = {
        1: ((25.4, 48.4), (57.7, 80.8), (62.3, 84.1)),
        10: ((56.4, 80.4), (70.2, 89.3), (72.2, 90.1)),
    }
    for percent, numbers in published.items():
        for key, label, run, paper in zip(
            ("scratch", "m2", "m2-long"),
            ("from scratch", duration(b.epochs), duration(longer)),
            (short, short, long),
            numbers,
            strict=True,
        ):
            evaluation = semi(b, percent, scratch=key == "scratch")
            words = f"{percent} % of the labels, {label}"
            top = dict(zip(("top-1", "top-5"), paper, strict=True))
            rows.append(Row(f"{key}-{percent}", words, run, evaluation, top))
    return Table(
        "semi",
        scale,
        "Semi-supervised learning",
        "What is pretraining worth where labels are few?",
        tuple(rows),
        ("top-1", "top-5"),
    )


class Build(Protocol):
    """Makes a table at a scale, with the scale's own length of pretraining or another."""

    def __call__(self, scale: Scale, epochs: int | None = None) -> Table: ...


TABLES: dict[str, Build] = {
    "bn-statistics": bn_statistics,
    "byol-vs-m2": byol_vs_m2,
    "moco": moco,
    "bn-batch-size": bn_batch_size,
    "single-machine": single_machine,
    "alpha": alpha,
    "alpha-base": alpha_base,
    "linear": linear_classification,
    "semi": semi_supervised,
    "coco": coco,
    "lvis": lvis,
}
