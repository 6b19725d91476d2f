"""Tables of image files: paths in a .csv, .tsv or .parquet, perhaps with a label and a split beside each."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from momentum2.data.folders import Files
from momentum2.data.layout import labels_from_words
from momentum2.errors import SettingError, UserError
from momentum2.files import open_regular, read

SUFFIXES = (".csv", ".tsv", ".parquet")
IMAGE_COLUMNS = ("path", "file", "image", "file_name", "filename", "file_path", "image_path", "img")
LABEL_COLUMNS = ("label", "labels", "class", "category", "target", "fine_label")
_SPLIT = "split"


def open_table(path: Path, split: str, image: str | None, label: str | None) -> Files:
    """Image files named in a table, relative to it.

    Args:
        path: The table, with a column "split" or without; or a folder with one table per split (train.csv, test.csv).
        split: The split.
        image: Column of the paths; by default one of `IMAGE_COLUMNS`.
        label: Column of the labels; by default one of `LABEL_COLUMNS`, if there is one.
    """
    if path.is_dir():
        tables = {file.stem: file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES}
    else:
        tables = {"train": path}
    rows = [(name, *row) for name, file in tables.items() for row in _rows(file, image, label)]
    if any(row[3] for row in rows) and not path.is_dir():
        rows = [(own or name, file, word, own) for name, file, word, own in rows]
    chosen = [row for row in rows if row[0] == split]
    if not chosen:
        found = sorted({row[0] for row in rows})
        raise SettingError(
            "data.root", f"{path} has no rows for split {split!r} (found: {', '.join(found) or 'none'})."
        )
    urls = [row[1] for row in chosen if "://" in row[1]]
    if urls:
        raise SettingError(
            "data.root",
            f"{path} names images by URL ({len(urls):,} of them). Download them, or pack them into shards.",
        )
    # One numbering of the classes in all splits.
    where = np.flatnonzero([row[0] == split for row in rows])
    labels, classes = labels_from_words([row[2] for row in rows], where, str(path))
    return Files(path if path.is_dir() else path.parent, (row[1] for row in chosen), labels, classes)


def _rows(path: Path, image: str | None, label: str | None) -> list[tuple[str, str, str]]:
    """(path, label, split) of each row; an empty text where there is no label or split."""
    columns = _parquet(path, image, label) if path.suffix == ".parquet" else _text(path, image, label)
    if not columns[0]:
        raise UserError(f"The table {path} is empty. Write one image per row.")
    if not all(columns[0]):
        raise UserError(f"Row {columns[0].index('') + 1:,} of {path} has no path.")
    return list(zip(*columns, strict=True))


def _text(path: Path, image: str | None, label: str | None) -> list[list[str]]:
    try:
        text = io.StringIO(read(path).decode("utf-8-sig"), newline="")
        reader = csv.DictReader(text, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        chosen = choose_columns(reader.fieldnames or (), image, label, path)
        rows = [[(row.get(name) or "").strip() if name else "" for name in chosen] for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a table ({error}).") from error
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], []]


def _parquet(path: Path, image: str | None, label: str | None) -> list[list[str]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("Parquet needs an extra. Run pip install 'momentum2[parquet]'.") from None
    try:
        with open_regular(path) as file:
            schema = pq.read_schema(file)
        chosen = choose_columns(schema.names, image, label, path)
        if not pa.types.is_string(schema.field(chosen[0]).type):
            raise SettingError(
                "data.image_column",
                f"{chosen[0]} of {path} has no paths but {schema.field(chosen[0]).type}. Images inside a table "
                'are read by the data set "hf".',
            )
        with open_regular(path) as file:
            table = pq.read_table(file, columns=[name for name in chosen if name])
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read as a table ({' '.join(str(error).split())[:200]})."
        ) from error
    none = [""] * len(table)
    texts = {
        name: ["" if value is None else str(value) for value in table[name].to_pylist()]
        for name in chosen
        if name
    }
    return [texts[name] if name else none for name in chosen]


def choose_columns(
    names: Sequence[str], image: str | None, label: str | None, path: Path | str
) -> tuple[str, str | None, str | None]:
    """The columns of images, labels and splits: those that were named, or that have a usual name."""
    by_name = {name.lower(): name for name in names if name}
    for setting, named in (("data.image_column", image), ("data.label_column", label)):
        if named is not None and named not in names:
            raise SettingError(
                setting, f"{named} is not a column of {path}, which has {', '.join(map(str, names))}."
            )
    image = image or _usual(by_name, IMAGE_COLUMNS)
    if image is None:
        raise SettingError(
            "data.image_column",
            f"is needed: none of the columns of {path} ({', '.join(map(str, names)) or 'none'}) has a usual name.",
        )
    return image, label or _usual(by_name, LABEL_COLUMNS), by_name.get(_SPLIT)


def _usual(by_name: Mapping[str, str], usual: Sequence[str]) -> str | None:
    return next((by_name[name] for name in usual if name in by_name), None)


def has_header(path: Path) -> bool:
    """Whether the first line of a text table names columns, one of them as columns of images are named."""
    try:
        with open_regular(path) as file:
            first = file.readline(10_000).decode("utf-8-sig", "replace").strip()
    except OSError:
        return False
    return _usual({word.lower(): word for word in first.split("\t")}, IMAGE_COLUMNS) is not None


def has_images(path: Path) -> bool:
    """Whether a Parquet file has images in it, and not only their paths."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return False
    try:
        with open_regular(path) as file:
            kinds = [field.type for field in pq.read_schema(file)]
    except (OSError, pa.ArrowException):
        return False
    return any(pa.types.is_binary(kind) or pa.types.is_struct(kind) for kind in kinds)
