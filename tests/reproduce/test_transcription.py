"""Every number of every table of the paper is in ours, beside the right row, and no other number is."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from momentum2.reproduce import TABLES

TRANSCRIPTION = Path(__file__).with_name("paper_tables.txt")
LATEX = Path(__file__).parents[3] / "shared" / "paper" / "momentum2_teacher.tex"

Grid = list[list[str]]
#: (table, row, column) of ours -> number.
Numbers = dict[tuple[str, str, str], float]


def transcription() -> dict[str, Grid]:
    """The tabulars by name, their lines as cells."""
    grids: dict[str, Grid] = {}
    for block in TRANSCRIPTION.read_text(encoding="utf-8").split("\n## ")[1:]:
        name, *lines = block.strip("\n").splitlines()
        grids[name] = [[cell.strip() for cell in line.split("|")] for line in lines]
    return grids


def plain(cell: str) -> str:
    """A cell without LaTeX."""
    cell = re.sub(r"\\cite\{[^}]*\}", "", cell)
    cell = re.sub(r"\\multirow\{ ?\d\}\{\*\}\{([^}]*)\}", r"\1", cell)
    cell = re.sub(r"\\multicolumn\{\d\}\{\w\}\{([^}]*)\}", r"\1", cell)
    cell = re.sub(r"\\(?:emph|textbf)\{([^}]*)\}", r"\1", cell)
    words = {r"\to": "→", r"\alpha": "α", r"\times": "×", r"\%": "%", "~": " ", "$": ""}
    for latex, word in words.items():
        cell = cell.replace(latex, word)
    return " ".join(cell.split())


def tabulars(latex: str) -> Iterator[tuple[str, Grid]]:
    """The tabulars of the LaTeX source, as `transcription` has them."""
    latex = re.sub(r"\\begin\{tabular\}\[c\]\{@\{\}c@\{\}\}(.*?)\\\\(.*?)\\end\{tabular\}", r"\1\2", latex)
    latex = latex.replace(r"Batch\\size", "Batch size")
    for _, table in re.findall(r"\\begin\{table(\*?)\}(.*?)\\end\{table\1\}", latex, re.DOTALL):
        label = re.findall(r"\\label\{(.*?)\}", table)[0]
        pattern = r"\\begin\{tabular\}\{[^}]*\}(.*?)\\end\{tabular\}(.*?)(?=\\begin\{tabular\}|$)"
        for grid, after in re.findall(pattern, table, re.DOTALL):
            part = ""
            if "subtable" in table:
                part = ": " + plain(re.findall(r"\\caption\{((?:[^{}]|\{[^}]*\})*)\}", after)[0])
            lines = re.sub(r"\\(?:mid|top)rule", "", grid).split(r"\\")
            cells = [[plain(cell) for cell in line.split("&")] for line in lines]
            yield label + part, [line for line in cells if any(line)]


@pytest.mark.skipif(not LATEX.exists(), reason="the LaTeX source of the paper is not here")
def test_the_transcription_is_the_papers():
    printed = list(tabulars(LATEX.read_text(encoding="utf-8")))
    assert printed == list(transcription().items())
    assert LATEX.read_text(encoding="utf-8").count(r"\begin{tabular}") == len(printed) + 1  # one is a cell


def number(cell: str) -> float | None:
    """`0.25s`, `26.1 (+1.7)`; None for `-`."""
    return None if cell == "-" else float(re.findall(r"^\d+(?:\.\d+)?", cell)[0])


#: How rows of the paper are called here.
NORMS = {"Synced BN": "synced", "BN": "local", "Momentum BN": "momentum"}
BYOL_VS_M2 = {
    ("BYOL w/ Synced BN", "4096"): "byol-synced",
    ("BYOL w/o Synced BN", "32"): "byol",
    ("Momentum^2 Teacher", "32"): "m2",
    ("Momentum^2 Teacher", "128"): "m2-large",
}
METHODS = {"Ours": "m2", "BYOL": "byol", "SimSiam": "simsiam"}
LINEAR = {
    ("Jigsaw", "90"): "jigsaw-90",
    ("InstDis", "200"): "instdis-200",
    ("BigBiGAN", "-"): "bigbigan",
    ("Local Agg.", "-"): "local-agg",
    ("CPC v2", "200"): "cpc-v2-200",
    ("CMC", "-"): "cmc",
    ("SimCLR", "200"): "simclr-200",
    ("MOCOv2", "200"): "moco",
    ("PCL-v2", "200"): "pcl-v2-200",
    ("InfoMin Aug", "200"): "infomin-aug-200",
    ("BYOL", "300"): "byol",
    ("Ours", "300"): "m2",
    ("PIRL", "800"): "pirl-800",
    ("SimCLR", "1000"): "simclr-1000",
    ("MOCOv2", "800"): "moco-long",
    ("InfoMin Aug", "800"): "infomin-aug-800",
    ("BYOL", "1000"): "byol-long",
    ("Ours", "1000"): "m2-long",
}
SEMI = {
    ("Supervised", "-"): "supervised-s4l",
    ("Pseudolabels", "-"): "pseudolabels",
    ("VAT", "-"): "vat",
    ("UDA", "-"): "uda",
    ("FixMatch", "-"): "fixmatch",
    ("InstDisc", "200"): "instdisc-200",
    ("PIRL", "800"): "pirl-800",
    ("MoCov2", "800"): "moco-v2-800",
    ("PCL", "200"): "pcl-200",
    ("SimCLR", "1000"): "simclr-1000",
    ("SWAV(B=256)", "200"): "swav-batch-256-200",
    ("SWAV(B=4096)", "200"): "swav-batch-4096-200",
    ("SWAV(B=4096)", "800"): "swav-batch-4096-800",
    ("BYOL", "1000"): "byol-1000",
    ("Ours", "300"): "m2",
    ("Ours", "1000"): "m2-long",
}
STARTS = ["random", "supervised", "moco", "byol", "m2"]
STARTED = {
    "random init.": "random",
    "supervised": "supervised",
    "MoCo 200e": "moco",
    "BYOL 300e": "byol",
    "Ours 300e": "m2",
}
DETECTORS = {
    "Mask R-CNN": "mask_rcnn",
    "Cascade R-CNN": "cascade_rcnn",
    "RetinaNet": "retinanet",
    "FCOS": "fcos",
}
BOX, MASK = ["box AP", "box AP50", "box AP75"], ["mask AP", "mask AP50", "mask AP75"]


def cells() -> Iterator[tuple[str, str, str, str]]:
    """Each number of the transcription as (table, row, column) of ours, and the cell."""
    grids = transcription()

    def rows(label: str) -> Grid:
        return grids.pop(label)[1:]

    for student, teacher, top1, seconds in rows("tab:impact_of_syncbn"):
        key = f"{NORMS[student]}-{NORMS[teacher]}"
        yield "bn-statistics", key, "top-1", top1
        yield "bn-statistics", key, "seconds", seconds
    for model, top1, top5, samples, seconds in rows("tab:byol_with_momentumbn"):
        for column, cell in (("top-1", top1), ("top-5", top5), ("seconds", seconds)):
            yield "byol-vs-m2", BYOL_VS_M2[model, samples], column, cell
    for name, *values in rows("tab:moco_with_momentumbn"):
        key = {"MoCo w/ Shuffling BN": "shuffle", "MoCo w/ Momentum BN": "momentum"}[name]
        for column, cell in zip(("top-1", "top-5", "seconds"), values, strict=True):
            yield "moco", key, column, cell
    sizes = grids["tab:impact_of_bn"][0][1:]
    for method, *values in rows("tab:impact_of_bn"):
        for samples, cell in zip(sizes, values, strict=True):
            yield "bn-batch-size", f"{METHODS[method]}-{samples}", "top-1", cell
    lengths = [head.removesuffix("e") for head in grids["tab:training_on_1_machine"][0][2:]]
    for method, batch, *values in rows("tab:training_on_1_machine"):
        for length, cell in zip(lengths, values, strict=True):
            yield "single-machine", f"{METHODS[method]}-{batch}-{length}", "top-1", cell
    for table, label in (("alpha", "tab:abl_alpha"), ("alpha-base", "tab:abl_alpha_base")):
        alphas = grids[label][0][1:]
        for name, *values in rows(label):
            for alpha, cell in zip(alphas, values, strict=True):
                key = "cosine" if alpha == "1 → 0" else alpha
                yield table, f"{table}-{key}", {"Top1": "top-1", "Top5": "top-5"}[name], cell
    for method, epochs, top1, top5 in rows("tab:imagenet_linear"):
        yield "linear", LINEAR[method, epochs], "top-1", top1
        yield "linear", LINEAR[method, epochs], "top-5", top5
    for method, *values in rows("tab:imagenet_linear_semi")[1:]:
        if values:  # not a heading
            epochs, *numbers = values
            places = [(column, percent) for column in ("top-1", "top-5") for percent in (1, 10)]
            for (column, percent), cell in zip(places, numbers, strict=True):
                yield "semi", f"{SEMI[method, epochs]}-{percent}", column, cell
    for label in [label for label in grids if label.startswith("tab:coco_finetuning")]:
        model, schedule = re.findall(r": (.*), (\d)× schedule", label)[0]
        for place, values in enumerate(rows(label)):
            named = not values[0][0].isdigit()
            start = STARTED[values[0]] if named else STARTS[place]
            for column, cell in zip(BOX + MASK, values[named:], strict=False):
                yield "coco", f"coco-{DETECTORS[model]}-{schedule}x-{start}", column, cell
    for name, *values in rows("tab:coco_lvis"):
        for column, cell in zip(MASK, values, strict=True):
            yield "lvis", f"lvis-mask_rcnn-2x-{STARTED[name]}", column, cell
    assert not grids  # every tabular has been read


def test_every_number_of_the_paper_is_in_our_tables_and_no_other():
    published: Numbers = {}
    for table, row, column, cell in cells():
        value = number(cell)
        if value is not None:
            assert (table, row, column) not in published
            published[table, row, column] = value
    ours: Numbers = {
        (name, row.key, column): value
        for name, build in TABLES.items()
        for table in [build("paper")]
        for row in (*table.rows, *table.cited)
        for column, value in row.paper.items()
    }
    assert ours == published


def test_every_row_of_ours_has_a_number_but_those_from_scratch():
    """The supervised baseline of the paper is not our network from scratch."""
    without = {
        (name, row.key)
        for name, build in TABLES.items()
        for row in (*build("paper").rows, *build("paper").cited)
        if not row.paper
    }
    assert without == {("semi", "scratch-1"), ("semi", "scratch-10")}


def test_every_cell_has_a_column_of_its_table():
    for name, build in TABLES.items():
        table = build("paper")
        for row in (*table.rows, *table.cited):
            assert set(row.paper) <= set(table.columns), (name, row.key)


def test_rows_are_as_long_as_in_the_paper():
    for name, keys in (("linear", LINEAR), ("semi", SEMI)):
        table = TABLES[name]("paper")
        lengths = {row.key: row.pretraining.epochs for row in table.rows}
        labels = {row.key: row.label for row in table.cited}
        for (_, epochs), key in keys.items():
            parts = [key] if name == "linear" else [f"{key}-1", f"{key}-10"]
            assert any(part in lengths or part in labels for part in parts)
            for part in parts:
                if part in lengths:
                    assert lengths[part] == int(epochs)
                elif part in labels:
                    said = re.findall(r", (\d+) epochs$", labels[part])
                    assert said == ([] if epochs == "-" else [epochs])
    for name in ("coco", "lvis"):
        for row in TABLES[name]("paper").rows:
            start = row.key.split("-")[-1]
            printed = next(label for label, key in STARTED.items() if key == start)
            length = re.findall(r" (\d+)e$", printed)
            assert re.findall(r", (\d+) epochs$", row.label) == length
            assert not length or row.pretraining.epochs == int(length[0])
