import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

WARM = Path(__file__).with_name("warm.py")


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A program to start in place of `sys.executable` that has imported torch and momentum2 (see warm.py)."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        program, address = Path(folder, "python"), Path(folder, "socket")
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{WARM}" ask "{address}" "$@"\n')
        program.chmod(0o755)
        with subprocess.Popen(
            [sys.executable, str(WARM), "serve", str(address), str(program)],
            # If a test asks for more threads than there are free cores, those that wait are not to burn time.
            env=dict(
                os.environ, PYTHONPATH=str(WARM.parents[1]), OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive"
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the tests
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield str(program)
