"""Settings of the programs: one TOML file and environment variables, below the command line.

A program reads its table of the file, ``[bookie]``, ``[autorecovery]``, ``[proxy]`` or ``[dlog]``,
and the variables that begin with its prefix, ``DLOG_BOOKIE_`` and so on, followed by the key in
capitals.  All programs also read ``[ledger_client]``, whose settings are not on the command line.
The command line takes precedence over variables, these over the file, and the file over the
default.  ``--config`` or ``DLOG_CONFIG`` names the file.

A running server reads its file again on SIGHUP, and applies the settings that may change.  Without
a file, this signal stops it as SIGTERM does.

A wrong key or value is an error that names its place, and what is expected there.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

_Model = TypeVar("_Model")
TABLES = ("dlog", "bookie", "autorecovery", "proxy", "ledger_client")
FILE_VARIABLE = "DLOG_CONFIG"
LOG_FORMATS = ("plain", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
_LOGGER = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_KIND_NAMES = {
    str: "text",
    Path: "a path",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
KINDS = tuple(_KIND_NAMES)
_TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Option:
    """A setting: its type (one of `KINDS`), its default, and its meaning.

    The default is None if the setting is required, or if None is its value.
    """

    kind: type
    default: object
    text: str = ""
    changes: bool = False
    """Whether a running program applies another value."""
    live: bool = False
    """Whether it may be set for a whole cluster, by `dlog cluster settings`."""


def read_settings(
    table: str,
    options: Mapping[str, Option],
    *,
    file: str | None,
    environment: Mapping[str, str],
) -> dict[str, object]:
    """Return the settings of a table in the file and the environment, by key.

    Args:
        table: one of `TABLES`.
        options: the keys of the table.
        file: path of the TOML file; None: the path in the variable DLOG_CONFIG, if it is set.
        environment: the process's variables.

    Raises:
        ConfigurationError: the file cannot be read, a key is unknown, or a value is wrong.
    """
    path = configuration_file(file, environment)
    found = _checked(_table_of(path, table), options, f"{path} [{table}] {{}}") if path else {}
    prefix = variable_of(table, "")
    others = [variable_of(other, "") for other in TABLES if variable_of(other, "") != prefix]
    named = {
        name.removeprefix(prefix).lower(): value
        for name, value in environment.items()
        if name.startswith(prefix) and (table != "dlog" or not name.startswith(tuple(others)))
    }
    if table == "dlog":  # other programs may have variables with this prefix
        named = {key: value for key, value in named.items() if key in options}
    return found | _checked(named, options, f"${prefix}{{}}", is_variable=True)


def configuration_file(given: str | None, environment: Mapping[str, str]) -> str:
    """Return the path of the configuration file, "" for none."""
    return given or environment.get(FILE_VARIABLE) or ""


def log_levels_of(log_level: str) -> dict[str, str]:
    """Return the level of each logger that a text like ``info,dlcore.proxy=debug`` names.

    The first level is the program's, whose logger has the name "".

    Raises:
        ConfigurationError: a level or a name is none, comes twice, or the first one is missing.
    """
    levels: dict[str, str] = {}
    for part in log_level.split(","):
        name, separator, level = part.strip().rpartition("=")
        is_named = bool(separator) and _LOGGER.fullmatch(name) is not None
        if level not in LOG_LEVELS or name in levels or is_named != bool(levels):
            raise ConfigurationError(
                f"log_level={log_level!r}: expected one of {', '.join(LOG_LEVELS)}, and after it "
                f"levels of modules, like info,dlcore.proxy=debug; {part!r} does not fit"
            )
        levels[name] = level
    return levels


def require_log_format(log_format: str) -> None:
    """Raise `ConfigurationError` unless `log_format` is one of `LOG_FORMATS`."""
    if log_format not in LOG_FORMATS:
        raise ConfigurationError(
            f"log_format={log_format!r}: expected one of {', '.join(LOG_FORMATS)}"
        )


def variable_of(table: str, key: str) -> str:
    """Return the name of the environment variable of a setting."""
    return f"DLOG_{key.upper()}" if table == "dlog" else f"DLOG_{table.upper()}_{key.upper()}"


def parse_value(value: object, kind: type, place: str) -> object:
    """Return `value` as `kind`; a TOML value must have the type already, text is parsed.

    Raises:
        ConfigurationError: it is no such value; the error names the `place`.
    """
    problem = ConfigurationError(f"{place}={value!r}: expected {_KIND_NAMES[kind]}")
    if kind is bool and isinstance(value, str):
        value = _TRUTHS.get(value, value)
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, KINDS):
        raise problem
    if kind in (str, Path) and not isinstance(value, (str, Path)):
        raise problem
    if kind is int and isinstance(value, float):
        raise problem
    try:
        parsed: object = kind(value)
    except ValueError as error:
        raise problem from error
    return parsed


def options_of(model: type, prefix: str = "", *, explained: bool = True) -> dict[str, Option]:
    """Return the settings of a class by its fields; those of parts have the part's name as prefix.

    If they are to be `explained`, their meaning is read from the source, which takes 20 ms.
    """
    kinds, texts = get_type_hints(model), field_texts(model) if explained else {}
    options: dict[str, Option] = {}
    for each in fields(model):
        key, kind = prefix + each.name, kinds[each.name]
        if kind in KINDS:
            default = None if each.default is MISSING else each.default
            options[key] = Option(kind, default, texts.get(each.name, ""))
        else:
            options |= options_of(kind, f"{key}_", explained=explained)
    return options


def config_of(model: type[_Model], values: Mapping[str, object], prefix: str = "") -> _Model:
    """Return the configuration from values by the keys of `options_of`, with defaults for the rest.

    Raises:
        ConfigurationError: one of the values is wrong.
    """
    kinds = get_type_hints(model)
    given = {
        each.name: values[prefix + each.name]
        if kinds[each.name] in KINDS
        else config_of(kinds[each.name], values, f"{prefix}{each.name}_")
        for each in fields(model)  # type: ignore[arg-type]
        if kinds[each.name] not in KINDS or prefix + each.name in values
    }
    return model(**given)


def values_of(configured: object, prefix: str = "") -> dict[str, object]:
    """Return the values of a configuration, by the keys of `options_of`."""
    values: dict[str, object] = {}
    for each in fields(configured):  # type: ignore[arg-type]
        key, value = prefix + each.name, getattr(configured, each.name)
        values |= {key: value} if isinstance(value, KINDS) else values_of(value, f"{key}_")
    return values


def field_texts(model: type) -> dict[str, str]:
    """Return the docstrings below a class's fields, each as one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    name = ""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            texts[name] = " ".join(str(node.value.value).split())
        else:
            name = ""
    return texts


def _table_of(path: str, table: str) -> Mapping[str, Any]:
    import tomllib  # most commands have no file

    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"configuration file {path}: {error}") from error
    for name, content in tables.items():
        if name not in TABLES or not isinstance(content, dict):
            raise ConfigurationError(
                f"configuration file {path}: unknown {name!r}, expected the tables "
                f"{', '.join(f'[{each}]' for each in TABLES)}"
            )
    found: dict[str, Any] = tables.get(table, {})
    return found


def _checked(
    values: Mapping[str, object],
    options: Mapping[str, Option],
    place: str,
    *,
    is_variable: bool = False,
) -> dict[str, object]:
    checked = {}
    for key, value in values.items():
        here = place.format(key.upper() if is_variable else key)
        option = options.get(key)
        if option is None:
            raise ConfigurationError(
                f"{here}={value!r}: there is no such setting, expected one of "
                f"{', '.join(sorted(options))}"
            )
        checked[key] = parse_value(value, option.kind, here)
    return checked
