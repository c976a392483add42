"""The context of every subcommand: the namespace to talk to, and how to answer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from dlcore.namespace import Namespace as AsyncNamespace, open_namespace as open_async_namespace
from dlcore.sync import Namespace, open_namespace
from dlcore.tls import TlsFiles

DEBUG_KEY = "debug"
_URI_KEY = "uri"
_JSON_KEY = "json"
_Command = TypeVar("_Command", bound=Callable[..., Any])
_Result = TypeVar("_Result")


def common_options(command: _Command) -> _Command:
    """Add --uri, --json and --debug; given to a group they hold for its subcommands."""
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
            expose_value=False,
            callback=_remember(_JSON_KEY),
            help="Answer in JSON, for programs.",
        ),
        click.option(
            "--uri",
            metavar="URI",
            expose_value=False,
            callback=_remember(_URI_KEY),
            envvar="DLOG_URI",
            help="Namespace, like distributedlog://127.0.0.1:2181/dlog; default: $DLOG_URI.",
        ),
        _tls_option("ca", "Certificates to trust: connections to bookies use TLS"),
        _tls_option("cert", "Our certificate, where bookies ask for one"),
        _tls_option("key", "Its private key"),
    ):
        command = option(command)
    return command


def _tls_option(name: str, help_text: str) -> Callable[[_Command], _Command]:
    variable = f"DLOG_TLS_{name.upper()}"
    return click.option(
        f"--tls-{name}",
        metavar="FILE",
        expose_value=False,
        callback=_remember(f"tls_{name}"),
        envvar=variable,
        help=f"{help_text} (PEM); default: ${variable}.",
    )


def _remember(key: str) -> Callable[[click.Context, click.Parameter, object], None]:
    def callback(context: click.Context, parameter: click.Parameter, value: object) -> None:
        source = context.get_parameter_source(parameter.name or key)
        by_hand = source is click.core.ParameterSource.COMMANDLINE
        # The environment must not replace what stands on the command line before the subcommand.
        if value and (by_hand or key not in context.obj):
            context.obj[key] = value

    return callback


def _remember_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.obj[DEBUG_KEY][DEBUG_KEY] = True


def wants_json() -> bool:
    """Whether --json was given."""
    return bool(click.get_current_context().obj.get(_JSON_KEY))


def namespace_uri() -> str:
    """Return the namespace that --uri or DLOG_URI names.

    Raises:
        click.UsageError: neither is given.
    """
    context = click.get_current_context()
    uri = context.obj.get(_URI_KEY)
    if not uri:
        raise click.UsageError("no namespace: give --uri or set DLOG_URI", context)
    return str(uri)


def namespace_tls() -> TlsFiles | None:
    """Return the files that --tls-ca, --tls-cert and --tls-key name, or None.

    Raises:
        ConfigurationError: one is missing that the others need.
    """
    given = click.get_current_context().obj
    return TlsFiles.of(
        ca=str(given.get("tls_ca", "")),
        cert=str(given.get("tls_cert", "")),
        key=str(given.get("tls_key", "")),
    )


def confirmed(command: _Command) -> _Command:
    """Add --yes to a command that destroys something; it calls `confirm` before it does."""
    return click.option("--yes", is_flag=True, help="Do not ask.")(command)


def confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal whether to go on, unless `yes`.

    Raises:
        click.UsageError: there is nobody to ask.
        click.Abort: the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(
            "--yes is needed where nobody can be asked", click.get_current_context()
        )
    click.confirm(question, abort=True, err=True)


def run_async(work: Callable[[AsyncNamespace], Coroutine[Any, Any, _Result]]) -> _Result:
    """Run `work` with that namespace, open for its time, on an event loop of its own."""

    async def run() -> _Result:
        async with await open_async_namespace(namespace_uri(), tls=namespace_tls()) as namespace:
            return await work(namespace)

    return asyncio.run(run())


@contextmanager
def connect() -> Iterator[Namespace]:
    """Open that namespace."""
    with open_namespace(namespace_uri(), tls=namespace_tls()) as namespace:
        yield namespace
