import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # where `oracle` is, for the tests of this folder


@pytest.fixture
def fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses stay in fp64: `.float()`, there to leave bf16, would round them."""
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))
