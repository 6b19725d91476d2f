"""The command line as a person meets it: its output and its exit code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from momentum2.cli import commands, main
from momentum2.cli.commands import COMMANDS, _config
from momentum2.cli.options import Words
from momentum2.config import Config, DataConfig
from momentum2.data.opening import find_data
from momentum2.errors import UserError
from momentum2.recipes import RECIPES
from momentum2.settings import kind_of, leaves, words_of


def momentum2(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "momentum2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def planned(*arguments: str) -> Config:
    """What `momentum2 plan` takes its words for."""
    return _config(COMMANDS["plan"].options().parse("plan", arguments))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "no command called 'nonsense'"),
        (["pretrian"], "Did you mean pretrain?"),
        (["--out", "x", "pretrain"], "Choose a command before --out"),
        (["plan"], "Missing argument RECIPE. Choose one of quickstart"),
        (["plan", "nosuchrecipe"], "no recipe called 'nosuchrecipe'"),
        (["plan", "quickstrat"], "Did you mean quickstart?"),
        (["plan", "quickstart", "--optim.lr", "abc"], "--optim.lr takes a number, not 'abc'"),
        (
            ["plan", "quickstart", "--method.alpha", "x"],
            "--method.alpha takes cosine, auto or a number, not 'x'",
        ),
        (["plan", "quickstart", "--method.name", "x"], "--method.name takes byol, moco"),
        (["plan", "quickstart", "--method.name", "mocco"], "Did you mean moco?"),
        (["plan", "quickstart", "--optim.lrr", "1"], "Did you mean --optim.lr?"),
        (["plan", "quickstart", "--optim.lr"], "--optim.lr needs a value: a number."),
        (["plan", "quickstart", "--optim.lr", "--probe"], "--optim.lr needs a value: a number."),
        (
            ["plan", "quickstart", "--train.compile", "maybe"],
            "--train.compile takes true or false, not 'maybe'",
        ),
        (["plan", "--probe", "maybe", "quickstart"], "--probe takes true or false, not 'maybe'"),
        (["plan", "quickstart", "maybe"], "Unexpected argument 'maybe'"),
        (["plan", "quickstart", "--lr", "1"], "Did you mean --optim.lr?"),
        (["plan", "quickstart", "--optim.learning_rate", "1"], "Did you mean --optim.lr?"),
        (["plan", "quickstart", "--epochs", "1"], "Did you mean --train.epochs?"),
        (["pretrain", "quickstart", "--output_dir", "x"], "Did you mean --out?"),
        (["plan", "quickstart", "--train.compile=maybe"], "--train.compile takes true or false, not 'maybe'"),
        (["plan", "quickstart", "--train.steps", "1e3"], "--train.steps takes a whole number or none"),
        (["plan", "quickstart", "--train.batch_size", "1"], "--train.batch_size must be at least 2"),
        (["plan", "quickstart", "--train.steps", "0"], "--train.steps must be at least 1"),
        (["plan", "quickstart", "--method.alpha", "1.5"], "--method.alpha must be from 0 to 1"),
        (["plan", "quickstart", "--optim.lr=-1"], "--optim.lr must be at least 0"),
        (["plan", "byol", "--optim.nesterov", "true"], "--optim.nesterov is only for sgd"),
        (["plan", "quickstart", "--optim.nesterov=true", "--optim.sgd_momentum=0"], "above 0"),
        (["plan", "quickstart", "--optim.milestones", "[0.6,60]"], "shares of the run"),
        (
            ["plan", "simclr", "--method.export", "teacher"],
            "--method.export cannot be teacher: SimCLR has none",
        ),
        (["plan", "quickstart", "--optim.lr", "-1e-3"], "--optim.lr must be at least 0, not -0.001"),
        (["plan", "quickstart", "--monitor.log_every", "0"], "--monitor.log_every must be at least 1"),
        (
            ["plan", "quickstart-paper", "--views.recipe", "supervised"],
            "makes 1 view per image, but BYOL takes at least 2 views. Use byol.",
        ),
        (
            ["plan", "quickstart", "--method.name", "moco", "--views.repeat", "2"],
            "--views.repeat is 2, which makes 4 views per image, but MoCo takes 2 views. Set it to 1.",
        ),
        (
            ["plan", "quickstart", "--views.recipe", "evaluation"],
            "evaluation makes 1 view per image, but SimCLR takes at least 2 views.",
        ),
        (
            ["plan", "quickstart", "--views.recipe", "evaluation", "--views.repeat", "2"],
            "--views.repeat must be 1 with views.recipe evaluation, which draws nothing at random",
        ),
        (["plan", "quickstart-paper", "--train.devices", "32"], "needs at least 2 samples but would get 1"),
        (["plan", "quickstart", "--train.devices", "7"], "cannot be divided among 7 device(s)"),
        (
            ["plan", "quickstart-paper", "--method.teacher_norm", "shuffle"],
            "--method.teacher_norm shuffle does not work with BYOL",
        ),
        (["plan", "quickstart", "extra"], "Unexpected argument 'extra'. See momentum2 plan --help."),
        (["plan", "quickstart", "--processes", "0"], "--processes must be at least 1"),
        (["plan", "quickstart", "--images", "0"], "--images must be at least 1"),
        (["plan", "quickstart", "-x"], "Unknown option"),
        (["plan", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["plan", "folder", "--data.root", "nowhere"], "nowhere"),
        (["plan", "folder", "--data.root="], "--data.root is empty"),
        (["pretrain", "folder", "--data", "photos"], "Unknown option --data. Did you mean --data.root?"),
        (["pretrain", "quickstart", "--out="], "Choose a run directory with --out DIR."),
        (["evaluate"], "Choose what to evaluate: knn, linear or semi."),
        (["evaluate", "kn", "RUN"], "Choose what to evaluate: knn, linear or semi. 'kn' is not one of them."),
        (["evaluate", "knn"], "Missing argument RUN"),
        (["evaluate", "knn", "nowhere", "--k", "0"], "--k must be at least 1"),
        (["evaluate", "linear", "nowhere", "--lr=-1"], "--lr must be at least 0"),
        (["evaluate", "semi", "nowhere", "--epochs", "0"], "--epochs must be at least 1"),
        (["evaluate", "knn", "nowhere", "--data.rot", "x"], "Did you mean --data.root?"),
        (["evaluate", "knn", "nowhere", "--config", "x"], "Unknown option --config"),
        (["views"], "Missing argument DATA"),
        (["report"], "Missing argument RUN"),
        (["export", "nowhere"], "Choose a format with --format"),
        (["watch", "nowhere", "--port", "70000"], "--port must be at most 65,535, not 70000"),
        (["--print-completion"], "Choose a shell"),
        (["--print-completion", "csh"], "Choose a shell: momentum2 --print-completion bash|zsh"),
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "quickstart", "--ima", "1000"],
        ["plan", "quickstart", "--proc", "2"],
        ["plan", "quickstart", "--train.step", "2"],
        ["plan", "quickstart", "--train.epoch=3"],
        ["plan", "quickstart", "--data.image_s", "48"],
        ["plan", "--conf", "x.yaml"],
        ["pretrain", "quickstart", "--ou", "x"],
    ],
)
def test_nothing_is_abbreviated(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    assert "Unknown option --" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    out = tmp_path_factory.mktemp("trained") / "run"
    size = ["--train.steps=1", "--train.batch_size=8", "--model.width=0.125", "--model.projector_hidden=16"]
    data = ["--data.train_size=16", "--eval_data.train_size=200", "--data.image_size=16", "--train.threads=1"]
    rest = ["--monitor.knn_every=0", "--monitor.report=false", "--train.device=cpu"]
    assert main(["pretrain", *size, *data, "--out", str(out), *rest, "quickstart"]) == 0
    return out


def test_a_root_without_a_name_never_means_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "annotations").mkdir()
    command = ["detect", "--model", "fcos", "--data.root", str(tmp_path), "--init", "random"]
    command += ["--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "has no annotations/instances_SPLIT.json" in capsys.readouterr().err
    (tmp_path / "annotations" / "instances_val2017.json").touch()
    assert main(command) == 2  # so it is COCO, whose training split is not there
    assert "instances_train2017.json" in capsys.readouterr().err
    assert main([*command, "--data.name", "shapes"]) == 2
    assert "--data.root is only for files" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_longer_run_is_refused_with_a_way(trained: Path, capsys: pytest.CaptureFixture[str]):
    weights = trained / "encoder.safetensors"
    config = ["--config", str(trained / "config.yaml")]
    assert main(["pretrain", *config, "--train.steps=2", "--out", str(trained)]) == 2
    assert f"to train longer, start another run with model.weights {weights}" in capsys.readouterr().err
    assert main(["pretrain", *config, "--train.steps=2", "--train.seed=1", "--out", str(trained)]) == 2
    said = capsys.readouterr().err
    assert "to train longer" not in said
    command = ["pretrain", *config, "--out", str(trained)]
    assert f"To resume it as it was, run momentum2 {' '.join(command)}." in said
    assert main(command) == 0


def test_a_plan_says_why_a_network_is_small_and_who_can_have_it(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "quickstart", "--images", "1000"]) == 0
    small = capsys.readouterr().out
    assert "network     small, so that a CPU can train it" in small
    assert (
        "exports     onnx; torchvision, timm, detectron2, huggingface with model.backbone resnet18, " in small
    )
    assert main(["plan", "imagenet-1node"]) == 0
    usual = capsys.readouterr().out
    assert "exports     torchvision, timm, detectron2, onnx, huggingface\n" in usual
    assert "network" not in usual


def test_what_a_command_is_about_may_come_last(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """`pretrain` has done so for the fixture."""
    assert (trained / "encoder.safetensors").exists()
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert main(["plan", "--images", "1000", "quickstart"]) == 0
    assert "1,000 images" in capsys.readouterr().out
    assert main(["evaluate", "knn", "--k", "5", "--floors", "false", str(run)]) == 0
    assert main(["report", "--points", "5", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()
    assert main(["export", "--format", "onnx", str(run), "--out", str(tmp_path / "weights")]) == 0
    assert (tmp_path / "weights").is_dir()
    assert main(["embed", "--out", str(tmp_path / "f.npz"), "--data.train_size=9", str(run)]) == 0
    assert len(np.load(tmp_path / "f.npz")["features"]) == 9
    assert main(["reproduce", "--dry-run", "alpha"]) == 0
    assert main(["views", "--out", str(tmp_path / "v.png"), "--count=2", "shapes"]) == 0
    command = [sys.executable, "-m", "momentum2", "watch", "--port", "0", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"Watching {run} at http://127.0.0.1:")
        process.kill()


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].options().positional])
def test_words_of_every_command_come_in_any_order(name: str):
    options = COMMANDS[name].options()
    given = [(f"--{option}", _some_value(hint)) for option, hint in list(options.known.items())[:3]]
    about = ["one", "two"]
    orders = [
        [*about, *(word for pair in given for word in pair)],
        [*(word for pair in given for word in pair), *about],
        ["one", *(word for pair in given for word in pair), "two"],
        [*(f"{flag}={value}" for flag, value in reversed(given)), *about],
    ]
    found = [options.parse(name, order) for order in orders]
    assert all((one.named, one.options, one.settings) == (("one", "two"), *_given(found[0])) for one in found)
    assert len(found[0].options) + len(found[0].settings) == len(given)


def _given(words: Words) -> tuple[dict[str, object], dict[str, object]]:
    return words.options, words.settings


def _some_value(hint: object) -> str:
    kind = kind_of(hint)
    return "true" if "true" in kind else "1" if "number" in kind else (words_of(hint) or ["text"])[0]


def test_several_runs_stand_anywhere(trained: Path, tmp_path: Path):
    for name in "ab":
        shutil.copytree(trained, tmp_path / name)
    runs, page = [str(tmp_path / name) for name in "ab"], tmp_path / "page.html"
    assert main(["report", runs[0], "--points", "5", runs[1], "--out", str(page)]) == 0
    assert page.exists()


def test_the_folder_recipe_goes_by_what_was_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Also where that is what it says by itself, and however it was said: 200 epochs, a twentieth of them warm-up."""
    for i in range(40):
        Image.new("RGB", (32, 32), (i, 0, 0)).save(tmp_path / f"{i}.png")
    (tmp_path / "f.yaml").write_text("train: {epochs: 200}")
    folder = ["plan", "folder", "--data.root", str(tmp_path), "--train.device", "cpu"]
    for words in (
        ["--train.epochs", "200"],
        ["--train.epochs=200"],
        ["--config", str(tmp_path / "f.yaml")],
    ):
        assert main([*folder, *words]) == 0
        said = capsys.readouterr().out
        assert "400 of 16 images (200 epochs" in said
        assert "warm-up     20 steps" in said
    assert main([*folder, "--train.epochs", "200", "--train.batch_size", "8"]) == 0
    assert "warm-up     50 steps" in capsys.readouterr().out


def test_a_config_file_in_another_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.yaml").write_text("train: {}", encoding="utf-16")
    assert main(["plan", "--config", str(tmp_path / "config.yaml")]) == 2
    assert "not a YAML file of settings" in capsys.readouterr().err


def test_a_network_is_tested_at_the_size_at_which_it_is_trained(tmp_path: Path):
    (tmp_path / "f.yaml").write_text("data: {image_size: 48}")
    spelled = ["--data.image_size", "48"], ["--data.image_size=48"], ["--config", str(tmp_path / "f.yaml")]
    for words in spelled:
        config = planned("quickstart", *words)
        assert (config.data.image_size, config.eval_data.image_size) == (48, 48)
        config = planned("quickstart", *words, "--eval_data.image_size", "64")
        assert (config.data.image_size, config.eval_data.image_size) == (48, 64)


def test_a_flag_wins_over_a_file_wherever_it_stands(tmp_path: Path):
    file, later = tmp_path / "f.yaml", tmp_path / "later.yaml"
    file.write_text("optim: {lr: 0.5, weight_decay: 0.25}\ntrain: {epochs: 7}")
    later.write_text("train: {epochs: 8}")
    lr, config = ["--optim.lr", "0.2"], ["--config", str(file)]
    for words in ([*lr, *config, "quickstart"], ["quickstart", *config, *lr], [*config, "quickstart", *lr]):
        found = planned(*words)
        assert (found.optim.lr, found.optim.weight_decay, found.train.epochs) == (0.2, 0.25, 7)
    assert planned(*config, "--config", str(later)).train.epochs == 8
    assert planned(*config, "--optim.lr=0.1", "--optim.lr=0.3").optim.lr == 0.3, "the last one"


def test_a_mistake_in_a_file_names_the_file_and_one_in_a_flag_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "f.yaml"
    file.write_text("train: {epochs: 0, sed: 1}")
    assert main(["plan", "--config", str(file)]) == 2
    assert f"{file}: Unknown setting train.sed. Did you mean train.seed?" in capsys.readouterr().err
    file.write_text("train: {epochs: 0}")
    assert main(["plan", "--config", str(file)]) == 2
    assert f"{file}: train.epochs must be at least 1" in capsys.readouterr().err
    assert main(["plan", "--config", str(file), "--train.epochs=-1"]) == 2
    assert "momentum2: --train.epochs must be at least 1, not -1." in capsys.readouterr().err


def test_how_values_are_written():
    def one(*words: str) -> Config:
        return planned("quickstart", *words)

    assert one("--data.root=07").data.root == "07"
    assert one("--data.root", "null.d").data.root == "null.d"
    assert one("--data.root", "none").data.root is None
    assert one("--data.root=null").data.root is None
    assert one("--eval_data.name", "none").eval_data.name == "none"
    assert one("--train.steps=5", "--train.steps=none").train.steps is None
    assert one("--eval_data.test_split", "-20%").eval_data.test_split == "-20%"
    assert one("--data.split=a=b").data.split == "a=b"
    assert one("--train.batch-size", "64").train.batch_size == 64
    for words, value in (([], True), (["true"], True), (["False"], False), (["no"], False)):
        assert planned("--train.compile", *words, "quickstart").train.compile is value
    assert one("--optim.lr", "1e-3").optim.lr == 1e-3
    with pytest.raises(UserError, match=r"Unexpected argument '--optim\.lr'"):
        planned("quickstart", "--", "--optim.lr")


def test_data_that_is_named_is_taken_whole(tmp_path: Path):
    """A run that was tested on some images of its own, by its recipe, embeds all of somebody else's."""
    data = find_data(str(tmp_path), DataConfig("shapes", train_size=5000))
    assert (data.name, data.root, data.train_size) == ("folder", str(tmp_path), None)
    with pytest.raises(UserError, match=r"^Pass a folder of images"):
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
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_mistake_in_a_process_of_its_own():
    result = momentum2("plan", "quickstart", "--optim.lrr", "1")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "momentum2: Unknown option --optim.lrr. Did you mean --optim.lr?\n"


def fails(*rest: object) -> None:
    raise ValueError("a mistake\nof ours.")


def test_an_error_of_our_own_is_one_sentence_that_names_its_file(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("momentum2.training.estimate.planned", fails)
    assert main(["plan", "quickstart"]) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert said.startswith("momentum2: Unexpected ValueError: a mistake. ")
    (file,) = tmp_path.glob("momentum2-error-*.txt")
    assert str(file) in said
    assert "of ours." in file.read_text()
    assert 'raise ValueError("a mistake' in file.read_text()

    run = tmp_path / "run"
    shutil.copytree(trained, run)
    monkeypatch.setattr("momentum2.report.page.write_report", fails)
    assert main(["report", str(run)]) == 1
    (file,) = run.glob("momentum2-error-*.txt")
    assert f"details in {file}." in capsys.readouterr().err
    file.unlink()
    monkeypatch.setattr("momentum2.api.pretrain", fails)
    assert main(["pretrain", "quickstart", "--out", str(run)]) == 1
    (file,) = run.glob("momentum2-error-*.txt")
    assert f"details in {file}." in capsys.readouterr().err


def test_an_error_that_nothing_can_be_written_about(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    monkeypatch.setattr("momentum2.report.page.write_report", fails)
    assert main(["report", "/proc"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said, "better than nothing"
    assert said.splitlines()[-1].startswith("momentum2: Unexpected ValueError: a mistake. ")


def test_version_and_commands(capsys: pytest.CaptureFixture[str]):
    assert momentum2("--version").stdout.startswith("momentum2 0.")
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert all(f"  {name}" in said for name in COMMANDS)
    assert main(["evaluate", "--help"]) == 0
    assert "evaluate semi" in capsys.readouterr().out


def test_help_is_there_before_torch():
    code = (
        "import sys; from momentum2.cli import main; main(['--help']); main(['pln']); main(['evaluate']); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600).returncode == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_option_once(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    usage = said.split("\n\n")[0].splitlines()
    assert usage[0].startswith(f"usage: momentum2 {name}")
    assert len(usage) <= 3
    shown = [line.split()[0] for line in said.splitlines() if line.startswith("  --")]
    options = COMMANDS[name].options()
    assert sorted(shown) == sorted(
        f"--{option.rstrip('_')}" for option in options.known if not option.startswith("objects.")
    )
    for part in (*options.options, *([options.settings] if options.settings else [])):
        for field in (f for f in leaves(type(part)) if "." not in f):
            assert f"{field}: " in (part.__doc__ or ""), "what a user needs to know about it"


def test_help_is_by_group_with_the_defaults_of_the_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    for words, batch in ((["plan", "quickstart", "-h"], 64), (["pretrain", "--help"], 256)):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert "optim: The optimizer and its schedule" in said
        assert "Learning rate per 256 images" in said
        assert f"Images per optimizer step, over all processes. (default: {batch})" in said
        assert "--method.alpha {cosine,auto}|X" in said
        assert "80% is a share of all" in said
    assert main(["detect", "--model=fcos", "--data.name", "coco", "--help"]) == 0
    assert "(default: [800])" in capsys.readouterr().out


def test_recipes_lists_all():
    result = momentum2("recipes")
    assert result.returncode == 0
    assert all(name in result.stdout for name in RECIPES)


def test_a_recipe_is_shown_whole(capsys: pytest.CaptureFixture[str]):
    assert main(["recipes", "stl10"]) == 0
    said = capsys.readouterr().out
    assert "momentum2 pretrain stl10 --data.root STL10" in said
    assert "88.18" in said
    settings = yaml.safe_load(said[said.index("method:\n") :])
    assert settings["train"]["batch_size"] == 2048
    assert main(["recipes", "stl-10"]) == 2
    assert "Did you mean stl10?" in capsys.readouterr().err


def test_completion(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--print-completion", "bash"]) == 0
    (tmp_path / "momentum2.bash").write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        script = (
            'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_momentum2; echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", script, str(tmp_path / "momentum2.bash"), "momentum2", *words],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    assert completed("pl") == ["plan"]
    assert completed("evaluate", "") == ["knn", "linear", "semi"]
    assert completed("plan", "quick") == ["quickstart", "quickstart-paper"]
    assert completed("plan", "quickstart", "--train.ep") == ["--train.epochs"]
    assert completed("pretrain", "quickstart", "--method.name", "mo") == ["moco"]
    assert main(["--print-completion=zsh"]) == 0
    assert "#compdef momentum2" in capsys.readouterr().out


def test_completion_without_its_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert "pip install 'momentum2[completion]'" in capsys.readouterr().err


def test_the_reader_of_a_pipe_may_leave():
    command = f'"{sys.executable}" -m momentum2 pretrain --help | head -1; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == ["usage: momentum2 pretrain RECIPE [options]", "0"]
    assert done.stderr == ""


def test_import_is_light():
    code = (
        "import sys, momentum2; print([m for m in sys.modules if m.startswith('torch')]);"
        "momentum2.MomentumBatchNorm; momentum2.norms.momentum_norms; momentum2.load_encoder; dir(momentum2);"
        "from momentum2 import *"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_probe_for_several_processes_takes_the_time_of_one(capsys: pytest.CaptureFixture[str]):
    small = ["--model.width", "0.125", "--train.batch_size", "8", "--train.threads", "1"]
    assert main(["plan", "quickstart", "--processes", "2", "--probe", "true", *small]) == 0
    assert "s per step" in capsys.readouterr().out


def test_a_stopped_command_asks_to_be_run_again(capsys: pytest.CaptureFixture[str]):
    assert commands._stopped() == os.EX_TEMPFAIL
    assert "Run the same command again" in capsys.readouterr().out


def test_old_spellings_are_taken_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["export", str(tmp_path / "none"), "--licence", "mit", "--format", "timm", "--out", "x"]) == 2
    assert "momentum2: --licence is now --license.\n" in capsys.readouterr().err
    assert main(["plan", "quickstart", "--images", "1000", "--views.colour", "0.5"]) == 0
    assert capsys.readouterr().err == "momentum2: views.colour is now views.color.\n"
    assert planned("quickstart", "--views.colour", "0.5").views.color == 0.5


@pytest.mark.parametrize("stdout", ["unread", "full", "closed"])
def test_a_stream_that_takes_nothing_is_no_traceback(stdout: str):
    """As with `| true`, a full disk, and `>&-`: what is printed is written only at the end."""
    words = [sys.executable, "-m", "momentum2", "--version"]
    if stdout == "closed":
        words = [sys.executable, "-c", f"import os; os.close(1); os.execv({words[0]!r}, {words})"]
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full, open(writing, "wb") as unread:
        done = subprocess.run(
            words,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout={"unread": unread, "full": full, "closed": None}[stdout],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    said = ["momentum2: The disk is full. Free some space and run the same command again to resume."]
    assert done.stderr.splitlines() == (said if stdout == "full" else [])
    assert done.returncode == (2 if stdout == "full" else 0)
