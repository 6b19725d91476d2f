"""`momentum2 reproduce stability`: its seeds, one after the other, and what they say as JSON, Markdown and plots."""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from momentum2.config import Config
from momentum2.data import open_dataset
from momentum2.errors import SettingError, UserError, called
from momentum2.files import read_json, whole_file, write_whole
from momentum2.reproduce.outcome import environment
from momentum2.reproduce.rows import duration
from momentum2.reproduce.stability import Instrument, Stability, run_seed

_log = logging.getLogger("momentum2")

#: What a point is.
_KEYS = ("share", "step", "norm", "alpha", "samples")
#: Norms that do not depend on the samples per device, and all.
_WHOLE = ("synced", "ema")
_NORMS = ("local", "momentum", *_WHOLE, "scheduled")
#: What is wrong with a target.
_PARTS = ("noise", "history", "bias", "sum")


@dataclass(frozen=True)
class Study:
    """What is to be measured.

    Args:
        scale: The size of the training.
        epochs: Its length.
        loss: paper or repulsion.
        instrument: What is measured along the training.
        config: The training with a seed.
        seeds: The seeds to run.
        out: Where everything goes.
        stem: The name of the files there.
    """

    scale: str
    epochs: int
    loss: str
    instrument: Instrument
    config: Callable[[int], Config]
    seeds: tuple[int, ...]
    out: Path
    stem: str

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All that decides the numbers beside the seed, as JSON has it: which images, not where they are."""
        config = self.config(0)
        training = asdict(config)
        del training["train"]["seed"], training["eval_data"]
        for name in ("root", "cache_dir"):
            del training["data"][name]
        with called({"data.root": "data"}):
            names = open_dataset(replace(config.data, cache="off")).names
        digest = hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()
        told = {
            "scale": self.scale,
            "epochs": self.epochs,
            "loss": self.loss,
            "training": training,
            "images": {"count": len(names), "names": f"sha256:{digest}"},
            "instrument": asdict(self.instrument),
        }
        found: dict[str, Any] = json.loads(json.dumps(told))
        return found

    def file(self, seed: int) -> Path:
        """What is known of a seed."""
        return self.out / self.stem / f"seed-{seed}.json"


def run_study(study: Study) -> str:
    """Measure the seeds that are not there yet; returns what all of them say as Markdown."""
    try:
        (study.out / study.stem).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            "out", f"{study.out} cannot be created ({error.strerror}). Choose another folder."
        ) from None
    finished = {found["seed"] for found in _results(study)}
    for seed in study.seeds:
        if seed in finished:
            _log.info("%s  seed %d was finished before", time.strftime("%X"), seed)
            continue
        _log.info("%s  start  seed %d", time.strftime("%X"), seed)
        measured = run_seed(study.config(seed), study.instrument, study.out / study.stem)
        found = {"settings": study.settings, "environment": environment(), **_rounded(measured)}
        write_whole(study.file(seed), _as_json(found))
        _log.info("%s  done   seed %d in %.1f min", time.strftime("%X"), seed, measured["cpu_seconds"] / 60)
        write_study(study)
    return write_study(study)


def _results(study: Study) -> list[dict[str, Any]]:
    """What is known of every seed, by this command or earlier ones."""
    paths = (study.out / study.stem).glob("seed-*.json")
    known = sorted(int(m[1]) for path in paths if (m := re.fullmatch(r"seed-(\d+)\.json", path.name)))
    return [_read(study, seed) for seed in known]


def _read(study: Study, seed: int) -> dict[str, Any]:
    path = study.file(seed)
    try:
        found: dict[str, Any] = read_json(path)
        same = found["settings"] == study.settings
        shares = study.instrument.shares if same else ()  # with other settings, there may be others
        whole = found["seed"] == seed and bool(found["points"]) and _is_whole(found, shares)
    except (ValueError, LookupError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{path} is not a result of stability. Remove it to measure this seed again.")
    if not same:
        raise SettingError(
            "out",
            f"{study.out} has {path.name}, which was measured with other settings or images, perhaps by another "
            "version. Choose another folder.",
        )
    return found


def _is_whole(found: Mapping[str, Any], shares: Iterable[float]) -> bool:
    """Whether what was measured with a seed has every share of the training, and each point all of its numbers."""
    points, numbers = found["points"], [found["steps"], found["cpu_seconds"]]
    for point in points:
        numbers += [
            point[name] for name in ("share", "step", "alpha", "age", "noise", "history", "bias", "signal")
        ]
        if (
            point["norm"] != "ema" or point["samples"] is not None
        ):  # of all devices, so without a number of them
            numbers.append(point["samples"])
    errors = [point["errors"][name] for point in points for name in (*_PARTS, "signal")]
    return (
        all(type(number) in (int, float) and abs(number) < 1e9 for number in (*numbers, *errors))
        and all(error >= 0 for error in errors)
        and all(point["norm"] in _NORMS and point["signal"] > 1e-10 for point in points)
        and {point["share"] for point in points if point["norm"] == "scheduled"} >= set(shares)
    )


def _as_json(found: Mapping[str, Any]) -> bytes:
    """JSON with one line for each point."""
    text = json.dumps(found)
    return (re.sub(r'(?<=[\[,]) ?(?=\{"share")', "\n", text) + "\n").encode()


def _rounded(value: Any) -> Any:
    """Numbers with four digits, which is more than is known of them."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def write_study(study: Study) -> str:
    """Write the JSON, the Markdown and the plots of all seeds that are finished; returns the Markdown."""
    found = summarize(study.settings, _results(study))
    text, place = markdown(found), study.out / study.stem
    write_whole(place.with_suffix(".json"), _as_json(found))
    if not plot(found, place):
        text += "\nFor plots: pip install 'momentum2[reproduce]'.\n"
    write_whole(place.with_suffix(".md"), text.encode())
    return text


def summarize(settings: dict[str, Any], seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Every point: the mean over seeds of its signal, and of the rest in units of the signal, with their spread.

    That is the standard deviation over seeds, `std`; for one seed the standard error in its training, `error`.
    """
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for point in (p for seed in seeds for p in seed["points"]):
        by_key.setdefault(tuple(point[key] for key in _KEYS), []).append(point)
    points = []
    for key, same in by_key.items():
        parts = [Stability(p["noise"], p["history"], p["bias"], p["signal"]) for p in same]
        numbers = [{**part.ratios, "signal": part.signal} for part in parts]
        points.append(
            {
                **dict(zip(_KEYS, key, strict=True)),
                "age": same[0]["age"],
                "mean": {name: fmean(n[name] for n in numbers) for name in numbers[0]},
                "std": {name: stdev(n[name] for n in numbers) for name in numbers[0]}
                if len(same) > 1
                else None,
                "error": same[0]["errors"] if len(same) == 1 else None,
            }
        )
    title = "Stability of a teacher's targets"
    return {"title": title, "settings": settings, "points": _rounded(points), "seeds": seeds}


def named(point: Mapping[str, Any]) -> str:
    """The norm of a point in words."""
    norm, alpha = point["norm"], point["alpha"]
    names = {"local": "BN", "synced": f"synced BN ({point['samples']})", "ema": "EMAN"}
    if norm == "momentum":
        return f"Momentum BN, α = {alpha:g}"
    return names.get(norm, f"Momentum BN, scheduled: α = {alpha:.2g}")


def markdown(found: Mapping[str, Any]) -> str:
    """The tables for people: at each share of the training, by samples and by what is wrong with a target."""
    settings, seeds = found["settings"], found["seeds"]
    count, steps = len(seeds), seeds[0]["steps"]
    minutes = fmean(seed["cpu_seconds"] for seed in seeds) / 60
    parts = [
        f"## {found['title']}",
        f"How much does a target depend on anything but its image? Scale: {settings['scale']}, "
        f"{duration(settings['epochs'])} ({steps:,} steps), {settings['loss']} loss, "
        f"seed{'s' * (count > 1)} {', '.join(str(seed['seed']) for seed in seeds)}, {minutes:.1f} minutes of a core "
        "each. Variances are in units of the signal, the variance between images; ages in steps. "
        + (
            "± is the standard deviation over seeds."
            if count > 1
            else "± is the standard error over random draws of companions; seeds may differ by more."
        ),
    ]
    own = next(p["samples"] for p in found["points"] if p["norm"] == "scheduled")
    for share in settings["instrument"]["shares"]:
        points = [p for p in found["points"] if p["share"] == share]
        samples = settings["instrument"]["samples"]
        parts += [
            f"### After {share:.0%} of the training ({points[0]['step']:,} steps)",
            "Noise, by samples per device:",
            _table(["", *map(str, samples)], _by_samples(points, samples)),
            f"All errors, at {own} samples per device:",
            _table(
                ["", *_PARTS, "signal", "age"],
                ([named(p), *_errors(p)] for p in points if p["norm"] in _WHOLE or p["samples"] == own),
            ),
        ]
    return "\n\n".join(parts) + "\n"


def _by_samples(points: list[dict[str, Any]], samples: list[int]) -> Iterable[list[str]]:
    for name in dict.fromkeys(named(p) for p in points):
        same = [p for p in points if named(p) == name]
        cells = {p["samples"]: _cell(p, "noise") for p in same}
        whole = same[0]["norm"] in _WHOLE
        yield [name, *(next(iter(cells.values())) if whole else cells.get(n, "") for n in samples)]


def _errors(point: Mapping[str, Any]) -> list[str]:
    return [*(_cell(point, name) for name in (*_PARTS, "signal")), f"{point['age']:.1f}"]


def _spread(point: Mapping[str, Any], name: str) -> float:
    """The standard deviation over seeds; of one seed, its standard error."""
    return float((point["std"] or point["error"])[name])


def _cell(point: Mapping[str, Any], name: str) -> str:
    value, spread = point["mean"][name], _spread(point, name)
    text = f"{round(value, 3) + 0.0:.3f}" if value else "0"  # an estimate of 0 may be below it: no −0.000
    return f"{text} ± {spread:.3f}" if spread > 1e-9 else text  # nothing that is drawn changes it


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(found: Mapping[str, Any], place: Path) -> bool:
    """Two plots beside `place`: errors against α, and against samples; False without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "momentum2"}):
        for name, figure in (
            ("alpha", _against_alpha(found, Figure)),
            ("samples", _against_samples(found, Figure)),
        ):
            with whole_file(place.with_name(f"{place.name}-{name}.svg")) as file:
                figure.savefig(file, format="svg", metadata={"Date": None})
    return True


def _against_alpha(found: Mapping[str, Any], figure_class: Any) -> Any:
    """Noise, history and bias of fixed α, one line for each share of the training; α = 1 is BN."""
    own = next(p["samples"] for p in found["points"] if p["norm"] == "scheduled")
    figure = figure_class(figsize=(11, 4), layout="constrained")
    shares = found["settings"]["instrument"]["shares"]
    alphas = sorted({*found["settings"]["instrument"]["alphas"], 1.0})
    # From light to dark, as the training goes on.
    colors = [(0.55 - 0.55 * i / len(shares), 0.8 - 0.65 * i / len(shares), 0.85) for i in range(len(shares))]
    panels = figure.subplots(1, 4, sharex=True, sharey=True)
    for axes, part in zip(panels, _PARTS, strict=True):
        for share, color in zip(shares, colors, strict=True):
            line = sorted(
                (p["alpha"], p["mean"][part], _spread(p, part))
                for p in found["points"]
                if p["share"] == share and p["norm"] in ("local", "momentum") and p["samples"] == own
            )
            kept = [(a, v, s) for a, v, s in line if v > 0]  # an estimate of 0 may be below it
            places, values, spreads = zip(*kept, strict=True) if kept else ((), (), ())
            axes.errorbar(
                places, values, yerr=spreads, fmt="o-", ms=4, color=color, label=f"after {share:.0%}"
            )
        axes.set(title=part, xscale="log", yscale="log", xlabel="α (1 is BN)")
        axes.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="variance / signal")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(shares), frameon=False)
    figure.suptitle(f"What is wrong with a target, {own} samples per device")
    return figure


def _against_samples(found: Mapping[str, Any], figure_class: Any) -> Any:
    """Noise, and all errors, against samples per device; early, in the middle and at the end of the training."""
    shares = found["settings"]["instrument"]["shares"]
    shares = list(dict.fromkeys((shares[0], shares[len(shares) // 2], shares[-1])))
    samples = found["settings"]["instrument"]["samples"]
    figure = figure_class(figsize=(3.3 * len(shares) + 3, 7), layout="constrained")
    panels = figure.subplots(2, len(shares), sharex=True, sharey="row", squeeze=False)
    for column, share in zip(panels.T, shares, strict=True):
        points = [p for p in found["points"] if p["share"] == share and p["norm"] != "scheduled"]
        for number, name in enumerate(dict.fromkeys(named(p) for p in points)):
            same = [p for p in points if named(p) == name]
            for axes, part in zip(column, ("noise", "sum"), strict=True):
                values = [p["mean"][part] for p in same]
                if same[0]["norm"] in _WHOLE:
                    # Whatever the samples of a device; EMAN has no noise, and no place on a logarithmic axis.
                    if values[0] > 0:
                        style = {"synced": "--", "ema": ":"}[same[0]["norm"]]
                        axes.axhline(values[0], ls=style, color=f"C{number}", label=name)
                else:
                    spreads = [_spread(p, part) for p in same]
                    axes.errorbar(
                        [p["samples"] for p in same],
                        values,
                        yerr=spreads,
                        fmt="o-",
                        ms=4,
                        color=f"C{number}",
                        label=name,
                    )
        for axes in column:
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(samples, [str(n) for n in samples])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        column[0].set(title=f"after {share:.0%}")
        column[1].set(xlabel="samples per device")
    panels[0, 0].set(ylabel="noise / signal")
    panels[1, 0].set(ylabel="(noise + history + bias) / signal")
    handles, labels = panels[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle("What a target owes to its companions, and all that is wrong with it")
    return figure
