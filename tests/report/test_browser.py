"""The page in a real browser. Skipped, with a message, where there is no Chromium."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from momentum2.config import DataConfig
from momentum2.data import open_dataset
from momentum2.report import write_report
from momentum2.report.learned import Learned
from momentum2.report.page import _map, render
from momentum2.report.sprites import COLUMNS, draw_sprites
from momentum2.runs.handle import read_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: the hostile one, and one of it with alarms, other numbers and no images any more."""
    folder = tmp_path_factory.mktemp("pages")
    second = folder / "second"
    shutil.copytree(run, second)
    with (second / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 2, "alarm": "Step 2: the representation has <b>collapsed</b>: it is 0."})
            + "\n"
        )
    config = (second / "config.yaml").read_text()
    (second / "config.yaml").write_text(config.replace("root: ", "root: /nowhere"))
    return write_report([run, second], folder / "page.html")


def dot(browser: Any, index: int) -> tuple[float, float]:
    """Where a dot of the map is on the screen."""
    browser.run("document.getElementById('map').scrollIntoView({block: 'center'})")
    left, top = browser.run("[canvas.getBoundingClientRect().x, canvas.getBoundingClientRect().y]")
    x, y = browser.run(f"[toX({index}), toY({index})]")
    return left + x, top + y


def set_value(browser: Any, id: str, value: str) -> None:
    """What choosing an entry of a list does."""
    browser.run(f"byId('{id}').value = '{value}', byId('{id}').dispatchEvent(new Event('change'))")


def test_it_loads_without_errors_and_without_the_network(browser: Any, page: Path):
    browser.open(page.as_uri())
    assert browser.problems == []
    assert browser.requests == [page.as_uri()]
    assert browser.run("document.querySelectorAll('#curves-plot path.curve').length") >= 10
    alarms = browser.run("document.getElementById('alarm-plot').textContent")
    assert "the representation has <b>collapsed</b>" in alarms


def test_pointing_at_a_curve_shows_its_values(browser: Any, page: Path):
    browser.open(page.as_uri())
    panel = "document.querySelector('#curves-plot .panel')"
    browser.run(f"{panel}.scrollIntoView({{block: 'center'}})")
    left, top, width, height = browser.run(
        f"(({{x, y, width, height}}) => [x, y, width, height])({panel}.querySelector('svg').getBoundingClientRect())"
    )
    assert browser.run(f"{panel}.querySelector('.values').hidden")
    browser.mouse("mouseMoved", left + width * 0.97, top + height / 2)
    browser.until(f"!{panel}.querySelector('.values').hidden")
    said = browser.run(f"{panel}.querySelector('.values').textContent")
    last = browser.run("DATA.runs[0].series.loss")
    assert said.startswith(f"step {last['step'][-1]:g}")
    assert f"{last['value'][-1]:.4g}" in said
    assert browser.problems == []


def test_names_that_are_markup_are_shown_as_text(browser: Any, page: Path):
    browser.open(page.as_uri())
    assert browser.run("typeof boom") == "undefined"
    assert browser.run("document.querySelectorAll('img:not(.sheet), main script, main b').length") == 0
    classes = browser.run("[...document.querySelectorAll('#legend span')].map((e) => e.textContent)")
    assert classes == ["</script><script>boom()</script>", "<img src=x onerror=boom()>", "a & b"]
    assert browser.run("document.querySelector('h3').textContent") == "run <b>"
    assert "run <b>" in browser.run("document.querySelector('#curves-plot .runs').textContent")
    assert browser.run("document.querySelector('.row figure').title").startswith(
        "test/<img src=y onerror=boom()>"
    )
    assert browser.problems == []


def test_pointing_at_a_dot_shows_its_image(browser: Any, page: Path):
    browser.open(page.as_uri())
    assert browser.run("tip.hidden")
    browser.mouse("mouseMoved", *dot(browser, 7))
    browser.until("!tip.hidden")
    chosen = browser.run("selected")
    assert browser.run(f"shown.names[{chosen}]") in browser.run("tip.textContent")
    # What is drawn in the tip is the image: its color is that of the thumbnail in the sprite.
    script = """(async () => {
      const address = tip.querySelector('.thumb').style.backgroundImage.slice(5, -2), image = new Image();
      image.src = address; await image.decode(); return [image.naturalWidth, image.naturalHeight]; })()"""
    assert browser.run(script) == [16 * COLUMNS, 16 * 2]
    browser.click(*dot(browser, chosen))
    neighbors = browser.run(f"shown.neighbors[{chosen}].length")
    assert browser.run("document.querySelectorAll('.row.chosen figure').length") == neighbors + 1
    wrong = browser.run(
        f"shown.neighbors[{chosen}].filter((j) => shown.labels[j] !== shown.labels[{chosen}]).length"
    )
    assert browser.run("document.querySelectorAll('.row.chosen .wrong').length") == wrong


def test_the_map_is_usable_with_the_keyboard(browser: Any, page: Path):
    browser.open(page.as_uri())
    browser.run("canvas.focus()")
    browser.key("ArrowRight")
    first = browser.run("selected")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert browser.run("selected") != first
    assert browser.run("toX(selected)") > browser.run(f"toX({first})")
    assert browser.run("document.getElementById('spoken').textContent") != ""
    browser.key("Enter")
    assert browser.run("document.querySelectorAll('.row.chosen').length") == 1
    browser.key("+")
    assert browser.run("view.zoom") > 1
    browser.key("0")
    assert browser.run("view.zoom") == 1


def test_the_selector_changes_the_run(browser: Any, page: Path):
    browser.open(page.as_uri())
    assert not browser.run("document.getElementById('explorer').hidden")
    set_value(browser, "run", "1")
    assert browser.run("document.getElementById('explorer').hidden")
    visible = browser.run(
        "[...document.querySelectorAll('[data-run]:not([hidden])')].map((e) => e.dataset.run)"
    )
    assert set(visible) == {"1"}
    assert browser.problems == []


def test_axes_and_theme_can_be_changed(browser: Any, page: Path):
    browser.open(page.as_uri())
    set_value(browser, "axis", "images")
    drawn = "[...document.querySelectorAll('#curves-plot .panel:nth-of-type(1) svg > text')].map((e) => e.textContent)"
    assert "30" in browser.run(drawn)  # of 32 images
    set_value(browser, "axis", "step")
    assert "30" not in browser.run(drawn)
    light = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.run("document.getElementById('theme').click()")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != light
    browser.open(page.as_uri(), dark=True)
    assert browser.run("getComputedStyle(document.body).backgroundColor") != light
    assert browser.problems == []


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Any, page: Path):
    browser.open(page.as_uri(), width=390, height=844, phone=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.run("innerWidth") == 390
    assert browser.problems == []


def test_it_prints(browser: Any, page: Path):
    browser.open(page.as_uri(), dark=True)
    assert browser.pdf().startswith(b"%PDF")


def test_ten_thousand_points(browser: Any, run: Path, tmp_path: Path):
    files, n, rng = read_run(run), 10_000, np.random.default_rng(0)
    few = draw_sprites(open_dataset(DataConfig("shapes", image_size=16)), range(COLUMNS**2), 16)
    sprites: dict[str, int] = {}
    labels = rng.integers(0, 40, n)
    learned = Learned(
        what="many images",
        how="at random",
        names=[f"image {i}" for i in range(n)],
        xy=rng.random((n, 2)),
        neighbors=rng.integers(0, n, (n, 8)),
        sprites=type(few)(few.side, few.pictures * -(-n // COLUMNS**2)),
        class_names=tuple(f"class {c}" for c in range(40)),
        labels=labels,
        predicted=labels,
        k=5,
    )
    path = tmp_path / "many.html"
    path.write_text(render([files], [_map(learned, sprites)], "", "", list(sprites)), encoding="utf-8")
    browser.open(path.as_uri())
    assert browser.problems == []
    browser.mouse("mouseMoved", *dot(browser, 1234))
    browser.until("selected === 1234 && tip.textContent.includes('image 1234')")
