"""The smallest run that goes through everything."""

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

#: Some photos of COCO in its layout. Where they are not, tests with photos are skipped.
ARCHIVE = Path(
    os.environ.get("MOMENTUM2_COCO", Path(__file__).parents[3] / "shared" / "data" / "coco_tiny.tar")
)

SETTINGS = {
    "model": "retinanet",
    "init": "random",
    "encoder.width": "0.125",
    "head.fpn_channels": "32",
    "head.box_width": "16",
    "head.proposals": "20",
    "head.sampled": "16",
    "head.score_threshold": "0.005",
    "head.detections": "10",
    "data.short_edges": "[40,48]",
    "data.test_short_edge": "48",
    "data.max_long_edge": "64",
    "data.train_size": "16",
    "data.test_size": "5",
    "train.batch_size": "4",
    "train.steps": "6",
    "train.checkpoint_every": "2",
    "train.threads": "1",
    "train.device": "cpu",
    "monitor.log_every": "1",
    "evaluate_every": "0",
}


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with annotations/, train2017/ and val2017/."""
    if not ARCHIVE.exists():
        pytest.skip("needs photos of COCO")
    with tarfile.open(ARCHIVE) as archive:
        folder = tmp_path_factory.mktemp("photos")
        archive.extractall(folder, filter="data")
    (annotations,) = folder.rglob("annotations")
    return annotations.parent


@pytest.fixture
def arguments() -> Callable[..., list[str]]:
    """Arguments of `momentum2 detect` for a run of a few seconds, changed as told (`_` for `.`)."""

    def make(out: Path, **changes: str) -> list[str]:
        settings = SETTINGS | {name.replace("__", "."): value for name, value in changes.items()}
        return ["--out", str(out), *(f"--{name}={value}" for name, value in settings.items())]

    return make
