"""Attacks on every command alike: odd circumstances, odd files for all that it reads, odd places for what it writes."""

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from attacks import _JSON_VALUES as JSON_VALUES
from attacks import _PATHS as PATHS
from attacks import KNN, ON_RUN, RUN, TEXTS, both, copies, group
from attacks import _devices_stay as devices_stay
from attacks import _odd_paths as odd_paths
from corpus import (
    DETECT,
    EMBED,
    KINDS,
    PRETRAIN,
    damages,
    encoded,
    pickled_bomb,
    replace_by,
    stability_result,
    zip_bomb,
)
from judge import Case, Place

_SEARCH = ("search", "run", "photos/class0/0.png", "--in", "found.npz")
_SELECT = ("select", "found.npz", "--by")
_STABILITY = ("reproduce", "stability", "--out", "studies")
#: A good call of every command, on copies of the bases.
COMMANDS: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    "version": ("--version",),
    "completion": ("--print-completion", "bash"),
    "recipes": ("recipes",),
    "recipe": ("recipes", "quickstart"),
    "backbones": ("backbones", "resnet1*"),
    "plan": ("plan", "quickstart", "--images", "1000"),
    "plan-help": ("plan", "--help"),
    "views": ("views", "photos", "--count", "2", "--out", "views.png"),
    "stats": ("stats", "photos"),
    "pretrain": (*PRETRAIN, "--out", "new"),
    "knn": KNN,
    "linear": (
        *("evaluate", "linear", *KNN[2:-8], "--epochs", "1", "--floors", "false"),
        *("--threads", "1", "--data.cache", "off"),
    ),
    "semi": ("evaluate", "semi", *KNN[2:-8], "--fraction", "0.5", "--epochs", "1", "--threads", "1"),
    "embed": ON_RUN["embed"],
    "search": (*_SEARCH, "--out", "search.html", "--count", "2"),
    "duplicates": (*_SELECT, "duplicates", "--out", "select.csv"),
    "outliers": (*_SELECT, "outliers", "--out", "select.html"),
    "diverse": (*_SELECT, "diverse", "--count", "3", "--keep", "keep.txt"),
    "runs": ("runs", ".", "--out", "runs.csv"),
    "report": ON_RUN["report"],
    "eval-only": ("detect", "detector", "--eval_only", "true", "--train.threads", "1"),
    "images": ("detect", "detector", "--images", "photos", "--train.threads", "1"),
    "detect": DETECT,
    "stability": _STABILITY,
    "table": ("reproduce", "alpha", "--dry_run", "true"),
    "torchvision": ON_RUN["export"],
    "onnx": ("export", "run", "--format", "onnx", "--out", "exported"),
    "recalibrate": (
        "export",
        "run",
        "--format",
        "torchvision",
        "--out",
        "exported",
        "--recalibrate",
        "photos",
    ),
    "log": ("log", "run", "--to", "tensorboard"),
    "doctor": ("doctor",),
}


def _study(place: Place) -> None:
    folder = place.case / "studies" / "stability"
    folder.mkdir(parents=True)
    (folder / "seed-0.json").write_text(json.dumps(stability_result()))


BASES = both(copies("run", "photos", "found.npz", "detector"), _study)


def _closed(place: Place) -> None:
    place.case.chmod(0o555)


def _broken_home(place: Place) -> None:
    (place.case / "file").write_text("not a folder")


_CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "no-home": {"without": ("HOME",)},
    "home-missing": {"environment": {"HOME": "/proc/nonexistent/home"}},
    "home-file": {"environment": {"HOME": "file", "XDG_CACHE_HOME": "file"}, "prepare": _broken_home},
    "no-temporary-folder": {"environment": {"TMPDIR": "/proc/nonexistent", "TEMP": "", "TMP": "/dev/null"}},
    "lang-c": {"environment": {"LANG": "C", "LC_ALL": "C"}, "encoding": "ascii"},
    "lang-odd": {"environment": {"LANG": "xx_YY.nonsense", "LC_ALL": "\x1b[31m"}},
    "no-path": {"without": ("PATH", "LANG")},
    "no-columns": {"environment": {"COLUMNS": "0", "LINES": "-1", "TERM": "\x1b[31m"}},
    "one-column": {"environment": {"COLUMNS": "1", "TERM": "dumb"}},
    "odd-columns": {"environment": {"COLUMNS": "9" * 30, "LINES": "x", "TERM": ""}},
    "odd-threads": {"environment": {"OMP_NUM_THREADS": "x", "MKL_NUM_THREADS": "-1"}},
    "head": {"streams": {"stdout": "pipe"}},
    "closed-stdout": {"streams": {"stdout": "closed"}},
    "closed-stderr": {"streams": {"stderr": "closed"}},
    "closed-both": {"streams": {"stdout": "closed", "stderr": "closed"}},
    "full-stdout": {"streams": {"stdout": "full"}},
    "full-stderr": {"streams": {"stderr": "full"}},
    "broken-stderr": {"streams": {"stderr": "pipe"}},
    "read-only": {"prepare": _closed, "powerless": True},
    "gone": {"gone": True},
    "files-8": {"limits": {"NOFILE": 8}},
    "files-16": {"limits": {"NOFILE": 16}},
    "memory-1": {"limits": {"AS": 1 << 20}},
    "memory-100": {"limits": {"AS": 100 << 20}},
    "file-size-1000": {"limits": {"FSIZE": 1000}},
    "no-processes": {"limits": {"NPROC": 0}, "powerless": True},
    "ascii": {"encoding": "ascii"},
    "utf-16": {"encoding": "utf-16"},
}


@group
def circumstances() -> Iterator[Case]:
    for command, words in COMMANDS.items():
        for name, given in _CIRCUMSTANCES.items():
            kept = dict(given)
            prepare = both(BASES, kept.pop("prepare", lambda place: None))
            yield Case("C3", f"around-{command}-{name}", words, prepare, cpu=25, memory=1500, **kept)


#: Files that a command reads, from where it runs.
_READS: dict[str, tuple[str, ...]] = {
    "views": ("photos/class0/0.png", "photos"),
    "stats": ("photos/class0/0.png", "photos"),
    "search": ("found.npz", "photos/class0/0.png", "run", "run/config.yaml", "run/encoder.safetensors"),
    "duplicates": ("found.npz",),
    "outliers": ("found.npz", "photos/class0/0.png"),
    "diverse": ("found.npz",),
    "runs": ("run/config.yaml", "run/metrics.jsonl", "run/results.json", "run/plan.json", "run"),
    "eval-only": (
        "detector",
        "detector/detector.safetensors",
        "detector/config.yaml",
        "detector/results.json",
    ),
    "images": ("detector/detector.safetensors", "detector/config.yaml", "photos", "photos/class0/0.png"),
    "detect": ("detector", "detector/config.yaml", "detector/metrics.jsonl", "detector/results.json"),
    "stability": ("studies/stability/seed-0.json", "studies/stability", "studies"),
    "recalibrate": ("photos", "run/encoder.safetensors"),
    "log": ("run/config.yaml", "run/metrics.jsonl", "run/tracker-tensorboard.json", "run"),
    "linear": ("run/config.yaml", "run/results.json", "run/encoder.safetensors", "run/linear"),
    "semi": ("run/config.yaml", "run/results.json", "run/encoder.safetensors"),
}


def _other(name: str, kind: str, place: Place) -> None:
    path = place.case / name
    if path.is_dir():
        path.rename(place.case / "elsewhere")
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "missing":
        path.unlink(missing_ok=True)
    elif kind == "unreadable":
        path.unlink(missing_ok=True)
        path.write_text("text")
        path.chmod(0)
    else:
        replace_by(path, kind)


@group
def files_of_commands() -> Iterator[Case]:
    for command, names in _READS.items():
        for name in names:
            for kind in ("missing", "unreadable", *KINDS):
                prepare = both(BASES, partial(_other, name, kind))
                label = f"kind-{command}-{name.replace('/', '-')}-{kind}"
                # A study whose result is not there would be measured, which takes long.
                if (
                    command == "stability"
                    and kind in ("missing", "dangling", "folder")
                    and "seed" not in name
                ):
                    continue
                if command == "stability" and kind in ("missing",):
                    continue
                yield Case(
                    "C6",
                    label,
                    COMMANDS[command],
                    prepare,
                    cpu=20,
                    memory=900,
                    powerless=kind == "unreadable",
                )


#: What ends in the name of a file or folder.
_NAMED: dict[str, tuple[str, ...]] = {
    "stats": ("stats",),
    "stats-config": ("stats", "photos", "--config"),
    "views-config": ("views", "photos", "--count", "2", "--config"),
    "detect-config": ("detect", "run", "--out", "new", "--config"),
    "detect-images": ("detect", "run", "--images"),
    "detect-out": ("detect", "run", "--train.steps", "0", "--out"),
    "detect-run": ("detect", "--images", "photos"),
    "search-run": ("search", "--in", "found.npz", "photos/class0/0.png"),
    "search-image": ("search", "run", "--in", "found.npz"),
    "search-in": ("search", "run", "photos/class0/0.png", "--in"),
    "search-out": (*_SEARCH, "--out"),
    "search-data": (*_SEARCH, "--out", "a.html", "--data"),
    "select": ("select", "--by", "diverse", "--count", "2"),
    "select-out": (*_SELECT, "duplicates", "--out"),
    "select-keep": (*_SELECT, "duplicates", "--keep"),
    "select-data": (*_SELECT, "outliers", "--out", "a.html", "--data"),
    "runs": ("runs",),
    "runs-out": ("runs", ".", "--out"),
    "log": ("log", "--to", "tensorboard"),
    "log-to": ("log", "run", "--to"),
    "recalibrate": ("export", "run", "--format", "torchvision", "--out", "exported", "--recalibrate"),
    "license": ("export", "run", "--format", "torchvision", "--out", "exported", "--license"),
    "table": ("plan", "quickstart", "--data.name", "table", "--data.root"),
    "shards": ("plan", "quickstart", "--data.name", "shards", "--data.root"),
    "hf": ("plan", "quickstart", "--data.name", "hf", "--data.root"),
    "reproduce": ("reproduce",),
    "reproduce-rows": ("reproduce", "alpha", "--dry_run", "true", "--rows"),
    "reproduce-seeds": ("reproduce", "alpha", "--dry_run", "true", "--seeds"),
    "reproduce-data": ("reproduce", "alpha", "--scale", "cifar", "--dry_run", "true", "--data"),
    "reproduce-launcher": ("reproduce", "alpha", "--scale", "paper", "--dry_run", "true", "--launcher"),
    "stability-data": ("reproduce", "stability", "--scale", "cifar", "--data"),
    "stability-seeds": ("reproduce", "stability", "--seeds"),
    "backbones": ("backbones",),
    "doctor": ("doctor",),
    "alpha": ("plan", "quickstart", "--images", "1000", "--method.alpha"),
}


@group
def odd_paths_of_commands() -> Iterator[Case]:
    for option, words in _NAMED.items():
        for name, path in (
            PATHS | {"nul-like": "a\u2400b", "dash": "-", "dashes": "--", "url": "s3://x/y"}
        ).items():
            yield Case(
                "C3",
                f"named-{option}-{name}",
                (*words, path),
                both(BASES, odd_paths),
                cpu=15,
                memory=900,
                powerless=True,
                check=devices_stay,
            )


@group
def odd_words_of_commands() -> Iterator[Case]:
    for option, words in _NAMED.items():
        for name, text in TEXTS.items():
            yield Case("C8", f"named-{option}-{name}", (*words, text), BASES, cpu=15, memory=900)


_WRITES: dict[str, tuple[str, ...]] = {
    "views": ("views.png",),
    "search": ("search.html",),
    "duplicates": ("select.csv",),
    "outliers": ("select.html",),
    "diverse": ("keep.txt",),
    "runs": ("runs.csv",),
    "stability": (
        *("studies/stability.json", "studies/stability.md", "studies/stability-alpha.svg"),
        "studies/stability-samples.svg",
    ),
    "torchvision": ("exported",),
    "eval-only": (
        *("detector/evaluation/results.json", "detector/evaluation/detections.json"),
        "detector/evaluation/predictions.png",
    ),
    "images": ("detector/images/detections.json", "detector/images/pictures/class0/0.png"),
    "detect": ("detector/plan.txt", "detector/metrics.jsonl", "detector/results.json", "detector/.lock"),
    "log": ("run/tracker-tensorboard.json", "run/.tracker-tensorboard.lock", "run/tensorboard"),
    "linear": ("run/linear", "run/results.json", "run/linear/teacher"),
    "semi": ("run/semi", "run/results.json"),
}


@group
def links_where_commands_write() -> Iterator[Case]:
    for command, names in _WRITES.items():
        for name in names:
            for to in ("file.txt", "new.txt", "folder"):

                def plant(place: Place, name: str = name, to: str = to) -> None:
                    path = place.case / name
                    path.parent.mkdir(exist_ok=True, parents=True)
                    path.unlink(missing_ok=True)
                    path.symlink_to(place.victims / to)

                # What goes into a folder follows a link to one: that is its owner's choice.
                if to == "folder" and name.endswith(("linear", "teacher", "semi", "tensorboard")):
                    continue
                label = f"link-{command}-{name.replace('/', '-')}-{to}"
                yield Case("C5", label, COMMANDS[command], both(BASES, plant), cpu=20, memory=900)


@group
def studies_of_others() -> Iterator[Case]:
    """Results of `reproduce stability` that are not what they say."""

    def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Place], None]:
        def prepare(place: Place) -> None:
            path = place.case / "studies" / "stability" / "seed-0.json"
            found = json.loads(path.read_text())
            result = change(found)
            path.write_text(json.dumps(found if result is None else result))

        return both(BASES, prepare)

    good = stability_result()
    values = [*JSON_VALUES, 0, 1e300, 10**400, 1e-300]
    for i, value in enumerate(values):
        yield Case("C7", f"study-whole-{i}", _STABILITY, changed(lambda found, v=value: {"x": v}), cpu=15)  # type: ignore[misc]
        for key in good:
            yield Case(
                "C7",
                f"study-{key}-{i}",
                _STABILITY,
                changed(lambda found, k=key, v=value: found.update({k: v})),  # type: ignore[misc]
                cpu=15,
                memory=700,
            )
        for key in good["points"][0]:
            for which in (0, -1):
                yield Case(
                    "C7",
                    f"study-point{which}-{key}-{i}",
                    _STABILITY,
                    changed(lambda found, k=key, v=value, w=which: found["points"][w].update({k: v})),  # type: ignore[misc]
                    cpu=15,
                    memory=700,
                )
        for key in good["points"][0]["errors"]:
            yield Case(
                "C7",
                f"study-error-{key}-{i}",
                _STABILITY,
                changed(lambda found, k=key, v=value: found["points"][0]["errors"].update({k: v})),  # type: ignore[misc]
                cpu=15,
                memory=700,
            )
    for i, name in enumerate(("seed-00.json", "seed-٣.json", "seed-" + "9" * 200 + ".json", "seed-7.json")):

        def more(place: Place, name: str = name) -> None:
            BASES(place)
            (place.case / "studies" / "stability" / name).write_text("[]")

        yield Case("C7", f"study-name-{i}", _STABILITY, more, cpu=15, memory=700)


@group
def features_of_others() -> Iterator[Case]:
    """Files of features that are damaged, lie about their sizes, or hold what is no number."""

    def written(change: Callable[[bytes], bytes]) -> Callable[[Place], None]:
        def prepare(place: Place) -> None:
            path = place.case / "found.npz"
            path.write_bytes(change(path.read_bytes()))

        return both(BASES, prepare)

    def arrays(**changes: Any) -> Callable[[bytes], bytes]:
        def change(data: bytes) -> bytes:
            with np.load(io.BytesIO(data)) as file:
                found = {name: file[name] for name in file} | changes
            out = io.BytesIO()
            np.savez(out, **{name: value for name, value in found.items() if value is not None})  # type: ignore[arg-type]
            return out.getvalue()

        return change

    def member(name: str, content: bytes) -> Callable[[bytes], bytes]:
        def change(data: bytes) -> bytes:
            out = io.BytesIO()
            with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
                for entry in old.namelist():
                    new.writestr(entry, content if entry == name else old.read(entry))
            return out.getvalue()

        return change

    def header(text: str) -> bytes:
        padded = text.encode() + b" " * 10 + b"\n"
        return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded

    n = 12
    changes: dict[str, Callable[[bytes], bytes]] = {
        "objects": arrays(paths=np.array([{}] * n, object)),
        "nan": arrays(features=np.full((n, 4), np.nan, np.float32)),
        "huge": arrays(features=np.full((n, 4), 3e38, np.float32)),
        "zero": arrays(features=np.zeros((n, 4), np.float32)),
        "empty": arrays(features=np.zeros((0, 4), np.float32), paths=np.zeros(0, "U1"), labels=None),
        "scalar": arrays(features=np.float32(1)),
        "ints": arrays(features=np.zeros((n, 4), np.int64)),
        "complex": arrays(features=np.zeros((n, 4), np.complex64)),
        "wide": arrays(features=np.zeros((n, 100_000), np.float16)),
        "fewer": arrays(paths=np.array(["a"])),
        "controls": arrays(paths=np.array([f"{text[:50]}{i}" for i, text in enumerate(TEXTS.values())][:n])),
        "surrogates": arrays(paths=np.array(["\udcff.png"] * n)),
        "bytes": arrays(paths=np.array([b"\xff\x00a"] * n)),
        "dates": arrays(paths=np.array(["2020-01-01"] * n, "M8[s]")),
        "labels": arrays(labels=np.full(n, 10**15)),
        "negative-labels": arrays(labels=np.full(n, -5)),
        "class-names": arrays(class_names=np.array([f"a\n{'x' * 9}"])),
        "no-origin": arrays(origin=None),
        "deep-origin": arrays(origin=np.array("[" * 50_000)),
        "shape": member(
            "features.npy", header("{'descr': '<f4', 'fortran_order': False, 'shape': (4000000000, 512), }")
        ),
        "negative": member(
            "features.npy", header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4), }")
        ),
        "descr": member(
            "features.npy", header("{'descr': 'O', 'fortran_order': False, 'shape': (1,), }") + pickled_bomb()
        ),
        "code": member("features.npy", header("__import__('os').system('touch $CANARY')")),
        "deep": member("features.npy", header("(" * 9000)),
        "bomb": lambda data: zip_bomb(600 << 20),
        "pickle": lambda data: pickled_bomb(),
    }
    for name, value in _ORIGINS.items():
        changes[f"origin-{name}"] = arrays(origin=np.array(value))
    for i in range(21):
        changes[f"damaged-{i}"] = partial(lambda data, i: list(damages(data, 21, seed=2))[i][1], i=i)
    for name, change in changes.items():
        for command in ("search", "duplicates", "outliers", "diverse"):
            yield Case(
                "C15", f"features-{command}-{name}", COMMANDS[command], written(change), cpu=15, memory=900
            )


_ORIGINS = {
    f"{key}-{i}": json.dumps(
        {"encoder": "x", "image_size": 8, "name": "folder", "root": "photos"} | {key: value}
    )
    for key in ("encoder", "image_size", "name", "root", "split", "reading")
    for i, value in enumerate(JSON_VALUES)
}


@group
def detectors_of_others() -> Iterator[Case]:
    """Cards of detectors with values of wrong types, and damaged detectors."""

    def card(keys: tuple[str, ...], value: Any) -> Callable[[Place], None]:
        def prepare(place: Place) -> None:
            path = place.case / "detector" / "detector.safetensors"
            data = path.read_bytes()
            end = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:end])
            inside = json.loads(header["__metadata__"]["momentum2-detector"])
            table = inside
            for key in keys[:-1]:
                table = table[key]
            if keys:
                table[keys[-1]] = value
            header["__metadata__"]["momentum2-detector"] = json.dumps(inside if keys else value)
            text = json.dumps(header).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

        return both(BASES, prepare)

    places: list[tuple[str, ...]] = [(), ("model",), ("version",), ("short_edge",), ("max_long_edge",)]
    places += [("class_names",), ("category_ids",), ("encoder",), ("head",), ("more",), ("head", "more")]
    places += [("encoder", name) for name in ("backbone", "stem", "width", "options")]
    places += [("head", name) for name in ("fpn_channels", "detections", "score_threshold", "pool_samples")]
    for keys in places:
        for i, value in enumerate([*JSON_VALUES, 10**9, 10**400, ["\x1b[31m"] * 3, "planted"]):
            label = f"detector-{'.'.join(keys) or 'whole'}-{i}"
            yield Case("C7", label, COMMANDS["images"], card(keys, value), cpu=15, memory=900)
    for i in range(21):

        def damage(place: Place, i: int = i) -> None:
            BASES(place)
            path = place.case / "detector" / "detector.safetensors"
            path.write_bytes(list(damages(path.read_bytes(), 21, seed=6))[i][1])

        for command in ("images", "eval-only"):
            yield Case("C10", f"detector-{command}-{i}", COMMANDS[command], damage, cpu=15, memory=900)


@group
def deep_folders() -> Iterator[Case]:
    """Folders within folders, deeper than Python recurses and longer than a path may be."""

    def deep(place: Place) -> None:
        BASES(place)
        here = os.getcwd()
        os.mkdir(place.case / "deep")
        os.chdir(place.case / "deep")
        for _ in range(2500):
            os.mkdir("a")
            os.chdir("a")
        os.chdir(here)

    for name, words in {
        "runs": ("runs", "deep"),
        "stats": ("stats", "deep"),
        "views": ("views", "deep"),
        "shards": ("plan", "quickstart", "--data.name", "shards", "--data.root", "deep"),
        "table": ("plan", "quickstart", "--data.name", "table", "--data.root", "deep"),
        "hf": ("plan", "quickstart", "--data.name", "hf", "--data.root", "deep"),
        "images": ("detect", "detector", "--images", "deep"),
        "report": ("report", "deep"),
        "knn": ("evaluate", "knn", "run", "--data", "deep"),
        "export": ("export", "run", "--format", "torchvision", "--out", "exported", "--recalibrate", "deep"),
        "cifar": ("plan", "quickstart", "--data.name", "cifar10", "--data.root", "deep"),
        "coco": ("detect", "run", "--out", "new", "--data.root", "deep"),
    }.items():
        yield Case("C15", f"deep-{name}", words, deep, cpu=15, memory=700)
    for i, pattern in enumerate(
        [
            "{0..999999}{0..999999}.tar",
            "{0.." + "9" * 5000 + "}.tar",
            "{5..1}.tar",
            "{" * 3000 + ".tar",
            "*" * 200 + ".tar",
        ]
    ):
        words = ("plan", "quickstart", "--data.name", "shards", "--data.root", pattern)
        yield Case("C15", f"pattern-{i}", words, codes=frozenset({2}), cpu=15, memory=400)


@group
def tables_and_shards() -> Iterator[Case]:
    """Columns and shards of others."""
    texts: dict[str, bytes] = {
        "empty.csv": b"",
        "header.csv": b"path,label\n",
        "nul.csv": b"path,label\n\0.png,1\n",
        "quote.csv": b'path,label\n"' + b"a" * 300_000,
        "bytes.csv": b"path,label\n\xff.png,1\n",
        "controls.csv": b"path,label\nphotos/class0/0.png,\x1b[31m\nphotos/class1/0.png,a\rFORGED\n",
        "names.csv": b"path,\x1b[31m\nphotos/class0/0.png,1\n",
        "many.csv": b",".join(b"c%d" % i for i in range(20_000)) + b"\n",
        "up.csv": b"path,label\n../victims/secret,1\n/etc/passwd,2\n",
        "fifo.csv": b"path,label\nfifo.png,1\nfifo.png,2\n",
        "digits.csv": b"path,label\nphotos/class0/0.png," + b"9" * 5000 + b"\nphotos/class1/0.png,1\n",
        "nan.csv": b"path,label\nphotos/class0/0.png,nan\nphotos/class1/0.png,inf\n",
        "utf16.csv": "path,label\nphotos/class0/0.png,1\n".encode("utf-16"),
        "tabs.tsv": b"path\tlabel\n\t\t\t\n",
        "noise.csv": bytes(range(256)) * 20,
        "noise.parquet": bytes(range(256)) * 20,
        "magic.parquet": b"PAR1" + b"\xff" * 100 + b"\xff\xff\xff\x7fPAR1",
        "empty.parquet": b"",
        "noise.tar": bytes(range(256)) * 20,
        "keys.tar": b"",
    }
    for name, data in texts.items():

        def prepare(place: Place, name: str = name, data: bytes = data) -> None:
            BASES(place)
            (place.case / name).write_bytes(data)
            os.mkfifo(place.case / "fifo.png")

        kind = "shards" if name.endswith(".tar") else "table"
        for command, words in {
            "plan": ("plan", "quickstart", "--data.name", kind, "--data.root", name),
            "embed": (*EMBED[:1], "run", *EMBED[2:], "--data", name, "--data.image_size", "8"),
            "stats": ("stats", name),
        }.items():
            yield Case("C15", f"columns-{command}-{name}", words, prepare, cpu=12, memory=700)
    for kind in KINDS:
        for suffix in ("csv", "tsv", "parquet", "npy", "npz", "tar", "zip", "txt", "tif", "dcm"):

            def odd(place: Place, kind: str = kind, suffix: str = suffix) -> None:
                BASES(place)
                replace_by(place.case / f"given.{suffix}", kind)

            for command in ("stats", "views"):
                words = (command, f"given.{suffix}", *(("--out", "v.png") if command == "views" else ()))
                yield Case("C6", f"given-{command}-{suffix}-{kind}", words, odd, cpu=12, memory=700)


@group
def arrays_among_images() -> Iterator[Case]:
    """`.npy`, TIFF and DICOM files that are damaged or lie, among images."""

    def saved(value: Any, **options: Any) -> bytes:
        out = io.BytesIO()
        np.save(out, value, **options)
        return out.getvalue()

    good = saved(np.zeros((8, 8, 3), np.uint8))
    files: dict[str, bytes] = {
        "object.npy": saved(np.array([{}], object), allow_pickle=True),
        "scalar.npy": saved(np.float32(1)),
        "bands.npy": saved(np.zeros((8, 8, 300), np.uint8)),
        "empty.npy": saved(np.zeros((0, 8, 3), np.uint8)),
        "text.npy": saved(np.array(["a" * 100])),
        "complex.npy": saved(np.zeros((8, 8), np.complex64)),
        "nan.npy": saved(np.full((8, 8), np.nan, np.float32)),
        "inf.npy": saved(np.full((8, 8), np.inf, np.float32)),
        "huge.npy": saved(np.full((8, 8), 1e308)),
        "shape.npy": good[:10] + good[10:].replace(b"(8, 8, 3)", b"(9**9,9,)")[:118] + good[128:],
        "large.npy": good.replace(b"(8, 8, 3), ", b"(80000,80000)")[: len(good)],
        "pickle.npy": pickled_bomb(),
        "deep.npy": b"\x93NUMPY\x01\x00\xff\x1f" + b"(" * 8191,
        "noise.dcm": bytes(128) + b"DICM" + bytes(range(256)) * 8,
        "length.dcm": bytes(128) + b"DICM\x02\x00\x00\x00UL\x04\x00\xff\xff\xff\xff" + b"\xff" * 64,
        "bigtiff.tif": b"II+\0\x08\0\0\0\x10\0\0\0\0\0\0\0" + b"\xff" * 64,
        "strips.tif": b"II*\0\x08\0\0\0" + b"\x03\0" + b"\x00\x01\x04\0\x01\0\0\0\xff\xff\xff\x7f" * 3,
    }
    files |= {f"damaged-{name}.npy": data for name, data in damages(good, 14, seed=4)}
    tif = encoded("TIFF", side=16)
    files |= {f"damaged-{name}.tiff": data for name, data in damages(tif, 14, seed=5)}
    for name, data in files.items():
        for alone in (True, False):

            def prepare(place: Place, name: str = name, data: bytes = data, alone: bool = alone) -> None:
                RUN(place)
                folder = place.case / ("arrays" if alone else "photos")
                (folder / "class0").mkdir(parents=True, exist_ok=True)
                (folder / "class0" / f"0{name}").write_bytes(data)

            root = "arrays" if alone else "photos"
            label = f"array-{'alone' if alone else 'among'}-{name}"
            yield Case("C4", f"{label}-stats", ("stats", root), prepare, cpu=12, memory=700)
            words = ("embed", "run", *EMBED[2:], "--data", root, "--data.image_size", "8")
            yield Case("C4", f"{label}-embed", words, prepare, cpu=12, memory=700)
