"""Run attacks and say what gets through: `python tests/attack/run.py [--only C2,C8] [--log results.jsonl]`.

With a log it goes on where it was stopped. Exits with 1 if anything got through.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import commands  # noqa: F401  its groups of cases
from attacks import CAUSES, every_case
from corpus import make_bases
from judge import Impossible, Judge


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CAUSES), help="causes, separated by commas")
    parser.add_argument("--match", default="", help="run cases whose names contain this")
    parser.add_argument("--each", type=int, default=1, help="run every n-th case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this many")
    parser.add_argument("--log", type=Path, help="file of verdicts")
    options = parser.parse_args()
    done = {}
    if options.log and options.log.exists():
        done = {entry["id"]: entry for entry in map(json.loads, options.log.read_text().splitlines())}
    causes, begin = options.only.split(","), time.monotonic()
    cases = [c for c in every_case()[:: options.each] if c.cause in causes and options.match in c.id]
    with Judge(Path(__file__).parents[2]) as judge:
        make_bases(judge)
        for case in cases:
            if case.id in done:
                continue
            if time.monotonic() - begin > options.seconds:
                break
            try:
                entry = {"id": case.id, "problems": judge.run(case)}
            except Impossible:
                entry = {"id": case.id, "problems": [], "impossible": True}
            except Exception as error:
                entry = {"id": case.id, "problems": [f"the case itself: {type(error).__name__}: {error}"]}
            done[case.id] = entry
            if options.log:
                with options.log.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
            if entry["problems"]:
                print(f"{case.id}: {'; '.join(entry['problems'])}", flush=True)
    counts = {key: Counter[str]() for key in ("cases", "through", "net")}
    for case in cases:
        if case.id in done:
            problems = done[case.id]["problems"]
            counts["cases"][case.cause] += 1
            counts["through"][case.cause] += bool(problems)
            counts["net"][case.cause] += any(problem.startswith("net:") for problem in problems)
    print(f"\n{'':<6}{'cases':>8}{'through':>9}{'of them only the net':>22}")
    for cause in [*CAUSES, "all"]:
        row = [sum(c.values()) if cause == "all" else c[cause] for c in counts.values()]
        print(f"{cause:<6}{row[0]:>8,}{row[1]:>9,}{row[2]:>22,}   {CAUSES.get(cause, '')}")
    return 1 if counts["through"].total() else 0


if __name__ == "__main__":
    sys.exit(main())
