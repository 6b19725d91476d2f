"""Every command as a function, each with the order of its events on one screen. The command line calls these."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from momentum2 import distributed
from momentum2.backbones import Facts, listed
from momentum2.config import OWN, Config, DataConfig, Network, ObjectsConfig, Resume, Tracker
from momentum2.data import Dataset, open_dataset
from momentum2.data.fingerprint import Fingerprint, difference, fingerprint
from momentum2.data.looking import check_reading, reading_of
from momentum2.data.opening import find_data, open_unchecked, typical_size
from momentum2.data.sampler import chosen_order
from momentum2.data.sequence import as_dataset
from momentum2.data.statistics import Statistics, channels_of, measure
from momentum2.data.workers import refuse_unguarded
from momentum2.distributed.together import broadcast_bytes, joined, raise_together
from momentum2.errors import SettingError, Stopped, UserError
from momentum2.evaluate import embed as features_file
from momentum2.evaluate import knn, linear, semi
from momentum2.evaluate.accuracy import report as keep_result
from momentum2.evaluate.embed import Embeddings as Embeddings
from momentum2.evaluate.online import online_knn
from momentum2.evaluate.search import Neighbors as Neighbors
from momentum2.evaluate.search import SearchOptions, as_it_saw_them
from momentum2.evaluate.search import search as search_features
from momentum2.evaluate.selection import By, SelectOptions
from momentum2.evaluate.selection import Selection as Selection
from momentum2.evaluate.selection import select as select_features
from momentum2.evaluate.subject import Subject, SubjectOptions, data_of, open_subject
from momentum2.files import place_of, write_csv
from momentum2.methods import Method
from momentum2.runs import objects
from momentum2.runs.card import EncoderCard, inspect
from momentum2.runs.directory import open_run
from momentum2.runs.encoder import load_encoder as load_encoder
from momentum2.runs.encoder import save_encoder
from momentum2.runs.handle import Run
from momentum2.runs.metrics import floors_in, last_knn
from momentum2.runs.names import ENCODER, START
from momentum2.runs.planned import write_plan
from momentum2.runs.results import Result, below_floors
from momentum2.runs.table import RunRow as RunRow
from momentum2.runs.table import columns, compare
from momentum2.runs.trackers import send
from momentum2.settings import check as check_settings
from momentum2.settings import flatten, is_whole
from momentum2.training.build import build_method, make_job, with_cache, with_devices, with_precision
from momentum2.training.checks import check, check_encoder, method_class
from momentum2.training.device import choose_algorithms, choose_device, guest
from momentum2.training.estimate import check_memory
from momentum2.training.loop import fit
from momentum2.training.plan import describe, describe_images, idle_settings, resolve, share
from momentum2.training.start import Record, starting_weights

if TYPE_CHECKING:
    from momentum2.detection.presets import DetectConfig
    from momentum2.recipes import Recipe
    from momentum2.report.learned import ReportOptions
    from momentum2.reproduce.command import ReproduceOptions

log = logging.getLogger("momentum2")

#: A run directory, one of its checkpoints, an `encoder.safetensors` or another file of weights.
Source = str | os.PathLike[str]


def recipe(name: str, overrides: Mapping[str, object] | None = None) -> Config:
    """The config of a named recipe with your own settings, dotted (`{"train.epochs": 20}`) or nested.

    A recipe that adapts to the images, such as `folder`, looks at them here.
    """
    from momentum2.recipes import configure, find

    _expect("overrides", overrides, Mapping | None, "a mapping of settings, such as {'train.epochs': 20}")
    given = flatten(overrides or {})
    return configure(find(name), given, copied=given if is_whole(given) else ())


def plan(
    config: Config, *, images: int | None = None, processes: int = 1, probe: bool = False
) -> list[tuple[str, str]]:
    """What a config resolves to, as (name, value) lines: steps, rates, devices, memory; with `probe`, time."""
    from momentum2.training.estimate import planned

    _expect("config", config, Config, "a Config, such as recipe(...) gives")
    with guest():
        return [*planned(config, images, processes, probe), *_network(config, inspect(config))]


def pretrain(
    config: Config,
    out: Source,
    *,
    resume: Resume = "auto",
    dataset: Dataset | Sequence[Any] | None = None,
    encoder: nn.Module | None = None,
    method: type[Method] | None = None,
) -> Run:
    """Pretrain into the run directory `out`, from its newest checkpoint if there is one.

    Args:
        config: The whole run.
        out: The run directory.
        resume: auto: resume or start. never: only start. must: only resume.
        dataset: Your own images instead of `config.data`: a `momentum2.data.Dataset`, or any sequence of images or
            (image, label) pairs.
        encoder: Your own network instead of `config.model`: (n, channels, s, s) -> (n, d). It is copied.
        method: Your own method instead of `config.method.name`.

    Returns:
        The run; `run.finished` is False if a signal stopped it; then the same call resumes it.
    """
    refuse_unguarded()
    _expect("config", config, Config, "a Config, such as recipe(...) gives")
    _expect("encoder", encoder, nn.Module | None, "an nn.Module")
    if method is not None and not (isinstance(method, type) and issubclass(method, Method)):
        raise UserError(f"method must be a subclass of Method, not {method!r}.")
    place, images = Path(out), None if dataset is None else as_dataset(dataset)
    if images is not None:
        images.max_bad_fraction, images.reading = config.data.max_bad_fraction, reading_of(config.data)
        check_reading(images)
    config = _with_objects(config, images, encoder, method)
    kind = method_class(config, method)
    check(config, kind)
    facts = inspect(config, encoder)
    check_encoder(config, facts)
    with guest(), joined(device := choose_device(config.train.device)):
        config = with_devices(config, place, kind)
        share(config, distributed.world_size(), kind)  # before anything is written
        _check_gradients(facts)
        with open_run(place, config, resume, idle_settings(config, kind)) as run:
            before = run.checkpoints.info()
            config = with_precision(config, before, device)
            choose_algorithms(config.train.precision, config.train.deterministic, device)
            start = starting_weights(config, before)  # before many images are decoded in vain
            if images is None:
                images = open_dataset(with_cache(config.data, before), seed=config.train.seed)
            seen = fingerprint(images)
            _check_images(images, seen, before, kind, place)
            order = chosen_order(config.data.order, len(images), before)
            resolved = resolve(config, len(images), distributed.world_size(), method)
            if encoder is None:
                check_memory(config, resolved, len(images.class_names or ()))
            built = build_method(config, resolved, len(images.class_names or ()), encoder, start.file)
            if start.file is not None and distributed.is_main():
                _save(place / START, built, config, 0, start.record)
            built.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            lines = [*describe(config, resolved, facts, start.record), *describe_images(config, images)]
            _say_plan([*lines, *_network(config, facts)], resolved.steps, place)
            score = online_knn(config, place, resolved.steps)
            job = make_job(config, resolved, built, images, place, device, score, start.record, order, seen)
            finished = fit(job, run)
            if finished and distributed.is_main():
                _save(place / ENCODER, built, config, resolved.steps, start.record)
        if finished and distributed.is_main():
            log.info("Done: the encoder is %s", place / ENCODER)
            knn = last_knn(Run(place).metrics())
            if verdict := below_floors(knn.get("knn_top1", 100.0), floors_in(knn)):
                log.info("The network ends below a floor. %s", verdict)
            if config.monitor.report:
                from momentum2.report.page import write_last_report

                log.info(write_last_report(place))
    return Run(place, finished)


def _network(config: Config, facts: Facts) -> list[tuple[str, str]]:
    """Lines of a plan: why the network is small, and which tools can have it."""
    from momentum2 import export

    card = EncoderCard.of_run(config, facts.feature_dim, "student", 0)
    small = card.backbone == "resnet10" or card.width < 1
    why = [("network", "small, so that a CPU can train it")] if small else []
    return [*why, ("exports", export.possible(card))]


def _save(path: Path, method: Method, config: Config, step: int, start: Record | None) -> None:
    network, best = next(iter(method.encoders().items()))
    card = EncoderCard.of_run(config, best.feature_dim, network, step, start)
    # Before the first step teacher and student are one.
    save_encoder(path, best, card if step else replace(card, network=None))


def _expect(name: str, given: object, kind: Any, words: str) -> None:
    """Raise a `UserError` for an argument of another kind, which a type checker would have named."""
    if not isinstance(given, kind):
        raise UserError(f"{name} must be {words}, not {given!r}.")


def _with_objects(
    config: Config, dataset: Dataset | None, encoder: nn.Module | None, method: type[Method] | None
) -> Config:
    """`config` with the identities of the given objects; refuses one that names objects which were not given."""
    given = ObjectsConfig(
        None if method is None else objects.of_class(method),
        None if encoder is None else objects.of_network(encoder),
        None if dataset is None else objects.of_dataset(dataset),
    )
    for name, now in vars(given).items():
        if now is None and getattr(config.objects, name) is not None:
            raise SettingError(
                f"objects.{name}",
                f"is {getattr(config.objects, name)}, which can only be passed from Python: pretrain({name}=...).",
            )
    config = replace(config, objects=given)
    if method is not None:
        config = replace(config, method=replace(config.method, name=OWN))
    if encoder is not None:
        config = replace(config, model=replace(config.model, backbone=OWN))
    if dataset is not None:
        if (config.eval_data.name, config.eval_data.root) == (config.data.name, config.data.root):
            # The recipe's own: accuracy on other images than those of the run would only mislead.
            config = replace(config, eval_data=replace(config.eval_data, name="none"))
        config = replace(config, data=replace(config.data, name=OWN))
    return config


def _check_gradients(encoder: Facts) -> None:
    if distributed.world_size() > 1 and encoder.unused:
        raise UserError(
            f"{encoder.architecture.backbone} has parameters that get no gradient, so several processes would wait for "
            f"them forever: {', '.join(encoder.unused[:5])}. Set their requires_grad to False."
        )


def _check_images(
    images: Dataset, seen: Fingerprint, before: Mapping[str, Any], kind: type[Method], out: Path
) -> None:
    """Refuse, on all processes, other images than those of the run, or of process 0."""
    raise_together(_problem(images, seen, before, kind, out))
    first = json.loads(broadcast_bytes(json.dumps(seen).encode()))
    why = difference(first, seen, images.names)
    raise_together(None if why is None else UserError(f"The processes see different images: {why}."))


def _problem(
    images: Dataset, seen: Fingerprint, before: Mapping[str, Any], kind: type[Method], out: Path
) -> UserError | None:
    if before.get("images", len(images)) != len(images):
        return UserError(
            f"{out} was started with {before['images']:,} images but now finds {len(images):,}. Use the same images, "
            "or choose another run directory."
        )
    why = difference(before["fingerprint"], seen, images.names) if "fingerprint" in before else None
    if why is not None:
        return UserError(
            f"{out} was started with different images: {why}. Use the same images, or choose another run directory."
        )
    if kind.needs_labels and images.labels is None:
        return UserError(f"{kind.__name__} needs labels. Put each class in its own folder.")
    return None


def _say_plan(lines: list[tuple[str, str]], steps: int, out: Path) -> None:
    if distributed.is_main():
        for line in write_plan(out, steps, lines):
            log.info(line)


def evaluate_knn(
    source: Source,
    *,
    data: str | None = None,
    options: knn.KnnOptions | None = None,
    subject: SubjectOptions | None = None,
    encoder: nn.Module | None = None,
) -> Result:
    """Classify test images by their nearest training images.

    Args:
        source: What is evaluated.
        data: Labeled images: a folder, an archive, a list, a table, shards or shapes (default: the run's own).
        options: How.
        subject: Which network, on which images and where, in detail.
        encoder: Your own network, if the run was started with one.
    """
    with _subject(source, data, subject, encoder) as found:
        return _kept(knn.evaluate_knn(found, options or knn.KnnOptions()), found)


def evaluate_linear(
    source: Source,
    *,
    data: str | None = None,
    options: linear.LinearOptions | None = None,
    subject: SubjectOptions | None = None,
    encoder: nn.Module | None = None,
) -> Result:
    """Train a linear classifier on the frozen encoder; the arguments are those of `evaluate_knn`."""
    with _subject(source, data, subject, encoder) as found:
        return _kept(linear.evaluate_linear(found, options or linear.LinearOptions()), found)


def evaluate_semi(
    source: Source,
    options: semi.SemiOptions,
    *,
    data: str | None = None,
    subject: SubjectOptions | None = None,
    encoder: nn.Module | None = None,
) -> Result:
    """Fine-tune the whole network on some of the labels; the arguments are those of `evaluate_knn`."""
    with _subject(source, data, subject, encoder) as found:
        return _kept(semi.evaluate_semi(found, options), found)


def embed(
    source: Source,
    *,
    data: str | None = None,
    out: Source | None = None,
    subject: SubjectOptions | None = None,
    encoder: nn.Module | None = None,
) -> Embeddings:
    """Features of images, with their names and labels; with `out`, also as a .npz or .parquet file."""
    with _subject(source, data, subject, encoder) as found:
        if out is None:
            return features_file.embeddings(found)
        return features_file.embed(found, features_file.EmbedOptions(os.fspath(out)))


def search(
    source: Source,
    images: Source | Sequence[Source],
    features: Source | Embeddings,
    *,
    options: SearchOptions | None = None,
    out: Source | None = None,
    data: str | None = None,
    encoder: nn.Module | None = None,
) -> list[Neighbors]:
    """The images nearest to an image, or to each of several, by their features.

    Args:
        source: The encoder that made the features.
        images: Image files.
        features: Of the images to search in: what `embed` returned or wrote.
        options: How many, and by which network.
        out: Also write a page (.html) that shows them.
        data: Where the images are, for the page (default: where they were when the features were made).
        encoder: Your own network, if the run was started with one.
    """
    asked = [os.fspath(images)] if isinstance(images, str | os.PathLike) else [os.fspath(i) for i in images]
    if not asked:
        raise UserError("No image given. Pass at least one.")
    place = _file("out", out, ".html")
    known = _embeddings(features)
    options = options or SearchOptions()
    check_settings(options)
    with _subject(source, None, as_it_saw_them(source, known, options), encoder) as found:
        nearest = search_features(found, asked, known, options.count)
    if place is not None and distributed.is_main():
        from momentum2.report.gallery import write_search

        write_search(place, nearest, known, data)
    return nearest


def select(
    features: Source | Embeddings,
    by: By,
    *,
    options: SelectOptions | None = None,
    out: Source | None = None,
    keep: Source | None = None,
    data: str | None = None,
) -> Selection:
    """Images that repeat others, that are unlike all others, or that represent all others, by their features.

    Args:
        features: What `embed` returned or wrote.
        by: duplicates, outliers or diverse.
        options: The similarity of duplicates, the number of images, and so on.
        out: Also write a table (.csv) or a page that shows them (.html).
        keep: Also write a list file (.txt): of the diverse images, or of those that are not duplicates or outliers.
        data: Where the images are (default: where they were when the features were made).
    """
    from momentum2.report import gallery

    place, listed = _file("out", out, ".csv", ".html"), _file("keep", keep, ".txt")
    known = _embeddings(features)
    found = select_features(known, replace(options or SelectOptions(), by=by))
    if listed is not None:
        kept = found.indices if by == "diverse" else found.rest
        gallery.write_list(listed, np.sort(kept).tolist(), known, data)
    if place is not None and place.suffix == ".csv":
        gallery.write_table(place, found, known)
    elif place is not None:
        gallery.write_selection(place, found, known, data)
    return found


def compare_runs(folder: Source, out: Source | None = None) -> list[RunRow]:
    """The runs in a folder with their results and the settings that differ; with `out`, also as a .csv file."""
    place = _file("out", out, ".csv")
    found = compare(Path(folder))
    if place is not None:
        write_csv(place, columns(found))
    return found


def _embeddings(features: Source | Embeddings) -> Embeddings:
    return features if isinstance(features, Embeddings) else features_file.read_embeddings(Path(features))


def _file(setting: str, place: Source | None, *suffixes: str) -> Path | None:
    return None if place is None else place_of(setting, place, *suffixes)


def export_encoder(
    source: Source,
    format: str,
    out: Source,
    *,
    network: Network | None = None,
    recalibrate: str | None = None,
    license: str = "unknown",
    encoder: nn.Module | None = None,
) -> str:
    """Write an encoder for another tool into the new folder `out`; returns the lines of Python that load it."""
    from momentum2.export import export

    with guest():
        return export(Path(source), format, Path(out), network, recalibrate, license, encoder)


def write_report(
    runs: Source | Sequence[Source], out: Source | None = None, options: "ReportOptions | None" = None
) -> Path:
    """Write one HTML page about a run, or several side by side; returns its path."""
    from momentum2.report import page

    several = [runs] if isinstance(runs, str | os.PathLike) else runs
    with guest():
        return page.write_report([Path(run) for run in several], None if out is None else Path(out), options)


def log_run(run: Source, to: Tracker) -> int:
    """Send a tracker (tensorboard, wandb, mlflow) what it does not have yet of a run; returns the number of records."""
    return send(Path(run), to)


def doctor(folder: Source = ".") -> list[tuple[str, str]]:
    """What a bug report needs, as (name, value) lines: versions, devices, cores, memory, disk at `folder`, speed."""
    from momentum2.training.doctor import examine

    with guest():
        return examine(Path(folder))


def views(
    data: str, out: Source = "views.png", *, count: int = 8, overrides: Mapping[str, object] | None = None
) -> Path:
    """Draw images with the views that the network sees of them; returns the path of the drawing."""
    from momentum2.data.contact_sheet import write_views
    from momentum2.settings import override

    given = flatten(overrides or {})
    found = find_data(data, DataConfig(image_size=32) if data == "shapes" else DataConfig())
    config = override(Config(data=found), given)
    if "data.image_size" not in given:
        size = typical_size(open_dataset(replace(config.data, cache="off")))
        config = replace(config, data=replace(config.data, image_size=size))
    write_views(config, Path(out), count)
    return Path(out)


def stats(data: str, *, count: int = 256, overrides: Mapping[str, object] | None = None) -> Statistics:
    """The values of some of the images, and the settings (window, mean, std, channels) to use."""
    from momentum2.settings import override

    given = flatten(overrides or {})
    config = override(Config(data=find_data(data, DataConfig())), given).data
    dataset = open_unchecked(config, config.split)
    if "data.channels" not in given:
        config = replace(config, channels=channels_of(dataset))
        dataset.reading = reading_of(config)
    return measure(dataset, count)


def detect(
    config: "DetectConfig", out: Source, source: Source | None = None, *, resume: Resume = "auto"
) -> bool:
    """Fine-tune a detector on the encoder of `source` and evaluate it; returns False if a signal stopped it."""
    with _needing_detection(), guest():
        from momentum2.detection.finetune import finetune

        return finetune(config, None if source is None else os.fspath(source), Path(out), resume)


def evaluate_detector(
    run: Source, *, overrides: Mapping[str, object] | None = None, out: Source | None = None
) -> dict[str, Any]:
    """Scores of the fine-tuned detector in `run`, for boxes (`bbox`) and, if it has them, masks (`segm`).

    Args:
        run: The run directory of `detect`.
        overrides: Settings that differ from training, such as `data.root`; those that cannot change are refused.
        out: Where the results go (default: the folder evaluation in the run).
    """
    with _needing_detection(), guest():
        from momentum2.detection.use import evaluate

        return evaluate(Path(run), flatten(overrides or {}), None if out is None else Path(out))


def detect_images(
    run: Source, images: Source, *, overrides: Mapping[str, object] | None = None, out: Source | None = None
) -> Path:
    """Run the fine-tuned detector in `run` on a folder of images; returns the folder of detections and drawings."""
    with _needing_detection(), guest():
        from momentum2.detection.use import detect_in

        place = None if out is None else Path(out)
        return detect_in(Path(run), Path(images), flatten(overrides or {}), place)


def reproduce_table(name: str, options: "ReproduceOptions | None" = None) -> str:
    """Run what is not finished yet of a table of the paper; returns it, next to the paper's numbers, as Markdown.

    With `options.dry_run`, returns the commands instead. `Stopped` is raised if a signal ended a table.
    `stability` is not a table of the paper: it measures how noisy the targets of a teacher are, by its norm.
    """
    from momentum2.reproduce.command import STABILITY, ReproduceOptions, find_study, find_work, jobs_of
    from momentum2.reproduce.runner import commands, reproduce, write_table
    from momentum2.reproduce.stability_page import run_study

    options = options or ReproduceOptions()
    check_settings(options)
    if name == STABILITY:
        study = find_study(options)
        with guest():
            text = run_study(study)
        log.info("Written to %s.md and .json.", study.out / study.stem)
        return text
    work = find_work(name, options)
    if options.dry_run:
        return "\n".join(commands(work))
    try:
        text = reproduce(work, jobs_of(options))
    except Stopped:
        write_table(work)
        raise
    log.info("Written to %s.md, .json and .png.", work.out / work.table.stem)
    return text


def watch(run: Source, port: int = 8010) -> None:
    """Serve a live page about a run on 127.0.0.1 until Ctrl-C; port 0 picks a free one."""
    from momentum2.report.watch import watch as serve

    serve(Path(run), port)


def list_recipes() -> dict[str, "Recipe"]:
    """The named recipes: their configs, and what they are."""
    from momentum2.recipes import RECIPES

    return {name: build() for name, build in RECIPES.items()}


def list_backbones(pattern: str | None = None) -> list[str]:
    """The names of the networks that can be pretrained, or of those that match a pattern such as `timm/vit_tiny*`."""
    return listed(pattern)


@contextmanager
def _needing_detection() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("faster_coco_eval"):
            raise
        raise UserError("Detection needs its extra. Run pip install 'momentum2[detection]'.") from None


@contextmanager
def _subject(
    source: Source, data: str | None, options: SubjectOptions | None, encoder: nn.Module | None
) -> Iterator[Subject]:
    options = options or SubjectOptions()
    if data is not None:
        options = replace(options, data=find_data(data, data_of(source)))
    with guest(), open_subject(source, options, encoder) as subject:
        yield subject


def _kept(result: Result | None, subject: Subject) -> Result:
    """Save a result in the run's `results.json`; raise `Stopped` if there is none."""
    if result is None:
        raise Stopped
    return keep_result(result, subject.directory)
