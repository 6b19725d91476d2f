"""From run directories to a table."""

import json
from pathlib import Path
from statistics import mean, stdev

import pytest

from momentum2.reproduce import TABLES, Scale
from momentum2.reproduce.outcome import collect, is_evaluated, markdown, plot, read_outcome
from momentum2.reproduce.runner import Work, write_table

TABLE = TABLES["bn-statistics"]("cifar")
TOP1 = {0: 51.25, 1: 53.75}
REST = {"low": 0.0, "high": 100.0, "images": 10}


def results(seed: int, top1: float, recalibrated: float, knn: float, floors: dict[str, float]) -> dict:
    """The entries of a row that is finished."""

    def entry(evaluation: str, network: str, value: float, floors: dict[str, float]) -> dict:
        return {
            "evaluation": evaluation,
            "data": "cifar test",
            "network": network,
            "accuracy": {"top1": value, "top5": 90.0, **REST},
            "settings": {"seed": seed},
            "floors": floors,
        }

    return {
        "ours": entry("linear cached", "teacher", top1, floors),
        "again": entry("linear cached", "teacher, recalibrated", recalibrated, {}),
        "knn": entry("knn", "teacher", knn, {name: value - 1 for name, value in floors.items()}),
    }


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Two rows are finished, the first with both seeds, the second with one; the third has a run without result."""
    for row, seeds in zip(TABLE.rows, ((0, 1), (0,), (0,)), strict=False):
        for seed in seeds:
            run = row.pretraining.run(tmp_path, seed)
            run.mkdir(parents=True)
            found = results(
                seed, TOP1[seed], 55.0, 45.0, {"raw pixels": 40.0} if row is TABLE.rows[0] else {}
            )
            accuracy = {"top1": 40.0, "top5": 85.0, **REST}
            baseline = {**found["ours"], "network": "raw pixels", "accuracy": accuracy}
            if row is not TABLE.rows[2]:
                (run / "results.json").write_text(json.dumps({"floor": baseline, **found}))
            lines = [{"step": k, "step_time": 0.1 * k} for k in (1, 2, 9)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def found(out: Path, seconds: dict[str, list[float]] | None = None) -> dict:
    return collect(TABLE, out, seconds, lambda row, seed: ["momentum2 ..."])


def test_numbers_are_those_of_the_run(out: Path):
    outcome = read_outcome(TABLE.rows[0], out, 1)
    assert outcome is not None
    seconds = pytest.approx(0.2)
    assert outcome.numbers == {
        "top-1": 53.75,
        "top-5": 90.0,
        "recalibrated": 55.0,
        "kNN": 45.0,
        "seconds": seconds,
    }
    assert read_outcome(TABLE.rows[1], out, 1) is None
    assert read_outcome(TABLE.rows[2], out, 0) is None


def test_a_result_of_another_seed_or_network_is_not_this_rows(out: Path):
    path = TABLE.rows[0].pretraining.run(out, 0) / "results.json"
    entries = json.loads(path.read_text())
    other = {**entries["ours"], "network": "student", "accuracy": {"top1": 99.0, "top5": 99.0, **REST}}
    path.write_text(json.dumps({"student": other, **entries}))
    outcome = read_outcome(TABLE.rows[0], out, 0)
    assert outcome is not None
    assert outcome.numbers["top-1"] == TOP1[0]
    entries["ours"]["settings"]["seed"] = 7
    path.write_text(json.dumps(entries))
    assert read_outcome(TABLE.rows[0], out, 0) is None


def test_a_row_is_finished_with_its_last_evaluation(out: Path):
    row = TABLE.rows[0]
    path = row.pretraining.run(out, 0) / "results.json"
    entries = json.loads(path.read_text())
    del entries["again"]
    path.write_text(json.dumps(entries))
    assert read_outcome(row, out, 0) is None
    assert [is_evaluated(row, each, out, 0) for each in row.evaluations] == [True, False, True]


def test_mean_and_spread_are_over_the_seeds_that_are_there(out: Path):
    first, second, third, *_ = found(out)["rows"]
    assert first["mean"]["top-1"] == pytest.approx(mean(TOP1.values()))
    assert first["std"]["top-1"] == pytest.approx(stdev(TOP1.values()))
    assert second["mean"]["top-1"] == 51.25
    assert second["std"] == {}
    assert third["mean"] == {}
    assert [s["seed"] for s in first["seeds"]] == [0, 1]
    assert (out / first["seeds"][1]["results"]).exists()


def test_seconds_measured_in_turns_are_never_mixed_with_those_of_the_runs(out: Path):
    rows = found(out, {TABLE.rows[0].pretraining.name: [0.125, 0.25, 0.0625]})["rows"]
    assert rows[0]["mean"]["seconds"] == 0.125
    assert "seconds" not in rows[1]["mean"]
    assert all("seconds" not in seed["numbers"] for row in rows for seed in row["seeds"])
    assert found(out)["rows"][1]["mean"]["seconds"] == pytest.approx(0.2)


def test_markdown_shows_the_paper_beside_us(out: Path):
    lines = markdown(found(out)).splitlines()
    (row,) = [line for line in lines if line.startswith("| student Synced BN, teacher Synced BN")]
    numbers = "52.50 ± 1.77 | 55.00 ± 0.00 | 45.00 ± 0.00 | 0.200 ± 0.000"
    assert row == f"| student Synced BN, teacher Synced BN | {numbers} | 2 | 88.06 | 1.10 |"
    (missing,) = [line for line in lines if line.startswith("| student BN, teacher BN |")]
    assert missing == "| student BN, teacher BN | – | – | – | – | 0 | 84.16 | 0.24 |"
    assert any(line.startswith("| *raw pixels* | 40.00 |  | 39.00 |") for line in lines)


@pytest.mark.parametrize(
    ("name", "scale", "epochs", "text"),
    [
        ("bn-statistics", "cifar", None, "Scale: cifar, 1 epoch."),
        ("bn-statistics", "cifar", 4, "Scale: cifar, 4 epochs."),
        ("bn-statistics", "paper", None, "Scale: paper, 400 epochs."),
        ("linear", "cifar", 3, "Scale: cifar, 3 epochs, 10 epochs."),
    ],
)
def test_a_table_says_how_long_its_runs_are(
    tmp_path: Path, name: str, scale: str, epochs: int | None, text: str
):
    empty = collect(TABLES[name](scale, epochs), tmp_path, None, lambda row, seed: [])
    assert text in markdown(empty)


def test_cited_rows_are_printed_under_the_others_with_the_papers_numbers(tmp_path: Path):
    table = TABLES["linear"]("paper")
    found = collect(table, tmp_path, None, lambda row, seed: [])
    assert [row["row"] for row in found["cited"]] == [row.key for row in table.cited]
    lines = [line for line in markdown(found).splitlines() if line.startswith("|")]
    assert lines[0] == "|  | seeds | paper top-1 % | paper top-5 % |"
    labels = [line.split(" | ")[0].removeprefix("| ").rstrip("¹²³") for line in lines[2:]]
    assert labels == [row.label for row in (*table.rows, *table.cited)]
    assert "| Jigsaw, 90 epochs | cited | 45.7 | – |" in lines
    assert "| CMC | cited | 66.2 | 87.0 |" in lines
    assert len({line.count("|") for line in lines}) == 1


def test_cells_of_cited_rows_stay_under_their_columns(tmp_path: Path):
    table = TABLES["linear"]("paper")
    run = table.rows[1].pretraining.run(tmp_path, 0)
    run.mkdir(parents=True)
    entry = {"evaluation": "linear", "data": "test", "network": "teacher", "floors": {}}
    entry |= {"accuracy": {"top1": 70.0, "top5": 90.0, **REST}, "settings": {"seed": 0}}
    (run / "results.json").write_text(json.dumps({"ours": entry}))
    (run / "metrics.jsonl").write_text("")
    text = markdown(collect(table, tmp_path, None, lambda row, seed: []))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == "|  | top-1 % | top-5 % | seeds | paper top-1 % | paper top-5 % |"
    assert "| CMC |  |  | cited | 66.2 | 87.0 |" in lines


def test_contradictions_of_the_paper_are_footnotes(tmp_path: Path):
    text = markdown(collect(TABLES["byol-vs-m2"]("paper"), tmp_path, None, lambda row, seed: []))
    assert "| BYOL, synced BN (4096)¹ |" in text
    assert "| BYOL, BN (32)² |" in text
    assert "| Momentum² Teacher (128)³ |" in text
    notes = text.split("\n\n")[-3:]
    assert notes[0].startswith("¹ The paper has 87.6 and 90.8")
    assert notes[1].startswith("² The paper's text has 61.5 with batch size 128")
    assert notes[2].startswith("³ The paper has 90.6 and 91.2")
    once = markdown(collect(TABLES["coco"]("paper"), tmp_path, None, lambda row, seed: []))
    assert once.count("which MoCo this is") == 1  # though eight rows have it


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_a_row_reads_the_network_and_the_protocol_of_its_number(tmp_path: Path, network: str):
    row = TABLES["linear"]("paper").rows[0]  # BYOL's own number: the student's, by BYOL's protocol
    run = row.pretraining.run(tmp_path, 0)
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    accuracy = {"top1": 70.0, "top5": 90.0, **REST}
    for evaluation in ("linear", "linear byol"):
        entry = {"evaluation": evaluation, "data": "test", "network": network, "accuracy": accuracy}
        entry["settings"] = {"seed": 0}
        (run / "results.json").write_text(json.dumps({"only": entry}))
        found = read_outcome(row, tmp_path, 0)
        assert (found is not None) is ((evaluation, network) == ("linear byol", "student"))


def test_floors_of_other_data_are_not_this_tables(out: Path):
    """At the paper's scale STL-10 and ImageNet share a directory and the name of the evaluation."""
    other = out / "runs" / "stl10" / "seed-0"
    other.mkdir(parents=True)
    mine = json.loads((TABLE.rows[0].pretraining.run(out, 0) / "results.json").read_text())
    mine["ours"]["floors"] = {"raw pixels": 99.0}
    (other / "results.json").write_text(json.dumps(mine))
    assert found(out)["floors"] == {"raw pixels": {"top-1": 40.0, "kNN": 39.0}}


def test_a_copied_run_and_a_table_without_results_are_no_obstacle(out: Path):
    (TABLE.rows[0].pretraining.run(out, 0).parent / "seed-0.bak").mkdir()
    lines = markdown(found(out)).splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    floors_alone = {**found(out), "rows": [{**row, "mean": {}, "std": {}} for row in found(out)["rows"]]}
    assert not any("40.00" in line for line in markdown(floors_alone).splitlines())


def test_seconds_without_results_are_no_row_of_the_plot(out: Path):
    pytest.importorskip("matplotlib", reason="plots need the reproduce extra")
    seconds = {row.pretraining.name: [0.1, 0.1] for row in TABLE.rows}
    assert plot(found(out, seconds), out / "plot.png")
    assert not plot(found(out / "nothing", seconds), out / "none.png")


def test_the_plot_is_a_picture(out: Path):
    pytest.importorskip("matplotlib", reason="plots need the reproduce extra")
    from PIL import Image

    assert plot(found(out), out / "plot.png")
    with Image.open(out / "plot.png") as picture:
        assert min(picture.size) > 200


def test_a_table_without_results_does_not_ask_for_an_extra(tmp_path: Path):
    work = Work(TABLE, tuple(row.key for row in TABLE.rows), tmp_path, (0,), "CIFAR", None, None, 2)
    assert "pip install" not in write_table(work)
    assert not (tmp_path / "bn-statistics.png").exists()


def test_verdicts_pair_the_rows_by_seed(tmp_path: Path):
    table = TABLES["bn-statistics"]("cifar")
    accuracy = {  # by seed
        "local-momentum": {0: (50.0, 44.0), 1: (51.0, 45.0), 2: (53.0, 47.0), 3: (60.0, 60.0)},
        "local-local": {0: (48.0, 44.5), 1: (48.0, 44.5), 2: (51.0, 47.5)},
    }
    for row in table.rows:
        for seed, (top1, knn) in accuracy.get(row.key, {}).items():
            run = row.pretraining.run(tmp_path, seed)
            run.mkdir(parents=True)
            (run / "results.json").write_text(json.dumps(results(seed, top1, top1 + knn, knn, {})))
            (run / "metrics.jsonl").write_text("")
    verdicts = collect(table, tmp_path, None, lambda row, seed: [])["verdicts"]
    known = [v for v in verdicts if "top-1" in v]
    assert [(v["better"], v["other"]) for v in known] == [("local-momentum", "local-local")]
    (verdict,) = known
    assert verdict["paper"] == pytest.approx(88.18 - 84.16)
    assert verdict["top-1"]["seeds"] == 3  # the fourth has no partner
    assert verdict["top-1"]["effect"] == pytest.approx(mean([2, 3, 2]))
    assert verdict["top-1"]["interval"] == pytest.approx(4.303 * stdev([2, 3, 2]) / 3**0.5)
    assert (verdict["top-1"]["word"], verdict["kNN"]["word"]) == ("shown", "bounded")
    assert verdict["recalibrated"]["effect"] == pytest.approx(mean([1.5, 3.5, 1.5]))
    text = markdown(collect(table, tmp_path, None, lambda row, seed: []))
    assert "| A Momentum BN teacher is better than a BN teacher | +4.0 | +2.3 ± 1.4 | shown | +2.2 ±" in text


def test_verdicts_on_time_compare_turns(tmp_path: Path):
    names = {row.key: row.pretraining.name for row in TABLE.rows}
    turns = {"local-momentum": [0.102, 0.2, 0.1], "local-local": [0.1, 0.2, 0.1], "synced-synced": [0.2] * 3}
    seconds = {names[key]: times for key, times in turns.items()}
    verdicts = collect(TABLE, tmp_path, seconds, lambda row, seed: [])["verdicts"]
    same, less = (v for v in verdicts if v["cost"])
    assert same["paper"] == pytest.approx(100 * (1 - 0.25 / 0.24), abs=0.01)
    assert same["seconds"]["effect"] == pytest.approx(mean([-2, 0, 0]))
    assert same["seconds"]["word"] == "shown"  # at most 5% behind
    assert less["seconds"]["effect"] == pytest.approx(mean([49, 0, 50]))
    assert less["seconds"]["word"] == "bounded"
    text = markdown(collect(TABLE, tmp_path, seconds, lambda row, seed: []))
    assert "| Momentum BN takes at most 5% more time than BN | -4.2 | -0.7 ±" in text


@pytest.mark.parametrize("name", list(TABLES))
@pytest.mark.parametrize("scale", ["smoke", "cifar", "paper"])
def test_claims_are_about_rows_of_their_table(name: str, scale: Scale):
    table = TABLES[name](scale)
    keys = {row.key for row in table.rows}
    for claim in table.claims:
        assert {claim.better, claim.other} <= keys
        assert claim.better != claim.other


def test_a_table_says_how_its_runs_differ_from_the_scales_own(tmp_path: Path):
    table = TABLES["bn-statistics"]("cifar")
    varied = table.varied({"method.repulsion": "batch"}, ("repulsion", "8-samples"))
    found = collect(varied, tmp_path, None, lambda row, seed: [])
    assert found["variant"] == ["repulsion", "8-samples"]
    assert "Scale: cifar, 1 epoch, repulsion, 8 samples." in markdown(found)
    assert "repulsion" not in markdown(collect(table, tmp_path, None, lambda row, seed: []))
