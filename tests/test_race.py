"""The race on a few drawn images: every kind of row, the files it keeps, and the page it writes."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from scipy.stats import ttest_1samp

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def race() -> ModuleType:
    spec = importlib.util.spec_from_file_location("race", ROOT / "benchmarks" / "race.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["race"] = module  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


SMALL = [
    "--data",
    "shapes",
    "--train-size",
    "200",
    "--test-size",
    "60",
    "--linear",
    "none",
    "--budgets",
    "0.5",
]


def test_a_race_from_start_to_page(
    race: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(race.SHARED, "train.batch_size", 16)
    monkeypatch.setitem(race.SHARED, "model.width", 0.125)
    out = tmp_path / "race"

    def here(words: list[str], **_: object) -> object:
        """A run in this process: the arguments after the script's name."""
        race.main(words[words.index("one") :])
        return type("Ended", (), {"returncode": 0, "stderr": ""})

    rows = ["bundle", "simclr", "byol", "moco", "pixels", "random", "patches"]
    words = ["run", *SMALL, "--out", str(out), "--rows", *rows, "--seeds", "0", "1"]
    with monkeypatch.context() as inside:  # not beyond: matplotlib asks another program for fonts
        inside.setattr(race.subprocess, "run", here)
        race.main(words)
    runs = race.read_runs(out)
    assert len(runs) == len(rows) * 2
    bundle = next(r for r in runs if r["row"] == "bundle")
    assert bundle["settings"]["method"]["repulsion"] == "batch"
    assert bundle["settings"]["optim"]["name"] == "muon"
    assert bundle["steps"] >= 1
    assert bundle["cpu_seconds"] >= 0.5
    assert set(bundle["networks"]) == {"teacher", "student"}
    assert all(0 <= first["knn20"] <= 100 for r in runs for first in r["networks"].values())
    assert all("recalibrated" in race.first(r) for r in runs if r["table"] == "B")
    # What is there is not run again.
    with monkeypatch.context() as forbidden:
        forbidden.setattr(race.subprocess, "run", None)
        race.main(words)
    page = tmp_path / "docs" / "race.md"
    race.main(["table", "--out", str(out), "--page", str(page)])
    text = page.read_text(encoding="utf-8")
    assert "Table B" in text
    assert "Table A" not in text  # no library raced
    for row in ("bundle", "simclr", "byol", "moco"):
        assert f"(`{row}`)" in text
    assert (tmp_path / "docs" / "race.svg").read_text(encoding="utf-8").startswith("<?xml")
    found = json.loads((out / "race.json").read_text(encoding="utf-8"))
    assert found["rows"]["bundle"]["budgets"]["0.5"]["to_rival"]["rival"] == "simclr"


def run(row: str, seed: int, top1: float, budget: float = 60.0, rate: float = 0.16) -> dict[str, object]:
    return {
        "row": row,
        "words": "",
        "table": "B",
        "budget": budget,
        "seed": seed,
        "rate": rate,
        "steps": 100,
        "gemm": [80, 80],
        "networks": {"student": {"knn20": top1, "knn200": 1.0, "dimensions": 4.0}},
    }


def test_wrong_data_are_one_sentence_before_any_run(
    race: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        race.main(["run", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{tmp_path / 'nowhere'} does not exist." in said.err
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_is_named_and_counts(
    race: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "empty").mkdir()
    words = ["run", "--data", str(tmp_path / "empty"), "--out", str(tmp_path / "out"), "--rows", "simclr"]
    with pytest.raises(SystemExit) as ended:
        race.main([*words, "--budgets", "1", "--seeds", "0"])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "simclr-1s-seed-0: failed" in said
    assert "contains no images" in said
    assert "Traceback" not in said


def test_a_row_and_its_rival_differ_in_what_its_name_says(race: ModuleType):
    def peak(name: str) -> tuple[object, ...]:
        row = race.ROWS[name]
        batch = row.settings.get("train.batch_size", race.SHARED["train.batch_size"])
        return tuple(rate * batch / 256 for rate in row.rates)

    for name, row in race.ROWS.items():
        if row.rival:
            rival = race.ROWS[row.rival]
            assert (row.table, rival.table) == ("B", "B")
            if row.settings.get("optim.name") == rival.settings.get("optim.name"):
                assert peak(name) == pytest.approx(peak(row.rival))


def test_rates_are_chosen_where_all_were_tried(race: ModuleType, tmp_path: Path):
    (tmp_path / "runs").mkdir()
    low, middle, high = race.ROWS["simclr-views"].rates
    tried = [(60.0, low, 50.0), (60.0, middle, 49.0), (60.0, high, 51.0), (300.0, middle, 60.0)]
    runs = [run("simclr-views", race.TUNING_SEED, top1, budget, rate) for budget, rate, top1 in tried]
    for count, expected in ((2, middle), (3, high), (4, high)):
        (tmp_path / "runs" / f"{count - 1}.json").write_text(json.dumps(runs[count - 1]))
        (tmp_path / "runs" / "0.json").write_text(json.dumps(runs[0]))
        assert race.chosen_rate(tmp_path, "simclr-views") == expected
    text = "\n".join(race.tuning(runs))
    assert f"| `simclr-views` | 60 | {low:g}: 50.0, {middle:g}: 49.0, **{high:g}: 51.0** |" in text


def test_a_row_is_compared_with_its_rival_seed_by_seed(race: ModuleType):
    ours = [run("bundle-views", 10 + i, top1) for i, top1 in enumerate((61.0, 62.5, 62.0, 70.0))]
    rival = [run("simclr-views", 10 + i, top1) for i, top1 in enumerate((60.0, 60.5, 61.5))]
    others = [run("simclr", 10 + i, 50.0) for i in range(3)]
    found = race.summarize([*ours, *rival, *others])
    gap = found["rows"]["bundle-views"]["budgets"]["60"]["to_rival"]
    low, high = ttest_1samp([1.0, 2.0, 0.5], 0).confidence_interval(0.95)
    assert gap == {
        "rival": "simclr-views",
        "pairs": 3,
        "refused": 0,
        "mean": pytest.approx((high + low) / 2),
        "interval": pytest.approx((high - low) / 2),
    }
    assert f"| `bundle-views` | `simclr-views` | 60 | 3 | +1.2 ± {(high - low) / 2:.1f} | – |" in race.pairs(
        found
    )
    (sentence,) = (words for words in race.verdicts(found) if "four views" in words)
    assert "not distinguishable from SimCLR" in sentence


def test_the_interval_is_that_of_students_t(race: ModuleType):
    values = [0.3, -1.2, 0.8, 1.9]
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    assert race.interval(values) == pytest.approx((high - low) / 2)
    assert race.interval([1.0]) is None


def test_time_to_an_accuracy(race: ModuleType):
    curve = [(300.0, 55.0), (60.0, 35.0), (120.0, 45.0)]
    assert race.time_to(30, curve) == "≤ 60"
    assert race.time_to(40, curve) == "85"  # halfway between 60 and 120 on a logarithmic scale
    assert race.time_to(55, curve) == "300"
    assert race.time_to(60, curve) == "> 300"


@pytest.mark.parametrize(
    ("short", "long", "times"),
    [
        ("≤ 30", "> 300", 10),
        ("40", "300", 7.5),
        ("≤ 60", "≤ 300", None),
        ("> 60", "> 300", None),
        ("–", "3", None),
    ],
)
def test_a_ratio_of_times_is_a_bound(race: ModuleType, short: str, long: str, times: float | None):
    assert race.at_least(short, long) == times


def test_the_page_is_what_the_script_writes(race: ModuleType):
    runs = race.read_runs(race.RESULTS)
    text = race.markdown(race.summarize(runs), runs, "race.svg")
    assert text == (ROOT / "docs" / "race.md").read_text(encoding="utf-8")


def test_runs_on_a_machine_of_another_speed_are_not_compared(race: ModuleType):
    def run(core: float, steps: int) -> dict[str, object]:
        return {"gemm": [core, core / 2], "steps": steps}  # the second product was disturbed

    assert race.comparable(run(80, 1000), run(86, 1480), (1000, 1400))
    assert not race.comparable(run(60, 1000), run(80, 1400), (1000, 1400))  # another kind of core
    assert not race.comparable(run(80, 1000), run(80, 1600), (1000, 1400))  # more steps than usual
    assert race.comparable(run(80, 1000), run(86, 1600), ())
    assert not race.comparable(run(80, 1000), run(90, 1600), ())


def test_the_clock_charges_what_a_step_costs_undisturbed(race: ModuleType, monkeypatch: pytest.MonkeyPatch):
    now = iter([0.0, 1.0, 2.0, 3.0, 13.0, 14.0])  # the fourth step was disturbed
    monkeypatch.setattr(race.time, "process_time", lambda: next(now))
    clock = race.Clock(4.5)
    assert [clock.tick() for _ in range(5)] == [True, True, True, True, False]
    assert clock.spent == pytest.approx(5)
    assert clock.raw == 14
    assert clock.share == 1
