"""Every command and every program in README and docs is run, in order, in a directory with a few photos.

Blocks marked `sh` and `python` are run; `text` blocks are for what cannot be run here (clusters) or is run
elsewhere (`make test` runs this). Training commands get a few options more, so that they end in seconds. The first use
of each command is run by a fresh interpreter, the others by one that has imported torch (see warm.py).
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import momentum2
from momentum2.cli.commands import COMMANDS
from momentum2.recipes import RECIPES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

TINY = {
    "--train.steps": 2,
    "--train.batch_size": 8,
    "--model.width": 0.125,
    "--model.projector_hidden": 32,
    "--train.threads": 1,
}
SHORTER = {  # the first that fits
    "momentum2 pretrain quickstart": TINY
    | {"--data.train_size": 64, "--eval_data.train_size": 64, "--monitor.knn_every": 0},
    "momentum2 pretrain ": TINY,
    "momentum2 reproduce stability": {},
    "momentum2 reproduce ": {"--rows": "local-momentum"},
    "momentum2 plan ": {"--model.width": 0.125},
    "momentum2 evaluate linear ": {"--floors": "false"},
    "momentum2 evaluate knn ": {"--floors": "false"},
    "momentum2 detect ": {
        "--train.steps": 2,
        "--train.batch_size": 4,
        "--data.test_size": 3,
        "--train.threads": 1,
    },
}


#: Commands that a fresh interpreter runs in another file.
ELSEWHERE = {
    "recipes": "test_cli.py",
    "evaluate semi": "evaluate/test_semi.py",
    "watch": "test_cli.py",
    "reproduce": "reproduce/test_command.py",  # here it would be slow: all that it starts would be fresh too
}


def blocks(page: Path) -> list[tuple[str, str]]:
    return re.findall(
        r"^```(sh|python)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def shorter(line: str) -> str:
    """A command with what makes it quick; tests/test_package.py installs the package for real."""
    if line.startswith("pip install"):
        return "true"
    line = line.replace("np.arange(2000)", "np.arange(120)")  # pictures to draw
    for start, options in SHORTER.items():
        if start in line:  # what the page says itself stays
            more = {name: value for name, value in options.items() if name not in line}
            if "timm/" in line:  # only torchvision's ResNets have one
                more.pop("--model.width", None)
            return " ".join([line, *(f"{name} {value}" for name, value in more.items())])
    return line


def lines_of(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def command_in(line: str) -> str | None:
    """The name of the command that a line runs."""
    return next((name for name in COMMANDS if re.search(rf"\bmomentum2 {name}( |$)", line)), None)


def first_uses() -> dict[str, tuple[Path, str]]:
    """The page and the line of the first use of each command."""
    every = [(p, line) for p in PAGES for kind, text in blocks(p) if kind == "sh" for line in lines_of(text)]
    uses = {name: use for use in reversed(every) if (name := command_in(use[1])) is not None}
    return {name: use for name, use in uses.items() if name not in ELSEWHERE}


@pytest.fixture
def workplace(tmp_path: Path, warm_python: str) -> Path:
    """A directory as a reader has it: photos in two folders, and the commands, warm in bin and fresh in fresh."""
    rng = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(16):
            pixels = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.jpg")
    for folder, python in (("bin", warm_python), ("fresh", sys.executable)):
        (tmp_path / folder).mkdir()
        for name, module in (
            ("momentum2", "-m momentum2"),
            ("torchrun", "-m torch.distributed.run"),
            ("python", ""),
        ):
            script = tmp_path / folder / name
            script.write_text(f'#!/bin/sh\nexec "{python}" {module} "$@"\n')
            script.chmod(0o755)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_commands_of(page: Path, workplace: Path, warm_python: str):
    environment = dict(
        os.environ,
        PATH=f"{workplace / 'bin'}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=str(ROOT),
        XDG_CACHE_HOME=str(workplace / "cache"),
        OMP_NUM_THREADS="1",
    )
    first = first_uses().values()
    for language, text in blocks(page):
        if language == "sh":
            fresh = f'PATH="{workplace / "fresh"}:$PATH" '
            script = "\n".join(fresh * ((page, line) in first) + shorter(line) for line in lines_of(text))
            command = ["bash", "-euo", "pipefail", "-c", script]
        else:
            command = [warm_python, "-c", text]
        result = subprocess.run(
            command, cwd=workplace, env=environment, capture_output=True, text=True, timeout=1800
        )
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"


def test_every_command_is_run():
    assert {*first_uses(), *ELSEWHERE} == set(COMMANDS)


def test_every_setting_that_a_page_names_exists():
    known = {name for command in COMMANDS.values() for name in command.options().known}
    named = {(p.name, s) for p in PAGES for s in re.findall(r"--([a-z_]+\.[a-z_0-9]+)", p.read_text("utf-8"))}
    assert len(named) > 100
    assert {(page, setting) for page, setting in named if setting not in known} == set()


def test_the_job_for_a_cloud_is_well_formed():
    text = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    (job,) = (
        yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    )
    assert set(job) == {"name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run"}
    assert job["resources"]["use_spot"] is True
    for script in (job["setup"], job["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    words = shlex.split(job["run"].partition("-m momentum2 pretrain ")[2])
    options = COMMANDS["pretrain"].options()
    assert words[0] in RECIPES
    assert {word.removeprefix("--") for word in words[1::2]} <= set(options.known)
    assert {str(Path(place)) for place in job["file_mounts"]} == {words[2], str(Path(words[6]).parent)}


def test_the_site_is_whole(tmp_path: Path):
    """Every page is built and in the menu, links and anchors lead somewhere, every public name is in the reference,
    and a reader's browser loads nothing from elsewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = dict(os.environ, NO_MKDOCS_2_WARNING="1")
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {f"{p.stem}.html" for p in PAGES if p.stem != "README"} < {p.name for p in tmp_path.glob("*.html")}
    reference = (tmp_path / "api.html").read_text(encoding="utf-8")
    missing = [name for name in momentum2.__all__ if f'id="momentum2.{name}"' not in reference]
    assert missing == ["__version__"]
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?https?:[^>]*>", page.read_text(encoding="utf-8")
        )
        assert loaded == [], page.name
