"""Features as a file, for whatever comes next: search, clustering, plots, other classifiers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from momentum2 import distributed
from momentum2.data import Dataset
from momentum2.errors import SettingError, UserError
from momentum2.evaluate.features import Features
from momentum2.evaluate.subject import Subject
from momentum2.files import whole_file


@dataclass(frozen=True)
class EmbedOptions:
    """Where features go.

    Args:
        out: File to write: .npz, or .parquet (needs the parquet extra).
    """

    out: str | None = None


def embed(subject: Subject, options: EmbedOptions) -> Features:
    """Write the features of all images of `data.split`, with names and, if known, labels; returns them.

    An `.npz` has arrays `features` (n, d) float32, `paths` (n,), `labels` (n,) and `class_names`; a
    `.parquet` has columns `path`, `label`, `class` and `features`. Neither has labels if the data has none.
    """
    path = Path(options.out or "")
    if path.suffix not in (".npz", ".parquet"):
        raise SettingError("out", "must be a file that ends in .npz or .parquet.")
    if not path.parent.is_dir():
        raise SettingError("out", f"{path} is in a folder that does not exist. Create it, or choose another.")
    write = _write_npz if path.suffix == ".npz" else _parquet_writer()
    dataset = subject.images
    found = subject.features(dataset)
    if distributed.is_main():
        try:
            with whole_file(path) as file:
                write(file, found, dataset)
        except OSError as error:
            raise SettingError(
                "out", f"{path} cannot be written ({error.strerror}). Choose another file."
            ) from None
    return found


def _paths(found: Features, dataset: Dataset) -> list[str]:
    return [dataset.names[i] for i in found.indices.tolist()]


def _utf8(name: str) -> str:
    """A file's name as text that can be encoded: bytes that are not UTF-8 become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _write_npz(file: BinaryIO, found: Features, dataset: Dataset) -> None:
    arrays = {"features": found.features.numpy(), "paths": np.array(_paths(found, dataset))}
    if found.labels is not None:
        arrays |= {"labels": found.labels.numpy(), "class_names": np.array(dataset.class_names)}
    np.savez(file, allow_pickle=False, **arrays)


def _parquet_writer() -> Callable[[BinaryIO, Features, Dataset], None]:
    """The writer of .parquet files, asked for before the features are computed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(
            "Parquet files need pyarrow. Run pip install 'momentum2[parquet]', or use .npz."
        ) from None

    def write(file: BinaryIO, found: Features, dataset: Dataset) -> None:
        x = found.features
        columns = {"path": pa.array([_utf8(name) for name in _paths(found, dataset)])}
        if found.labels is not None and dataset.class_names is not None:
            labels = found.labels.numpy()
            names = np.array([_utf8(name) for name in dataset.class_names])
            columns |= {"label": pa.array(labels), "class": pa.array(names[labels])}
        columns["features"] = pa.FixedSizeListArray.from_arrays(pa.array(x.flatten().numpy()), x.shape[1])
        pq.write_table(pa.table(columns), file)

    return write
