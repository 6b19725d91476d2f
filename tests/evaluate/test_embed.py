import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from momentum2.config import DataConfig
from momentum2.errors import UserError
from momentum2.evaluate.embed import EmbedOptions, embed
from momentum2.evaluate.subject import SubjectOptions, open_subject

ONE = SubjectOptions(threads=1)


def test_npz_and_parquet_hold_the_same(run: Path, tmp_path: Path):
    with open_subject(run, ONE) as subject:
        assert embed(subject, EmbedOptions(str(tmp_path / "f.npz"))) == 200
        assert embed(subject, EmbedOptions(str(tmp_path / "f.parquet"))) == 200
        expected = subject.features(subject.images)
        names = list(subject.images.names)
    arrays = np.load(tmp_path / "f.npz", allow_pickle=False)
    assert np.array_equal(arrays["features"], expected.features.numpy())
    assert arrays["paths"].tolist() == names
    assert np.array_equal(arrays["labels"], expected.labels)
    table = pq.read_table(tmp_path / "f.parquet")
    assert table["path"].to_pylist() == names
    assert np.array_equal(np.array(table["features"].to_pylist(), np.float32), arrays["features"])
    assert table["class"].to_pylist() == arrays["class_names"][arrays["labels"]].tolist()
    assert sorted(p.name for p in tmp_path.glob("f.*")) == ["f.npz", "f.parquet"]


def test_images_without_labels(run: Path, tmp_path: Path):
    for i in range(3):
        Image.new("RGB", (20, 30), (80 * i, 0, 0)).save(tmp_path / f"{i}.jpg")
    data = DataConfig("folder", str(tmp_path), image_size=16, cache="off")
    with open_subject(run, replace(ONE, data=data)) as subject:
        embed(subject, EmbedOptions(str(tmp_path / "f.npz")))
        embed(subject, EmbedOptions(str(tmp_path / "f.parquet")))
    arrays = np.load(tmp_path / "f.npz", allow_pickle=False)
    assert sorted(arrays) == ["features", "paths"]
    assert arrays["paths"].tolist() == ["0.jpg", "1.jpg", "2.jpg"]
    assert pq.read_table(tmp_path / "f.parquet").column_names == ["path", "features"]


def test_the_same_command_gives_the_same_file(run: Path, tmp_path: Path):
    for name in ("a", "b"):
        with open_subject(run, ONE) as subject:
            embed(subject, EmbedOptions(str(tmp_path / f"{name}.npz")))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        (None, "Say where the features go"),
        ("f.csv", "Say where the features go"),
        ("no/f.npz", "does not exist"),
    ],
)
def test_mistakes_are_one_sentence(run: Path, out: str | None, sentence: str):
    with open_subject(run, ONE) as subject, pytest.raises(UserError, match=sentence):
        embed(subject, EmbedOptions(out))


@pytest.mark.slow
def test_two_processes_write_what_one_writes(run: Path, tmp_path: Path):
    program = (
        "import sys\n"
        "from momentum2.evaluate.embed import EmbedOptions, embed\n"
        "from momentum2.evaluate.subject import SubjectOptions, open_subject\n"
        "with open_subject(sys.argv[1], SubjectOptions(threads=1, feature_batch=64)) as subject:\n"
        "    embed(subject, EmbedOptions(sys.argv[2]))\n"
    )
    (tmp_path / "program.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for start, out in (([sys.executable], "one.npz"), (torchrun, "two.npz")):
        command = [*start, str(tmp_path / "program.py"), str(run), str(tmp_path / out)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, timeout=200)
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
