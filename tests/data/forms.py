"""The same labeled images in every form that can be read."""

import csv
import io
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from PIL import Image

from momentum2.config import DataConfig
from momentum2.data import open_dataset

#: Those that are named in a config.
FORMS = ("folder", "zip", "tar", "list", "csv", "tsv", "paths", "shards", "parquet", "arrow")


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def write_shards(folder: Path, out: Path, count: int, stem: str = "data", extra: bytes | None = None) -> None:
    """`count` shards with the images of `folder` in their order, and the number of each one's class."""
    names = open_dataset(DataConfig(root=str(folder), cache="off"))
    assert names.labels is not None
    out.mkdir(parents=True, exist_ok=True)
    each = -(-len(names) // count)
    for shard in range(count):
        with tarfile.open(out / f"{stem}-{shard:03}.tar", "w") as archive:
            for i in range(shard * each, min((shard + 1) * each, len(names))):
                path = folder / names.names[i]
                add(archive, f"{i:05}.cls", str(names.labels[i]).encode())
                add(archive, f"{i:05}{path.suffix}", path.read_bytes())
                if extra is not None:
                    add(archive, f"{i:05}.pyd", extra)


def as_form(folder: Path, form: str, out: Path) -> DataConfig:
    """The images of a folder of class folders, written again in another form."""
    dataset = open_dataset(DataConfig(root=str(folder), cache="off"))
    names, labels = list(dataset.names), dataset.labels
    assert labels is not None
    words = [name.split("/")[0] for name in names]
    out.mkdir(parents=True, exist_ok=True)
    match form:
        case "folder":
            shutil.copytree(folder, out / "copy")
            return DataConfig("folder", str(out / "copy"))
        case "zip":
            with zipfile.ZipFile(out / "a.zip", "w", strict_timestamps=False) as archive:
                for name in names:
                    archive.write(folder / name, name)
            return DataConfig("archive", str(out / "a.zip"))
        case "tar":
            with tarfile.open(out / "a.tar", "w", dereference=True) as tar:
                for name in reversed(names):
                    tar.add(folder / name, name)
            return DataConfig("archive", str(out / "a.tar"))
        case "list":
            lines = (f"{folder / name}\t{word}\n" for name, word in zip(names, words, strict=True))
            (out / "images.txt").write_text("".join(lines))
            return DataConfig("list", str(out / "images.txt"))
        case "csv" | "tsv":
            with (out / f"images.{form}").open("w", newline="") as file:
                rows = csv.writer(file, delimiter="\t" if form == "tsv" else ",")
                rows.writerow(["id", "Label", "path"])
                rows.writerows([i, words[i], folder / name] for i, name in enumerate(names))
            return DataConfig("table", str(out / f"images.{form}"))
        case "paths":
            import pyarrow as pa
            import pyarrow.parquet as pq

            table = pa.table({"file_name": [str(folder / name) for name in names], "label": words})
            pq.write_table(table, out / "paths.parquet")
            return DataConfig("table", str(out / "paths.parquet"))
        case "shards":
            write_shards(folder, out / "shards", 4)
            return DataConfig("shards", str(out / "shards"))
        case "parquet" | "arrow":
            rows = hugging_face(folder)
            if form == "arrow":
                rows.save_to_disk(str(out / "arrow"))
                return DataConfig("hf", str(out / "arrow"))
            rows.to_parquet(str(out / "train.parquet"))
            return DataConfig("hf", str(out / "train.parquet"))
    raise AssertionError(form)


def hugging_face(folder: Path) -> Any:
    """A `datasets.Dataset` with the encoded images in it."""
    import datasets

    dataset = open_dataset(DataConfig(root=str(folder), cache="off"))
    assert dataset.labels is not None
    cells = [{"bytes": (folder / name).read_bytes(), "path": None} for name in dataset.names]
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(dataset.class_names or ()))}
    table = {"image": cells, "label": dataset.labels.tolist()}
    return datasets.Dataset.from_dict(table, features=datasets.Features(kinds))


class Pairs:
    """A data set as a user writes one, which can be sent to processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(folder.rglob("*.*"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        file = self.files[index]
        with Image.open(file) as image:
            return image.convert("RGB"), self.classes.index(file.parent.name)
