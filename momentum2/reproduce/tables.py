"""The tables of the paper as data. The paper's numbers are those of its LaTeX source."""

from typing import Protocol

from momentum2.evaluate.protocols import ProtocolName
from momentum2.reproduce.rows import Cited, Flags, Row, Scale, Table, duration
from momentum2.reproduce.scales import (
    SMALL_MOCO,
    SMALL_SIMSIAM,
    Base,
    also,
    base,
    linear,
    norms,
    semi,
    size_flags,
)
from momentum2.reproduce.transfer import coco, lvis
from momentum2.reproduce.verdicts import Claim

#: The columns of tables in which the paper has top-5 as well.
_WITH_TOP5 = ("top-1", "top-5", "recalibrated", "kNN", "seconds")

#: Where the paper contradicts itself.
_BYOL_TOP5 = "The paper has 87.6 and 90.8 as top-5 beside BYOL's 72.5, and 87.6 beside MoCo's 66.8 as well."
_M2_TOP5 = "The paper has 90.6 and 91.2 as top-5 beside 72.9."

#: Why a method that has a recipe is only cited.
_SIMCLR = "SimCLR measures by a linear protocol of its own; 66.6 is published for batch 8192, 69.3 for 4096."


def _row(
    b: Base,
    key: str,
    label: str,
    changes: Flags,
    top1: float | None = None,
    seconds: float | None = None,
    top5: float | None = None,
    protocol: ProtocolName = "paper",
    note: str | None = None,
) -> Row:
    """A row that is pretrained with `changes` and evaluated linearly."""
    published = {"top-1": top1, "top-5": top5, "seconds": seconds}
    paper = {name: value for name, value in published.items() if value is not None}
    evaluation = linear(b, protocol)
    return Row(key, label, b.pretraining(changes), evaluation, paper, note, also(b, evaluation))


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
    claims = [
        Claim("A Momentum BN teacher is better than a BN teacher", "local-momentum", "local-local"),
        Claim(
            "Momentum BN in the teacher is as good as synced BN in both",
            "local-momentum",
            "synced-synced",
            1.0,
        ),
        Claim("Synced BN in both is better than BN in both", "synced-synced", "local-local"),
        Claim("The teacher's statistics count more than the student's", "local-synced", "synced-local"),
        Claim("With a Momentum BN teacher the student may have BN", "local-momentum", "synced-momentum", 1.0),
        Claim(
            "Momentum BN takes at most 5% more time than BN", "local-momentum", "local-local", 5.0, cost=True
        ),
        Claim("Momentum BN takes less time than synced BN", "local-momentum", "synced-synced", cost=True),
    ]
    if b.small:  # the paper does not know it
        rows.append(_row(b, "local-ema", "student BN, teacher EMAN", norms("local", "ema")))
        claims.append(
            Claim("Momentum BN is better than EMAN (not in the paper)", "local-momentum", "local-ema")
        )
    return Table(
        "bn-statistics",
        scale,
        "Table 1: BN statistics in student and teacher",
        "Is it the teacher's statistics that need many samples, and does Momentum BN give them without?",
        tuple(rows),
        claims=tuple(claims),
    )


def byol_vs_m2(scale: Scale, epochs: int | None = None) -> Table:
    b, theirs = base(scale, "imagenet-128gpu", epochs), base(scale, "byol", epochs)
    large = 4 * b.samples
    return Table(
        "byol-vs-m2",
        scale,
        "BYOL and Momentum² Teacher",
        "Does a Momentum BN teacher replace synced BN?",
        (
            _row(
                theirs,
                "byol-synced",
                f"BYOL, synced BN ({theirs.batch})",
                norms("synced", "synced"),
                72.5,
                5.25,
                87.6,
                protocol="byol",
                note=_BYOL_TOP5,
            ),
            _row(
                b,
                "byol",
                f"BYOL, BN ({b.samples})",
                norms("local", "local"),
                61.5,
                0.6,
                84.6,
                note="The paper's text has 61.5 with batch size 128, its table with 32.",
            ),
            _row(b, "m2", f"Momentum² Teacher ({b.samples})", norms("local", "momentum"), 72.0, 0.6, 90.6),
            _row(
                b,
                "m2-large",
                f"Momentum² Teacher ({large})",
                {**norms("local", "momentum"), **b.size(large)},
                72.9,
                top5=90.6,
                note=_M2_TOP5,
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
            _row(
                b,
                "shuffle",
                "shuffling BN",
                {**extra, **norms("local", "shuffle")},
                66.8,
                0.65,
                87.6,
                protocol="moco",
                note="On 32 GPUs; the paper has 67.5 for 8.",
            ),
            _row(
                b,
                "momentum",
                "Momentum BN",
                {**extra, **norms("local", "momentum")},
                67.8,
                0.35,
                88.0,
                protocol="moco",
            ),
        ),
        _WITH_TOP5,
        claims=(Claim("In MoCo, Momentum BN is better than shuffling BN", "momentum", "shuffle"),),
    )


def bn_batch_size(scale: Scale, epochs: int | None = None) -> Table:
    b, theirs = base(scale, "imagenet-128gpu", epochs), base(scale, "byol", epochs)
    ours: dict[int, float | None] = {16: 68.3, 32: 72.0, 48: 72.5, 64: 72.6, 128: 72.9}
    byol: dict[int, float | None] = {64: 59.7, 128: 69.6, 256: 71.8, 512: 72.2}
    if b.small:
        ours = byol = dict.fromkeys((2, 4, 8, 16, 32))

    # The paper's devices stay 128, with more samples each; BYOL's numbers are of one batch, divided.
    def byol_row(n: int, top1: float | None) -> Row:
        flags = {**norms("local", "local"), **size_flags(theirs.batch, n)}
        return _row(theirs, f"byol-{n}", f"BYOL, BN over {n}", flags, top1, protocol="byol")

    def m2_row(n: int, top1: float | None) -> Row:
        flags = {**norms("local", "momentum"), **b.size(n)}
        return _row(b, f"m2-{n}", f"Momentum² Teacher, BN over {n}", flags, top1)

    rows = [byol_row(n, top1) for n, top1 in byol.items()] + [m2_row(n, top1) for n, top1 in ours.items()]
    better = "Momentum² Teacher is better than BYOL"
    claims = [Claim(f"With {n} samples per BN, {better}", f"m2-{n}", f"byol-{n}") for n in ours if n in byol]
    # Above, the batch is divided; here the devices stay, and the batch, rate and m grow with the samples.
    if b.small:
        for n in (2, 8):
            batch = b.batch // b.samples * n
            for key, name, teacher in (("byol", "BYOL", "local"), ("m2", "Momentum² Teacher", "momentum")):
                flags = {**norms("local", teacher), **size_flags(batch, n)}
                rows.append(_row(b, f"{key}-{n}-of-{batch}", f"{name}, BN over {n}, batch {batch}", flags))
            words = f"With {n} samples per BN and batch {batch}, {better}"
            claims.append(Claim(words, f"m2-{n}-of-{batch}", f"byol-{n}-of-{batch}"))
    return Table(
        "bn-batch-size",
        scale,
        "Samples per BN",
        "How few samples can share BN statistics?",
        tuple(rows),
        claims=tuple(claims),
    )


def single_machine(scale: Scale, epochs: int | None = None) -> Table:
    small, simsiam = base(scale, "imagenet-1node", epochs), base(scale, "simsiam", epochs)
    large = base(scale, "imagenet-1node-1024", epochs)
    batch = 4 * small.batch
    # m stays as it is: the recipe of the larger batch has that of the smaller one, and so have the small scales.
    four_times = {**size_flags(batch, 4 * small.samples), "method.reference_batch": batch}
    siamese = SMALL_SIMSIAM if simsiam.small else {}

    def m2(b: Base, changes: Flags, batch: int, length: int, top1: float) -> Row:
        epochs = b.epochs * length
        label = f"Momentum² Teacher, batch {batch}, {duration(epochs)}"
        return _row(b, f"m2-{batch}-{epochs}", label, {**changes, "train.epochs": epochs}, top1)

    def siam(length: int, top1: float) -> Row:
        epochs = simsiam.epochs * length
        label = f"SimSiam, batch {simsiam.batch}, {duration(epochs)}"
        changes = {**siamese, "train.epochs": epochs}
        key = f"simsiam-{simsiam.batch}-{epochs}"
        return _row(simsiam, key, label, changes, top1, protocol="simsiam")

    rows = [
        m2(small, {}, small.batch, 1, 70.4),
        m2(large, four_times, batch, 1, 70.7),
        m2(large, four_times, batch, 2, 72.7),
        m2(large, four_times, batch, 3, 73.8),
        siam(1, 68.1),
        siam(2, 70.0),
    ]
    if not small.small:  # a batch for a cluster
        byol = base(scale, "byol", 3 * small.epochs)
        label = f"BYOL, batch {byol.batch}, {duration(byol.epochs)}"
        rows.append(_row(byol, f"byol-{byol.batch}-{byol.epochs}", label, {}, 72.5, protocol="byol"))
    return Table(
        "single-machine",
        scale,
        "Small batches on one machine",
        "How good can one machine be, and what do larger batches and longer schedules give?",
        tuple(rows),
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
    rows = [
        _row(
            b,
            f"alpha-{a}",
            "α 1 → 0" if a == "cosine" else f"α {a}",
            {"method.alpha": a},
            top1,
            top5=top5,
        )
        for a, (top1, top5) in published.items()
    ]
    claims = [
        Claim(f"α from 1 to 0 is better than α = {a}", "alpha-cosine", f"alpha-{a}")
        for a in published
        if a != "cosine"
    ]
    if b.small:  # the paper does not know it
        rows.append(_row(b, "alpha-auto", "α auto", {"method.alpha": "auto"}))
        claims.append(Claim("α auto is better than 1 to 0 (not in the paper)", "alpha-auto", "alpha-cosine"))
    return Table(
        "alpha",
        scale,
        "Varying α, the weight of the current batch",
        "Should the teacher trust the current batch or the history, and when?",
        tuple(rows),
        _WITH_TOP5,
        claims=tuple(claims),
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
        claims=tuple(
            Claim(f"α from 1 is better than from {a:g}", "alpha-base-1", f"alpha-base-{a:g}")
            for a in published
            if a != 1
        ),
    )


#: Method, epochs of pretraining, top-1 and top-5 of the rows that are not run here.
_CITED_LINEAR: tuple[tuple[str, int | None, float, float | None], ...] = (
    ("Jigsaw", 90, 45.7, None),
    ("InstDis", 200, 56.5, None),
    ("BigBiGAN", None, 56.6, None),
    ("Local Agg.", None, 60.2, None),
    ("CPC v2", 200, 63.8, 85.3),
    ("CMC", None, 66.2, 87.0),
    ("SimCLR", 200, 66.6, None),
    ("PCL v2", 200, 67.6, None),
    ("InfoMin Aug", 200, 70.1, 89.4),
    ("PIRL", 800, 63.6, None),
    ("SimCLR", 1000, 69.3, 89.0),
    ("InfoMin Aug", 800, 73.0, 91.1),
)

#: Method, epochs; top-1 with 1 % and 10 % of the labels, top-5 with both.
_CITED_SEMI: tuple[tuple[str, int | None, tuple[float | None, ...]], ...] = (
    ("Supervised (S4L)", None, (25.4, 56.4, 48.4, 80.4)),
    ("Pseudolabels", None, (None, None, 51.6, 82.4)),
    ("VAT", None, (None, None, 47.0, 83.4)),
    ("UDA", None, (None, 68.8, None, 88.5)),
    ("FixMatch", None, (None, 71.5, None, 89.1)),
    ("InstDisc", 200, (None, None, 39.2, 77.4)),
    ("PIRL", 800, (None, None, 57.2, 83.8)),
    ("MoCo v2", 800, (42.3, 63.8, 70.1, 86.2)),
    ("PCL", 200, (None, None, 75.3, 85.6)),
    ("SimCLR", 1000, (48.3, 65.6, 75.5, 87.8)),
    ("SwAV (batch 256)", 200, (51.3, 67.8, 76.6, 88.6)),
    ("SwAV (batch 4096)", 200, (52.6, 68.5, 77.7, 89.2)),
    ("SwAV (batch 4096)", 800, (53.9, 70.2, 78.5, 89.9)),
    ("BYOL", 1000, (53.2, 68.8, 78.4, 89.0)),
)


def _cited(
    method: str,
    epochs: int | None,
    paper: dict[str, float | None],
    percent: int | None = None,
    note: str | None = None,
) -> Cited:
    """A row of the literature; its key is made of its words, such as `simclr-1000` or `simclr-1000-10`."""
    words = [method.lower().translate(str.maketrans(" ", "-", ".()")), epochs, percent]
    label = method if epochs is None else f"{method}, {duration(epochs)}"
    return Cited(
        "-".join(str(word) for word in words if word is not None),
        label if percent is None else f"{percent} % of the labels, {label}",
        {name: value for name, value in paper.items() if value is not None},
        note,
    )


def linear_classification(scale: Scale, epochs: int | None = None) -> Table:
    b, byol = base(scale, "imagenet-128gpu", epochs), base(scale, "byol", epochs)
    longer = round(b.epochs * 10 / 3)
    large = b.size(4 * b.samples)  # the paper's best: 128 samples a device
    rows = [
        _row(
            byol,
            "byol",
            f"BYOL, synced BN, {duration(byol.epochs)}",
            norms("synced", "synced"),
            72.5,
            top5=90.8,
            protocol="byol",
            note=_BYOL_TOP5,
        ),
        _row(b, "m2", f"Momentum² Teacher, {duration(b.epochs)}", large, 72.9, top5=91.2, note=_M2_TOP5),
        _row(
            b,
            "m2-long",
            f"Momentum² Teacher, {duration(longer)}",
            {**large, "train.epochs": longer},
            74.5,
            top5=91.7,
        ),
    ]
    if not b.small:
        moco = base(scale, "moco-v2-8gpu", epochs)
        rows += [
            _row(
                moco,
                f"moco{'-long' * (times > 1)}",
                f"MoCo v2, {duration(times * moco.epochs)}",
                {"train.epochs": times * moco.epochs},
                top1,
                protocol="moco",
            )
            for times, top1 in ((1, 67.5), (4, 71.1))
        ]
        rows.append(
            _row(
                byol,
                "byol-long",
                f"BYOL, synced BN, {duration(longer)}",
                {  # as its authors change them for so long a run
                    "train.epochs": longer,
                    "optim.lr": 0.2,
                    "optim.weight_decay": 1.5e-6,
                    "method.weight_momentum": 0.004,
                },
                74.3,
                top5=91.6,
                protocol="byol",
            )
        )
    return Table(
        "linear",
        scale,
        "Linear classification",
        "How good are the frozen features?",
        tuple(rows),
        _WITH_TOP5,
        cited=()
        if b.small
        else tuple(
            _cited(
                method,
                length,
                {"top-1": top1, "top-5": top5},
                note=_SIMCLR if method == "SimCLR" else None,
            )
            for method, length, top1, top5 in _CITED_LINEAR
        ),
    )


def semi_supervised(scale: Scale, epochs: int | None = None) -> Table:
    b = base(scale, "imagenet-128gpu", epochs)
    longer = round(b.epochs * 10 / 3)
    large = b.size(4 * b.samples)
    short, long = b.pretraining(large), b.pretraining({**large, "train.epochs": longer})
    rows, cited = [], []
    published = {
        1: ((57.7, 80.8), (62.3, 84.1)),
        10: ((70.2, 89.3), (72.2, 90.1)),
    }
    for place, (percent, numbers) in enumerate(published.items()):
        words = f"{percent} % of the labels"
        # The supervised baseline that the paper cites is not this network from scratch by the same schedule.
        scratch = semi(b, percent, None)
        rows.append(Row(f"scratch-{percent}", f"{words}, from scratch", short, scratch))
        for key, run, paper in zip(("m2", "m2-long"), (short, long), numbers, strict=True):
            top = dict(zip(("top-1", "top-5"), paper, strict=True))
            label = f"{words}, {duration(run.epochs)}"
            rows.append(Row(f"{key}-{percent}", label, run, semi(b, percent, "teacher"), top))
        for method, length, values in _CITED_SEMI:
            row = _cited(method, length, {"top-1": values[place], "top-5": values[2 + place]}, percent)
            if row.paper:
                cited.append(row)
    return Table(
        "semi",
        scale,
        "Semi-supervised learning",
        "What is pretraining worth where labels are few?",
        tuple(rows),
        ("top-1", "top-5"),
        cited=() if b.small else tuple(cited),
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
