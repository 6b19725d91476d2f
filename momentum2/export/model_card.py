"""MODEL_CARD.md: what the weights are, how to load them, and how they came about."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from momentum2.backbones import TIMM
from momentum2.runs.card import EncoderCard
from momentum2.runs.metrics import read_metrics
from momentum2.runs.names import CONFIG, METRICS, RESULTS
from momentum2.runs.planned import read_plan
from momentum2.runs.results import read_results
from momentum2.settings import config_from_file

#: Settings that say where things lie on somebody's machine.
_PRIVATE = ("root", "cache_dir", "weights", "device")
#: How a folder gets to the Hub: by its own command, which asks for its own credentials.
UPLOAD = "hf upload ORGANIZATION/NAME FOLDER"
#: Metrics of the training that say something about the weights.
_TOLD = {"loss": "training loss", "knn_top1": "online kNN, top-1 (%)"}


def run_of(source: Path) -> Path | None:
    """The run directory that holds an encoder: named itself, or by its file or one of its checkpoints."""
    return next((p for p in (source, *source.parents[:2]) if (p / CONFIG).is_file()), None)


def model_card(
    card: EncoderCard,
    source: Path,
    lines: str,
    license: str,
    recalibrated: str | None,
    loaded_by_timm: bool = False,
) -> str:
    """The text of MODEL_CARD.md, with the front matter that the Hugging Face Hub reads."""
    run = run_of(source)
    library = "library_name: timm\n" if loaded_by_timm else ""
    parts = [
        f"---\nlicense: {license}\n{library}pipeline_tag: image-feature-extraction\n---",
        f"# {card.backbone}, pretrained by momentum2",
        _table(_facts(card, run, license, recalibrated)),
        f"## Loading\n\n```python\n{lines}```",
        *([f"## Sharing\n\n```text\n{UPLOAD}\n```"] if loaded_by_timm else []),
        f"## Numbers\n\n{_table(numbers) if (numbers := _numbers(run)) else 'None were measured.'}",
    ]
    if run:
        parts.append(f"## Training\n\nThe whole recipe:\n\n```yaml\n{_recipe(run)}```")
    return "\n\n".join(parts) + "\n"


def _facts(card: EncoderCard, run: Path | None, license: str, recalibrated: str | None) -> dict[str, str]:
    origin = (
        f"{card.network} of {card.method} after {card.step:,} steps" if card.step is not None else "unknown"
    )
    data = read_plan(run).said.get("data") if run else None
    side = round(card.image_size / card.crop)
    kind = {1: "gray", 3: "RGB"}.get(card.channels, f"{card.channels} channels")
    window = f", values of more than 8 bits by the window {list(card.window)}" if card.window else ""
    facts = {
        "network": f"{_shape(card)}, without classifier",
        "output": f"{card.feature_dim} pooled features",
        "input": f"{kind}, {card.image_size} × {card.image_size}{window}: shorter side to {side} "
        f"({card.interpolation}, antialiased), center, scaled to [0, 1], minus {list(card.mean)}, "
        f"divided by {list(card.std)}",
        "origin": origin,
        "training data": data or card.data or "unknown",
        "license": license,
        **({"started from": _start(card.start)} if card.start else {}),
        "written by": f"momentum2 {card.version}",
    }
    return facts | ({"batch norm": f"statistics measured again on {recalibrated}"} if recalibrated else {})


def _shape(card: EncoderCard) -> str:
    if card.backbone.startswith(TIMM):
        return ", ".join([card.backbone, *card.options])
    return ", ".join([card.backbone, f"stem {card.stem}", f"width {card.width:g}", *card.options])


def _start(start: dict[str, str]) -> str:
    terms = f", license {start['license']}" if "license" in start else ""
    return f"{start['name']}{terms}, SHA-256 {start['sha256']}"


def _numbers(run: Path | None) -> dict[str, str]:
    """What was measured: while training, and by `momentum2 evaluate`."""
    if run is None:
        return {}
    numbers: dict[str, str] = {}
    records = read_metrics(run / METRICS) if (run / METRICS).is_file() else []
    for name, words in _TOLD.items():
        found = [record for record in records if name in record]
        if found:
            numbers[words] = f"{found[-1][name]:.4g} at step {found[-1]['step']:,}"
    for name, result in read_results(run / RESULTS).items():
        accuracy: Any = result.get("accuracy")
        if accuracy:
            interval = f"95% interval {accuracy['low']:.2f} to {accuracy['high']:.2f}"
            numbers[name.replace(" | ", ", ")] = f"top-1 {accuracy['top1']:.2f}% ({interval})"
    return numbers


def _recipe(run: Path) -> str:
    settings = asdict(config_from_file(run / CONFIG))
    public = {
        section: {name: value for name, value in part.items() if name not in _PRIVATE}
        for section, part in settings.items()
    }
    return yaml.safe_dump(public, sort_keys=False)


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
