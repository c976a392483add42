"""The context of every subcommand: the namespace, and the form of its answers.

Modules that take long to import, above all the clients, are imported where a command begins its
work.  Therefore help, completion and wrong command lines answer at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dlcore.base.config import SESSION_TIMEOUT_S, LedgerClientConfig
from dlcore.base.errors import DLError, UnsupportedError
from dlcore.base.log_lines import JsonLines, Process
from dlcore.base.settings import (
    FILE_VARIABLE,
    LOG_FORMATS,
    Option,
    config_of,
    configuration_file,
    options_of,
    read_settings,
    require_log_format,
)

if TYPE_CHECKING:
    from dlcore.api.namespace import Namespace as AsyncNamespace
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.access.zookeeper import ZooKeeperAccess
    from dlcore.base.config import LogConfig
    from dlcore.sync import Namespace

DEBUG_KEY = "debug"
JSON_KEY = "json"
_NAMES_KEY = "names"
NAMESPACE_KEY = "uri"
ENDPOINT_KEY = "endpoint"
_PATIENCE_KEY = "patience"
_TOKEN_KEY = "token_file"
CONFIG_KEY = "config"
LOG_FORMAT_KEY = "log_format"
ROLE_KEY = "role"
_FILE_KEY = "file is read"
_SERVING = "serve_"
_PATIENCE_S = 60.0
_CONNECT_SHARE = 0.75
"""Share of the patience for connecting: less than all of it, so that the error names the server
that refused, and not only the timeout."""
_Command = TypeVar("_Command", bound=Callable[..., Any])
_Result = TypeVar("_Result")


def common_options(command: _Command) -> _Command:
    """Add --uri, --json and the like; options of a group hold for its subcommands, too."""
    for option in (
        click.option(
            "--debug",
            is_flag=True,
            expose_value=False,
            callback=_remember_debug,
            help="Show the traceback of a failure.",
        ),
        click.option(
            "--json",
            is_flag=True,
            is_eager=True,  # errors in the other options are also printed as JSON
            expose_value=False,
            callback=_remember(JSON_KEY),
            help="Print results and errors as JSON, for programs.",
        ),
        click.option(
            "--patience",
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            expose_value=False,
            callback=_remember(_PATIENCE_KEY),
            envvar="DLOG_PATIENCE",
            help=f"Longest time that the cluster may take for an answer [{_PATIENCE_S:g}].",
        ),
        click.option(
            "--config",
            metavar="FILE",
            expose_value=False,
            callback=_remember(CONFIG_KEY),
            envvar=FILE_VARIABLE,
            help=f"TOML file with settings (docs/configuration.md); default: ${FILE_VARIABLE}.",
        ),
        click.option(
            "--log-format",
            type=click.Choice(LOG_FORMATS),
            expose_value=False,
            callback=_remember(LOG_FORMAT_KEY),
            envvar="DLOG_LOG_FORMAT",
            help=f"How logs are written [{LOG_FORMATS[0]}].",
        ),
        click.option(
            "--uri",
            metavar="URI",
            expose_value=False,
            callback=_remember(NAMESPACE_KEY),
            envvar="DLOG_URI",
            help="Namespace, like distributedlog://127.0.0.1:2181/dlog; default: $DLOG_URI.",
        ),
        click.option(
            "--endpoint",
            metavar="GRPC",
            expose_value=False,
            callback=_remember(ENDPOINT_KEY),
            envvar="DLOG_ENDPOINT",
            help="Use proxies only, like grpc://host:port; default: $DLOG_ENDPOINT.",
        ),
        _file_option("tls_ca", "Use TLS to bookies or proxies, and trust these certificates (PEM)"),
        _file_option("tls_cert", "Certificate of this client, if they require one (PEM)"),
        _file_option("tls_key", "Private key of --tls-cert (PEM)"),
        _file_option("token_file", "Send the token in this file to proxies"),
        _file_option("zk_tls_ca", "Use TLS to ZooKeeper, and trust these certificates (PEM)"),
        _file_option("zk_tls_cert", "Certificate for ZooKeeper, if it requires one (PEM)"),
        _file_option("zk_tls_key", "Private key of --zk-tls-cert (PEM)"),
        _file_option("zk_auth_file", "ZooKeeper's user, as a line user:password"),
        _file_option("encryption_keys", "Keys of encrypted logs, or command:… that prints them"),
    ):
        command = option(command)
    return command


def _file_option(key: str, help_text: str) -> Callable[[_Command], _Command]:
    variable = f"DLOG_{key.upper()}"
    return click.option(
        f"--{key.replace('_', '-')}",
        metavar="FILE",
        expose_value=False,
        callback=_remember(key),
        envvar=variable,
        help=f"{help_text}; default: ${variable}.",
    )


def _remember(key: str) -> Callable[[click.Context, click.Parameter, object], None]:
    def callback(context: click.Context, parameter: click.Parameter, value: object) -> None:
        source = context.get_parameter_source(parameter.name or key)
        by_hand = source is click.core.ParameterSource.COMMANDLINE
        # The environment must not override an option before the subcommand.
        if value and (by_hand or key not in context.obj):
            context.obj[key] = value

    return callback


def _remember_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.obj[DEBUG_KEY] = True


DLOG_OPTIONS = {
    "uri": Option(str, None, "The namespace, like distributedlog://127.0.0.1:2181/dlog."),
    "endpoint": Option(
        str, None, "Use only the proxies at this endpoint, like grpc://127.0.0.1:4190."
    ),
    "patience": Option(
        float, _PATIENCE_S, "Longest time in seconds that the cluster may take for an answer."
    ),
    "log_format": Option(
        str, LOG_FORMATS[0], "How logs are written: plain, or json with an object on each line."
    ),
    "tls_ca": Option(
        str, None, "PEM file of the certificates to trust; set: bookies and proxies must use TLS."
    ),
    "tls_cert": Option(str, None, "PEM file of this client's certificate, if servers require one."),
    "tls_key": Option(str, None, "PEM file of the private key of `tls_cert`."),
    "token_file": Option(
        str, None, "File with the token that is sent to proxies; it is read again as it changes."
    ),
    "zk_tls_ca": Option(
        str, None, "PEM file of the certificates to trust at ZooKeeper; set: it must use TLS."
    ),
    "zk_tls_cert": Option(str, None, "PEM file of the certificate for ZooKeeper, if it needs one."),
    "zk_tls_key": Option(str, None, "PEM file of the private key of `zk_tls_cert`."),
    "zk_auth_file": Option(
        str,
        None,
        "File with ZooKeeper's user as a line user:password; only this user may use the nodes.",
    ),
    "encryption_keys": Option(
        str,
        None,
        "File with the keys of encrypted logs, or `command:…` that prints them; proxies and direct "
        "clients of such logs need it (docs/encryption.md).",
    ),
}
"""Settings of the table [dlog] of the configuration file, and of variables."""


def given_settings() -> dict[str, Any]:
    """Return the settings of every command: from its line, from variables, from the file.

    Raises:
        ConfigurationError: the file cannot be read, or has a wrong setting.
    """
    given: dict[str, Any] = click.get_current_context().obj
    if _FILE_KEY not in given:
        found = read_settings("dlog", DLOG_OPTIONS, file=given.get(CONFIG_KEY), environment={})
        if given.get(NAMESPACE_KEY):
            found.pop(ENDPOINT_KEY, None)  # an endpoint would take precedence
        given[_FILE_KEY] = True
        for key, value in found.items():
            given.setdefault(key, value)
        require_log_format(given.get(LOG_FORMAT_KEY, LOG_FORMATS[0]))
    return given


def log_format() -> str:
    """Return how logs are written, one of `LOG_FORMATS`."""
    return str(given_settings().get(LOG_FORMAT_KEY, LOG_FORMATS[0]))


def takes_settings(options: Mapping[str, Option]) -> Callable[[_Command], _Command]:
    """Add an option for each setting of a program that the command runs; None if not given."""

    def add(command: _Command) -> _Command:
        for key, option in reversed(list(options.items())):
            # --tls-… are the files for connections to bookies, in every command.
            flag = f"{_SERVING}{key}" if key.startswith("tls_") else key
            command = click.option(
                f"--{flag.replace('_', '-')}",
                type=option.kind,
                help=f"{option.text} [{option.default!r}]",
            )(command)
        return command

    return add


def program_settings(
    table: str, options: Mapping[str, Option], given: Mapping[str, object]
) -> dict[str, object]:
    """Return the settings of a program: from `given` of the command line, variables, the file.

    Raises:
        ConfigurationError: a setting is unknown, or has a wrong value.
    """
    file = click.get_current_context().obj.get(CONFIG_KEY)
    by_hand = {
        key.removeprefix(_SERVING): value for key, value in given.items() if value is not None
    }
    return read_settings(table, options, file=file, environment=os.environ) | by_hand


def client_config() -> LedgerClientConfig:
    """Return the configuration of the bookie client, from the file and variables.

    Raises:
        ConfigurationError: a setting is unknown, or has a wrong value.
    """
    options = options_of(LedgerClientConfig, explained=False)
    return config_of(LedgerClientConfig, program_settings("ledger_client", options, {}))


def has_settings_file() -> bool:
    """Whether the command line names a configuration file."""
    file = click.get_current_context().obj.get(CONFIG_KEY)
    return bool(configuration_file(file, os.environ))


def wants_json() -> bool:
    """Whether --json was given."""
    return bool(click.get_current_context().obj.get(JSON_KEY))


def lists_names(command: _Command) -> _Command:
    """Add --quiet to a command that lists objects; `show_rows` then prints only their names."""
    return click.option(
        "-q",
        "--quiet",
        is_flag=True,
        expose_value=False,
        callback=_remember(_NAMES_KEY),
        help="Print only the names, one on each line, for example for xargs.",
    )(command)


def wants_names() -> bool:
    """Whether --quiet was given."""
    return bool(click.get_current_context().obj.get(_NAMES_KEY))


def namespace_uri() -> str:
    """Return the namespace that --uri or DLOG_URI names.

    Raises:
        click.UsageError: neither is given.
        UnsupportedError: an endpoint is given.
    """
    context = click.get_current_context()
    endpoint = namespace_endpoint()
    if endpoint is not None:
        raise UnsupportedError(
            f"{endpoint}: {context.command_path} needs ZooKeeper and bookies, which proxies do not "
            "offer: give --uri and no --endpoint"
        )
    uri = given_settings().get(NAMESPACE_KEY)
    if not uri:
        raise click.UsageError("no namespace: give --uri or set DLOG_URI", context)
    return str(uri)


def namespace_endpoint() -> str | None:
    """Return the proxies that --endpoint or DLOG_ENDPOINT names, if it is given."""
    endpoint = given_settings().get(ENDPOINT_KEY)
    return str(endpoint) if endpoint else None


def namespace_tls() -> TlsFiles | None:
    """Return the files that --tls-ca, --tls-cert and --tls-key name, or None.

    Raises:
        ConfigurationError: a file is missing that the others need.
    """
    from dlcore.base.access.tls import TlsFiles

    given = given_settings()
    return TlsFiles.of(
        ca=str(given.get("tls_ca", "")),
        cert=str(given.get("tls_cert", "")),
        key=str(given.get("tls_key", "")),
    )


def zookeeper_access() -> ZooKeeperAccess:
    """Return the files that --zk-tls-ca, --zk-auth-file and the like name.

    Raises:
        ConfigurationError: a file is missing that the others need.
    """
    from dlcore.base.access.zookeeper import ZooKeeperAccess

    return ZooKeeperAccess.of(given_settings())


def direct_arguments() -> dict[str, Any]:
    """Return the arguments with which a namespace is opened over ZooKeeper and bookies.

    Raises:
        ConfigurationError: a setting is wrong, or a file is missing that others need.
    """
    return {
        "client_config": client_config(),
        "tls": namespace_tls(),
        "zookeeper": zookeeper_access(),
        "encryption_keys": given_settings().get("encryption_keys"),
    }


def proxy_token() -> Callable[[], str] | None:
    """Return a function that reads the token in --token-file, if it is given."""
    from dlcore.backends.flight.bearer import token_file

    path = given_settings().get(_TOKEN_KEY)
    return token_file(str(path)) if path else None


def confirmed(command: _Command) -> _Command:
    """Add --yes to a command that destroys data.

    The command calls `require_consent` at once, and `ask` when it knows which data it destroys.
    """
    return click.option("--yes", is_flag=True, help="Do not ask.")(command)


def require_consent(*, yes: bool) -> None:
    """Raise if the user cannot be asked, before anything is done.

    Raises:
        click.UsageError: there is no terminal, or --json, and --yes is not given.
    """
    if not yes and (wants_json() or sys.stdin is None or not sys.stdin.isatty()):
        raise click.UsageError(
            "--yes is required without a terminal, and with --json",
            click.get_current_context(),
        )


def note(text: str) -> None:
    """Print a note on standard error: a line, or with --json an object."""
    _show_note(text, as_json=wants_json())


def _show_note(text: str, *, as_json: bool) -> None:
    click.echo(json.dumps({"note": text}, ensure_ascii=False) if as_json else text, err=True)


class LoggedNotes(logging.Handler):
    """Prints log messages as notes, if the program has set up no logging of its own."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(logging.WARNING)
        self._given = given  # it is called in any thread

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message."""
        if self._given.get(LOG_FORMAT_KEY) == "json":
            process = Process.here(self._given.get(ROLE_KEY, "dlog"))
            click.echo(JsonLines(process).format(record), err=True)
        else:
            _show_note(record.getMessage(), as_json=bool(self._given.get(JSON_KEY)))


def ask(what: str, *, yes: bool) -> None:
    """Print on standard error the action `what`; unless `yes`, ask the user for consent to it.

    Raises:
        click.Abort: the answer is no.
    """
    if yes:
        note(what)
    else:
        click.confirm(f"{what}?", abort=True, err=True)


def run_async(
    work: Callable[[AsyncNamespace], Coroutine[Any, Any, _Result]],
    *,
    is_long: bool = False,
    config: LogConfig | None = None,
) -> _Result:
    """Run `work` with the namespace, open meanwhile, on its own event loop.

    The namespace is direct, or that of the proxies at --endpoint, whose configuration is used in
    place of `config`.  The time limit is --patience, unless the work `is_long`, and prints results
    or its progress.

    Raises:
        DLError: `work` failed, or took too long.
    """
    endpoint, tls = namespace_endpoint(), namespace_tls()
    if endpoint is None:
        return run_direct(work, is_long=is_long, config=config)
    token = proxy_token()
    from dlcore.backends.flight.namespace import open_namespace

    async def run() -> _Result:
        patience_s = _CONNECT_SHARE * patience()
        async with await open_namespace(
            endpoint, patience_s=patience_s, tls=tls, token=token
        ) as namespace:
            return await work(namespace)

    return asyncio.run(run() if is_long else in_time(run(), endpoint))


def run_direct(
    work: Callable[[DirectNamespace], Coroutine[Any, Any, _Result]],
    *,
    is_long: bool = False,
    config: LogConfig | None = None,
) -> _Result:
    """Run `work` as `run_async` does, for commands that proxies do not offer.

    Raises:
        UnsupportedError: --endpoint is given.
        DLError: `work` failed, or took too long.
    """
    uri, arguments = namespace_uri(), direct_arguments()
    from dlcore.backends.direct.namespace import open_namespace

    async def run() -> _Result:
        timeout_s = connect_timeout_s()
        async with await open_namespace(
            uri, connect_timeout_s=timeout_s, config=config, **arguments
        ) as namespace:
            return await work(namespace)

    return asyncio.run(run() if is_long else in_time(run()))


def patience() -> float:
    """Return how long the cluster may take for an answer, in seconds."""
    return float(given_settings().get(_PATIENCE_KEY) or _PATIENCE_S)


def connect_timeout_s() -> float:
    """Return how long to wait for the first connection to ZooKeeper, in seconds."""
    return min(SESSION_TIMEOUT_S, _CONNECT_SHARE * patience())


def in_time(
    work: Coroutine[Any, Any, _Result], asked: str | None = None
) -> Coroutine[Any, Any, _Result]:
    """Return `work` with the time limit of --patience, and an error that names it."""
    uri, patience_s = asked or namespace_uri(), patience()

    async def run() -> _Result:
        limit = asyncio.timeout(patience_s)
        try:
            async with limit:
                return await work
        except TimeoutError as error:
            # Only the limit's own error is about the patience; the work may raise another one.
            if not limit.expired():
                raise
            raise DLError(f"{uri} did not give all answers within {patience_s:g} s") from error

    return run()


@contextmanager
def connect() -> Iterator[Namespace]:
    """Open the namespace: the direct one, or that of the proxies at --endpoint."""
    from dlcore.sync import open_namespace

    endpoint = namespace_endpoint()
    if endpoint is not None:
        patience_s, tls, token = patience(), namespace_tls(), proxy_token()
        with open_namespace(endpoint, patience_s=patience_s, tls=tls, token=token) as namespace:
            yield namespace
        return
    uri, timeout_s = namespace_uri(), connect_timeout_s()
    with open_namespace(uri, connect_timeout_s=timeout_s, **direct_arguments()) as namespace:
        yield namespace
