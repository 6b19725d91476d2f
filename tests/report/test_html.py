"""Text that nobody vouches for."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from momentum2.report.html import duration, escape, number, script_json, table


@given(st.text())
def test_json_in_a_script_cannot_end_it_and_says_the_same(text: str):
    written = script_json({"name": text})
    assert "<" not in written
    assert json.loads(written) == {"name": text}


def test_no_number_is_no_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_json([float("nan")])


@given(st.text())
def test_escaped_text_has_no_markup(text: str):
    assert not set("<>\"'") & set(escape(text))


def test_tables_escape_everything():
    assert "<i>" not in table(["<i>"], [("<i>", "<i>")], "<i>")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (1234, "1,234"),
        (0.123456, "0.1235"),
        (float("nan"), "no number"),
        (True, "True"),
        ("x", "x"),
    ],
)
def test_numbers(value: object, text: str):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (61, "1 min 1 s"), (3725, "1 h 2 min"), (3599.9, "1 h 0 min")]
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text
