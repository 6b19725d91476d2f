"""Run directories to one HTML page that needs nothing else."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from momentum2.errors import SettingError, UserError, reason
from momentum2.files import asked_for, real, write_whole
from momentum2.report import details, summary
from momentum2.report.curves import CURVES, HEALTH, alarms, series
from momentum2.report.html import escape, note, script_json
from momentum2.report.learned import Learned, ReportOptions, check_map, look, queries
from momentum2.report.sprites import COLUMNS
from momentum2.runs.handle import Snapshot, read_runs
from momentum2.runs.names import REPORT
from momentum2.settings import check

NO_LABELS = "No confusion matrix: the images are unlabeled. Put each class in its own folder."


def write_report(runs: Sequence[Path], out: Path | None = None, options: ReportOptions | None = None) -> Path:
    """Write the report of a run, or of several side by side; returns its path.

    What cannot be shown (no checkpoint yet, images that are gone) is one line on the page that says why.

    Args:
        runs: Run directories.
        out: The page (default: `report.html` in the run, or beside the first of several).
        options: What to look at.
    """
    options = options or ReportOptions()
    check(options)
    check_map(options.map)
    opened = read_runs([Path(run) for run in runs])
    if not opened:
        raise UserError("No run given. Pass a run directory.")
    first = opened[0].directory
    if out is not None and not out.name:
        raise SettingError("out", f"{str(out)!r} is not a file. Choose one, such as report.html.")
    path = out or (first / REPORT if len(opened) == 1 else real(first).parent / REPORT)
    page = _report(opened, options)
    with asked_for("out", path):
        write_whole(path, page.encode("utf-8", "replace"))
    return path


def write_last_report(run: Path) -> str:
    """Write a finished run's report, and say so in one line; whatever goes wrong, the run itself is safe."""
    try:
        return f"Report: {write_report([run])}"
    except UserError as error:
        return f"No report: {error}"
    except Exception as error:  # days of training must not end in a failure because of a page
        return f"No report ({reason(error)}). Try momentum2 report {run}"


def _report(runs: Sequence[Snapshot], options: ReportOptions) -> str:
    sprites: dict[str, int] = {}  # runs that were shown the same images share the thumbnails
    maps, learned, views, norms = [], [], [], []
    for place, run in enumerate(runs):
        found = _or_note(lambda run=run: look(run, options))  # type: ignore[misc]
        seen = isinstance(found, Learned)
        maps.append(_map(found, sprites) if isinstance(found, Learned) else None)
        if isinstance(found, Learned):
            found = details.confusion_part(found) if found.labels is not None else note(NO_LABELS)
        heading = "<h3>Confusions</h3>" if seen else ""
        learned.append(_of_run(place, heading + found))
        views.append(_of_run(place, _or_note(lambda run=run: details.views_part(run))))  # type: ignore[misc]
        norms.append(_of_run(place, _or_note(lambda run=run: details.norms_part(run))))  # type: ignore[misc]
    return render(runs, maps, "".join(learned), "".join(views), list(sprites), norms="".join(norms))


def _or_note(make: Callable[[], Any]) -> Any:
    """What `make` makes, or the reason why it cannot."""
    try:
        return make()
    except UserError as error:
        return note(f"Left out: {error}")


def _of_run(place: int, part: str) -> str:
    return f'<div data-run="{place}">{part}</div>'


def _map(learned: Learned, sprites: dict[str, int]) -> dict[str, Any]:
    pictures = [base64.b64encode(picture).decode() for picture in learned.sprites.pictures]
    return {
        "words": f"{learned.what}. {learned.how}.",
        "x": learned.xy[:, 0].round(4).tolist(),
        "y": learned.xy[:, 1].round(4).tolist(),
        "names": learned.names,
        "neighbors": learned.neighbors.tolist(),
        "classes": learned.class_names,
        "labels": None if learned.labels is None else learned.labels.tolist(),
        "predicted": None if learned.predicted is None else learned.predicted.tolist(),
        "queries": queries(learned),
        "side": learned.sprites.side,
        "columns": COLUMNS,
        "sprites": [sprites.setdefault(picture, len(sprites)) for picture in pictures],
    }


def render(
    runs: Sequence[Snapshot],
    maps: Sequence[dict[str, Any] | None],
    learned: str,
    views: str,
    sprites: Sequence[str],
    live: dict[str, Any] | None = None,
    norms: str = "",
) -> str:
    """The whole page; `live` has what a page needs that refreshes itself."""
    several = len(runs) > 1
    script = "\n".join(_asset(name) for name in ("page.js", "explorer.js", "start.js"))
    options = "".join(f'<option value="{i}">{escape(run.name)}</option>' for i, run in enumerate(runs))
    settings = [_of_run(i, details.settings_part(run)) for i, run in enumerate(runs)]
    data = curves_data(runs) | {"curves": [*map(asdict, CURVES)], "health": [*map(asdict, HEALTH)]}
    for entry, found in zip(data["runs"], maps, strict=True):
        entry["map"] = found
    return Template(_asset("page.html")).substitute(
        policy=_policy(script, live is not None),
        title=escape(f"momentum2: {', '.join(run.name for run in runs)}"),
        status="Live" if live else "",
        style=_asset("page.css"),
        selector=f'<label>Details of <select id="run">{options}</select></label>' if several else "",
        **moving_parts(runs),
        norms=norms,
        learned=learned,
        views=views,
        settings=(details.differences(runs) if several else "") + "".join(settings),
        environment=details.environment(),
        data=script_json(data | {"live": False} | (live or {})),
        sprites=script_json(list(sprites)),
        script=script,
    )


def moving_parts(runs: Sequence[Snapshot]) -> dict[str, str]:
    """The parts of the page that change while a run trains."""
    return {
        "headline": summary.headline(runs),
        "results": summary.results_table(runs),
        "values": summary.values_table(runs),
        "alarms": summary.alarm_list(runs),
    }


def curves_data(runs: Sequence[Snapshot]) -> dict[str, Any]:
    """What the plots are drawn from."""
    return {"runs": [{"name": run.name, "series": series(run), "alarms": alarms(run)} for run in runs]}


def _asset(name: str) -> str:
    return files("momentum2.report").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str, live: bool) -> str:
    """A content security policy: this script, and nothing from anywhere."""
    allowed = f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
