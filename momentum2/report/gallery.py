"""Pages of images side by side, with small copies of them inside: they open from a file, and nothing leaves them."""

import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from momentum2.config import DataConfig
from momentum2.data import Dataset, open_dataset
from momentum2.data.folders import Files
from momentum2.data.images import BadImage, Picture
from momentum2.data.opening import find_data
from momentum2.errors import SettingError, UserError, shown
from momentum2.evaluate.embed import Embeddings, Origin
from momentum2.evaluate.search import Neighbors
from momentum2.evaluate.selection import Selection
from momentum2.files import asked_for, write_csv, write_whole
from momentum2.report.html import data_uri, escape, note

_SIDE = 192  # pixels of the longer side of a thumbnail
_MOST = 500  # images on the page of a selection: some megabytes

#: Data sets that a file of features may name: they are on this machine, and opening them fetches nothing.
_LOCAL = ("folder", "imagenet", "archive", "list", "cifar10", "cifar100", "stl10", "shapes")
_FILES = ("folder", "imagenet", "list")

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
.note { opacity: .75; }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: .75rem; }
figure { margin: 0; padding: .4rem; border: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
figure { border-radius: .4rem; }
figure.query { border: 2px solid #2a7ae2; }
figure img { display: block; width: 100%; height: 8rem; object-fit: contain; }
figure p { height: 8rem; margin: 0; display: grid; place-items: center; opacity: .6; text-align: center; }
figcaption { font-size: .8rem; overflow-wrap: anywhere; } figcaption b { display: block; }
"""


@dataclass(frozen=True)
class Shown:
    """One image on a page.

    Args:
        name: What it is called.
        words: What is said of it.
        picture: A small copy (WebP), or None if it cannot be shown.
        query: Whether the others beside it were found for it.
    """

    name: str
    words: str
    picture: bytes | None
    query: bool = False


def write_search(path: Path, found: Sequence[Neighbors], features: Embeddings, data: str | None) -> None:
    """The page of a search: each image, and beside it those that were found."""
    wanted = {name for one in found for name in one.names}
    pictures, missing = _thumbnails_of(features, data, wanted)
    queries = Files(Path(), [one.image for one in found], None, None)
    rows = []
    for i, one in enumerate(found):
        query = Shown(one.image, "searched for", _thumbnail(queries, i), query=True)
        cards = [
            Shown(name, f"similarity {similarity:.3f}", pictures.get(name))
            for name, similarity in zip(one.names, one.similarity.tolist(), strict=True)
        ]
        rows.append((Path(one.image).name, [query, *cards]))
    _write(
        path,
        "Nearest images",
        f"Among {len(features.names):,} images, by the cosine similarity of their features.",
        missing,
        rows,
    )


def write_selection(path: Path, found: Selection, features: Embeddings, data: str | None) -> None:
    """The page of a selection: each image, for duplicates beside the one that it repeats."""
    some = list(zip(found.names, found.similarity.tolist(), found.like.tolist(), strict=True))[:_MOST]
    like = {features.names[i] for _, _, i in some} if found.by == "duplicates" else set()
    pictures, missing = _thumbnails_of(features, data, like | {name for name, _, _ in some})
    groups: dict[str, list[Shown]] = {}
    for name, similarity, i in some:
        card = Shown(name, f"similarity {similarity:.3f}", pictures.get(name))
        if found.by == "duplicates":
            kept = features.names[i]
            groups.setdefault(kept, [Shown(kept, "kept", pictures.get(kept), query=True)]).append(card)
        else:
            groups.setdefault("", []).append(card)
    of = f"{len(found.names):,} of {len(features.names):,} images"
    intro = {
        "duplicates": f"{of} repeat an earlier one, which is kept.",
        "outliers": f"{of}, least similar to the others first.",
        "diverse": f"{of} that cover the others; similarity is to the nearest earlier one.",
    }[found.by]
    intro += f" The first {_MOST} are shown." if len(found.names) > _MOST else ""
    _write(path, found.by.capitalize(), intro, missing, list(groups.items()))


def write_table(path: Path, found: Selection, features: Embeddings) -> None:
    """The selection as a .csv file: path, similarity, and the path that it is similar to."""
    rows = zip(found.names, found.similarity.tolist(), found.like.tolist(), strict=True)
    header = ("path", "similarity", "like")
    write_csv(path, [header, *((name, f"{value:.6f}", features.names[i]) for name, value, i in rows)])


def write_list(path: Path, rows: Iterable[int], features: Embeddings, data: str | None) -> None:
    """These images as a list file, which can be trained on: paths from its folder on, and classes if they are known."""
    origin = features.origin
    if data is None and (origin is None or origin.name not in _FILES or origin.root is None):
        raise SettingError(
            "keep", "needs features of image files; those of an archive have no paths. Leave it out."
        )
    root = Path(data or (origin.root if origin and origin.root else "."))
    folder = root.parent if root.is_file() else root
    lines = []
    for i in rows:
        line = os.path.relpath(folder / features.names[i], path.parent)
        if line != line.strip() or not line.isprintable():
            raise UserError(f"{shown(features.names[i])} cannot be written to a list of paths. Rename it.")
        if features.labels is not None and features.class_names is not None:
            line += f"\t{features.class_names[features.labels[i]]}"
        lines.append(f"{line}\n")
    with asked_for("keep", path):
        write_whole(path, "".join(lines).encode())


def _thumbnails_of(
    features: Embeddings, data: str | None, wanted: set[str]
) -> tuple[dict[str, bytes | None], str]:
    """Small copies of images by name, and a sentence if they are not found where the features come from."""
    try:
        dataset = _images_of(features.origin, data)
    except UserError as error:
        return {}, f"The images are not shown: {error}"
    found = {name: _thumbnail(dataset, i) for i, name in enumerate(dataset.names) if name in wanted}
    lost = wanted - found.keys()
    where = shown(data or (features.origin.root if features.origin else "") or "")
    return found, f"{len(lost):,} images are not shown: they are no longer in {where}." if lost else ""


def _images_of(origin: Origin | None, data: str | None) -> Dataset:
    size = origin.image_size if origin else 224
    if data is not None:
        config = find_data(data, DataConfig(image_size=size))
        config = replace(config, split=origin.split if origin else config.split)
    elif origin is None or origin.name not in _LOCAL:
        raise UserError("The features do not say where the images are. Pass their folder as data.")
    else:
        config = DataConfig(origin.name, origin.root, image_size=size, split=origin.split)  # type: ignore[arg-type]
    return open_dataset(replace(config, cache="off"))


def _thumbnail(dataset: Dataset, index: int) -> bytes | None:
    try:
        return _small(dataset.picture(index))
    except BadImage:
        return None


def _small(picture: Picture) -> bytes:
    reduce = next((r for r in (8, 4, 2) if max(picture.size) >= r * _SIDE), 1)
    image = Image.fromarray(picture.pixels(reduce))
    if max(image.size) < _SIDE // 2:  # tiny ones, such as CIFAR's: as they are, only larger
        factor = _SIDE // max(image.size)
        image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    image.save(file, "WEBP", quality=80)
    return file.getvalue()


def _write(
    path: Path, title: str, intro: str, missing: str, rows: Sequence[tuple[str, Sequence[Shown]]]
) -> None:
    parts = []
    for heading, cards in rows:
        title_of = f"<h2>{escape(shown(heading))}</h2>" if heading else ""
        parts.append(f'<section>{title_of}<div class="row">{"".join(map(_card, cards))}</div></section>')
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>momentum2: {escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1><p>{escape(intro)}</p>{note(missing) if missing else ''}{''.join(parts)}"
        "</main></body></html>\n"
    )
    with asked_for("out", path):
        write_whole(path, page.encode("utf-8", "replace"))


def _card(card: Shown) -> str:
    name = escape(shown(card.name))
    picture = (
        f'<img src="{data_uri("image/webp", card.picture)}" alt="{name}" loading="lazy">'
        if card.picture
        else "<p>not shown</p>"
    )
    kind = ' class="query"' if card.query else ""
    return f"<figure{kind}>{picture}<figcaption><b>{escape(card.words)}</b>{name}</figcaption></figure>"
