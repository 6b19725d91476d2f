"""What a step asks of a GPU and how often it waits for it, counted on the fake device."""

from pathlib import Path

import pytest
import torch
from counting import Counted, config, count

from momentum2.config import MethodConfig
from momentum2.training import loop

#: Every wait that is left, by file; a usual step has none. This list only shrinks.
WAITS = {
    "usual": {},
    "logged": {"training/log.py": 1},
    # A copy of each tensor, one look at all of them for NaN, and the histories' rows.
    "saved": {"runs/checkpoint.py": None, "weights.py": None},
}
CASES = {
    "plain": (MethodConfig(teacher_norm="local"), 1, {}),
    "momentum": (MethodConfig(), 1, {}),
    "auto": (MethodConfig(alpha="auto"), 1, {}),
    "devices": (MethodConfig(), 1, {"train": {"devices": 4, "batch_size": 32}}),
    "auto devices": (MethodConfig(alpha="auto"), 1, {"train": {"devices": 4, "batch_size": 32}}),
    "plain of 32": (MethodConfig(teacher_norm="local"), 1, {"images": 32}),
    "synced": (MethodConfig(student_norm="synced", teacher_norm="synced"), 8, {}),
    "shuffle": (MethodConfig("moco", queue_size=1024, teacher_norm="shuffle"), 8, {}),
    "dino": (MethodConfig("dino"), 8, {}),
    "simclr": (MethodConfig("simclr"), 8, {}),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counted]:
    return {
        name: count(config(method, world=world, **options), tmp_path_factory.mktemp("run"), world)
        for name, (method, world, options) in CASES.items()
    }


def test_a_step_waits_for_nothing_and_copies_from_pinned_memory(counted: dict[str, Counted]):
    for name, found in counted.items():
        for kind, allowed in WAITS.items():
            by_file: dict[str, int] = {}
            for line, times in getattr(found, kind).waits.items():
                file = line.rpartition(":")[0]
                by_file[file] = by_file.get(file, 0) + times
            assert by_file.keys() <= allowed.keys(), f"{name}, {kind}"
            for file, limit in allowed.items():
                assert limit is None or by_file.get(file, 0) <= limit, f"{name}, {kind}: {by_file}"
            assert not getattr(found, kind).pageable, f"{name}, {kind}"
        assert found.device.dtypes["convolution"] == {torch.bfloat16, torch.float32}, name  # the blur is fp32


def test_momentum_statistics_cost_little_more_than_plain_ones(counted: dict[str, Counted]):
    plain, momentum = counted["plain"].usual, counted["momentum"].usual
    assert momentum.calls <= 1.35 * plain.calls
    assert momentum.kernels <= 1.30 * plain.kernels
    assert momentum.bytes <= 1.02 * plain.bytes
    drift = counted["momentum"].logged.calls - counted["plain"].logged.calls - (momentum.calls - plain.calls)
    assert drift <= 30


@pytest.mark.parametrize("devices", [False, True])
def test_choosing_alpha_costs_a_few_operations_and_one_of_each_norm(
    counted: dict[str, Counted], devices: bool
):
    fixed = counted["devices" if devices else "momentum"].usual
    auto = counted["auto devices" if devices else "auto"].usual
    most = 80 if devices else 55  # one for each device of each norm would be 60 more for each
    assert auto.calls - fixed.calls <= most
    assert auto.kernels - fixed.kernels <= most
    assert auto.bytes <= 1.01 * fixed.bytes


def test_devices_in_one_process_cost_no_more_traffic(counted: dict[str, Counted]):
    assert counted["devices"].usual.bytes <= 1.20 * counted["plain of 32"].usual.bytes


def test_synced_statistics_cost_little_more_than_plain_ones(counted: dict[str, Counted]):
    plain, synced = counted["plain"].usual, counted["synced"].usual
    assert synced.calls <= 1.75 * plain.calls
    assert synced.kernels <= 1.40 * plain.kernels
    assert synced.bytes <= 1.15 * plain.bytes


def test_shuffled_samples_travel_once(counted: dict[str, Counted]):
    """8 images of 96 px arrive, and outputs; not those of all 8 processes."""
    assert counted["shuffle"].usual.received < 1.1 * 8 * 3 * 96 * 96 * 4


def test_a_wait_in_the_loop_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the first test would say if somebody looked at the loss in every step."""
    source = Path(loop.__file__).read_text()
    line = "            stop = taken.stop\n"
    assert source.count(line) == 1
    broken = source.replace(line, line + "            taken.loss.item()\n")
    program = compile(broken, loop.__file__, "exec")
    space: dict[str, object] = {"__name__": loop.__name__}
    exec(program, space)
    monkeypatch.setattr("counting.fit", space["fit"])
    found = count(config(MethodConfig("simsiam"), size=32, width=0.25), tmp_path)
    place = source[: source.index(line)].count("\n") + 2
    assert found.usual.waits == {f"training/loop.py:{place}": 1}
