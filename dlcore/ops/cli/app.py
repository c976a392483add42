"""The root of the `dlog` command, and how it reports failures to the shell.

Exit codes: 0 done, 1 the operation failed, 2 the command line was wrong, 130 interrupted, 143
terminated.  A failure is one line on standard error, `error: …`, without a traceback; `--debug`
shows the traceback.  With `--json` the line is an object with the message, the name and code of the
error, and whether another try may succeed.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import io
import logging
import os
import signal
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from dlcore.base.errors import ConfigurationError, DLError
from dlcore.ops.cli.acl import acl_group
from dlcore.ops.cli.audit import audit_group
from dlcore.ops.cli.autorecovery import autorecovery_group
from dlcore.ops.cli.bookie import bookie_group
from dlcore.ops.cli.cluster import cluster_group
from dlcore.ops.cli.console import console_command
from dlcore.ops.cli.context import DEBUG_KEY, JSON_KEY, LoggedNotes, common_options
from dlcore.ops.cli.debug import debug_group
from dlcore.ops.cli.ledger import ledger_group
from dlcore.ops.cli.log import log_group
from dlcore.ops.cli.metadata import metadata_group
from dlcore.ops.cli.namespace import namespace_group
from dlcore.ops.cli.output import show_error
from dlcore.ops.cli.proxy import proxy_group
from dlcore.ops.cli.restoring import restore_command
from dlcore.ops.cli.sandbox import sandbox_command
from dlcore.ops.cli.secure import secure_group
from dlcore.ops.cli.segment import segment_group
from dlcore.ops.cli.sql import sql_command
from dlcore.ops.cli.staging import staging_group
from dlcore.ops.cli.top import top_command
from dlcore.ops.cli.upgrade import upgrade_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LAZY = ("crc32c", "numpy", "pyarrow")
"""Together they take half of the clients' load time: checksums, and arrays of entries."""


class _LazyModule(ModuleType):
    """A placeholder for a module, which loads it at the first access to an attribute."""

    # Reentrant: modules that the import loads may use the placeholder meanwhile.
    _lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if sys.modules.get(self.__name__) is self:
                # As long as the placeholder is there, `import_module` would return it.
                del sys.modules[self.__name__]
                self.__dict__.update(importlib.import_module(self.__name__).__dict__)
        return getattr(sys.modules[self.__name__], name)


def load_lazily() -> None:
    """Make the modules of `LAZY` load at first use; modules that are loaded already stay.

    Only the process of the command does this: most commands never use them.
    """
    for name in LAZY:
        if name not in sys.modules and importlib.util.find_spec(name) is not None:
            sys.modules[name] = _LazyModule(name)


EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


SECTIONS = {
    "For everybody": ("log", "namespace", "sandbox"),
    "For operators of a cluster": (
        "console",
        "sql",
        "top",
        "cluster",
        "bookie",
        "proxy",
        "autorecovery",
        "metadata",
        "restore",
        "upgrade",
    ),
    "For those who secure it": ("secure", "acl", "audit"),
    "For those who look for a fault": ("debug", "segment", "ledger", "staging"),
}
"""The commands by the people that need them, as help shows them."""


class _Sections(click.Group):
    """The root of the command, whose help shows `SECTIONS`."""

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each section with their one-line help."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(limit)) for name in names]
                )


@click.group(
    cls=_Sections,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: dlog sandbox --uri-file uri.txt",
)
@click.version_option(package_name="distributed-dlog", prog_name="dlog")
@common_options
def dlog() -> None:
    """Work with replicated logs.

    The namespace is given by --uri, before or after the subcommand, or by DLOG_URI.

    Exit codes: 0 done, 1 the operation failed, 2 the command line was wrong, 130 interrupted, 143
    terminated.
    """


dlog.add_command(sandbox_command)
dlog.add_command(metadata_group)
dlog.add_command(restore_command)
dlog.add_command(namespace_group)
dlog.add_command(log_group)
dlog.add_command(segment_group)
dlog.add_command(bookie_group)
dlog.add_command(cluster_group)
dlog.add_command(ledger_group)
dlog.add_command(staging_group)
dlog.add_command(autorecovery_group)
dlog.add_command(proxy_group)
dlog.add_command(acl_group)
dlog.add_command(audit_group)
dlog.add_command(secure_group)
dlog.add_command(debug_group)
dlog.add_command(top_command)
dlog.add_command(console_command)
dlog.add_command(sql_command)
dlog.add_command(upgrade_group)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit the process with its code; SIGTERM ends it as cleanly as SIGINT."""
    load_lazily()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # As for standard error: the encoding of a locale may lack letters of names, payloads or
        # help.
        sys.stdout.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: the command line without the program's name; the default is the process's.
    """
    given: dict[str, object] = {}
    logging.lastResort = LoggedNotes(given)
    try:
        exit_code = dlog.main(
            args=None if arguments is None else list(arguments),
            prog_name="dlog",
            standalone_mode=False,
            obj=given,
        )
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help(), err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        return _fail(_usage_text(error), error, EXIT_USAGE, given)
    except (click.Abort, KeyboardInterrupt) as error:
        return _fail("interrupted", error, EXIT_INTERRUPTED, given)
    except BrokenPipeError:
        _drop_output()  # the reader closed the pipe, as `head` does
        return EXIT_FAILED
    except OSError as error:
        if given.get(DEBUG_KEY):
            raise
        _drop_output()
        return _fail(_system_text(error), error, EXIT_FAILED, given)
    except DLError as error:
        if given.get(DEBUG_KEY):
            raise
        usage = isinstance(error, ConfigurationError)
        text = str(error) or type(error).__name__
        return _fail(text, error, EXIT_USAGE if usage else EXIT_FAILED, given)
    # The exit code of a command that returned one.
    return exit_code if isinstance(exit_code, int) else 0


def _usage_text(error: click.ClickException) -> str:
    text = error.format_message()
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{text} (see: {context.command_path} --help)" if context else text


def _system_text(error: OSError) -> str:
    if error.filename is None and error.errno in _OUTPUT_ERRORS:
        return f"cannot write the output: {error.strerror}"
    return str(error)


def _drop_output() -> None:
    """Discard output that was not written: else the interpreter would report it at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(text: str, error: BaseException, exit_code: int, given: Mapping[str, object]) -> int:
    show_error(text, error, exit_code=exit_code, as_json=bool(given.get(JSON_KEY)))
    return exit_code
