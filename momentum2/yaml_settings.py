"""Settings in a YAML file, as plain data: no more than YAML's events is used, and nothing is constructed."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from momentum2.errors import SettingError, UserError, shown
from momentum2.files import read

LARGEST_FILE = 100_000  # bytes; a complete config has about 3,000
_DEEPEST = 4  # mappings inside each other; a config has two
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})  # YAML's, where they are not in quotes


def read_settings(path: Path) -> dict[str, object]:
    """The settings in a YAML file by their dotted names: each the text that is written there, None, or a list of these.

    Events are taken one after the other, each of them limited: there is nothing to recurse into.
    """
    try:
        data = read(path, LARGEST_FILE)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    try:
        return _from_events(yaml.parse(data.decode("utf-8-sig"), Loader=yaml.SafeLoader))
    except UnicodeDecodeError:
        why = "its text is not UTF-8"
    except _NotSettings as error:
        why = str(error)
    except SettingError as error:
        raise error.in_file(path) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = (f"line {mark.line + 1}: " if mark else "") + " ".join((error.problem or "").split())
    except (yaml.YAMLError, ValueError, OverflowError):  # the last two: of characters that do not exist
        why = "it has characters that text cannot have"
    raise UserError(f"{path} is not a YAML file of settings ({why}).")


class _NotSettings(Exception):
    """YAML, but not settings."""


def _from_events(events: Iterable[yaml.Event]) -> dict[str, object]:
    found: dict[str, object] = {}
    keys: list[str | None] = []  # of each open mapping, the one that waits for its value
    items: list[object] | None = None  # of the open list
    seen = 0  # mappings that are not in another one

    def refuse(why: str) -> _NotSettings:
        mark = event.start_mark
        return _NotSettings(f"line {mark.line + 1}: {why}" if mark else why)

    def put(value: object) -> None:
        name = ".".join(map(str, keys))
        if name in found:
            raise SettingError(shown(name, 80), "is given twice.")
        found[name], keys[-1] = value, None

    for event in events:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            raise refuse("aliases and tags are not allowed")
        if isinstance(event, yaml.MappingStartEvent):
            seen += not keys
            if items is not None or seen > 1 or (keys and keys[-1] is None) or len(keys) == _DEEPEST:
                raise refuse("a value is expected here, or a section of them")
            keys.append(None)
        elif isinstance(event, yaml.MappingEndEvent):
            keys.pop()
            if keys:
                keys[-1] = None
        elif isinstance(event, yaml.SequenceStartEvent):
            if items is not None or not keys or keys[-1] is None:
                raise refuse("a list is not expected here")
            items = []
        elif isinstance(event, yaml.SequenceEndEvent):
            put(items)
            items = None
        elif isinstance(event, yaml.ScalarEvent):
            value = None if event.style is None and event.value in _NULLS else event.value
            if not keys:
                raise refuse("names of settings are expected")
            if items is not None:
                items.append(value)
            elif keys[-1] is None:
                keys[-1] = event.value
            else:
                put(value)
    if not seen:
        raise _NotSettings("it is empty")
    return found
