"""The tables as data: their commands are those of the command line, and their numbers the paper's."""

import re
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from momentum2.arguments import add_config, make_parser, parse, read_config
from momentum2.config import Config
from momentum2.engine.plan import resolve
from momentum2.recipes import find
from momentum2.reproduce import TABLES, Scale, Table
from momentum2.reproduce.rows import Pretraining

SCALES = get_args(Scale)
IMAGES = 1_281_167
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
    parser = make_parser("pretrain", "")
    parser.add_argument("--out", type=str)
    add_config(parser, find(command[1]).config)
    return read_config(parser, parse(parser, command[2:]))


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
        ("split", "synced"),
        ("synced", "split"),
        ("split", "split"),
        ("split", "momentum"),
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
            assert train.virtual_devices == 128
        else:
            assert train.batch_size == 4096
    for name in ("linear", "semi", "coco", "lvis"):
        (train,) = {
            config_of(r.pretraining).train
            for r in TABLES[name]("paper").rows
            if r.key.endswith("m2") or r.key == "m2-10"
        }
        assert (train.batch_size, train.virtual_devices) == (128 * 128, 128)


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


@pytest.mark.skipif(not LATEX.exists(), reason="the LaTeX source of the paper is not here")
def test_published_numbers_are_in_the_paper():
    text = LATEX.read_text(encoding="utf-8")
    in_tables = set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", text)) | set(
        re.findall(r"(\d+\.?\d*)s\b", text)
    )
    values = {float(number) for number in in_tables}
    for build in TABLES.values():
        for row in build("paper").rows:
            assert row.paper, row.key
            assert set(row.paper.values()) <= values, row.key
