"""The tree of settings: which keys exist, of which type, what each means, and which one a wrong key is near to.

Owns: everything that is read off config.schema's classes (types by annotation, meanings by the docstring under
each field). Must not know Hydra or files of the user.
Called by: config.compose (checks keys before Hydra sees them), cli.commands (`diloco config`).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import operator
import re
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from diloco_cli.config import schema
from diloco_cli.config.schema import Config, IslandNetwork, IslandOverride

_HINTS: dict[type, dict[str, Any]] = {}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of the configuration, for lists."""

    key: str
    kind: str
    """In words: "a whole number", "one of ddp, fsdp"."""
    default: Any
    doc: str


def type_of(key: str) -> Any:
    """The annotation at a dotted key, Optional stripped; None if there is no such key.

    Keys of dictionaries (islands.named.ISLAND) are free; below Any (model.entry_args.x.y) so is everything.
    """
    current: Any = Config
    for part in key.split("."):
        if current is Any:
            return Any
        if dataclasses.is_dataclass(current):
            current = _hints(current).get(part)
        elif typing.get_origin(current) is dict:
            current = typing.get_args(current)[1] if part else None
        elif typing.get_origin(current) is list:
            current = typing.get_args(current)[0] if part.isdigit() else None
        else:
            return None
        if current is None:
            return None
        current = _strip_optional(current)
    return current


def is_optional(key: str) -> bool:
    """Whether null is allowed at `key`."""
    parent, _, name = key.rpartition(".")
    owner = type_of(parent) if parent else Config
    if not dataclasses.is_dataclass(owner):
        return False
    hint = _hints(owner).get(name)
    return type(None) in typing.get_args(hint)


def in_dictionary(key: str) -> bool:
    """Whether `key` is, or lies below, a dictionary with free names."""
    parts = key.split(".")
    return any(typing.get_origin(type_of(".".join(parts[:i]))) is dict for i in range(1, len(parts) + 1))


def kind_of(annotation: Any) -> str:
    """What belongs there, in words, to follow "is not" or "must be"."""
    annotation = _strip_optional(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"one of {', '.join(annotation.__members__) if annotation is not schema.Anchor else 'base, global'}"
    if dataclasses.is_dataclass(annotation):
        return "a group of settings"
    origin = typing.get_origin(annotation)
    if origin is list:
        return "a list [a, b]"
    if origin is dict:
        return "a mapping {key: value}"
    words: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    words[Any] = "a whole number or auto"  # islands.*.batch, the only such key
    return words.get(annotation, "a value")


@functools.cache
def settings(group: str = "") -> tuple[Setting, ...]:
    """Every setting of `group` (all groups if empty) down to the leaves, in the order of the schema."""
    found = [s for s in _walk(Config(), "") if not group or s.key.split(".")[0] == group]
    return tuple(found)


def groups() -> dict[str, str]:
    """Group name -> what it is, in one line."""
    return {f.name: _GROUP_DOCS[f.name] for f in dataclasses.fields(Config)}


def docs(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it, on one line."""
    tree = ast.parse(inspect.cleandoc(inspect.getsource(cls)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    found: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = following.value if isinstance(following, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[statement.target.id] = " ".join(text.value.split())
    return found


def suggest(key: str) -> str:
    """The nearest key that exists, or "": first for islands named in a usual wrong way, then by spelling."""
    island = re.fullmatch(r"(?:islands|network)\.(?:named\.)?(?:island[-_]?)?(\d+)\.(.+)", key)
    if island:
        for prefix, cls in (("islands.named", IslandOverride), ("network.named", IslandNetwork)):
            names = [s.removeprefix(".") for s in _below(cls)]
            close = difflib.get_close_matches(island[2], names, n=1, cutoff=0.7)
            if close:
                return f"{prefix}.island-{island[1]}.{close[0]}"
    known = [s.key for s in settings()] + list(_named_keys(key))
    groups_and_keys = known + list(groups())
    close = difflib.get_close_matches(key, groups_and_keys, n=1, cutoff=0.75)
    if close:
        return close[0]
    # Right name, wrong or missing group: lr -> inner.lr.
    leaf = key.rpartition(".")[2]
    by_leaf = {k.rpartition(".")[2]: k for k in reversed(known)}
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.75)
    return by_leaf[close[0]] if close else ""


def _named_keys(key: str) -> Iterator[str]:
    match = re.match(r"(islands|network)\.named\.([^.]+)\.", key)
    if match:
        cls = IslandOverride if match[1] == "islands" else IslandNetwork
        yield from (f"{match[1]}.named.{match[2]}{below}" for below in _below(cls))


def _below(cls: type) -> Iterator[str]:
    yield from (f".{s.key}" for s in _walk(cls(), ""))


def _walk(value: Any, prefix: str) -> Iterator[Setting]:
    cls = type(value)
    meanings = docs(cls)
    for field in dataclasses.fields(value):
        key, default = f"{prefix}{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(default):
            yield from _walk(default, f"{key}.")
        else:
            hint = _hints(cls)[field.name]
            kind = kind_of(hint) + (" or null" if type(None) in typing.get_args(hint) else "")
            yield Setting(key, kind, default, meanings.get(field.name, ""))


def _hints(cls: Any) -> dict[str, Any]:
    owner = cls if isinstance(cls, type) else type(cls)
    if owner not in _HINTS:
        _HINTS[owner] = typing.get_type_hints(owner)
    return _HINTS[owner]


def _strip_optional(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return functools.reduce(operator.or_, inner)
    return annotation


_GROUP_DOCS = docs(Config)
