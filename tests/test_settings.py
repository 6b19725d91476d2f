"""Settings are data: what a file or a flag says is converted or refused in one sentence, and never imported."""

import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from momentum2 import load_encoder
from momentum2.api import pretrain
from momentum2.cli import commands, main
from momentum2.config import Config, DataConfig, Limits, ModelConfig, MonitorConfig, TrainConfig
from momentum2.detection.presets import DetectConfig, DetectionDataName, DetectorName, preset
from momentum2.errors import SettingError, UnknownSetting, UserError
from momentum2.recipes import RECIPES
from momentum2.runs.card import EncoderCard
from momentum2.settings import (
    _kinds,
    check,
    config_from_file,
    convert,
    flatten,
    from_file,
    leaves,
    override,
)
from momentum2.yaml_settings import LARGEST_FILE, read_settings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has a checkpoint but no encoder file, so that everything about it is asked of its config."""
    config = Config(
        model=ModelConfig("resnet18", projector_hidden=16, projector_out=8, width=0.125),
        data=DataConfig("shapes", image_size=16, train_size=16, cache="off"),
        eval_data=DataConfig("shapes", image_size=16, train_size=16, cache="off"),
        train=TrainConfig(steps=1, batch_size=8, threads=1, device="cpu"),
        monitor=MonitorConfig(report=False),
    )
    out = tmp_path_factory.mktemp("runs") / "run"
    assert pretrain(config, out).finished
    (out / "encoder.safetensors").unlink()
    return out


# What names a class to construct in the tools that construct classes, jsonargparse and PyYAML above all.
FORMS = [
    "data: evil.X",
    "data: {class_path: evil.X}",
    "data: {class_path: evil.X, init_args: {}}",
    "train: {class_path: evil.X, init_args: {}, dict_kwargs: {}}",
    "views: evil.X",
    "views: !evil.X {}",
    "views: !!python/object:evil.X {}",
    "views: !!python/object/apply:evil.X []",
    "views: {recipe: !!python/name:evil.X }",
    "!!python/module:evil : 1",
    "method: {alpha: evil.X}",
    "method: {name: {class_path: evil.X}}",
    "evil.X: {}\nevil: evil.X",
    "data: &evil {class_path: evil.X}\ntrain: *evil",
    "data:\n  <<: {class_path: evil.X}",
    "objects: {method: evil.X, encoder: evil.X, dataset: evil.X}\nmethod: {class_path: evil.X}",
    "model: {backbone: resnet18, class_path: evil.X}",
    "evil.X",
    "- evil.X",
]

COMMANDS: dict[str, Callable[[Path], int]] = {
    "plan --config": lambda run: main(["plan", "--config", str(run / "config.yaml"), "--images", "1000"]),
    "plan RECIPE --config": lambda run: main(["plan", "quickstart", "--config", str(run / "config.yaml")]),
    "pretrain": lambda run: main(
        ["pretrain", "--config", str(run / "config.yaml"), "--out", str(run / "new")]
    ),
    "views": lambda run: main(
        ["views", "shapes", "--config", str(run / "config.yaml"), "--out", "views.png"]
    ),
    "detect": lambda run: main(["detect", "--config", str(run / "config.yaml"), "--out", str(run / "new")]),
    "detect RUN": lambda run: main(["detect", str(run), "--out", str(run / "new")]),
    "stats": lambda run: main(["stats", "shapes", "--config", str(run / "config.yaml")]),
    "report": lambda run: main(["report", str(run)]),
    "watch": lambda run: main(["watch", str(run), "--port", "0"]),
    "evaluate knn": lambda run: main(["evaluate", "knn", str(run)]),
    "evaluate linear": lambda run: main(["evaluate", "linear", str(run)]),
    "evaluate semi": lambda run: main(["evaluate", "semi", str(run), "--fraction", "0.1"]),
    "embed": lambda run: main(["embed", str(run), "--out", str(run / "features.npz")]),
    "export": lambda run: main(["export", str(run), "--format", "torchvision", "--out", str(run / "new")]),
}


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """A module that can be imported; tells whether it was."""
    (tmp_path / "evil.py").write_text("open('imported', 'w').close()\n\nclass X:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    return lambda: "evil" in sys.modules or (tmp_path / "imported").exists()


def test_the_evil_module_could_be_imported(evil: Callable[[], bool]):
    assert not evil()
    __import__("evil")
    assert evil()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_config_imports_nothing(
    command: str,
    form: str,
    run: Path,
    tmp_path: Path,
    evil: Callable[[], bool],
    capsys: pytest.CaptureFixture[str],
):
    shutil.copytree(run, tmp_path / "sent")
    (tmp_path / "sent" / "config.yaml").write_text(form)
    assert COMMANDS[command](tmp_path / "sent") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"momentum2: {tmp_path / 'sent' / 'config.yaml'}")
    assert len(said.splitlines()) == 1
    assert not evil()
    assert not (tmp_path / "sent" / "new").exists()


@pytest.mark.parametrize("form", [*FORMS, "objects: {method: evil.X, encoder: evil.X, dataset: evil.X}"])
def test_a_folder_of_runs_imports_nothing(form: str, run: Path, tmp_path: Path, evil: Callable[[], bool]):
    """A table of runs names the one that it cannot read, and goes on; a tracker does not ask the config."""
    shutil.copytree(run, tmp_path / "runs" / "sent")
    (tmp_path / "runs" / "sent" / "config.yaml").write_text(form)
    assert main(["runs", str(tmp_path / "runs")]) in (0, 2)
    assert main(["log", str(tmp_path / "runs" / "sent"), "--to", "tensorboard"]) in (0, 2)
    assert not evil()


@pytest.mark.parametrize("name", ["evil.X", "timm/evil.X", "torchvision/evil.X", "hf-hub:evil/X", "own"])
def test_the_card_of_an_encoder_imports_nothing(
    name: str, run: Path, tmp_path: Path, evil: Callable[[], bool]
):
    card = EncoderCard.of_run(config_from_file(run / "config.yaml"), 64, "student", 1)
    path = tmp_path / "encoder.safetensors"
    save_file({"x": torch.zeros(1)}, path, replace(card, backbone=name).to_metadata())
    with pytest.raises(UserError):
        load_encoder(path)
    save_file({"x": torch.zeros(1)}, path, replace(card, options=("norm_layer=evil.X",)).to_metadata())
    with pytest.raises(UserError):
        load_encoder(path)
    assert not evil()


@pytest.mark.parametrize("form", FORMS)
def test_the_config_of_a_loaded_encoder_imports_nothing(
    form: str, run: Path, tmp_path: Path, evil: Callable[[], bool]
):
    shutil.copytree(run, tmp_path / "sent")
    load_encoder(tmp_path / "sent")
    (tmp_path / "sent" / "config.yaml").write_text(form)
    with pytest.raises(UserError, match=r"is not a YAML file|Unknown setting|takes"):
        load_encoder(tmp_path / "sent")
    assert not evil()


@pytest.mark.parametrize(
    "words",
    [
        ["--data", "evil.X"],
        ["--data=evil.X"],
        ['--data={"class_path":"evil.X"}'],
        ["--data.class_path", "evil.X"],
        ['--views={"class_path": "evil.X", "init_args": {}}'],
        ["--views.help", "evil.X"],
        ["--data.help=evil.X"],
        ["--method.alpha", "evil.X"],
        ["--method.name", '{"class_path": "evil.X"}'],
        ["--print_config", "evil.X"],
    ],
)
@pytest.mark.parametrize("command", ["plan", "pretrain"])
def test_a_flag_imports_nothing(
    words: list[str], command: str, evil: Callable[[], bool], capsys: pytest.CaptureFixture[str]
):
    assert main([command, "quickstart", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not evil()


def whole_configs() -> dict[str, Config | DetectConfig]:
    configs: dict[str, Config | DetectConfig] = {name: build().config for name, build in RECIPES.items()}
    for model in get_args(DetectorName):
        configs |= {f"{model} {data}": preset(model, data) for data in get_args(DetectionDataName)}
    return configs


@pytest.mark.parametrize("name", whole_configs())
def test_a_config_survives_yaml(name: str, tmp_path: Path):
    config = whole_configs()[name]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False))
    assert from_file(type(config)(), tmp_path / "config.yaml") == config
    assert override(type(config)(), flatten(asdict(config))) == config
    check(config)


@given(
    root=st.none() | st.text(st.characters(exclude_characters="\0")).filter(lambda s: _is_name(s)),
    split=st.sampled_from(
        ["none", "null", "~", "", "yes", "07", "1e3", "80%", "-20%", " a ", "a: b", "#", "- x"]
    ),
    steps=st.none() | st.integers(1, 10**9),
    lr=st.floats(0, 1e6),
    alpha=st.sampled_from(["cosine", "auto"]) | st.floats(0, 1),
    compile=st.booleans(),
    edges=st.lists(st.integers(1, 8192), min_size=1),
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_values_survive_yaml(root, split, steps, lr, alpha, compile, edges, tmp_path: Path):
    """Also a folder called none, and a split called 07: YAML's own opinion of them is not asked."""
    base = Config()
    config = replace(
        base,
        method=replace(base.method, alpha=alpha),
        data=replace(base.data, root=root, split=split),
        train=replace(base.train, steps=steps, compile=compile),
        optim=replace(base.optim, lr=lr),
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    assert from_file(Config(), tmp_path / "config.yaml") == config
    detector = replace(DetectConfig(), data=replace(DetectConfig().data, short_edges=edges, root=root))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(detector)))
    assert from_file(DetectConfig(), tmp_path / "config.yaml") == detector


def _is_name(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.dates()
    | st.binary(max_size=20)
    | st.sampled_from(
        ["cosine", "byol", "none", "true", "1e-3", "0x10", "010", "1_0", ".nan", ".inf", "[1,2]"]
    )
)
NAMES = st.sampled_from([*leaves(Config), "data", "train", "name", "root", "epochs", "alpha"]) | st.text(
    max_size=9
)
TREES = st.recursive(
    SCALARS,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(NAMES | SCALARS, inside, max_size=5),
)


def read_or_refuse(path: Path) -> Config | str:
    try:
        return config_from_file(path)
    except UserError as error:
        said = str(error)
        assert len(said.splitlines()) == 1
        assert len(said) < 1000 + len(str(path))
        assert str(path) in said
        said.encode()
        return said


@given(TREES)
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_any_tree_converts_or_is_one_sentence(tmp_path: Path, tree: object):
    (tmp_path / "any.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    found = read_or_refuse(tmp_path / "any.yaml")
    if isinstance(found, Config):
        check(found)


@given(
    st.binary() | st.text(st.sampled_from("data:root{}[],&*!|>%@`'\"#-? \n\t\\xuU0\ufeff")).map(str.encode)
)
@example(b'"\\U00110000": 1')
@example(b'data: {root: "\\0"}')
@example(b'data: {root: "\\ud800"}')
@example(b"%YAML " + b"9" * 5000 + b".1\n---\ntrain: {}")
@example(b"\xef\xbb\xbftrain: {epochs: 3}")
@example("train: {epochs: 3}".encode("utf-16"))
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_any_file_converts_or_is_one_sentence(tmp_path: Path, data: bytes):
    (tmp_path / "any.yaml").write_bytes(data)
    read_or_refuse(tmp_path / "any.yaml")


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{" * 100_000,
        "data: " + "[" * 90_000,
        "data: " + "{a: " * 20_000,
        "? " * 40_000,
        "- " * 49_000,
        "\n".join(" " * i + "a:" for i in range(400)),
        LAUGHS,
        "train: &t {epochs: 3}\neval_data: *t",
        "train: &t\n  <<: *t",
        "x" * (LARGEST_FILE + 1),
        "train: {epochs: " + "9" * 90_000 + "}",
        "data: {root: [" + "1," * 40_000 + "]}",
        "train: {epochs: 3}\n---\ntrain: {epochs: 4}",
        "train: {epochs: 3}\ntrain: {epochs: 4}",
        "train: {epochs: 3}\ntrain.epochs: 4",
        "",
        "# nothing",
        "3",
        "\0",
        "train: [",
        "train: {epochs: 3",
        "\ttrain: 3",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_hostile_file_is_one_sentence(text: str, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(text)
    assert isinstance(read_or_refuse(tmp_path / "config.yaml"), str)


def test_what_is_not_a_file(tmp_path: Path):
    for path in (tmp_path, tmp_path / "nowhere", Path("/dev/zero")):
        assert isinstance(read_or_refuse(path), str)


def test_a_file_says_what_it_means(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "data: {root: 07, split: no, cache: off, download: Yes}\n"
        "optim: {lr: 1e-4, clip_norm: null}\n"
        "train.epochs: 010\n"
        "eval_data:\n  root: 'null'\n  name: none\n  cache_dir: ~\n"
    )
    config = config_from_file(path)
    assert (config.data.root, config.data.split, config.data.cache, config.data.download) == (
        "07",
        "no",
        "off",
        True,
    )
    assert (config.optim.lr, config.optim.clip_norm) == (1e-4, None)
    assert config.train.epochs == 10
    assert (config.eval_data.root, config.eval_data.name, config.eval_data.cache_dir) == (
        "null",
        "none",
        None,
    )


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("train.epochs", "0", "must be at least 1, not 0."),
        ("train.epochs", "abc", "takes a whole number, not 'abc'."),
        ("train.epochs", "1.5", "takes a whole number, not '1.5'."),
        ("train.epochs", None, "takes a whole number, not none."),
        ("train.epochs", True, "takes a whole number, not True."),
        ("train.epochs", 10**30, "takes a whole number, not 1000"),
        ("train.steps", "x", "takes a whole number or none, not 'x'."),
        ("train.steps", "0", "must be at least 1, not 0."),
        ("method.alpha", "1.5", "must be from 0 to 1, not 1.5."),
        ("method.alpha", "cosin", "takes cosine, auto or a number, not 'cosin'. Did you mean cosine?"),
        ("method.name", "byoll", "not 'byoll'. Did you mean byol?"),
        ("optim.lr", "nan", "takes a number, not 'nan'."),
        ("optim.lr", math.nan, "takes a number, not nan."),
        ("optim.lr", "-1", "must be at least 0, not -1."),
        ("optim.lr", [], "takes a number, not []."),
        ("train.compile", "maybe", "takes true or false, not 'maybe'."),
        ("train.compile", 1, "takes true or false, not 1."),
        ("data.root", 7, "takes text or none, not 7."),
        ("data.root", "a\0b", "takes text or none, not 'a\\x00b'."),
        ("data.split", None, "takes text, not none."),
        ("data.split", "x" * 1000, None),
        ("train.batch_size", "x" * 1000, "..."),
    ],
)
def test_a_wrong_value_names_the_setting(name: str, value: object, says: str | None):
    if says is None:
        override(Config(), {name: value})
        return
    with pytest.raises(SettingError) as error:
        override(Config(), {name: value})
    assert error.value.setting == name
    assert str(error.value).startswith(f"{name} ")
    assert says in str(error.value)
    assert error.value.told("--").startswith(f"--{name} ")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("train.epoch", "train.epochs"),
        ("data", "data.root"),
        ("train", "train.epochs"),
        ("qqqqqqqq", ""),
        ("data.root.x", "data.root"),
        ("train.epochs\n", "train.epochs"),
    ],
)
def test_an_unknown_name_has_a_hint(name: str, close: str):
    with pytest.raises(UnknownSetting) as error:
        override(Config(), {name: "1"})
    assert error.value.problem == close
    assert len(error.value.told("--").splitlines()) == 1
    assert (f"Did you mean --{close}?" in error.value.told("--")) == bool(close)


def test_a_mistake_in_a_file_is_told_as_one_of_the_file(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("train: {epochs: 0}")
    with pytest.raises(SettingError) as error:
        config_from_file(path)
    assert error.value.setting == "train.epochs"
    assert error.value.told("--") == f"{path}: train.epochs must be at least 1, not 0."


def test_lists(tmp_path: Path):
    for value in ("[640, 800]", "640,800", ["640", 800], (640, 800)):
        assert override(DetectConfig(), {"data.short_edges": value}).data.short_edges == [640, 800]
    for value, says in (
        ("[]", "at least 1 value"),
        ("5,x", "a whole number"),
        ("5,0", "at least 1, not 0"),
    ):
        with pytest.raises(SettingError, match=says):
            override(DetectConfig(), {"data.short_edges": value})
    (tmp_path / "f.yaml").write_text("data:\n  short_edges:\n  - 5\n  - 6\n")
    assert from_file(DetectConfig(), tmp_path / "f.yaml").data.short_edges == [5, 6]


def test_settings_made_in_python_are_checked():
    for wrong in (
        replace(Config(), train=TrainConfig(epochs=0)),
        replace(Config(), train=TrainConfig(epochs="5")),  # type: ignore[arg-type]
        replace(Config(), train=TrainConfig(compile=1)),  # type: ignore[arg-type]
        replace(Config(), data=DataConfig(root=Path("x"))),  # type: ignore[arg-type]
    ):
        with pytest.raises(SettingError):
            check(wrong)
    assert override(Config(), {"data.root": Path("x")}).data.root == "x"


def test_every_default_is_within_its_limits():
    for config in (Config(), DetectConfig()):
        check(config)


def test_a_type_that_no_setting_can_have_is_noticed():
    @dataclass(frozen=True)
    class Wrong:
        when: complex = field(default=1j)

    with pytest.raises(TypeError, match="when"):
        check(Wrong())


def test_limits_are_read_from_the_types():
    limited = {name for name, hint in leaves(Config).items() if _limits(hint)}
    assert {"train.epochs", "method.alpha", "optim.clip_norm", "eval_data.image_size"} <= limited


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_every_number_of_a_command_has_a_ceiling(command: str):
    """A slip of the finger gets a sentence, not the memory of the machine."""
    for name, hint in commands.COMMANDS[command].options().known.items():
        for kind, limits in _kinds(hint):
            if kind in (int, float) and name not in HARMLESS:
                assert limits is not None, name
                assert limits.high <= 1e9, name
                with pytest.raises(SettingError, match=r"at most|from"):
                    convert(name, str(10**10), hint)


#: Numbers that are not sizes: seeds have 64 bits, and shares are checked with what they are shares of.
HARMLESS = {"train.seed", "seed", "fraction"}


def _limits(hint: object) -> bool:
    return any(isinstance(part, Limits) or _limits(part) for part in get_args(hint))


def test_flatten():
    assert flatten({"train": {"seed": 0}, "data.root": "x"}) == {"train.seed": 0, "data.root": "x"}


def test_read_settings_gives_text(tmp_path: Path):
    (tmp_path / "f.yaml").write_text("train: {epochs: 3, steps: null}\nx: [1, 'null', null]")
    assert read_settings(tmp_path / "f.yaml") == {
        "train.epochs": "3",
        "train.steps": None,
        "x": ["1", "null", None],
    }
