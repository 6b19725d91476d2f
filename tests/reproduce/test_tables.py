"""The tables as data: their commands are those of the command line, and their settings those behind their numbers."""

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from momentum2.cli.commands import COMMANDS
from momentum2.config import Config
from momentum2.evaluate.linear import LinearOptions
from momentum2.evaluate.subject import SubjectOptions
from momentum2.recipes import find
from momentum2.reproduce import TABLES, Scale, Table
from momentum2.reproduce.rows import Pretraining
from momentum2.training.plan import resolve

SCALES = get_args(Scale)
IMAGES = 1_281_167


def tables() -> list[Table]:
    return [build(scale) for build in TABLES.values() for scale in SCALES]


def config_of(run: Pretraining) -> Config:
    """What `momentum2 pretrain` makes of the run's own command."""
    command = run.command(Path("out"), 0, None)
    assert command[0] == "pretrain"
    return parsed(tuple(command))


@cache
def parsed(command: tuple[str, ...]) -> Config:
    words = COMMANDS["pretrain"].options().parse("pretrain", command[1:])
    return words.override(find(words.one()).config)


@pytest.mark.parametrize("table", tables(), ids=lambda t: f"{t.name}-{t.scale}")
def test_every_row_can_be_planned(table: Table):
    keys = [row.key for row in table.rows]
    assert len(set(keys)) == len(keys)
    for run in {row.pretraining.name: row.pretraining for row in table.rows}.values():
        config = config_of(run)
        plan = resolve(config, IMAGES, world=8 if table.scale == "paper" else 1)
        assert plan.steps > 0


def test_one_name_is_one_run():
    """Tables share runs by name, so that a name must stand for one config, and a config have one name."""
    for scale in SCALES:
        by_name: dict[str, object] = {}
        for build in TABLES.values():
            for row in build(scale).rows:
                settings = asdict(config_of(row.pretraining))
                assert by_name.setdefault(row.pretraining.name, settings) == settings
        settings = list(by_name.values())
        assert all(a != b for i, a in enumerate(settings) for b in settings[:i])


def test_no_two_detectors_share_a_directory():
    for scale in SCALES:
        rows = [row for name in ("coco", "lvis") for row in TABLES[name](scale).rows]
        assert len({row.detector(Path("out"), 0) for row in rows}) == len(rows)


def test_table_1_is_six_combinations_of_norms_and_its_rival():
    rows = TABLES["bn-statistics"]("cifar").rows
    norms = [(c.method.student_norm, c.method.teacher_norm) for c in (config_of(r.pretraining) for r in rows)]
    assert norms == [
        ("synced", "synced"),
        ("local", "synced"),
        ("synced", "local"),
        ("local", "local"),
        ("local", "momentum"),
        ("synced", "momentum"),
        ("local", "ema"),
    ]
    assert len(TABLES["bn-statistics"]("paper").rows) == 6
    same = [asdict(config_of(r.pretraining)) for r in rows]
    for settings in same:
        del settings["method"]["student_norm"], settings["method"]["teacher_norm"]
    assert all(settings == same[0] for settings in same)


def test_the_papers_cluster_keeps_its_devices():
    """ "We keep using 128 GPUs and change the number of samples within each GPU"; BYOL's own numbers divide 4096."""
    for row in TABLES["bn-batch-size"]("paper").rows:
        train = config_of(row.pretraining).train
        if row.key.startswith("m2"):
            assert train.devices == 128
        else:
            assert train.batch_size == 4096
    for name in ("linear", "semi", "coco", "lvis"):
        (train,) = {
            config_of(r.pretraining).train
            for r in TABLES[name]("paper").rows
            if r.key.endswith("m2") or r.key == "m2-10"
        }
        assert (train.batch_size, train.devices) == (128 * 128, 128)


@pytest.mark.parametrize("scale", SCALES)
def test_rows_of_bn_batch_size_differ_in_the_samples_of_bn_alone(scale: Scale):
    for row in TABLES["bn-batch-size"](scale).rows:
        plan = resolve(config_of(row.pretraining), IMAGES)
        assert plan.student_bn == plan.teacher_bn == int(row.key.split("-")[1])


def test_a_comparison_has_the_samples_that_it_names():
    rows = TABLES["byol-vs-m2"]("paper").rows
    samples = [resolve(config_of(row.pretraining), IMAGES).student_bn for row in rows]
    assert samples == [4096, 32, 32, 128]
    assert all(row.label.endswith(f"({n})") for row, n in zip(rows, samples, strict=True))


def test_a_row_from_scratch_differs_from_the_pretrained_one_by_its_weights_alone():
    out = Path("out")
    for name in ("semi", "coco", "lvis"):
        rows = TABLES[name]("cifar").rows
        for row in (r for r in rows if r.evaluation.scratch):
            words = row.evaluation.command(out, Path("detector"), 0, False, None)
            twins = [
                other.evaluation.command(out, Path("detector"), 0, False, None)
                for other in rows
                if not other.evaluation.scratch and other.pretraining == row.pretraining
            ]
            stripped = [w for w in words if w not in ("--weights", "--init", "random")]
            assert stripped in [[w for w in twin if w not in ("--network", "teacher")] for twin in twins]


#: Whose encoder a number of the paper is of, and by which linear protocol: its own runs are teachers by its own
#: protocol; numbers from elsewhere are as their authors measured them.
MEASURED = {
    "bn-statistics": {"": ("teacher", "paper")},
    "byol-vs-m2": {"byol-synced": ("student", "byol"), "": ("teacher", "paper")},
    "moco": {"": ("student", "moco")},
    "bn-batch-size": {"byol-": ("student", "byol"), "m2-": ("teacher", "paper")},
    "single-machine": {
        "m2-": ("teacher", "paper"),
        "simsiam-": ("student", "simsiam"),
        "byol-": ("student", "byol"),
    },
    "alpha": {"": ("teacher", "paper")},
    "alpha-base": {"": ("teacher", "paper")},
    "linear": {"byol": ("student", "byol"), "moco": ("student", "moco"), "m2": ("teacher", "paper")},
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_row_is_measured_as_its_number_was(name: str):
    """As the commands themselves are understood."""
    for row in TABLES[name]("paper").rows:
        expected = next(found for start, found in MEASURED[name].items() if row.key.startswith(start))
        verb, kind, _run, *words = row.evaluation.command(Path("run"), Path("out"), 0, True, None)
        assert (verb, kind) == ("evaluate", "linear")
        given = COMMANDS["evaluate linear"].options().parse("evaluate linear", ["run", *words])
        options = given.read(LinearOptions())
        assert (given.override(SubjectOptions()).network, options.protocol) == expected, row.key
        assert row.evaluation.result == ("linear" if expected[1] == "paper" else f"linear {expected[1]}")


def test_few_labels_and_detectors_start_from_the_published_network():
    expected = {"random": None, "scratch": None, "m2": "teacher"}
    expected |= dict.fromkeys(("supervised", "moco", "byol"), "student")
    for name in ("semi", "coco", "lvis"):
        for row in TABLES[name]("paper").rows:
            start = row.key.split("-")[0] if name == "semi" else row.key.split("-")[-1]
            words = row.evaluation.command(Path("run"), Path("out"), 0, False, None)
            asked = words[words.index("--network") + 1] if "--network" in words else None
            assert asked == expected[start], row.key
            assert row.evaluation.scratch is (asked is None)


@pytest.mark.parametrize("scale", ["smoke", "cifar"])
def test_rows_of_a_small_scale_are_measured_alike(scale: Scale):
    for name in MEASURED:
        for row in TABLES[name](scale).rows:
            network = "student" if row.key.startswith("simsiam") else "teacher"
            assert (row.evaluation.network, row.evaluation.protocol) == (network, "cached")


def test_rows_of_other_authors_have_their_settings():
    """Those of BYOL's and MoCo's own numbers, and m 0.01 on one machine at 256 and at 1024."""
    byol = {
        row.key: config_of(row.pretraining)
        for name in ("byol-vs-m2", "bn-batch-size", "single-machine", "linear")
        for row in TABLES[name]("paper").rows
        if row.evaluation.protocol == "byol"
    }
    assert len(byol) == 1 + 4 + 1 + 2
    for key, config in byol.items():
        long = key == "byol-long"
        assert config.model.zero_init_residual
        assert config.method.export == "student"
        assert config.train.batch_size == 4096
        assert config.train.epochs == (1000 if long else 300)
        assert (config.optim.lr, config.optim.weight_decay) == ((0.2, 1.5e-6) if long else (0.3, 1e-6))
        assert resolve(config, IMAGES).schedule.m(0) == pytest.approx(0.004 if long else 0.01)
    moco = {row.key: row for row in TABLES["linear"]("paper").rows}
    for key, epochs in (("moco", 200), ("moco-long", 800)):
        config = config_of(moco[key].pretraining)
        assert (config.train.batch_size, config.train.epochs) == (256, epochs)
        assert config.method.teacher_norm == "shuffle"
        assert resolve(config, IMAGES).schedule.m(0) == pytest.approx(0.001)
    for row in TABLES["single-machine"]("paper").rows:
        if row.key.startswith("m2"):
            plan = resolve(config_of(row.pretraining), IMAGES)
            assert plan.schedule.m(0) == pytest.approx(0.01)
            assert plan.student_bn == int(row.key.split("-")[1]) // 8


@pytest.mark.parametrize("scale", SCALES)
def test_a_larger_batch_on_one_machine_keeps_its_m(scale: Scale):
    rows = [r for r in TABLES["single-machine"](scale).rows if r.key.startswith("m2")]
    plans = [resolve(config_of(row.pretraining), IMAGES) for row in rows]
    assert len({plan.schedule.m(0) for plan in plans}) == 1
    assert plans[1].schedule.lr_base == pytest.approx(4 * plans[0].schedule.lr_base)


def test_cited_rows_are_of_the_papers_scale():
    for name, build in TABLES.items():
        keys = [row.key for row in (*build("paper").rows, *build("paper").cited)]
        assert len(set(keys)) == len(keys)
        assert bool(build("paper").cited) is (name in ("linear", "semi"))
        assert all(not build(scale).cited for scale in ("smoke", "cifar"))
