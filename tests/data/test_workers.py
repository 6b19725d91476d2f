"""Worker processes: order, and that their death or silence is noticed and nothing is left behind."""

import functools
import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

from momentum2.data import loader
from momentum2.data.workers import AHEAD, Workers, _hidden_main, needs_main
from momentum2.errors import UserError


def test_results_come_in_order_and_jobs_are_taken_as_needed() -> None:
    taken = []

    def jobs() -> Iterator[int]:
        for i in range(50):
            taken.append(i)
            yield i

    with Workers(operator.neg, 2, str) as workers:
        results = workers.map(jobs())
        assert next(results) == 0
        assert len(taken) == 2 * AHEAD
        assert list(results) == [-i for i in range(1, 50)]
    assert multiprocessing.active_children() == []


def test_a_worker_that_dies_is_named() -> None:
    with (
        Workers(os._exit, 2, lambda job: f"job {job}") as workers,
        pytest.raises(UserError, match=r"Worker process 0 \(pid \d+\) ended with exit code 3 at job 3"),
    ):
        list(workers.map([3, 4]))
    assert multiprocessing.active_children() == []


def test_a_worker_that_hangs_is_named() -> None:
    with (
        Workers(time.sleep, 1, lambda job: f"job {job}", timeout=1.0) as workers,
        pytest.raises(UserError, match=r"has been busy with job 1000000 for 1 seconds"),
    ):
        list(workers.map([1_000_000]))  # seconds, which nobody waits for
    assert multiprocessing.active_children() == []


def test_an_error_in_a_worker_brings_its_traceback() -> None:
    with (
        Workers(operator.neg, 1, str) as workers,
        pytest.raises(RuntimeError, match=r"(?s)Traceback.*TypeError"),
    ):
        list(workers.map(["text"]))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_leaves_the_workers_to_their_parent(number: signal.Signals) -> None:
    """torchrun and a terminal send it to all: a run that is to be saved still needs its next batch."""
    with Workers(operator.neg, 2, str) as workers:
        assert list(workers.map([1, 2])) == [-1, -2]
        for child in multiprocessing.active_children():
            os.kill(child.pid, number)
        assert list(workers.map([3, 4])) == [-3, -4]
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed() -> None:
    program = (
        "import multiprocessing, operator, time; from momentum2.data.workers import Workers;"
        "workers = Workers(operator.neg, 2, str); list(workers.map([1, 2]));"
        "print(*(child.pid for child in multiprocessing.active_children()), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
        assert parent.stdout.read() == ""  # which ends when no process has it open any more
    assert len(pids) == 2


def test_a_gpu_is_fed_by_most_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, processes, count in ((1, 1, 1), (2, 1, 1), (8, 1, 7), (64, 1, 16), (64, 8, 7), (8, 8, 1)):
        monkeypatch.setattr(loader, "allowed_cores", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert loader.default_workers(torch.device("cuda")) == count
        assert loader.default_workers(torch.device("cpu")) == 0


PROGRAM = """
import numpy as np
import momentum2 as m2
print("the program runs")
class Squares:
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return np.full((32, 32, 3), i, np.uint8)
settings = {"train.steps": 2, "train.batch_size": 16, "monitor.knn_every": 0, "data.workers": 1, "data.cache": "off"}
def main(name, dataset=None):
    given = settings | ({} if dataset else {"data.name": "folder", "data.root": "images"})
    print(m2.pretrain(m2.recipe("quickstart", given), "run-" + name, dataset=dataset).finished)
"""


def run_program(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    for i in range(32):
        (folder / "images").mkdir(exist_ok=True)
        Image.new("RGB", (32, 32), (8 * i, 0, 0)).save(folder / "images" / f"{i}.png")
    (folder / "program.py").write_text(PROGRAM + end)
    return subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


@functools.lru_cache
def cached() -> None: ...


def plain() -> None: ...


class Own:
    pass


@pytest.mark.parametrize(
    ("thing", "needs"),
    [
        (Own, True),
        (Own(), True),
        ([[Own()]], True),
        (Subset(Own(), [0]), True),  # type: ignore[arg-type]
        (functools.partial(plain), True),
        (cached, True),
        ([np.zeros(3), {"a": Path("b")}, torch.zeros(2)], False),
    ],
)
def test_what_names_something_of_the_program(
    thing: object, needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for own in (Own, plain, cached):
        monkeypatch.setattr(own, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], own.__name__, own, raising=False)
    assert needs_main(thing) is needs


def test_only_the_thread_that_starts_a_worker_hides_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    names = {"init_main_from_name", "init_main_from_path"}
    seen = []
    with _hidden_main():
        assert not names & spawn.get_preparation_data("x").keys()
        other = threading.Thread(target=lambda: seen.append(names & spawn.get_preparation_data("x").keys()))
        other.start()
        other.join()
    assert seen == [names & spawn.get_preparation_data("x").keys()]
    assert seen[0]


def test_many_tensors_of_one_memory_reach_a_worker() -> None:
    """Shared one by one, they would take more file descriptors than a process may have."""
    rows = list(torch.arange(400_000).reshape(1000, 400))
    with Workers(functools.partial(operator.getitem, rows), 1, str) as workers:
        assert [int(row[0]) for row in workers.map([0, 999])] == [0, 399_600]


def test_workers_do_not_run_a_program_that_is_not_guarded(tmp_path: Path) -> None:
    ended = run_program(tmp_path, 'main("plain")')
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n") == ["the program runs", "True", ""]


def test_a_data_set_of_the_program_needs_a_guard(tmp_path: Path) -> None:
    ended = run_program(tmp_path, 'if __name__ == "__main__":\n    main("own", Squares())')
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("True") == 1
    ended = run_program(tmp_path, 'main("own-unguarded", Squares())')
    assert ended.returncode != 0
    assert 'Put what it runs under `if __name__ == "__main__":`' in ended.stderr
    assert ended.stderr.rstrip().endswith("What it printed says why.")
