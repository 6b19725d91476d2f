"""One run in detail: confusions, views, settings, and how to run it again."""

import platform
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

import numpy as np
import torch

from momentum2 import __version__
from momentum2.data.contact_sheet import write_views
from momentum2.data.dataset import Ints
from momentum2.files import read_text
from momentum2.report.html import data_uri, escape, number, table
from momentum2.report.learned import Learned, confusion
from momentum2.runs.handle import Snapshot, differing_settings
from momentum2.runs.names import CONFIG
from momentum2.runs.state import read_alphas
from momentum2.yaml_settings import LARGEST_FILE

_MOST = 20  # classes up to which the whole matrix is shown
_PAIRS = 10


def confusion_part(learned: Learned) -> str:
    """The confusion matrix, and the most frequent mistakes in words."""
    assert learned.class_names is not None
    counts = confusion(learned)
    right, total = int(np.trace(counts)), int(counts.sum())
    caption = (
        f"{right / total:.1%} of these images are classified correctly by the {learned.k} nearest others on this page; "
        "evaluate knn, with all training images as neighbors, is the better measure."
    )
    matrix = _matrix(counts, learned.class_names) if len(counts) <= _MOST else ""
    wrong = counts * (1 - np.eye(len(counts), dtype=np.int64))
    order = np.argsort(-wrong, axis=None, kind="stable")[:_PAIRS]
    pairs = [(int(i) // len(counts), int(i) % len(counts)) for i in order]
    rows = [
        (learned.class_names[a], learned.class_names[b], int(counts[a, b])) for a, b in pairs if wrong[a, b]
    ]
    mistakes = table(("class", "taken for", "images"), rows, "Most frequent confusions") if rows else ""
    return f"<p>{escape(caption)}</p>{matrix}{mistakes}"


def _matrix(counts: Ints, names: Sequence[str]) -> str:
    """Rows are classes, columns what they were taken for; the tint is the share of the row."""
    head = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
    lines = []
    for r, name in enumerate(names):
        cells = []
        for c, count in enumerate(counts[r].tolist()):
            share = count / max(1, int(counts[r].sum()))
            kind = "right" if r == c else "wrong"
            title = escape(f"{name} taken for {names[c]}: {count}")
            cells.append(
                f'<td class="{kind}" style="--share:{share:.2f}" title="{title}">{count or "·"}</td>'
            )
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Confusion matrix"><table class="confusion">'
        "<caption>Rows: the class of an image; columns: the class of its neighbors</caption>"
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def norms_part(run: Snapshot) -> str:
    """The alpha of each norm in the last checkpoint, by name; nothing unless they choose it."""
    if run.config.method.alpha != "auto":
        return ""
    step, found = read_alphas(run.directory)
    if not found:
        return ""
    rows = [
        (name, *(number(float(value), 3) for value in (alphas.mean(), alphas.min(), alphas.max())))
        for name, alphas in sorted(found.items(), key=lambda norm: _natural(norm[0]))
    ]
    caption = f"α of each norm after {step:,} steps, over its devices"
    return f"<h3>α by norm</h3>{table(('norm', 'mean', 'smallest', 'largest'), rows, caption)}"


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer2 before layer10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", name)]


def views_part(run: Snapshot) -> str:
    """The contact sheet of what the network sees in training."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "views.webp"
        write_views(run.config, path, count=6)
        picture = data_uri("image/webp", path.read_bytes())
    words = "Each row: an image of the first batch, then the views of it that the network sees."
    return (
        f'<figure><img src="{picture}" alt="{words}" class="sheet"><figcaption>{words}</figcaption></figure>'
    )


def settings_part(run: Snapshot) -> str:
    """Plan, config and the commands that repeat the run."""
    config = run.directory / CONFIG
    commands = (
        f"momentum2 pretrain --config {quote(str(config))} --out NEW_DIRECTORY\n"
        f"momentum2 evaluate knn {quote(str(run.directory))}\n"
        f"momentum2 report {quote(str(run.directory))}"
    )
    text = read_text(config, LARGEST_FILE)
    parts = [f"<h4>Run it again</h4><pre>{escape(commands)}</pre>"]
    if run.plan:
        parts.append(f"<h4>What it resolves to</h4><pre>{escape(run.plan)}</pre>")
    parts.append(f"<details><summary>All settings (config.yaml)</summary><pre>{escape(text)}</pre></details>")
    return "".join(parts)


def differences(runs: Sequence[Snapshot]) -> str:
    """Settings in which the runs differ."""
    rows = [(name, *(number(run.settings.get(name), 6) for run in runs)) for name in differing_settings(runs)]
    if not rows:
        return "<p>All settings are the same.</p>"
    return table(("setting", *(run.name for run in runs)), rows, "Settings that differ")


def environment() -> str:
    """What this page, and at the end of a training also the run, was made with."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows = [
        ("momentum2", __version__),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("accelerators", ", ".join(gpus) or "none"),
        ("CPU threads", torch.get_num_threads()),
    ]
    return table((), rows, "Where this page was made")
