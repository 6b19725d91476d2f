import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from momentum2.config import Config, DataConfig
from momentum2.errors import UserError
from momentum2.evaluate.semi import SemiOptions, evaluate_semi
from momentum2.evaluate.subject import SubjectOptions, open_subject
from momentum2.evaluate.subsets import stratified

ONE = SubjectOptions(threads=1)
SHORT = SemiOptions(fraction=0.2, epochs=2, batch_size=18)


@pytest.mark.parametrize(("fraction", "epochs", "batch_size"), [(0.01, 20, 200), (0.1, 15, 1024)])
def test_length_and_rate_are_the_paper_s(
    run: Path, trained_with: Callable[..., Config], fraction: float, epochs: int, batch_size: int
):
    data = DataConfig("shapes", image_size=16, cache="off")  # 20,000 images
    with open_subject(run, replace(ONE, data=data)) as subject:
        config = trained_with(evaluate_semi, subject, SemiOptions(fraction=fraction))
    assert (config.train.epochs, config.train.batch_size) == (epochs, batch_size)
    assert config.optim.lr * 1024 / 256 == pytest.approx(0.08)


def test_the_whole_network_is_fine_tuned(run: Path):
    with open_subject(run, ONE) as subject:
        before = {name: value.clone() for name, value in subject.encoder.state_dict().items()}
        result = evaluate_semi(subject, SHORT)
        assert result is not None
        assert result.name == "semi 0.2 | pictures test | teacher"
        assert result.settings["labels"] == len(stratified(subject.labeled.train.labels, 0.2, 0))
        assert result.accuracy.images == 61
        assert all(torch.equal(value, before[name]) for name, value in subject.encoder.state_dict().items())
    saved = load_file(run / "semi-0.2" / "teacher" / "checkpoints" / "step-00000004" / "shared.safetensors")
    assert not torch.equal(saved["method/encoder.conv1.weight"], before["conv1.weight"])


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own(run: Path):
    words = ["evaluate", "semi", str(run), "--fraction", "0.2", "--epochs", "1", "--batch_size", "18"]
    command = [sys.executable, "-m", "momentum2", *words, "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "semi 0.2" in (run / "results.json").read_text()


def test_again_and_from_scratch(run: Path):
    """The same bits again; from scratch, the same images and another network."""
    with open_subject(run, ONE) as subject:
        first = evaluate_semi(subject, SHORT)
        again = evaluate_semi(subject, replace(SHORT, out=str(run / "again")))
        assert first == again
    with open_subject(run, replace(ONE, weights="random")) as subject:
        scratch = evaluate_semi(subject, SHORT)
    assert first is not None
    assert scratch is not None
    assert scratch.name == "semi 0.2 | pictures test | random initialization"
    assert scratch.settings == first.settings
    assert scratch.accuracy != first.accuracy


def test_a_list_of_names(run: Path, tmp_path: Path):
    path = tmp_path / "few.txt"
    with open_subject(run, ONE) as subject:
        names = subject.labeled.train.names
        path.write_text("\n".join(names[i].split("/")[-1] for i in range(60)))
        result = evaluate_semi(subject, SemiOptions(list=str(path), epochs=1))
    assert result is not None
    assert result.name == "semi few | pictures test | teacher"
    assert (result.settings["labels"], result.settings["batch size"]) == (60, 60)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (SemiOptions(), "either fraction or list"),
        (SemiOptions(fraction=0.1, list="few.txt"), "either fraction or list"),
        (SemiOptions(fraction=2.0), "above 0 and at most 1"),
        (SemiOptions(list="nowhere.txt"), "cannot be read"),
        (replace(SHORT, batch_size=64), "^batch_size 64 exceeds the number of images"),
    ],
)
def test_mistakes_are_one_sentence(run: Path, options: SemiOptions, sentence: str):
    with pytest.raises(UserError, match=sentence), open_subject(run, ONE) as subject:
        evaluate_semi(subject, options)


def test_pixels_cannot_be_fine_tuned(run: Path):
    with (
        open_subject(run, replace(ONE, weights="pixels")) as subject,
        pytest.raises(UserError, match="nothing to fine-tune"),
    ):
        evaluate_semi(subject, SHORT)
