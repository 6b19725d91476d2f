"""Folders of small images for the data tests, and a cache that is not the user's."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))  # where `forms` is, for the tests of this folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "momentum2"


def smooth(height: int, width: int, seed: int) -> np.ndarray:
    """An image that JPEG keeps well: a coarse random field, enlarged."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """make_folder(n, sizes=None, classes=0): n images, PNG and JPEG in turn, of one or of various sizes."""

    def make(count: int, *, name: str = "images", varied: bool = True, classes: int = 0) -> Path:
        root = tmp_path / name
        for i in range(count):
            size = (20 + i % 7 * 5, 40 - i % 5 * 4) if varied else (24, 24)
            folder = root / f"class{i % classes}" if classes else root
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(smooth(*size, seed=i)).save(folder / f"{i:03d}{('.png', '.jpg')[i % 2]}")
        return root

    return make
