"""The command line as a person meets it: its output and its exit code."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from momentum2.arguments import ConfigFile, Options
from momentum2.cli import _config, main
from momentum2.config import Config, DataConfig
from momentum2.errors import UserError
from momentum2.recipes import find_data


def momentum2(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "momentum2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "no command called 'nonsense'"),
        (["pretrian"], "did you mean pretrain?"),
        (["plan"], "Missing argument RECIPE"),
        (["plan", "nosuchrecipe"], "no recipe called 'nosuchrecipe'"),
        (["plan", "quickstrat"], "did you mean quickstart?"),
        (["plan", "quickstart", "--optim.lr", "abc"], "--optim.lr takes a number, not 'abc'"),
        (["plan", "quickstart", "--method.alpha", "x"], "--method.alpha takes cosine or a number, not 'x'"),
        (["plan", "quickstart", "--method.name", "x"], "--method.name takes byol, moco"),
        (["plan", "quickstart", "--optim.lrr", "1"], "Did you mean --optim.lr?"),
        (["plan", "quickstart", "--train.batch_size", "1"], "--train.batch_size must be at least 2"),
        (["plan", "quickstart", "--train.steps", "0"], "--train.steps must be at least 1"),
        (["plan", "quickstart", "--method.alpha", "1.5"], "--method.alpha must be from 0 to 1"),
        (["plan", "quickstart", "--optim.lr=-1"], "--optim.lr must be at least 0"),
        (["plan", "byol", "--optim.nesterov", "true"], "--optim.nesterov is for sgd"),
        (["plan", "quickstart", "--optim.nesterov=true", "--optim.sgd_momentum=0"], "above 0"),
        (["plan", "quickstart", "--optim.milestones", "[0.6,60]"], "shares of the run"),
        (["plan", "simclr", "--method.export", "teacher"], "Method simclr has no teacher to export"),
        (["plan", "quickstart", "--monitor.log_every", "0"], "--monitor.log_every must be at least 1"),
        (["plan", "quickstart", "--views.recipe", "supervised"], "byol compares two views"),
        (["plan", "quickstart", "--train.devices", "32"], "would see 1 sample"),
        (["plan", "quickstart", "--train.devices", "7"], "cannot be divided among 7 device(s)"),
        (["plan", "quickstart", "--method.teacher_norm", "shuffle"], "shuffle is MoCo's"),
        (["plan", "quickstart", "extra"], "Unexpected argument 'extra'"),
        (["plan", "quickstart", "--processes", "0"], "--processes must be at least 1"),
        (["plan", "quickstart", "--images", "0"], "--images must be at least 1"),
        (["plan", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["plan", "folder", "--data.root", "nowhere"], "nowhere"),
        (["plan", "folder", "--data.root="], "--data.root is empty"),
        (["pretrain", "folder", "--data", "photos"], "Unknown option --data. Did you mean --data.root?"),
        (["pretrain", "quickstart", "--out="], "Choose where the results go"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.startswith("momentum2: ")
    assert len(said.err.splitlines()) == 1


def test_the_folder_recipe_goes_by_what_was_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Also where that is what it says by itself: 200 epochs of 40 images, a twentieth of them warm-up."""
    for i in range(40):
        Image.new("RGB", (32, 32), (i, 0, 0)).save(tmp_path / f"{i}.png")
    folder = ["plan", "folder", "--data.root", str(tmp_path), "--train.device", "cpu"]
    assert main([*folder, "--train.epochs", "200"]) == 0
    said = capsys.readouterr().out
    assert "400 of 16 images (200 epochs" in said
    assert "warm-up     20 steps" in said
    assert main([*folder, "--train.epochs", "200", "--train.batch_size", "8"]) == 0
    assert "warm-up     50 steps" in capsys.readouterr().out


def test_a_config_file_in_another_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.yaml").write_text("train: {}", encoding="utf-16")
    assert main(["plan", "--config", str(tmp_path / "config.yaml")]) == 2
    assert "not a YAML file of settings" in capsys.readouterr().err


def test_a_network_is_tested_at_the_size_at_which_it_is_trained():
    sizes = ["quickstart", "--data.image_size", "48"], ["quickstart", "--data.image_size=48"]
    options = Options("plan", "", options=[ConfigFile()], settings=Config())
    for words in sizes:
        config = _config(options.parse(words))
        assert (config.data.image_size, config.eval_data.image_size) == (48, 48)
    config = _config(options.parse([*sizes[0], "--eval_data.image_size", "64"]))
    assert (config.data.image_size, config.eval_data.image_size) == (48, 64)


def test_data_that_is_named_is_taken_whole(tmp_path: Path):
    """A run that was tested on some images of its own, by its recipe, embeds all of somebody else's."""
    data = find_data(str(tmp_path), DataConfig("shapes", train_size=5000))
    assert (data.name, data.root, data.train_size) == ("folder", str(tmp_path), None)
    with pytest.raises(UserError, match="An empty name does not exist"):
        find_data("", DataConfig())


INTERRUPTED = """
import sys
import momentum2.__main__ as program

class Interrupt:
    def find_spec(self, name, *rest):
        if name == "momentum2.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.exit(program.main())
"""


def test_ctrl_c_during_the_imports_is_no_traceback():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_mistake_in_a_process_of_its_own():
    result = momentum2("plan", "quickstart", "--optim.lrr", "1")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "momentum2: Unknown option --optim.lrr. Did you mean --optim.lr?\n"


def test_help_and_version():
    assert momentum2("--version").stdout.startswith("momentum2 0.")
    assert "pretrain" in momentum2("--help").stdout
    text = momentum2("plan", "quickstart", "--help").stdout
    assert "--optim.lr" in text
    assert "Learning rate per 256 images" in text


def test_recipes_lists_all():
    from momentum2.recipes import RECIPES

    output = momentum2("recipes").stdout
    assert all(name in output for name in RECIPES)


def test_a_recipe_is_shown_whole(capsys: pytest.CaptureFixture[str]):
    assert main(["recipes", "stl10"]) == 0
    said = capsys.readouterr().out
    assert "momentum2 pretrain stl10 --data.root STL10" in said
    assert "88.18" in said
    settings = yaml.safe_load(said[said.index("method:\n") :])
    assert settings["train"]["batch_size"] == 2048
    assert main(["recipes", "stl-10"]) == 2
    assert "did you mean stl10?" in capsys.readouterr().err


def test_import_is_light():
    code = "import sys, momentum2; print([m for m in sys.modules if m.startswith('torchvision')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_probe_for_several_processes_takes_the_time_of_one(capsys: pytest.CaptureFixture[str]):
    small = ["--model.width", "0.125", "--train.batch_size", "8", "--train.threads", "1"]
    assert main(["plan", "quickstart", "--processes", "2", "--probe", "true", *small]) == 0
    assert "s a step" in capsys.readouterr().out
