"""A fixed choice of the attacks; `make attack` runs all of them (see docs/security.md)."""

import commands  # noqa: F401  its groups of cases
import pytest
from attacks import some_cases
from judge import Case, Facts, Impossible, Judge, verdict

CHOICE = some_cases(3)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CHOICE])
def test_attack(case: Case, judge: Judge):
    try:
        problems = judge.run(case)
    except Impossible:
        pytest.skip("needs file systems of its own")
    assert not problems, f"momentum2 {' '.join(map(ascii, case.arguments))}: {problems}"


CASE = Case("C0", "none", ())
GOOD = Facts(2, b"", b"momentum2: No.\n", 0.1, 0, "", ())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"code": 1, "stderr": b"momentum2: Unexpected E: x.\n"}, "net: exit code 1"),
        ({"code": 3}, "exit code 3"),
        ({"code": -11}, "killed by signal 11"),
        ({"reason": "hang"}, "hang"),
        ({"reason": "slow"}, "slow"),
        ({"cpu": 99.0}, "slow"),
        ({"peak": 5000}, "memory"),
        ({"left": ("sleep 9",)}, "left behind: sleep 9"),
        ({"stderr": b""}, "0 lines on stderr"),
        ({"stderr": b"momentum2: a\nb\nc\nd\n"}, "4 lines on stderr"),
        ({"stderr": b"No.\n"}, "no sentence of ours"),
        ({"stderr": b"momentum2: " + b"a" * 3000}, "characters on stderr"),
        ({"stderr": b"momentum2: \x1b[31m\n"}, "control character"),
        ({"stdout": "\u202e".encode()}, "control character"),
        ({"stdout": b"\xff"}, "stdout is not utf-8"),
        ({"stderr": b"momentum2: a\nFORGED\n"}, "forged line"),
        ({"stderr": b"momentum2: a\rFORGED\n"}, "forged line"),
        ({"stderr": b"Traceback (most recent call last):\nmomentum2: a\n"}, "traceback"),
        ({"stderr": b"x.py:3: UserWarning: a\nmomentum2: a\n"}, "a warning of a library"),
    ],
)
def test_the_judge_is_not_blind(change: dict[str, object], problem: str):
    assert not verdict(CASE, GOOD)
    facts = Facts(**(GOOD.__dict__ | change))
    assert any(problem in found for found in verdict(CASE, facts)), verdict(CASE, facts)
