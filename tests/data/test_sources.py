"""Every form of the same images gives the same pixels, labels and training; what is wrong with one is a sentence."""

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forms import FORMS, Pairs, add, as_form, hugging_face, write_shards
from PIL import Image

from momentum2.config import Config, DataConfig
from momentum2.data import Dataset, open_dataset
from momentum2.data.fingerprint import difference, fingerprint
from momentum2.data.opening import find_data
from momentum2.data.remote import check_url
from momentum2.data.sequence import as_dataset
from momentum2.errors import SettingError, UserError


@pytest.fixture
def folder(make_folder: Callable[..., Path]) -> Path:
    return make_folder(24, classes=3)


def same(dataset: Dataset, plain: Dataset, labels: bool = True) -> None:
    assert len(dataset) == len(plain)
    for i in np.random.default_rng(0).integers(0, len(plain), 40).tolist():
        np.testing.assert_array_equal(dataset.picture(i).pixels(), plain.picture(i).pixels())
    if labels:
        assert dataset.labels is not None
        np.testing.assert_array_equal(dataset.labels, plain.labels)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_pixels_and_labels(form: str, folder: Path, tmp_path: Path) -> None:
    plain = open_dataset(DataConfig(root=str(folder), cache="off"))
    data = as_form(folder, form, tmp_path / "form")
    dataset = open_dataset(DataConfig(data.name, data.root, cache="off"))
    same(dataset, plain)
    assert dataset.class_names == (("0", "1", "2") if form == "shards" else plain.class_names)
    found = find_data(data.root or "", DataConfig())
    assert (found.name, found.root) == (data.name, data.root)
    sent = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(sent.picture(5).pixels(), plain.picture(5).pixels())
    cached = open_dataset(DataConfig(data.name, data.root, cache="on"))
    same(cached, plain)
    assert difference(fingerprint(dataset), fingerprint(cached), dataset.names) is None


def python_forms(folder: Path) -> dict[str, Any]:
    pairs = Pairs(folder)
    every = [pairs[i] for i in range(len(pairs))]
    return {
        "torch": pairs,
        "list": every,
        "arrays": [(np.asarray(image), label) for image, label in every],
        "tensors": [
            (torch.from_numpy(np.array(image)).permute(2, 0, 1), torch.tensor(label))
            for image, label in every
        ],
        "dicts": [{"image": image, "label": label} for image, label in every],
        "datasets": hugging_face(folder),
        "images": [image for image, _ in every],
    }


@pytest.mark.parametrize("form", ["torch", "list", "arrays", "tensors", "dicts", "datasets", "images"])
def test_every_python_form_has_the_same_pixels(form: str, folder: Path) -> None:
    plain = open_dataset(DataConfig(root=str(folder), cache="off"))
    dataset = as_dataset(python_forms(folder)[form])
    same(dataset, plain, labels=form != "images")


def test_training_bits_are_the_same(folder: Path, tmp_path: Path) -> None:
    """A folder, its shards and a Python data set, the latter two with worker processes."""
    import safetensors.torch

    from momentum2 import pretrain, recipe

    def weights(name: str, data: dict[str, object], dataset: Any = None) -> dict[str, torch.Tensor]:
        fixed = {
            "model.width": 0.125,
            "model.projector_hidden": 16,
            "data.image_size": 16,
            "data.cache": "off",
        }
        fixed |= {"train.batch_size": 8, "train.steps": 3, "train.device": "cpu", "train.threads": 1}
        fixed |= {"eval_data.name": "none", "monitor.report": False, "optim.warmup_epochs": 0}
        config = recipe("quickstart", fixed | data)
        pretrain(config, tmp_path / name, dataset=dataset)
        return safetensors.torch.load_file(tmp_path / name / "encoder.safetensors")

    write_shards(folder, tmp_path / "shards", 3)
    first = weights("folder", {"data.name": "folder", "data.root": str(folder)})
    shards = {"data.name": "shards", "data.root": str(tmp_path / "shards"), "data.workers": 1}
    for again in (weights("of-shards", shards), weights("of-python", {"data.workers": 0}, Pairs(folder))):
        assert again.keys() == first.keys()
        assert all(torch.equal(again[name], first[name]) for name in first)


# -- shards


class Touch:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def shards(root: Path, **more: Any) -> Dataset:
    return open_dataset(DataConfig("shards", str(root), cache="off", **more))


def test_other_members_are_ignored_and_nothing_is_unpickled(folder: Path, tmp_path: Path) -> None:
    trap = pickle.dumps(Touch(tmp_path / "run"))
    write_shards(folder, tmp_path / "s", 2, extra=trap)
    with tarfile.open(tmp_path / "s" / "data-001.tar", "a") as archive:
        add(archive, "zz.jpg", trap)
        add(archive, "zz.cls", trap)
        link = tarfile.TarInfo("zzz.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(UserError, match="have a label and some do not"):
        shards(tmp_path / "s")
    with tarfile.open(tmp_path / "s" / "data-001.tar", "a") as archive:
        add(archive, "zz.cls", b"1")
    with tarfile.open(tmp_path / "s" / "data-002.tar", "w") as archive:
        add(archive, "y.jpg", trap)
        add(archive, "y.json", json.dumps({"label": 2, "text": "x"}).encode())
    (tmp_path / "s" / "data-001.tar").unlink()
    dataset = shards(tmp_path / "s", max_bad_fraction=0.5)
    assert dataset.labels is not None
    assert dataset.labels[-1] == 2
    dataset.read(range(len(dataset)))
    assert list(dataset.bad.values()) == ["not an image in a known format"]
    assert not (tmp_path / "run").exists()


def test_the_index_is_kept_and_a_changed_shard_is_noticed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(folder, tmp_path / "s", 2)
    plain = open_dataset(DataConfig(root=str(folder), cache="off"))
    same(shards(tmp_path / "s"), plain)
    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "open", None)  # it is not read again
        same(shards(tmp_path / "s"), plain)
    write_shards(folder, tmp_path / "s", 2, extra=b"more")
    same(shards(tmp_path / "s"), plain)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("s", 24), ("s/data-*.tar", 24), ("s/data-{000..002}.tar", 18), ("s/data-001.tar", 6)],
)
def test_patterns_of_shards(pattern: str, count: int, folder: Path, tmp_path: Path) -> None:
    write_shards(folder, tmp_path / "s", 4)
    assert len(shards(tmp_path / pattern)) == count


def test_splits_of_shards(folder: Path, tmp_path: Path) -> None:
    write_shards(folder, tmp_path / "s", 2, "x-train")
    write_shards(folder, tmp_path / "s", 1, "x-val")
    train, val = shards(tmp_path / "s"), shards(tmp_path / "s", split="val")
    assert (len(train), len(val)) == (24, 24)
    assert train.class_names == val.class_names
    assert find_data(str(tmp_path / "s"), DataConfig()).test_split == "val"
    with pytest.raises(UserError, match=r"has no split .test.\. Choose one of train, val"):
        shards(tmp_path / "s", split="test")


def test_broken_shards_are_a_sentence(folder: Path, tmp_path: Path) -> None:
    write_shards(folder, tmp_path / "s", 1)
    whole = (tmp_path / "s" / "data-000.tar").read_bytes()
    for content in (
        b"no tar at all" * 100,
        b"\x1f\x8b" + whole,
        whole[:512].replace(b"0", b"9") + whole[512:],
    ):
        (tmp_path / "s" / "data-000.tar").write_bytes(content)
        with pytest.raises(UserError, match="cannot be read as a shard"):
            shards(tmp_path / "s")
    (tmp_path / "s" / "data-000.tar").write_bytes(whole[: len(whole) * 2 // 3])  # a copy that was interrupted
    with pytest.raises(UserError, match="cannot be read as a shard"):
        shards(tmp_path / "s")
    (tmp_path / "s" / "data-000.tar").write_bytes(b"\0" * 10240)
    with pytest.raises(SettingError, match="has no images in its shards"):
        shards(tmp_path / "s")
    with pytest.raises(SettingError, match="has no shards"):
        shards(folder)
    with pytest.raises(SettingError, match="does not exist"):
        shards(tmp_path / "nowhere.tar")


# -- tables and Hugging Face


def table(tmp_path: Path, text: str, **more: Any) -> Dataset:
    (tmp_path / "t.csv").write_text(text)
    return open_dataset(DataConfig("table", str(tmp_path / "t.csv"), cache="off", max_bad_fraction=1, **more))


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("", {}, "data.image_column is needed: none of the columns"),
        ("a,b\n1,2\n", {}, "data.image_column is needed"),
        ("path\n", {}, "is empty"),
        ("path,label\na.jpg,1\n,2\n", {}, "Row 2 of .* has no path"),
        ("path,label\na.jpg,1\nb.jpg,\n", {}, "have a label and some do not"),
        ("path\na.jpg\n", {"label_column": "kind"}, "data.label_column kind is not a column"),
        ("path\na.jpg\n", {"image_column": "kind"}, "data.image_column kind is not a column"),
        ("path\na.jpg\n", {"split": "test"}, "no rows for split 'test'"),
        ("path\nhttp://x/a.jpg\n", {}, "by URL"),
        ('path\n"a.jpg\n', {}, "cannot be read as a table"),
        ("path\n" + "x" * 200_000 + "\n", {}, "cannot be read as a table"),
    ],
)
def test_tables_that_cannot_be_read(text: str, more: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        table(tmp_path, text, **more)


def test_tables_with_splits(folder: Path, tmp_path: Path) -> None:
    text = f"split,image,kind\ntrain,{folder}/class0/000.png,b\ntest,{folder}/class1/001.jpg,a\n"
    train = table(tmp_path, text, label_column="kind")
    test = table(tmp_path, text, label_column="kind", split="test")
    assert train.labels is not None
    assert test.labels is not None
    assert (train.labels.tolist(), test.labels.tolist()) == ([1], [0])
    assert train.class_names == test.class_names == ("a", "b")


def test_cells_of_parquet_are_not_executed(folder: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    png = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(png, "PNG")
    cells = [png.getvalue(), pickle.dumps(Touch(tmp_path / "run")), None, png.getvalue()]
    pq.write_table(pa.table({"picture": cells, "label": [1, 0, 0, 1]}), tmp_path / "t.parquet")
    dataset = open_dataset(DataConfig("hf", str(tmp_path / "t.parquet"), cache="off", max_bad_fraction=0.6))
    dataset.read(range(4))
    assert dataset.bad == {1: "not an image in a known format", 2: "an empty cell"}
    assert not (tmp_path / "run").exists()
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and nothing else")
    for kind in ("hf", "table"):
        with pytest.raises(UserError, match="cannot be"):
            open_dataset(DataConfig(kind, str(tmp_path / "t.parquet")))


def test_the_hub_needs_a_commit_and_leave(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="a commit of 40 digits") as caught:
        open_dataset(DataConfig("hf", "someone/pictures"))
    assert caught.value.setting == "data.revision"
    with pytest.raises(SettingError) as caught:
        open_dataset(DataConfig("hf", "someone/pictures", revision="0" * 40))
    assert caught.value.setting in ("data.download", "data.root")
    with pytest.raises(SettingError, match="does not exist, and is not the name"):
        open_dataset(DataConfig("hf", "no such/data set"))


# -- Python


class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        yield from ()


def test_python_data_that_cannot_be_used() -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    for images, words in (
        (Endless(), "is an IterableDataset"),
        (iter([pixels]), "must have __len__ and __getitem__"),
        ([], "has no images"),
        ([pixels, (pixels, 1)], "Label all of them or none"),
        ([{"pixels": pixels}], 'dicts without "image"'),
        ([(pixels, "cat")], "a whole number from 0"),
        ([(pixels, -1)], "a whole number from 0"),
    ):
        with pytest.raises(UserError, match=words):
            as_dataset(images)  # type: ignore[arg-type]


def test_unpicklable_data_needs_no_workers(tmp_path: Path) -> None:
    from momentum2.augment import view_specs
    from momentum2.config import ViewsConfig
    from momentum2.data import Loader

    rows = as_dataset([np.zeros((8, 8 + i % 2, 3), np.uint8) for i in range(8)])
    rows.items.append(lambda: None)  # type: ignore[attr-defined]
    specs = view_specs(ViewsConfig(), 8)
    with (
        Loader(rows, specs, seed=0, batch_size=4, stop=1, workers=1) as batches,
        pytest.raises(UserError, match="cannot be sent to worker processes"),
    ):
        next(iter(batches))
    with Loader(rows, specs, seed=0, batch_size=4, stop=1) as batches:
        assert len(next(iter(batches))) == 4


def test_floats_from_python_need_a_window() -> None:
    from momentum2.data.images import NeedsWindow, Reading

    values = torch.linspace(0, 1, 3 * 16 * 16).reshape(3, 16, 16)
    dataset = as_dataset([values])
    with pytest.raises(NeedsWindow):
        dataset.picture(0)
    dataset.reading = Reading(window=(0, 1))
    expected = (values * 255).round().byte().permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(dataset.picture(0).pixels(), expected)


# -- fingerprint


def test_a_copy_has_the_same_fingerprint_and_other_images_have_not(folder: Path, tmp_path: Path) -> None:
    import os
    import shutil

    before = fingerprint(open_dataset(DataConfig(root=str(folder), cache="off")))
    assert before == json.loads(json.dumps(before))
    shutil.copytree(folder, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "class0" / "000.png", (0, 0))

    def now() -> str | None:
        dataset = open_dataset(DataConfig(root=str(tmp_path / "copy"), cache="off"))
        return difference(before, fingerprint(dataset), dataset.names)

    assert now() is None
    file = tmp_path / "copy" / "class0" / "000.png"
    content = file.read_bytes()
    file.write_bytes((tmp_path / "copy" / "class0" / "006.png").read_bytes())
    assert now() == "class0/000.png has different content"
    file.write_bytes(b"")  # what cannot be read is said elsewhere
    assert now() is None
    file.write_bytes(content)
    file.rename(file.with_name("0.png"))
    assert now() == "they have different names or a different order"


def test_a_run_resumes_on_a_copy_and_not_on_other_images(folder: Path, tmp_path: Path) -> None:
    import shutil
    from dataclasses import replace

    from momentum2 import pretrain, recipe

    fixed = {"model.width": 0.125, "model.projector_hidden": 16, "data.image_size": 16, "train.device": "cpu"}
    fixed |= {"train.batch_size": 8, "train.steps": 2, "eval_data.name": "none", "monitor.report": False}
    config = recipe("quickstart", fixed | {"data.name": "folder", "data.root": str(folder)})
    pretrain(config, tmp_path / "run")
    shutil.copytree(folder, tmp_path / "copy")
    moved: Config = replace(config, data=replace(config.data, root=str(tmp_path / "copy")))
    assert pretrain(moved, tmp_path / "run").finished
    Image.new("RGB", (20, 20)).save(tmp_path / "copy" / "class1" / "001.jpg")
    with pytest.raises(
        UserError, match=r"started with different images: class1/001\.jpg has different content"
    ):
        pretrain(moved, tmp_path / "run")


@pytest.mark.slow
def test_processes_that_see_other_images_are_stopped(folder: Path, tmp_path: Path, warm_python: str) -> None:
    """Each machine has its own copy, and one of them is not the same."""
    import os
    import shutil
    import subprocess

    shutil.copytree(folder, tmp_path / "copy1")
    shutil.copytree(folder, tmp_path / "copy0")
    Image.new("RGB", (20, 20)).save(tmp_path / "copy1" / "class1" / "001.jpg")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from momentum2.__main__ import main\n"
        f"sys.argv += ['--data.root', {str(tmp_path / 'copy')!r} + os.environ['RANK']]\n"
        "sys.exit(main())\n"
    )
    words = "pretrain quickstart --model.width 0.125 --data.image_size 16 --data.name folder "
    words += "--train.batch_size 8 --train.steps 2 --train.device cpu --eval_data.name none --train.threads 1 --out"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(program)]
    done = subprocess.run(
        [warm_python, *torchrun, *words.split(), str(tmp_path / "run")],
        env=dict(
            os.environ,
            PYTHONPATH=str(Path(__file__).parents[2]),
            OMP_NUM_THREADS="1",
            PYTHON_EXEC=warm_python,
        ),
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "The processes see different images: class1/001.jpg has different content." in done.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


# -- URLs


@pytest.mark.parametrize(
    "url",
    [
        "pipe:cat secret",
        "pipe:aws s3 cp s3://secret -",
        "https://user:secret@host/a.tar",
        "https://host/a.tar?X-Amz-Signature=secret",
        "https://host/a.tar?token=secret",
        "https://host/a.tar#secret",
        "s3://secret@bucket/a.tar",
        "filecache::s3://secret/a.tar",
        "zip://secret.txt::https://host/a.zip",
        "ssh://secret/a.tar",
        "reference://secret",
        "file:///secret",
    ],
)
def test_urls_with_secrets_or_programs_are_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    from momentum2 import pretrain, recipe

    with pytest.raises(SettingError) as caught:
        check_url(url)
    assert "secret" not in str(caught.value)
    overrides = {"data.name": "shards", "data.root": url}
    with pytest.raises(SettingError) as caught:
        pretrain(recipe("quickstart", overrides), tmp_path / "run")
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(SettingError) as caught:
        find_data(url, DataConfig())
    assert "secret" not in str(caught.value)
