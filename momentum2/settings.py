"""Plain data to typed settings. What a file, a flag or a caller gives is data: nothing that it says is ever imported.

Settings are frozen dataclasses whose sections are dataclasses too; a setting has a dotted name such as `train.epochs`.
Given values are a flat mapping from such names to plain values: text as somebody wrote it, None, a list of these, or a
value of the right type from Python. The type of the field, not the look of the text, decides what a text means.
"""

import math
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from momentum2.config import Config, Limits
from momentum2.errors import SettingError, UnknownSetting
from momentum2.spelling import translate
from momentum2.yaml_settings import read_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")

#: The words for true and false, in small letters.
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
#: What other programs call some settings, for the hint that a mistake comes with.
_OTHER_WORDS = {
    "learning_rate": "lr",
    "base_lr": "lr",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "batch": "batch_size",
    "bs": "batch_size",
    "num_workers": "workers",
    "arch": "backbone",
    "model": "backbone",
    "wd": "weight_decay",
    "checkpoint": "weights",
    "temp": "temperature",
    "img_size": "image_size",
    "gpus": "devices",
    "output": "out",
    "output_dir": "out",
    "save_dir": "out",
}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "none"}


def config_from_file(path: Path) -> Config:
    """The `Config` in a YAML file, such as a run's `config.yaml`; what it leaves out has its default."""
    return from_file(Config(), path)


def from_file(base: S, path: Path, world: int = 1) -> S:
    """`base` with the settings of a run's file instead of its own, in whatever version's words.

    `world` is the number of processes that the run was started with, where that is known.
    """
    given = read_settings(path)
    try:
        return override(base, given, world)
    except SettingError as error:
        raise error.in_file(path) from None


def override(base: S, given: Mapping[str, object], world: int | None = None) -> S:
    """`base` with the given settings instead of its own; a `SettingError` for a name or value that it cannot have.

    `world` is the number of processes that a run was started with, for settings in the words of earlier versions; None
    if there is no such run.
    """
    hints = leaves(type(base))
    values = {
        name: convert(name, value, hints[name]) for name, value in understood(base, given, world).items()
    }
    return _changed(base, values)


def understood(
    base: "DataclassInstance", given: Mapping[str, object], world: int | None = None
) -> dict[str, object]:
    """Given settings by the names that `base` has. All pass here before they are typed; twice is as once."""
    hints = leaves(type(base))
    new = translate(given, {name: attrgetter(name)(base) for name in hints}, world)
    for name in new:
        if name not in hints:
            raise UnknownSetting(_shown_name(name), close_setting(name, hints))
    return new


def close_setting(name: str, known: Iterable[str]) -> str:
    """The setting that may be meant by a name that is none, or the empty string."""
    known = list(known)
    inside = [setting for setting in known if setting.startswith(f"{name}.")]
    if inside:  # a whole section; people mean its place
        return next((setting for setting in inside if setting.endswith(".root")), inside[0])
    section, _, last = name.rpartition(".")
    last = _OTHER_WORDS.get(last, last)
    same = [setting for setting in known if setting.rpartition(".")[2] == last]  # `lr` is `optim.lr`
    if same:
        return next((setting for setting in same if setting.startswith(f"{section}.")), same[0])
    return next(iter(get_close_matches(name[:100], known, n=1)), "")


def check(settings: "DataclassInstance") -> None:
    """Raise a `SettingError` for a value out of its type or limits, in settings that were made in Python."""
    for name, hint in leaves(type(settings)).items():
        value = attrgetter(name)(settings)
        if convert(name, value, hint) != value:
            raise _unfit(name, value, hint)


def flatten(tree: Mapping[str, object]) -> dict[str, object]:
    """`{"train": {"seed": 0}}` as `{"train.seed": 0}`; names may have dots already."""
    flat: dict[str, object] = {}
    for name, value in tree.items():
        inside = flatten(value) if isinstance(value, Mapping) else {"": value}
        for rest, leaf in inside.items():
            flat[f"{name}.{rest}" if rest else name] = leaf
    return flat


def is_whole(names: Iterable[str]) -> bool:
    """Whether settings are a whole `Config`, as a run writes it, and not some that somebody chose.

    That of an older version lacks what was added since.
    """
    known, names = leaves(Config), set(names)
    sections = {field.name for field in fields(Config)} - {"objects"}
    whole = sections <= {name.partition(".")[0] for name in names}
    return whole and 2 * len(known.keys() & names) > len(known)


@cache
def leaves(kind: type) -> dict[str, Any]:
    """The type of each setting of a dataclass, by its dotted name."""
    hints, found = get_type_hints(kind, include_extras=True), dict[str, Any]()
    for field in fields(kind):
        hint = hints[field.name]
        inside = leaves(hint) if isinstance(hint, type) and is_dataclass(hint) else {"": hint}
        found |= {f"{field.name}.{rest}" if rest else field.name: leaf for rest, leaf in inside.items()}
    return found


def convert(name: str, value: object, hint: Any) -> Any:
    """`value` as the setting's type; a `SettingError` that says what it takes, or its limits."""
    for kind, limits in _kinds(hint):
        try:
            found = _as(kind, name, value)
        except (ValueError, OverflowError):
            continue
        size = len(found) if isinstance(found, list) else found
        if limits and not limits.low <= size <= limits.high:
            bound = _bound(limits, size)
            if isinstance(found, list):
                raise SettingError(name, f"must have {bound} values, not {size}.")
            raise SettingError(name, f"must be {bound}, not {_shown(found)}.")
        return found
    raise _unfit(name, value, hint)


def _bound(limits: Limits, size: float) -> str:
    """What a number must be that is not within its limits. Of a range that is wide, only the end that matters."""
    if limits.high - limits.low <= 1000:
        return f"from {limits.low:g} to {limits.high:g}"
    return f"at least {limits.low:g}" if size < limits.low else f"at most {limits.high:,}"


def takes_none(hint: Any) -> bool:
    """Whether a setting may have no value."""
    return any(kind is type(None) for kind, _ in _kinds(hint))


def words_of(hint: Any) -> list[str]:
    """The words that a setting takes, if it takes some of them only."""
    return [str(word) for kind, _ in _kinds(hint) if get_origin(kind) is Literal for word in get_args(kind)]


def kind_of(hint: Any) -> str:
    """What a setting takes, in words: `cosine or a number`."""
    told = []
    for kind, _ in _kinds(hint):
        if get_origin(kind) is list:
            kinds = {str: "words"}
            told.append(f"{kinds.get(get_args(kind)[0], 'numbers')} separated by commas")
        else:
            told.append(_KINDS.get(kind) or ", ".join(map(str, get_args(kind))))
    return " or ".join(told)


def _kinds(hint: Any, limits: Limits | None = None) -> Iterator[tuple[Any, Limits | None]]:
    """The types that a setting may have, with their limits."""
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)
        yield from _kinds(hint, limits)
    elif get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _kinds(member, limits)
    else:
        yield hint, limits


def _as(kind: Any, name: str, value: object) -> Any:
    """`value` as one type; a `ValueError` if it cannot be."""
    text = value.strip() if isinstance(value, str) else None
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
    elif get_origin(kind) is list:
        if text is not None:
            inside = text.removeprefix("[").removesuffix("]").strip()
            value = inside.split(",") if inside else []
        if isinstance(value, list | tuple):
            return [convert(name, item, get_args(kind)[0]) for item in value]
    elif kind is type(None):
        if value is None or (text or "").lower() in ("none", "null"):
            return None
    elif kind is str:
        if isinstance(value, str | os.PathLike):
            name_or_path = os.fspath(value)
            if isinstance(name_or_path, str) and b"\0" not in os.fsencode(name_or_path):
                return name_or_path
    elif kind is bool:
        found = value if text is None else BOOLEANS.get(text.lower())
        if isinstance(found, bool):
            return found
    elif kind is int:
        number = int(text) if text is not None else value
        if isinstance(number, int) and not isinstance(number, bool) and abs(number) < 2**63:
            return number
    elif kind is float:
        number = float(text.replace(".inf", "inf")) if text is not None else value
        if isinstance(number, int | float) and not isinstance(number, bool) and not math.isnan(number):
            return float(number)
    else:
        raise TypeError(f"{name} has a type that no setting can have: {kind}")
    raise ValueError


def _unfit(name: str, value: object, hint: Any) -> SettingError:
    close = get_close_matches(str(value)[:100], words_of(hint), n=1)
    meant = f" Did you mean {close[0]}?" if close else ""
    return SettingError(name, f"takes {kind_of(hint)}, not {_shown(value)}.{meant}")


def _shown(value: object) -> str:
    """A value in a sentence, on one line and not too long."""
    try:
        text = "none" if value is None else f"{value:.6g}" if isinstance(value, float) else repr(value)
    except ValueError:  # of a number with thousands of digits
        text = "such a number"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _shown_name(name: str) -> str:
    return name if len(name) <= 80 and name.isprintable() else _shown(name)


def _changed(base: S, values: Mapping[str, object]) -> S:
    own: dict[str, Any] = {}
    sections: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            sections.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    for head, inside in sections.items():
        own[head] = _changed(getattr(base, head), inside)
    return replace(base, **own)
