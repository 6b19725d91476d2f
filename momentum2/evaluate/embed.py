"""Features as a file, for whatever comes next: search, selection, clustering, plots, other classifiers."""

import json
import tokenize
import zipfile
import zlib
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from momentum2 import distributed
from momentum2.errors import UserError, shown
from momentum2.evaluate.features import Features
from momentum2.evaluate.subject import Subject
from momentum2.files import asked_for, open_regular, parse_json, place_of, whole_file
from momentum2.runs.card import LARGEST_IMAGE
from momentum2.weights import checksum, on_cpu

_ORIGIN = "origin"  # the array, or the metadata of a Parquet file, that says where features come from
#: What a file that is damaged or of another kind can raise.
_DAMAGE = (
    *(ValueError, KeyError, TypeError, AttributeError, EOFError, OverflowError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, SyntaxError, tokenize.TokenError),  # numpy reads a header as Python
)


@dataclass(frozen=True)
class Origin:
    """Where features come from: what else must be the same to compare others with them, and where the images are.

    Args:
        encoder: SHA-256 of the weights.
        image_size: Side of what the encoder was shown.
        name: The kind of data set.
        root: Its folder or file, as it was given.
        split: Its part.
        reading: How images became pixels: decoded from `files`, as small as the crop allows; whole, as `arrays` that a
            cache has; or as arrays of `one size`, which are cropped on the device.
    """

    encoder: str
    image_size: int
    name: str
    root: str | None
    split: str
    reading: Literal["files", "arrays", "one size"]


@dataclass(frozen=True)
class Embeddings:
    """Features of n images.

    Args:
        features: (n, d) float32.
        names: Of the images.
        labels: (n,) int64, or None.
        class_names: What the labels mean, or None.
        origin: Where they come from, or None if that is not known.
    """

    features: NDArray[np.float32]
    names: list[str]
    labels: NDArray[np.int64] | None
    class_names: tuple[str, ...] | None
    origin: Origin | None = None


@dataclass(frozen=True)
class EmbedOptions:
    """Where features go.

    Args:
        out: File to write: .npz, or .parquet (needs the parquet extra).
    """

    out: str | None = None


def embeddings(subject: Subject) -> Embeddings:
    """The features of all images of `data.split`; unreadable images are left out."""
    dataset, data = subject.images, subject.options.data
    found: Features = subject.features(dataset)
    reading: Any = "one size" if dataset.fixed_size else "arrays" if dataset.in_memory else "files"
    return Embeddings(
        found.features.numpy(),
        [dataset.names[i] for i in found.indices.tolist()],
        None if found.labels is None else found.labels.numpy(),
        dataset.class_names,
        Origin(encoder_digest(subject), data.image_size, data.name, data.root, data.split, reading),
    )


def encoder_digest(subject: Subject) -> str:
    """What tells this encoder's weights from all others."""
    return checksum(on_cpu(subject.encoder.state_dict()))


def embed(subject: Subject, options: EmbedOptions) -> Embeddings:
    """Write the features of all images of `data.split`, with names and, if known, labels; returns them.

    An `.npz` has arrays `features` (n, d) float32, `paths` (n,), `labels` (n,), `class_names` and `origin` (JSON); a
    `.parquet` has columns `path`, `label`, `class` and `features`. Neither has labels if the data has none.
    """
    path = place_of("out", options.out or "", ".npz", ".parquet")
    write = _write_npz if path.suffix == ".npz" else partial(_write_parquet, *_parquet())
    found = embeddings(subject)
    if distributed.is_main():
        with asked_for("out", path), whole_file(path) as file:
            write(file, found)
    return found


def read_embeddings(path: Path) -> Embeddings:
    """What `embed` wrote, or another tool with the same arrays or columns; a `UserError` if it cannot be used."""
    if path.suffix not in (".npz", ".parquet"):
        raise UserError(f"{path} does not end in .npz or .parquet. Pass a file that momentum2 embed wrote.")
    read = _read_npz if path.suffix == ".npz" else partial(_read_parquet, _parquet()[1])
    try:
        with open_regular(path) as file:
            arrays, origin = read(file)
        return _checked(arrays, origin)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}).") from None
    except _DAMAGE as error:
        raise UserError(
            f"{path} is not a file of features ({shown(error)}). Write it again with momentum2 embed."
        ) from None


def _checked(arrays: dict[str, Any], origin: str | None) -> Embeddings:
    x, paths = arrays["features"], arrays["paths"]
    if x.ndim != 2 or x.dtype.kind != "f" or not x.size:
        raise ValueError("features must be numbers in rows and columns")
    x = np.ascontiguousarray(x, np.float32)
    if not all(np.isfinite(x[i : i + 65_536]).all() for i in range(0, len(x), 65_536)):
        raise ValueError("some features are not finite")
    if paths.dtype.kind != "U" or paths.shape != (len(x),):
        raise ValueError("there must be one path for each row of features")
    labels, classes = arrays.get("labels"), arrays.get("class_names")
    if labels is not None and classes is not None:
        if labels.dtype.kind not in "iu" or labels.shape != (len(x),) or classes.dtype.kind != "U":
            raise ValueError("there must be one label for each row of features")
        if labels.min() < 0 or labels.max() >= len(classes):
            raise ValueError("some labels have no class name")
    else:
        labels = classes = None
    return Embeddings(
        x,
        paths.tolist(),
        None if labels is None else labels.astype(np.int64),
        None if classes is None else tuple(classes.tolist()),
        None if origin is None else _origin(origin),
    )


def _origin(text: str) -> Origin:
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError("its origin is not a table")
    values: dict[str, Any] = {name: found.get(name) for name in Origin.__dataclass_fields__}
    for name, value in values.items():
        kinds = int if name == "image_size" else str | None if name == "root" else str
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ValueError(f"its origin has no proper {name}")
    if (
        values["reading"] not in ("files", "arrays", "one size")
        or not 0 < values["image_size"] <= LARGEST_IMAGE
    ):
        raise ValueError("its origin is not one that can be repeated")
    return Origin(**values)


def _utf8(name: str) -> str:
    """A file's name as text that can be encoded: bytes that are not UTF-8 become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _write_npz(file: BinaryIO, found: Embeddings) -> None:
    arrays: dict[str, Any] = {"features": found.features, "paths": np.array(found.names)}
    if found.labels is not None:
        arrays |= {"labels": found.labels, "class_names": np.array(found.class_names)}
    if found.origin is not None:
        arrays[_ORIGIN] = np.array(json.dumps(asdict(found.origin)))
    np.savez(file, allow_pickle=False, **arrays)


def _read_npz(file: BinaryIO) -> tuple[dict[str, Any], str | None]:
    with np.load(file, allow_pickle=False) as stored:
        names = ("features", "paths", "labels", "class_names", _ORIGIN)
        arrays = {name: stored[name] for name in names if name in stored}
    return arrays, str(arrays.pop(_ORIGIN)) if _ORIGIN in arrays else None


def _parquet() -> tuple[Any, Any]:
    """pyarrow, asked for before anything is computed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "Parquet files need pyarrow. Run pip install 'momentum2[parquet]', or use .npz."
        ) from None
    return pyarrow, pyarrow.parquet


def _write_parquet(pa: Any, pq: Any, file: BinaryIO, found: Embeddings) -> None:
    x = found.features
    columns = {"path": pa.array([_utf8(name) for name in found.names])}
    if found.labels is not None and found.class_names is not None:
        names = np.array([_utf8(name) for name in found.class_names])
        columns |= {"label": pa.array(found.labels), "class": pa.array(names[found.labels])}
    columns["features"] = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1])
    table = pa.table(columns)
    if found.origin is not None:
        table = table.replace_schema_metadata({_ORIGIN: json.dumps(asdict(found.origin))})
    pq.write_table(table, file)


def _read_parquet(pq: Any, file: BinaryIO) -> tuple[dict[str, Any], str | None]:
    table = pq.read_table(file)
    column = table["features"].combine_chunks()
    if not hasattr(column.type, "list_size"):
        raise ValueError("features must be lists of one length")
    values = column.flatten().to_numpy(zero_copy_only=False)
    arrays = {
        "features": values.reshape(len(table), column.type.list_size),
        "paths": np.array(table["path"].to_pylist(), dtype=np.str_),
    }
    if "class" in table.column_names:
        names, labels = np.unique(np.array(table["class"].to_pylist(), np.str_), return_inverse=True)
        arrays |= {"labels": labels, "class_names": names}
    origin = (table.schema.metadata or {}).get(_ORIGIN.encode())
    return arrays, None if origin is None else origin.decode()
