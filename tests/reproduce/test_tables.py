"""The tables as data: their commands are those of the command line, and their numbers the paper's."""

import re
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from momentum2.cli.commands import COMMANDS
from momentum2.config import Config
from momentum2.recipes import find
from momentum2.reproduce import TABLES, Scale, Table
from momentum2.reproduce.rows import Pretraining
from momentum2.training.plan import resolve

SCALES = get_args(Scale)
IMAGES = 1_281_167
NUMBER = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.])")
LATEX = Path(__file__).parents[3] / "shared" / "paper" / "momentum2_teacher.tex"


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


def test_table_1_is_six_combinations_of_norms():
    rows = TABLES["bn-statistics"]("cifar").rows
    norms = [(c.method.student_norm, c.method.teacher_norm) for c in (config_of(r.pretraining) for r in rows)]
    assert norms == [
        ("synced", "synced"),
        ("local", "synced"),
        ("synced", "local"),
        ("local", "local"),
        ("local", "momentum"),
        ("synced", "momentum"),
    ]
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
            assert stripped in twins


#: Top-1 and, where the paper has them, seconds per iteration, transcribed by hand.
PUBLISHED: dict[str, list[tuple[float, ...]]] = {
    "bn-statistics": [
        (88.06, 1.1),
        (87.80, 0.39),
        (87.12, 0.49),
        (84.16, 0.24),
        (88.18, 0.25),
        (88.25, 0.50),
    ],
    "byol-vs-m2": [(72.5, 5.25), (61.5, 0.6), (72.0, 0.6), (72.9,)],
    "moco": [(66.8, 0.65), (67.8, 0.35)],
    "bn-batch-size": [(59.7,), (69.6,), (71.8,), (72.2,), (68.3,), (72.0,), (72.5,), (72.6,), (72.9,)],
    "single-machine": [(70.4,), (70.7,), (72.7,), (73.8,), (68.1,), (70.0,)],
    "alpha": [(72.0,), (61.6,), (71.2,), (69.1,), (69.8,), (68.9,)],
    "alpha-base": [(72.0,), (71.6,), (71.2,), (69.7,), (69.5,), (69.6,)],
    "linear": [(72.5,), (72.9,), (74.5,)],
    "semi": [(25.4,), (57.7,), (62.3,), (56.4,), (70.2,), (72.2,)],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_row_shows_its_own_number_of_the_paper(name: str):
    rows = TABLES[name]("paper").rows
    shown = [tuple(row.paper[c] for c in ("top-1", "seconds") if c in row.paper) for row in rows]
    assert shown == PUBLISHED[name]


@pytest.mark.skipif(not LATEX.exists(), reason="the LaTeX source of the paper is not here")
def test_detectors_have_the_papers_numbers_line_by_line():
    lines = [line.split("&") for line in LATEX.read_text(encoding="utf-8").replace("\\\\", "").splitlines()]
    numbers = [tuple(float(x[0]) for cell in line if (x := NUMBER.findall(cell))) for line in lines]
    begin = next(i for i, line in enumerate(lines) if "random init." in line[0])
    ours = [tuple(row.paper.values()) for name in ("coco", "lvis") for row in TABLES[name]("paper").rows]
    printed = [line for line in numbers[begin:] if len(line) in (3, 6)]
    assert ours == printed[: len(ours)]
    assert len(ours) == 8 * 5 + 4


@pytest.mark.skipif(not LATEX.exists(), reason="the LaTeX source of the paper is not here")
def test_top5_is_beside_its_top1_in_the_paper():
    """In one line (but for the tables of alpha, which are turned)."""
    lines = [NUMBER.findall(line) for line in LATEX.read_text(encoding="utf-8").splitlines() if "&" in line]
    for name in ("byol-vs-m2", "moco", "linear", "semi"):
        for row in TABLES[name]("paper").rows:
            pair = {str(row.paper["top-1"]), str(row.paper["top-5"])}
            assert any(pair <= set(line) for line in lines), row.key
    for name in ("alpha", "alpha-base"):
        for column in ("top-1", "top-5"):
            turned = [str(row.paper[column]) for row in TABLES[name]("paper").rows]
            assert turned in lines
