"""Data sets of the Hugging Face `datasets` library: from the Hub, from an Arrow folder or from Parquet files."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from momentum2.config import DataConfig
from momentum2.data.cache import cache_folder
from momentum2.data.columns import LABEL_COLUMNS
from momentum2.data.dataset import Dataset, Ints, Numbered
from momentum2.data.images import MAX_BYTES, BadImage, Encoded, refuse_large
from momentum2.data.layout import labels_from_words, no_split, split_in
from momentum2.errors import SettingError, UserError, reason
from momentum2.files import at_home, files_below, folders_below, read


class Rows(Dataset):
    """The rows of a table whose column of images has encoded bytes, or paths of files."""

    def __init__(self, rows: Any, column: str, labels: Ints | None, classes: list[str] | None) -> None:
        super().__init__(Numbered(len(rows)), labels, classes)
        self.rows, self.column = rows, column
        self.version = str(getattr(rows, "_fingerprint", ""))

    def picture(self, index: int) -> Encoded:
        cell = self.rows[index][self.column]
        data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if data is None and path:
            data = _file(path)
        if not isinstance(data, bytes):
            raise BadImage("an empty cell" if data is None else f"{type(data).__name__}, not an image")
        refuse_large(len(data))
        return Encoded(data, self.reading)

    def stamp(self, index: int) -> str:
        return f"{index}\0{self.version}"


def _file(path: str) -> bytes:
    try:
        return read(Path(path), MAX_BYTES)
    except (OSError, ValueError) as error:
        raise BadImage(reason(error)) from error


def open_hf(data: DataConfig, split: str) -> Rows:
    """`data.root`: the name of a data set on the Hub (owner/name, or owner/name/configuration), a folder that
    `save_to_disk` wrote, a .parquet file, or a folder of them.
    """
    try:
        import datasets
    except ImportError:
        raise UserError("Hugging Face data sets need an extra. Run pip install 'momentum2[hf]'.") from None
    datasets.disable_progress_bars()
    root = data.root or ""
    path = at_home(root)
    with _offline(not data.download):
        try:
            opened = _local(datasets, path, split, data) if path.exists() else None
            table = opened if opened is not None else _from_hub(datasets, root, split, data)
        except UserError:
            raise
        except Exception as error:  # there is no end to what it raises
            raise SettingError(
                "data.root", f"{root} cannot be opened as a Hugging Face data set ({reason(error)})."
            ) from error
    return _rows(datasets, table, data)


def _local(datasets: Any, path: Path, split: str, data: DataConfig) -> Any:
    if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        found_below = (Path(place, name) for place, _, names in folders_below(path) for name in names)
        odd = [p for p in found_below if not (p.is_file() or p.is_dir())]
        if odd:  # a named pipe would be waited for
            raise SettingError("data.root", f"{path} has {odd[0].name}, which is not a file. Remove it.")
        found = datasets.load_from_disk(str(path))
        if not isinstance(found, datasets.DatasetDict):
            found = {"train": found}
    else:
        files = [path] if path.is_file() else list(files_below(path, ".parquet"))
        if not files or any(file.suffix.lower() != ".parquet" for file in files):
            raise SettingError("data.root", f"{path} has no Parquet or Arrow data set.")
        by_split: dict[str, list[str]] = {}
        for file in files:
            name = file.relative_to(path).as_posix() if path.is_dir() else file.name
            by_split.setdefault(split_in(name) or "train", []).append(str(file))
        if split not in by_split:
            raise no_split(path, split, by_split)
        cache = str(cache_folder(data.cache_dir) / "hf")
        return datasets.load_dataset(
            "parquet", data_files={split: by_split[split]}, split=split, cache_dir=cache
        )
    if split not in found:
        raise no_split(path, split, found)
    return found[split]


def _from_hub(datasets: Any, root: str, split: str, data: DataConfig) -> Any:
    named = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?", root)
    if named is None:
        raise SettingError(
            "data.root", f"{root} does not exist, and is not the name of a data set on the Hub."
        )
    name, configuration = named.groups()
    if data.revision is None or not re.fullmatch(r"[0-9a-f]{40}", data.revision):
        newest = f" The newest is {_newest(name)}." if data.download else ""
        raise SettingError(
            "data.revision",
            f"is needed for {name}, a data set on the Hub, so that its images stay the same: "
            f"a commit of 40 digits.{newest}",
        )
    try:
        table = datasets.load_dataset(name, configuration, split=split, revision=data.revision)
    except ConnectionError as error:
        if data.download:
            raise
        raise SettingError(
            "data.download", f"is false, and {name} is not on this machine. Set it to true to fetch it."
        ) from error
    sources = list((table.info.download_checksums or {}).keys())
    if sources and not any(f"@{data.revision}" in source for source in sources):
        raise SettingError(
            "data.revision",
            f"is {data.revision}, but another commit of {name} is on this machine. Set download to true.",
        )
    return table


def _newest(name: str) -> str:
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(name).sha)


@contextmanager
def _offline(offline: bool) -> Iterator[None]:
    """Inside, the libraries do not use the network. They read the variable for it when they are imported."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if offline:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _rows(datasets: Any, table: Any, data: DataConfig) -> Rows:
    features = table.features
    image = data.image_column or next(
        (name for name, kind in features.items() if isinstance(kind, datasets.Image)), None
    )
    if image is None:
        binary = (
            name
            for name, kind in features.items()
            if getattr(kind, "dtype", "") in ("binary", "large_binary")
        )
        image = next(binary, None) or next(
            (name for name, kind in features.items() if _is_image_struct(kind)), None
        )
    if image is None or image not in features:
        raise SettingError(
            "data.image_column",
            f"must be a column of images; {data.root} has {', '.join(features) or 'none'}.",
        )
    label = data.label_column
    if label is None:
        label = next((name for name in features if name.lower() in LABEL_COLUMNS), None)
    elif label not in features:
        raise SettingError(
            "data.label_column", f"{label} is not a column of {data.root}, which has {', '.join(features)}."
        )
    labels, classes = (None, None) if label is None else _labels(table, label)
    rows = table.select_columns([image])
    if isinstance(features[image], datasets.Image):
        rows = rows.cast_column(image, datasets.Image(decode=False))
    return Rows(rows.with_format(None), image, labels, classes)


def _is_image_struct(kind: Any) -> bool:
    return isinstance(kind, dict) and {"bytes", "path"} <= kind.keys()


def _labels(table: Any, column: str) -> tuple[Ints | None, list[str] | None]:
    """Labels of a column of classes, whole numbers or words; None for anything else, such as boxes."""
    kind, values = table.features[column], table.with_format("arrow")[:][column].to_pylist()
    names = getattr(kind, "names", None)
    if names is not None:
        if any(value is None or value < 0 for value in values):  # the Hub's mark for "unknown"
            return None, None
        return np.array(values, np.int64), list(names)
    if not all(isinstance(value, int | str) and not isinstance(value, bool) for value in values):
        return None, None
    return labels_from_words([str(value) for value in values], np.arange(len(values)), str(column))
