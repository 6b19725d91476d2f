"""The functions that a Python program calls: they do what the commands do, and leave the program as it was."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

import momentum2 as m2
from momentum2.cli import main
from momentum2.cli.commands import COMMANDS
from momentum2.evaluate.linear import LinearOptions
from momentum2.evaluate.selection import SelectOptions
from momentum2.evaluate.subject import SubjectOptions
from momentum2.report import ReportOptions
from momentum2.reproduce import runner
from momentum2.reproduce.command import ReproduceOptions
from momentum2.runs.objects import of_class
from momentum2.settings import flatten

ROOT = Path(__file__).parents[1]
TINY = {
    "method.name": "byol",
    "model": {"width": 0.125, "projector_hidden": 16, "projector_out": 8},
    "data.train_size": 64,
    "data.cache": "off",
    "eval_data.train_size": 64,
    "eval_data.test_split": "2%",
    "train.steps": 4,
    "train.batch_size": 16,
    "train.checkpoint_every": 2,
    "train.threads": 1,
    "train.device": "cpu",
    "train.precision": "fp32",
    "monitor.log_every": 1,
    "monitor.report": False,
    "monitor.knn_every": 0,
}
CPU = SubjectOptions(device="cpu", threads=1)


@pytest.fixture
def config() -> m2.Config:
    return m2.recipe("quickstart", TINY)


def pictures(n: int, seed: int = 0) -> list[tuple[Image.Image, int]]:
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 20, 24, 3), np.uint8)
    return [(Image.fromarray(p), i % 2) for i, p in enumerate(pixels)]


class Small(nn.Module):
    """A network of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1)


def test_five_lines(tmp_path: Path):
    """Those of the README, small: kNN while it trains and the page at the end hold from Python too."""
    for label, name in enumerate(("left", "right")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i, (image, _) in enumerate(pictures(20, label)):
            image.save(tmp_path / "photos" / name / f"{i}.png")
    settings = {**TINY, "data.root": str(tmp_path / "photos"), "train.steps": 2, "train.batch_size": 8}
    del settings["data.train_size"], settings["eval_data.train_size"], settings["eval_data.test_split"]
    settings |= {"monitor.knn_every": 1, "monitor.report": True}
    config = m2.recipe("folder", settings)
    run = m2.pretrain(config, tmp_path / "run")
    assert run.finished
    assert run.config.train.steps == 2
    assert any("knn_top1" in record for record in run.metrics())
    assert (run.path / "report.html").exists()
    found = m2.evaluate_knn(run, subject=CPU)
    assert 0 <= found.accuracy.top1 <= 100
    assert found.name in run.results()
    seen = m2.embed(run, data=str(tmp_path / "photos"), subject=CPU)
    assert seen.features.shape == (40, 16 * 4)
    assert seen.features.dtype == np.float32
    assert len(seen.names) == 40
    page = m2.write_report(run, tmp_path / "page.html")
    assert page.exists()


def test_overrides_are_dotted_or_nested_and_checked():
    nested, dotted = (
        m2.recipe("quickstart", {"train": {"epochs": 3}}),
        m2.recipe("quickstart", {"train.epochs": 3}),
    )
    assert nested == dotted
    with pytest.raises(m2.SettingError) as error:
        m2.recipe("quickstart", {"train.epochs": 0})
    assert error.value.setting == "train.epochs"
    assert str(error.value).startswith("train.epochs must be at least 1")  # no flag: nobody typed one


@pytest.mark.parametrize("settings", [{"train.devices": 5}, {"train.devices": 32}, {"train.accumulate": 3}])
def test_a_batch_that_cannot_be_shared_leaves_no_directory(tmp_path: Path, settings: dict[str, int]):
    with pytest.raises(m2.SettingError) as error:
        m2.pretrain(m2.recipe("quickstart", {**TINY, **settings}), tmp_path / "run")
    assert error.value.setting == "train.batch_size"
    assert not (tmp_path / "run").exists()


def test_arguments_of_another_kind_are_one_sentence(tmp_path: Path, config: m2.Config):
    for call in (
        lambda: m2.pretrain("quickstart", tmp_path / "run"),  # type: ignore[arg-type]
        lambda: m2.pretrain(config, tmp_path / "run", encoder="resnet18"),  # type: ignore[arg-type]
        lambda: m2.pretrain(config, tmp_path / "run", method="byol"),  # type: ignore[arg-type]
        lambda: m2.plan("quickstart"),  # type: ignore[arg-type]
        lambda: m2.recipe("quickstart", ["a"]),  # type: ignore[arg-type]
    ):
        with pytest.raises(m2.UserError, match=r" must be .*, not "):
            call()
    assert not (tmp_path / "run").exists()


def test_every_command_is_a_function():
    functions = {
        "recipes": m2.list_recipes,
        "backbones": m2.list_backbones,
        "plan": m2.plan,
        "views": m2.views,
        "stats": m2.stats,
        "pretrain": m2.pretrain,
        "evaluate knn": m2.evaluate_knn,
        "evaluate linear": m2.evaluate_linear,
        "evaluate semi": m2.evaluate_semi,
        "detect": m2.detect,
        "detect --eval-only": m2.evaluate_detector,
        "detect --images": m2.detect_images,
        "embed": m2.embed,
        "search": m2.search,
        "select": m2.select,
        "runs": m2.compare_runs,
        "report": m2.write_report,
        "watch": m2.watch,
        "reproduce": m2.reproduce_table,
        "export": m2.export_encoder,
        "log": m2.log_run,
        "doctor": m2.doctor,
    }
    assert {name.partition(" --")[0] for name in functions} == set(COMMANDS)
    assert {function.__name__ for function in functions.values()} <= set(m2.__all__)


def test_recipes_and_backbones_are_listed():
    recipes = m2.list_recipes()
    assert recipes["quickstart"].config == m2.recipe("quickstart")
    assert all(recipe.summary and recipe.expect for recipe in recipes.values())
    assert m2.list_backbones("torchvision/resnet*") == [
        name for name in m2.list_backbones() if name.startswith("torchvision/resnet")
    ]


def test_a_table_is_reproduced_from_python_in_any_thread(tmp_path: Path, capfd, caplog):
    """The signals of the host are its own, and so is its terminal. One that is stopped is `Stopped`."""
    options = ReproduceOptions(rows="local-momentum", out=str(tmp_path / "tables"), jobs=1)
    printed = m2.reproduce_table("alpha", replace(options, rows=None, dry_run=True))
    assert printed.splitlines()[0].startswith("momentum2 pretrain ")
    assert not (tmp_path / "tables").exists()
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    ended: list[BaseException] = []

    def run() -> None:
        try:
            m2.reproduce_table("bn-statistics", replace(options, rows="nosuchrow"))
        except m2.UserError as error:
            ended.append(error)
        with runner._stop_on_signals() as children:
            children.stop()
            try:
                children.run([sys.executable, "-c", ""], tmp_path / "log")
            except m2.Stopped as error:
                ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [type(error) for error in ended] == [m2.UserError, m2.Stopped]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert capfd.readouterr().out == ""


def test_there_are_four_calls_from_the_command_line_to_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    chain: list[str] = []

    def fit(job: object, run: object) -> bool:
        chain.extend(frame.name for frame in traceback.extract_stack() if "momentum2/" in frame.filename)
        return False

    monkeypatch.setattr("momentum2.api.fit", fit)
    flags = [f"--{name}={value}" for name, value in flatten(TINY).items()]
    assert main(["pretrain", "quickstart", *flags, "--out", str(tmp_path / "run")]) == os.EX_TEMPFAIL
    assert chain == ["main", "_run", "pretrain", "pretrain"]  # and these call one another, and the loop: four


def test_every_public_name_exists():
    assert all(hasattr(m2, name) for name in m2.__all__)
    assert set(m2.__all__) <= set(dir(m2))


# -- doors

METHOD = '''
"""A method that lives outside the package."""

import torch.nn.functional as F
from torch import nn

import momentum2 as m2


class Aligned(m2.Method):
    """Both views of an image near each other, all images spread over the sphere (Wang and Isola, 2020)."""

    def __init__(self, config, schedule, f, devices, classes):
        super().__init__(schedule)
        self.f, self.g = f, nn.Linear(f.feature_dim, config.model.projector_out)
        m2.convert_norms(self.f, config.method.student_norm, devices)

    def forward(self, views, labels):
        x, y = (F.normalize(self.g(self.f(v)), dim=1) for v in views)
        apart = sum((-2 * (1 - z @ z.T)).exp().mean().log() for z in (x, y)) / 2
        return m2.Output((x - y).square().sum(1).mean() + apart, x.detach(), {"apart": apart.detach()})

    def encoders(self):
        return {"student": self.f}
'''

TRAIN = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import momentum2 as m2
from momentum2.training import loop
import theirs

kill_at = int(sys.argv[3])
class Killer(loop.Stepper):
    def __call__(self, k, *rest, **more):
        if k == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(k, *rest, **more)
loop.Stepper = Killer
config = m2.recipe("quickstart", {**json.loads(sys.argv[4]), "views.repeat": 1})
assert m2.pretrain(config, sys.argv[2], method=theirs.Aligned).finished
"""


def test_a_method_from_outside_is_trained_killed_resumed_evaluated_and_exported(
    tmp_path: Path, config: m2.Config, warm_python: str
):
    (tmp_path / "theirs.py").write_text(METHOD)
    program = tmp_path / "train.py"
    program.write_text(TRAIN)

    def train(out: str, kill_at: int) -> int:
        command = [warm_python, program, tmp_path, tmp_path / out, str(kill_at), json.dumps(TINY)]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        return subprocess.run(command, env=environment, timeout=600, check=False).returncode

    assert train("whole", -1) == 0
    assert train("killed", 3) == -9
    assert train("killed", -1) == 0
    ends = [
        load_file(tmp_path / run / "checkpoints/step-00000004/shared.safetensors")
        for run in ("whole", "killed")
    ]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())

    run = m2.Run(tmp_path / "killed")
    assert run.config.method.name == "own"
    assert "theirs.Aligned" in str(run.config.objects.method)
    assert m2.evaluate_knn(run, subject=CPU).network == "student"
    m2.export_encoder(run, "onnx", tmp_path / "exported")
    assert m2.load_encoder(run).card.method == "own"
    assert m2.load_encoder(run.path / "checkpoints" / "step-00000004").card.network == "student"
    # Another class of that name, and none at all, are refused in a sentence.
    sys.modules.pop("theirs", None)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "theirs.py").write_text(METHOD.replace("-2 *", "-3 *"))
    sys.path.insert(0, str(tmp_path / "other"))
    try:
        from theirs import Aligned  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    pairs = m2.recipe("quickstart", {**TINY, "views.repeat": 1})
    with pytest.raises(m2.UserError, match=r"objects\.method was theirs\.Aligned"):
        m2.pretrain(pairs, run, method=Aligned)
    repeated = r"views\.repeat is 2, which makes 4 views per image, but Aligned takes 2 views\. Set it to 1\."
    with pytest.raises(m2.UserError, match=repeated):
        m2.pretrain(config, tmp_path / "repeated", method=Aligned)
    assert not (tmp_path / "repeated").exists()
    with pytest.raises(m2.SettingError, match=r"pretrain\(method=\.\.\.\)"):
        m2.pretrain(run.config, run)


BASES = """
import momentum2 as m2

class Base(m2.Method):
    strength = 2

class Mine(Base):
    pass
"""


def test_a_class_is_known_by_its_source_and_that_of_its_bases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    for version, text in enumerate((BASES, BASES, BASES.replace("strength = 2", "strength = 3"))):
        (tmp_path / f"bases{version}.py").write_text(text)
        name, digest = of_class(__import__(f"bases{version}").Mine).split()
        assert name == f"bases{version}.Mine"
        seen.append(digest)
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]
    assert not caplog.messages
    typed: dict[str, type] = {}
    exec("class Typed: pass", {"__name__": "console"}, typed)
    assert of_class(typed["Typed"]) == "console.Typed (source unknown)"
    assert "cannot notice changes" in caplog.text


def test_a_method_fits_in_forty_lines():
    assert len(METHOD.strip().splitlines()) <= 40


def test_an_encoder_of_ones_own(tmp_path: Path, config: m2.Config):
    torch.manual_seed(0)
    network = Small()
    before = network.state_dict()["body.0.weight"].clone()
    run = m2.pretrain(config, tmp_path / "run", encoder=network)
    assert torch.equal(network.state_dict()["body.0.weight"], before)  # it is copied
    with pytest.raises(m2.UserError, match=r"load_encoder\(.*encoder=\.\.\.\)"):
        m2.load_encoder(run)
    loaded = m2.load_encoder(run, encoder=Small())
    assert loaded(torch.rand(2, 3, 32, 32)).shape == (2, 6)
    assert not torch.equal(loaded.encoder.state_dict()["body.0.weight"], before)
    assert list(m2.evaluate_knn(run, encoder=Small(), subject=CPU).floors) == [
        "raw pixels",
        "whitened patches",
    ]
    assert m2.embed(run, encoder=Small(), subject=CPU).features.shape == (64, 6)
    m2.export_encoder(run, "onnx", tmp_path / "onnx", encoder=Small())
    with pytest.raises(m2.UserError, match="onnx"):
        m2.export_encoder(run, "timm", tmp_path / "timm", encoder=Small())
    with pytest.raises(m2.UserError, match=r"objects\.encoder was .*Small"):
        m2.pretrain(config, run, encoder=nn.Sequential(Small()))
    with pytest.raises(m2.UserError, match=r"one row of features"):
        m2.pretrain(config, tmp_path / "maps", encoder=nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))


@pytest.mark.parametrize("kind", ["pairs", "images", "arrays", "tensors", "torch"])
def test_a_data_set_of_ones_own(tmp_path: Path, config: m2.Config, kind: str):
    pairs = pictures(48)
    images = [image for image, _ in pairs]
    arrays = [np.asarray(image) for image in images]
    dataset = {
        "pairs": pairs,
        "images": images,
        "arrays": arrays,
        "tensors": [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays],
        "torch": torch.utils.data.Subset(pairs, range(48)),  # type: ignore[arg-type]
    }[kind]
    run = m2.pretrain(config, tmp_path / "run", dataset=dataset)  # type: ignore[arg-type]
    assert run.config.eval_data.name == "none"  # not the recipe's shapes
    # The same pixels make the same run, however they come.
    reference = m2.pretrain(config, tmp_path / "reference", dataset=images)
    assert [r["loss"] for r in run.metrics()] == [r["loss"] for r in reference.metrics()]
    with pytest.raises(m2.UserError, match=r"objects\.dataset was"):
        m2.pretrain(config, run, dataset=pictures(48, seed=1))


def test_what_is_no_data_set_is_said(tmp_path: Path, config: m2.Config):
    class Streaming(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    for what, says in (
        (Streaming(), "Streaming is an IterableDataset"),
        ([*pictures(2), pictures(1)[0][0]], "some are not"),
        ([(pictures(1)[0][0], "cat")] * 20, "whole number"),
        ([np.zeros((4, 4, 3), np.float32)] * 20, "data.window is not set"),
    ):
        with pytest.raises(m2.UserError, match=says):
            m2.pretrain(config, tmp_path / "run", dataset=what)  # type: ignore[arg-type]


def test_a_supervised_run_takes_labels_from_pairs(tmp_path: Path):
    config = m2.recipe("quickstart", {**TINY, "method.name": "supervised", "views.recipe": "supervised"})
    assert m2.pretrain(config, tmp_path / "run", dataset=pictures(48)).finished
    with pytest.raises(m2.UserError, match="needs labels"):
        m2.pretrain(config, tmp_path / "other", dataset=[image for image, _ in pictures(48)])


# -- in a host program


def test_threads_random_numbers_and_silence(tmp_path: Path, config: m2.Config, capfd, caplog):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    with caplog.at_level(logging.INFO, "momentum2"):
        m2.pretrain(config, tmp_path / "run")
        m2.evaluate_knn(tmp_path / "run", subject=CPU)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.rand(3), expected)
    assert any("teacher BN" in message for message in caplog.messages)
    assert any("top-1" in message for message in caplog.messages)
    assert capfd.readouterr().out == ""


def test_every_function_leaves_threads_and_random_numbers_alone(tmp_path: Path, config: m2.Config):
    run, threads = m2.pretrain(config, tmp_path / "run"), torch.get_num_threads()
    features = m2.embed(run, subject=CPU)
    for call in (
        lambda: m2.plan(config, probe=True),
        lambda: m2.load_encoder(run),
        lambda: m2.load_encoder(run.path / "checkpoints" / "step-00000004"),
        lambda: m2.export_encoder(run, "onnx", tmp_path / "onnx"),
        lambda: m2.write_report(run, tmp_path / "page.html", ReportOptions(points=20)),
        lambda: m2.views("shapes", tmp_path / "views.png", count=2),
        lambda: m2.stats("shapes", count=5),
        lambda: m2.evaluate_linear(run, options=LinearOptions(protocol="cached", floors=False), subject=CPU),
        lambda: m2.embed(run, subject=CPU),
        lambda: m2.select(features, "diverse", options=SelectOptions(count=3)),
        lambda: m2.compare_runs(tmp_path),
        lambda: m2.list_backbones("torchvision/resnet*"),
        lambda: m2.doctor(tmp_path),
    ):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        call()
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.get_num_threads() == threads


def test_not_in_the_main_thread(tmp_path: Path, config: m2.Config):
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(m2.pretrain(config, tmp_path / "run").finished))
    thread.start()
    thread.join()
    assert done == [True]


GROUP = """
import json, sys
import torch.distributed as dist
import momentum2 as m2

folder, rank, world = sys.argv[1], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
group = dist.group.WORLD
config = m2.recipe("quickstart", json.loads(sys.argv[2]))
run = m2.pretrain(config, f"{folder}/run")
assert run.finished and run.config.train.devices == world
assert 0 <= m2.evaluate_knn(run).accuracy.top1 <= 100
try:
    m2.pretrain(config, f"{folder}/run", resume="never")
except m2.UserError:
    pass
assert dist.is_initialized() and dist.group.WORLD is group
dist.barrier()
"""


@pytest.mark.parametrize("world", [1, 2])
def test_a_process_group_of_the_host_is_reused_and_left_alone(tmp_path: Path, warm_python: str, world: int):
    """However the host made it: the variables of torchrun are not there."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [warm_python, "-c", GROUP, tmp_path, json.dumps(TINY)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen([*command, str(rank), str(world)], env=environment))
            for rank in range(world)
        ]
        assert [process.wait(600) for process in processes] == [0] * world


CONSOLE = """
import sys
import numpy as np
import momentum2 as m2

class Mine:
    def __len__(self): return 64
    def __getitem__(self, i): return np.full((40, 40 + i, 3), i, np.uint8)

config = m2.recipe("quickstart", {"train.steps": 1, "data.workers": int(sys.argv[2]), "model.width": 0.125,
    "train.batch_size": 32, "monitor.knn_every": 0, "monitor.report": False, "train.device": "cpu", "train.threads": 1})
try:
    m2.pretrain(config, sys.argv[1], dataset=Mine())
except m2.UserError as error:
    print(error)
"""


@pytest.mark.parametrize(("workers", "says"), [(0, ""), (1, "data.workers to 0")])
def test_a_class_from_a_console_works_or_one_sentence_says_why_not(
    tmp_path: Path, warm_python: str, workers: int, says: str
):
    done = subprocess.run(
        [warm_python, "-", tmp_path / "run", str(workers)],
        input=CONSOLE,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert says in done.stdout
    assert bool(done.stdout) == bool(says)


def test_a_run_started_from_python_is_not_restarted_by_a_command(tmp_path: Path, config: m2.Config, capsys):
    run = m2.pretrain(config, tmp_path / "run", encoder=Small())
    assert main(["pretrain", "--config", str(run.path / "config.yaml"), "--out", str(run.path)]) == 2
    assert "can only be passed from Python" in capsys.readouterr().err
    assert main(["report", str(run.path)]) == 0
    assert main(["plan", "quickstart", "--objects.method", "x"]) == 2


def test_the_old_import_still_leads_there(tmp_path: Path, config: m2.Config):
    from momentum2.engine.pretrain import pretrain

    with pytest.warns(FutureWarning, match=r"momentum2\.pretrain"):
        assert pretrain(replace(config, train=replace(config.train, steps=1)), tmp_path / "run")
