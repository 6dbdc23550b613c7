"""From what was typed to a checked Config: Hydra's groups and override grammar, our messages.

Owns: where conf/ and recipes/ are, how a recipe is put under the command line, sweeps, and the translation of
everything that Hydra, OmegaConf and YAML say into one ConfigError with the full key and the nearest right thing.
Must not start anything or write anything. Keys are checked here before Hydra sees them, so that its own
messages (search paths, "use +key") are met only in odd cases.
Called by: cli.commands, tests. Precedence: schema < conf/ groups < recipe < command line.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import tomllib
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from diloco_cli.config import keys
from diloco_cli.config.schema import Config, IslandConfig, IslandOverride
from diloco_cli.config.validate import nearest, validate
from diloco_cli.errors import ConfigError

DEFAULT_RECIPE = "first-run"
_PACKAGE = Path(__file__).resolve().parent.parent
_COMMAND_LINE = "command line"
# Settings that hold a path; made absolute, because evaluate and the processes may stand in another folder.
_PATHS = (("data", "path"), ("data", "validation_path"), ("data", "tokenizer"), ("model", "hf_config"))


@dataclasses.dataclass(frozen=True)
class _Typed:
    """One override: as typed, and as Hydra's grammar reads it (`algorithm` renamed to `sync`)."""

    text: str
    parsed: Override

    @property
    def key(self) -> str:
        return str(self.parsed.key_or_group)

    @property
    def where(self) -> str:
        return f"{_COMMAND_LINE}: {self.text}"

    @property
    def value_text(self) -> str:
        return self.text.partition("=")[2]

    @property
    def is_choice(self) -> bool:
        """A group choice (`model=tiny`), not a value."""
        return self.key in keys.groups() and not isinstance(self.parsed.value(), dict)

    @property
    def is_free(self) -> bool:
        """Goes into a dictionary of the schema, where Hydra neither adds names unasked nor converts values."""
        return not self.is_choice and keys.in_dictionary(self.key)


@dataclasses.dataclass(frozen=True)
class _Source:
    """Who gave a setting its value, for messages."""

    typed: list[_Typed]
    recipe: dict[str, Any]
    path: Path

    def giver(self, key: str) -> _Typed | None:
        """The last override of `key`, or of a mapping that holds it, or of something inside it."""
        last_first = self.typed[::-1]
        holders = [one for one in last_first if f"{key}.".startswith(f"{one.key}.")]
        return next(iter(holders + [one for one in last_first if one.key.startswith(f"{key}.")]), None)

    def of(self, key: str) -> str:
        """The command line's words, or the recipe where it has the key, or the key itself."""
        giver = self.giver(key)
        if giver and not giver.is_choice:
            return giver.where
        return f"{self.path}: {key}" if self._in_recipe(key) is not None else key

    def shown(self, key: str) -> str:
        """The value that was given, as it was written; "" if that cannot be told."""
        giver = self.giver(key)
        if giver and giver.key == key:
            return giver.value_text
        value = self._in_recipe(key)
        return "" if value is None else str(value)

    def _in_recipe(self, key: str) -> Any:
        current: Any = self.recipe
        for part in key.split("."):
            if isinstance(current, list) and part.isdigit() and int(part) < len(current):
                current = current[int(part)]
            elif isinstance(current, dict) and part in current:
                current = current[part]
            else:
                return None
        return current


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A shipped recipe, with what its leading comment says."""

    name: str
    path: Path
    purpose: str
    time: str
    hardware: str
    result: str


def share_dir(name: str) -> Path:
    """The folder conf/ or recipes/: of the checkout that this package stands in, else of the installed package."""
    checkout = _PACKAGE.parent
    if (checkout / name).is_dir() and _is_ours(checkout / "pyproject.toml"):
        return checkout / name
    return _PACKAGE / "_share" / name


def _is_ours(pyproject: Path) -> bool:
    try:
        found = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found.get("project", {}).get("name") == "diloco")


def list_recipes() -> list[Recipe]:
    """The shipped recipes, first-run first, then by name."""
    paths = sorted(share_dir("recipes").glob("*.yaml"), key=lambda p: (p.stem != DEFAULT_RECIPE, p.stem))
    return [read_recipe_header(path) for path in paths]


def read_recipe_header(path: Path) -> Recipe:
    """The lines `# Purpose:`, `# Time:`, `# Hardware:`, `# Result:` that a recipe starts with (each may go on)."""
    found: dict[str, str] = {}
    current = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("#").strip()
        field = re.match(r"(Purpose|Time|Hardware|Result):\s*(.*)", text)
        if field:
            current = field[1].lower()
            found[current] = field[2]
        elif current and text:
            found[current] += f" {text}"
    return Recipe(path.stem, path, *(found.get(n, "") for n in ("purpose", "time", "hardware", "result")))


def group_options(group: str) -> dict[str, str]:
    """Option name -> the comment that its file starts with."""
    options: dict[str, str] = {}
    for path in sorted((share_dir("conf") / group).glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        options[path.stem] = first.lstrip("# ").strip() if first.startswith("#") else ""
    return options


def recipe_path(conf: str | None) -> Path:
    """The file that `conf=` names: a path, or the bare name of a shipped recipe."""
    conf = DEFAULT_RECIPE if conf is None else conf
    shipped = {recipe.name: recipe.path for recipe in list_recipes()}
    if conf in shipped:
        return shipped[conf]
    path = Path(conf).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"conf: {conf!r} is a folder, not a recipe", where=f"conf={conf}")
    close = nearest(path.stem, list(shipped))
    hint = f"conf={close}" if close else f"conf=FILE.yaml or one of {', '.join(shipped)}"
    raise ConfigError(f"conf: there is no recipe {conf!r}", where=f"conf={conf}", hint=hint)


def compose(overrides: list[str], conf: str | None = None) -> Config:
    """The checked configuration of one run.

    Args:
        overrides: KEY=VALUE in Hydra's grammar, as typed; no sweeps.
        conf: what stood behind `conf=`: a path or the bare name of a shipped recipe; None: first-run.

    Raises:
        ConfigError: for everything that is wrong, whatever found it.
    """
    path = recipe_path(conf)
    recipe = _load_recipe(path)
    typed = [_prepare(text) for text in overrides]
    for one in typed:
        if one.parsed.is_sweep_override():
            raise ConfigError(
                f"{one.key}: {one.value_text!r} stands for several runs",
                where=one.where,
                hint="add --multirun, or write a list as [a, b]",
            )
        _check_choice(one)
    source = _Source(typed, recipe, path)
    for key in _left_open("", recipe):
        if source.giver(key) is None:
            raise _missing(key, source)
    try:
        raw = _hydra(recipe, [_for_hydra(one) for one in typed if not one.is_free])
        for one in typed:
            if one.is_free:
                raw = OmegaConf.merge(raw, _nested(one.key, one.parsed.value()))
        _resolve(raw, "", source)
        cfg = OmegaConf.to_object(raw)
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(error, source) from error
    assert isinstance(cfg, Config)
    _make_paths_absolute(cfg)
    _make_batches_numbers(cfg)
    try:
        validate(cfg)
    except ConfigError as error:
        if error.where and keys.type_of(error.where) is not None:
            error.where = source.of(error.where)
        raise
    return cfg


def expand_sweeps(overrides: list[str]) -> list[list[str]]:
    """One list of overrides per run of a sweep, in order (the last sweep varies fastest)."""
    choices: list[list[str]] = []
    for text in overrides:
        one = _prepare(text)
        if not one.parsed.is_sweep_override():
            choices.append([text])
            continue
        value = one.parsed.value()
        if isinstance(value, Glob):
            values: Iterator[str] = iter(value.filter(list(group_options(one.key))))
        else:
            values = one.parsed.sweep_string_iterator()
        choices.append([f"{text.partition('=')[0]}={each}" for each in values])
        if not choices[-1]:
            raise ConfigError(f"{one.key}: the sweep is empty", where=one.where)
    return [list(combination) for combination in itertools.product(*choices)]


# ---- recipes --------------------------------------------------------------------------------------


def _load_recipe(path: Path) -> dict[str, Any]:
    """A recipe's content, keys checked, group choices brought to the one form that Hydra overrides with."""
    try:
        loaded = OmegaConf.load(path)
        recipe = OmegaConf.to_container(loaded, resolve=False)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(
            f"this is not valid YAML: {error.problem or error.context}", where=f"{path}, line {line}"
        ) from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError("the recipe cannot be read", where=str(path), why=_first_line(error)) from error
    if not isinstance(recipe, dict):
        raise ConfigError("a recipe is a mapping of settings", where=str(path), hint="a line such as run: {steps: 100}")
    defaults = recipe.pop("defaults", [])
    if "algorithm" in recipe:
        defaults = [*defaults, {"sync": recipe.pop("algorithm")}]
    for key, value in list(recipe.items()):
        if key in keys.groups() and isinstance(value, str):
            # `model: small` at the top of a recipe is a choice as on the command line.
            defaults = [*defaults, {key: recipe.pop(key)}]
    _check_tree("", recipe, str(path))
    content: dict[str, Any] = {"defaults": [*_recipe_defaults(defaults, path), "_self_"]}
    content.update((str(key), value) for key, value in recipe.items())
    return content


def _left_open(prefix: str, value: Any) -> Iterator[str]:
    """Keys whose value is ???, which OmegaConf would pass over where the schema has a default."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _left_open(f"{prefix}.{name}" if prefix else str(name), below)
    elif value == "???":
        yield prefix


def _recipe_defaults(defaults: Any, path: Path) -> list[dict[str, str]]:
    where = f"{path}: defaults"
    if not isinstance(defaults, list):
        raise ConfigError("defaults: this is a list of group choices", where=where, hint="- override /model: small")
    chosen: list[dict[str, str]] = []
    for entry in defaults:
        if entry == "_self_":
            continue
        if not isinstance(entry, dict) or len(entry) != 1:
            raise ConfigError(
                f"defaults: {entry!r} is not a group choice", where=where, hint="- override /model: small"
            )
        ((key, option),) = entry.items()
        group = str(key).removeprefix("override ").strip().removeprefix("/")
        group = "sync" if group == "algorithm" else group
        _check_option(group, str(option), where)
        chosen.append({f"override /{group}": str(option)})
    return chosen


def _check_tree(prefix: str, value: Any, where: str) -> None:
    """Every key of nested mappings and lists exists in the schema."""
    if isinstance(value, list):
        for index, below in enumerate(value):
            _check_tree(f"{prefix}{index}.", below, where)
    if isinstance(value, dict):
        for name, below in value.items():
            key = f"{prefix}{name}"
            _check_key(key, where)
            _check_tree(f"{key}.", below, where)


def _check_key(key: str, where: str) -> None:
    if keys.type_of(key) is not None:
        return
    parent = key.rpartition(".")[0]
    while parent and keys.type_of(parent) is None:
        parent = parent.rpartition(".")[0]
    close = keys.suggest(key)
    group = key.partition(".")[0]
    hint = f"{close}" if close else f"diloco config {group}" if group in keys.groups() else "diloco config"
    raise ConfigError(f"{key}: there is no such setting", where=where, hint=f"did you mean {hint}?" if close else hint)


# ---- overrides ------------------------------------------------------------------------------------


def _prepare(text: str) -> _Typed:
    """One override, parsed and with its key checked. `algorithm=` becomes `sync=`."""
    shown = f"{_COMMAND_LINE}: {text}"
    if text.startswith("-"):
        raise ConfigError(f"{text}: overrides have no dashes", where=shown, hint=text.lstrip("-"))
    if ("=" not in text and not text.startswith("~")) or text.lstrip("+~").startswith("="):
        shipped = [recipe.name for recipe in list_recipes()]
        close = nearest(text, shipped) or (text if text.endswith((".yaml", ".yml")) else "")
        raise ConfigError(
            f"{text!r} is not KEY=VALUE", where=shown, hint=f"conf={close}" if close else "sync.quorum=2, for example"
        )
    name, equals, value = text.partition("=")
    name = re.sub(r"^(\+{0,2}|~?)algorithm$", r"\1sync", name)
    one = _Typed(text, _parse(f"{name}{equals}{value}", text))
    key = one.key
    if key == "conf":
        raise ConfigError("conf: a recipe is chosen without a sign before it", where=shown, hint="conf=NAME")
    if re.match(r"hydra([./@]|$)", key) or one.parsed.package is not None:
        raise ConfigError(
            f"{key}: this is not a setting of diloco", where=shown, hint="diloco config lists the settings"
        )
    if one.is_choice:
        return one
    _check_key(key, shown)
    if one.parsed.type == OverrideType.DEL:
        raise ConfigError(
            f"{key}: a setting cannot be taken away, only changed",
            where=shown,
            hint=f"{key}=null" if keys.is_optional(key) else f"{key}=VALUE",
        )
    if not one.parsed.is_sweep_override():
        _check_tree(f"{key}.", one.parsed.value(), shown)
    return one


def _parse(text: str, typed: str) -> Override:
    """Hydra's grammar; where it gives up on a plain text (a path with a blank or ~), the value as it stands."""
    parser = OverridesParser.create()
    try:
        return parser.parse_override(text)
    except HydraException as error:
        reason = _first_line(error)
    name, _, value = text.partition("=")
    if keys.type_of(name.lstrip("+")) is str and "'" not in value and not value.startswith('"'):
        try:
            quoted = value.replace("\\", "\\\\")
            return parser.parse_override(f"{name}='{quoted}'")
        except HydraException:
            pass
    raise ConfigError(
        f"{name.lstrip('+~') or typed}: {value!r} cannot be read ({reason})",
        where=f"{_COMMAND_LINE}: {typed}",
        hint=f"put special characters in quotes: '{name}=\"...\"'",
    )


def _check_choice(one: _Typed) -> None:
    """A group choice (`model=tiny`) names an option that exists."""
    if one.is_choice and one.parsed.type != OverrideType.DEL:
        _check_option(one.key, str(one.parsed.value()), one.where)


def _check_option(group: str, option: str, where: str) -> None:
    if group not in keys.groups():
        close = nearest(group, list(keys.groups()))
        raise ConfigError(
            f"{group}: there is no such group", where=where, hint=f"did you mean {close}?" if close else ""
        )
    options = list(group_options(group))
    if option in options:
        return
    if group == "sync" and option == "data_parallel":
        raise ConfigError(
            "algorithm: data_parallel is for the simulator; train runs decoupled, streaming or diloco",
            where=where,
            hint="algorithm=decoupled",
        )
    close = nearest(option, options)
    raise ConfigError(
        f"{group}: there is no option {option!r}; there are {', '.join(options)}",
        where=where,
        hint=f"{group}={close}" if close else "",
    )


def _for_hydra(one: _Typed) -> str:
    """The override as Hydra takes it: "+" before a key that exists already means what it says without."""
    return str(one.parsed.input_line).lstrip("+")


def _nested(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return typing.cast(dict[str, Any], value)


# ---- Hydra ----------------------------------------------------------------------------------------


def _hydra(recipe: dict[str, Any], overrides: list[str]) -> Any:
    store = ConfigStore.instance()
    store.store(name="diloco_schema", node=Config)
    store.store(group="diloco_recipe", name="chosen", node=recipe, package="_global_")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(share_dir("conf")), job_name="diloco", version_base="1.3"):
        raw = hydra_compose("config", overrides=["+diloco_recipe=chosen", *overrides])
    # Unknown keys are refused by now, and dictionaries of the schema must take new names.
    OmegaConf.set_struct(raw, False)
    return raw


def _make_paths_absolute(cfg: Config) -> None:
    for group, name in _PATHS:
        value = getattr(getattr(cfg, group), name)
        if value and (group, name, value) != ("data", "tokenizer", "bytes"):
            setattr(getattr(cfg, group), name, os.path.abspath(Path(value).expanduser()))


def _make_batches_numbers(cfg: Config) -> None:
    """A batch may be a number or a word, so OmegaConf leaves "8" (out of quotes, an environment variable) a text."""
    islands: list[IslandConfig | IslandOverride] = [cfg.islands.each, *cfg.islands.named.values()]
    for island in islands:
        if isinstance(island.batch, str) and island.batch.strip().isdecimal():
            island.batch = int(island.batch)


# ---- messages -------------------------------------------------------------------------------------


def _resolve(raw: Any, prefix: str, source: _Source) -> None:
    """Follow every ${reference} once, so that one that leads nowhere is named by the key that holds it."""
    for name in range(len(raw)) if OmegaConf.is_list(raw) else list(raw):
        key = f"{prefix}{name}"
        try:
            value = None if OmegaConf.is_missing(raw, name) else raw[name]
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{key}: its reference cannot be resolved",
                where=source.of(key),
                why=_first_line(error),
                hint="a reference is written ${group.name}",
            ) from error
        if OmegaConf.is_config(value):
            _resolve(value, f"{key}.", source)


def _translate(error: Exception, source: _Source) -> ConfigError:
    """One sentence with the full key, from a chain of Hydra and OmegaConf exceptions."""
    chain = list(_chain(error))
    keyed = [e for e in chain if isinstance(e, OmegaConfBaseException) and getattr(e, "full_key", None)]
    if not keyed:
        return ConfigError(_first_line(chain[0]), where=str(source.path))
    key = str(keyed[0].full_key).replace("[", ".").replace("]", "").strip(".")
    where = source.of(key)
    if isinstance(keyed[0], MissingMandatoryValue):
        return _missing(key, source)
    kind = keys.type_of(key)
    if kind is None or kind is Any:
        return ConfigError(f"{key}: {_first_line(keyed[0])}", where=where)
    shown = source.shown(key)
    close = ""
    if isinstance(kind, type) and issubclass(kind, Enum):
        close = nearest(shown, list(kind.__members__))
    return ConfigError(
        f"{key}: {repr(shown) if shown else 'the value'} is not {keys.kind_of(kind)}",
        where=where,
        hint=f"{key}={close}" if close else "",
    )


def _missing(key: str, source: _Source) -> ConfigError:
    """A recipe's ??? that nobody filled in."""
    if key.endswith("path"):
        return ConfigError(f"{key}: say which file or folder", where=source.of(key), hint=f"{key}=FILE_OR_FOLDER")
    return ConfigError(f"{key}: the recipe leaves this to you", where=source.of(key), hint=f"{key}=VALUE")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    """The first line of a message that says something to a user."""
    for line in str(error).splitlines():
        line = line.strip()
        if line and "$VALUE" not in line and "earch path" not in line and "To append" not in line:
            return re.sub(r"\s+", " ", line)
    return type(error).__name__
