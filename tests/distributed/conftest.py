import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from momentum2 import distributed


@pytest.fixture(scope="session")
def on_processes(
    tmp_path_factory: pytest.TempPathFactory, warm_python: str
) -> Callable[[str, int], list[Any]]:
    """A function that runs a program of this folder in several processes; what each saved, by rank.

    The program is started as `python PROGRAM RESULTS_DIRECTORY`, with torchrun's environment, and saves
    RANK.pt there.
    """

    def run(program: str, world: int) -> list[Any]:
        out = tmp_path_factory.mktemp("results")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        environment = dict(
            os.environ,
            PYTHONPATH=str(Path(distributed.__file__).parents[2]),
            OMP_NUM_THREADS="1",
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        command = [warm_python, str(Path(__file__).with_name(program)), str(out)]
        processes = [
            subprocess.Popen(
                command, env=dict(environment, RANK=str(r), LOCAL_RANK=str(r)), stderr=subprocess.PIPE
            )
            for r in range(world)
        ]
        errors = [p.communicate(timeout=1800)[1].decode() for p in processes]
        assert [p.returncode for p in processes] == [0] * world, "\n".join(errors)
        return [torch.load(out / f"{rank}.pt") for rank in range(world)]

    return run
