"""Several processes evaluate as one: the same files, byte for byte."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from momentum2.evaluate.embed import EmbedOptions, embed
from momentum2.evaluate.knn import KnnOptions, evaluate_knn
from momentum2.evaluate.accuracy import report
from momentum2.evaluate.subject import SubjectOptions, open_subject

run, out = sys.argv[1], Path(sys.argv[2])
with open_subject(run, SubjectOptions(threads=1, feature_batch=10)) as subject:
    embed(subject, EmbedOptions(str(out / "many.npz")))
    report(evaluate_knn(subject, KnnOptions(k=5)), out)
with open_subject(run, SubjectOptions(threads=1, feature_batch=100)) as subject:
    embed(subject, EmbedOptions(str(out / "few.npz")))
"""


def start(command: list[str], out: Path, rank: int, world: int, port: int) -> subprocess.Popen[bytes]:
    out.mkdir(exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen([*command, str(out)], env=environment)


@pytest.mark.slow
def test_three_processes_find_what_one_finds(finished_run: Path, tmp_path: Path, warm_python: str):
    """184 training images are 19 batches of 10, the last of 4, or 2 of 100; 61 test images 7, the last of 1."""
    command = [warm_python, "-c", PROGRAM, str(finished_run)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start(command, tmp_path / "one", 0, 1, port)]
    processes += [start(command, tmp_path / "three", rank, 3, port) for rank in range(3)]
    assert [process.wait(1800) for process in processes] == [0] * 4
    for name in ("many.npz", "few.npz", "results.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes(), name
