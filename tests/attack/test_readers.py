"""Properties of what reads text from outside, in this process: it returns, or raises what a person is meant to read."""

import json
import string
import struct
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from judge import CONTROLS

from momentum2.cli.commands import COMMANDS
from momentum2.config import Config
from momentum2.errors import UserError, shown
from momentum2.settings import leaves, override
from momentum2.weights import read_state
from momentum2.yaml_settings import read_settings

often = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
NAMES = list(leaves(Config))
#: Pieces of which YAML is made, and some that are none.
_PIECES = [
    *"[]{}:,-?&*!|>'\"%@`#~",
    "\n",
    "\n  ",
    ": ",
    "- ",
    "---\n",
    "...",
    "&a ",
    "*a",
    "!!int ",
    "<<: ",
    "null",
]
_PIECES += [
    ".nan",
    "1e999",
    "0x1f",
    "\t",
    "\x85",
    "\u2028",
    "\ufeff",
    "\0",
    "train",
    "seed",
    "data",
    "root",
    "é",
]
YAML = st.lists(st.sampled_from(_PIECES), max_size=60).map("".join)


@often
@given(text=YAML | st.text(max_size=200))
def test_yaml(text: str, tmp_path: Path):
    path = tmp_path / "given.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        found = read_settings(path)
    except UserError:
        return
    assert all(isinstance(value, str | list | None) for value in found.values())
    try:
        override(Config(), found)
    except UserError:
        return


VALUES = (
    st.text(max_size=30)
    | st.integers().map(str)
    | st.floats().map(str)
    | st.sampled_from(["", "none", "[1,2]"])
)


@often
@given(name=st.sampled_from(NAMES), value=VALUES | st.none() | st.lists(VALUES, max_size=3))
def test_every_setting_takes_or_refuses_any_value(name: str, value: object):
    try:
        config = override(Config(), {name: value})
    except UserError:
        return
    section, _, field = name.partition(".")
    found = getattr(getattr(config, section), field)
    assert found is None or not isinstance(found, int | float) or abs(found) <= 2**63


WORDS = st.lists(
    st.sampled_from(
        ["--", "-h", "--help", "-1", "=", "--config", "--out", "quickstart", "--train.seed", "run"]
    )
    | st.sampled_from(NAMES).map(lambda name: f"--{name}")
    | st.text(max_size=20)
    | st.text(max_size=20).map(lambda text: f"--{text}"),
    max_size=6,
)


@often
@given(command=st.sampled_from(sorted(COMMANDS)), words=WORDS)
def test_words_of_a_command_line(command: str, words: list[str]):
    try:
        COMMANDS[command].options().parse(command, words)
    except UserError:
        return


@often
@given(text=st.text(st.characters(), max_size=400), most=st.integers(10, 500))
def test_what_is_shown_has_no_control(text: str, most: int):
    said = shown(text, most)
    assert not CONTROLS.search(said)
    assert "\n" not in said
    assert "\r" not in said
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in said)


TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "I64", "BF16", "X", 1, None]),
        "shape": st.lists(st.integers(-5, 2**63), max_size=4) | st.none(),
        "data_offsets": st.lists(st.integers(-5, 2**40), max_size=3),
    },
)
HEADERS = st.dictionaries(
    st.text(string.printable, max_size=10) | st.just("__metadata__"), TENSOR, max_size=4
)


@often
@given(
    header=HEADERS.map(json.dumps) | st.text(max_size=60),
    tensors=st.binary(max_size=64),
    length=st.none() | st.integers(0, 2**64 - 1),
)
def test_headers_of_safetensors(header: str, tensors: bytes, length: int | None, tmp_path: Path):
    data = header.encode("utf-8", "surrogatepass")
    size = len(data) if length is None else length
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", size) + data + tensors)
    try:
        read_state(tmp_path / "w.safetensors")
    except UserError:
        return


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".pkl", ""])
@often
@given(data=st.binary(max_size=200) | st.binary(max_size=60).map(lambda data: b"\x80\x02" + data))
def test_weights_of_torch(data: bytes, suffix: str, tmp_path: Path):
    (tmp_path / f"w{suffix}").write_bytes(data)
    with pytest.raises(UserError):
        read_state(tmp_path / f"w{suffix}")
