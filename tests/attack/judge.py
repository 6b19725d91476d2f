"""One judge for every attack: what a case is, how it is run, and what it must not do."""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORKING = Path(__file__).with_name("forking.py")
#: What no output may contain: C0 but tab, newline and return, DEL, C1, separators of lines and bidi controls.
CONTROLS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
#: Begins the text that names plant: no line of output may begin with it.
FORGED = "FORGED"
CANARY = "canary"
LONGEST = 2500  # characters that one mistake may be told in


@dataclass(frozen=True)
class Place:
    """Where one case happens.

    Args:
        case: The current folder of the command; all that it may change.
        victims: Files beside it that it must not change.
        bases: Things that were made once, to copy from (see corpus.py).
    """

    case: Path
    victims: Path
    bases: Path

    def copy(self, base: str, name: str | None = None) -> Path:
        """A copy of a base in the case's folder."""
        source, target = self.bases / base, self.case / (name or base)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target)
        return target


@dataclass(frozen=True)
class Facts:
    """What a command did. `reason` is why it had to be ended: slow, memory or hang."""

    code: int
    stdout: bytes
    stderr: bytes
    cpu: float
    peak: int
    reason: str
    left: tuple[str, ...]


def nothing(place: Place) -> None:
    """Prepares nothing."""


@dataclass(frozen=True)
class Case:
    """One attack.

    Args:
        cause: Which of the fifteen doors it tries.
        name: What it is called; unique with its cause.
        arguments: The words after `momentum2`.
        prepare: Puts what the command will meet into its place.
        codes: Exit codes that are right.
        cpu: CPU seconds that it may take.
        memory: MB that it may take above an idle interpreter.
        environment: Variables beside the usual ones.
        check: Looks at the place afterward; returns what is wrong, or nothing.
        disk: Size of a file system of its own at `disk/` in the case's folder, such as `64k`.
        limits: Of `setrlimit`, by name; AS is above what imports take.
        powerless: Run without the powers of root.
        encoding: Of the terminal.
        first: Commands that are run before it; these must succeed.
        streams: What stdout and stderr are instead of files, by name: closed, a pipe that nobody reads, full.
        without: Variables that are not there.
        gone: Run it in a folder that was removed.
    """

    cause: str
    name: str
    arguments: tuple[str, ...]
    prepare: Callable[[Place], object] = nothing
    codes: frozenset[int] = frozenset({0, 2})
    cpu: float = 8.0
    memory: int = 400
    environment: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Place, Facts], str | None] | None = None
    disk: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)
    powerless: bool = False
    encoding: str = "utf-8"
    first: tuple[tuple[str, ...], ...] = ()
    streams: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    gone: bool = False

    @property
    def id(self) -> str:
        return f"{self.cause}-{self.name}"


class Impossible(Exception):
    """This machine does not let the case be (no namespaces, no file systems of one's own)."""


class Judge:
    """Runs cases, one after the other, in forks of one process. Use it as a context manager."""

    def __init__(self, package: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="attack-"))
        self.bases = self.root / "bases"
        self.bases.mkdir()
        environment = dict(os.environ, PYTHONPATH=str(package), OMP_NUM_THREADS="1", PYTHONWARNINGS="default")
        self._server = subprocess.Popen(
            [sys.executable, str(FORKING)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=self.root,
            start_new_session=True,
        )
        assert self._server.stdout is not None
        if self._server.stdout.readline() != b"ready\n":
            raise RuntimeError("The process for the cases did not start.")
        self.idle = self._ask(["--version"], self.root, {}).peak

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: object) -> None:
        with self._server:  # closes its pipes, at which it ends
            pass
        _remove(self.root)

    def make(self, name: str, *commands: tuple[str, ...]) -> Path:
        """Run commands that must succeed in the folder of the bases."""
        for words in commands:
            facts = self._ask(list(words), self.bases, {"cpu": 120.0, "memory": 4000})
            if facts.code:
                raise RuntimeError(f"{name}: {words} ended with {facts.code}: {facts.stderr.decode()}")
        return self.bases / name

    def run(self, case: Case) -> list[str]:
        """Everything that is wrong with what the case did; `net:` begins what only the last net caught."""
        where = Path(tempfile.mkdtemp(prefix="case-", dir=self.root))
        place = Place(where / "case", where / "victims", self.bases)
        place.case.mkdir()
        place.victims.mkdir()
        for name in ("file.txt", "config.yaml", "secret"):
            (place.victims / name).write_text(f"{name} of somebody else\n")
        (place.victims / "folder").mkdir()
        try:
            case.prepare(place)
            for name in ("home", "tmp", *(["disk"] if case.disk else [])):
                (place.case / name).mkdir(exist_ok=True)
            request: dict[str, Any] = {
                "cpu": case.cpu,
                "memory": case.memory + self.idle,
                "powerless": case.powerless,
                "limits": dict(case.limits),
                "encoding": case.encoding,
                "streams": dict(case.streams),
                "without": case.without,
                "gone": case.gone,
                "environment": dict(case.environment) | {"CANARY": str(where / CANARY)},
            }
            if case.disk:
                request["disk"] = [str(place.case / "disk"), case.disk]
            for words in case.first:
                before = self._ask(list(words), place.case, {"environment": dict(case.environment)})
                if before.code:
                    return [f"before it, {words[0]} ended with {before.code}: {before.stderr[-300:]!r}"]
            untouched = _snapshot(place.victims)
            facts = self._ask(list(case.arguments), place.case, request)
            if facts.code == 77:
                raise Impossible
            problems = verdict(case, facts, self.idle)
            if _snapshot(place.victims) != untouched:
                problems.append("a file outside its folder was changed")
            if (where / CANARY).exists():
                problems.append("planted code ran")
            if case.check and (wrong := case.check(place, facts)):
                problems.append(wrong)
            return problems
        finally:
            _remove(where)

    def _ask(self, arguments: list[str], folder: Path, request: dict[str, Any]) -> Facts:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        streams = [self.root / "stdout", self.root / "stderr"]
        for stream in streams:
            stream.unlink(missing_ok=True)
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        (folder / "tmp").mkdir(exist_ok=True)
        whole: dict[str, Any] = {"cpu": 60.0, "memory": 4000} | request
        whole["environment"] = environment | whole.get("environment", {})
        whole |= {"arguments": arguments, "folder": str(folder)}
        whole |= {"stdout": str(streams[0]), "stderr": str(streams[1])}
        self._server.stdin.write(json.dumps(whole).encode() + b"\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        said = [stream.read_bytes() if stream.exists() else b"" for stream in streams]
        return Facts(
            answer["code"], *said, answer["cpu"], answer["peak"], answer["reason"], tuple(answer["left"])
        )


def verdict(case: Case, facts: Facts, idle: int = 0) -> list[str]:
    """What is wrong with these facts."""
    problems = []
    if facts.reason:
        limit = {"slow": f"{case.cpu:g} s of CPU", "memory": f"{case.memory} MB", "hang": "it sits idle"}
        problems.append(f"{facts.reason}: {limit[facts.reason]}")
    elif facts.code < 0:
        problems.append(f"killed by signal {-facts.code}")
    if facts.cpu > case.cpu and not facts.reason:
        problems.append(f"slow: {facts.cpu:.1f} s of CPU")
    if facts.peak - idle > case.memory and not facts.reason:
        problems.append(f"memory: {facts.peak - idle} MB above an idle interpreter")
    if facts.left:
        problems.append(f"left behind: {'; '.join(facts.left)}")
    texts = []
    for name, data in (("stdout", facts.stdout), ("stderr", facts.stderr)):
        try:
            texts.append(data.decode(case.encoding))
        except UnicodeDecodeError:
            problems.append(f"{name} is not {case.encoding}")
            texts.append(data.decode("latin-1"))
    stderr = texts[1]
    for name, text in zip(("stdout", "stderr"), texts, strict=True):
        if found := CONTROLS.search(text):
            problems.append(f"{name} has the control character {found[0]!r}")
        if re.search(rf"(^|[\n\r]){FORGED}", text):
            problems.append(f"{name} has a forged line")
        if "Traceback (most recent call last)" in text:
            problems.append(f"traceback: {_last_line(text)}")
        if re.search(r"\w*Warning:", text):
            problems.append(f"a warning of a library: {re.search(r'.*Warning:.*', text)[0][:200]}")  # type: ignore[index]
    if facts.code not in case.codes and facts.code >= 0:
        net = "net: " if facts.code == 1 and stderr.count("Unexpected ") else ""
        problems.append(f"{net}exit code {facts.code}: {_last_line(stderr)}")
    if facts.code == 2 and "stderr" not in case.streams:
        lines = [line for line in stderr.splitlines() if line.strip()]
        if not 1 <= len(lines) <= 3:
            problems.append(f"{len(lines)} lines on stderr")
        if not any(line.startswith("momentum2") for line in lines):
            problems.append("no sentence of ours")
        if len(stderr) > LONGEST:
            problems.append(f"{len(stderr)} characters on stderr")
    return problems


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return ascii(lines[-1][:300]) if lines else "nothing was said"


def _snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        seen = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(seen.st_mode) else ""
        found[str(path)] = (seen.st_mode, seen.st_size, seen.st_mtime_ns, content)
    return found


def _remove(folder: Path) -> None:
    """Remove a folder whatever its permissions and depth."""
    subprocess.run(["chmod", "-R", "u+rwX", str(folder)], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["rm", "-rf", str(folder)], check=False)
