import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # where the judge is, for the tests of this folder

from corpus import make_bases
from judge import Judge


@pytest.fixture(scope="session")
def judge() -> Iterator[Judge]:
    """The judge, with what the cases are made of."""
    if not os.path.exists("/proc/self/task"):
        pytest.skip("needs Linux")
    with Judge(Path(__file__).parents[2]) as one:
        make_bases(one)
        yield one
