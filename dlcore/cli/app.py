"""The root of the `dlog` command, and how its failures reach the shell.

Exit codes: 0 done, 1 the operation failed, 2 the command line was wrong, 130 interrupted,
143 terminated.  A failure is one line on standard error, `error: …`, without a traceback; `--debug`
shows it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import click

from dlcore.cli.autorecovery import autorecovery_group
from dlcore.cli.bookie import bookie_group
from dlcore.cli.context import DEBUG_KEY, common_options
from dlcore.cli.ledger import ledger_group
from dlcore.cli.log import log_group
from dlcore.cli.sandbox import sandbox_command
from dlcore.cli.segment import segment_group
from dlcore.cli.staging import staging_group
from dlcore.errors import ConfigurationError, DLError

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: dlog sandbox --uri-file uri.txt",
)
@click.version_option(package_name="distributed-dlog", prog_name="dlog")
@common_options
def dlog() -> None:
    """Work with replicated logs.

    The namespace is given by --uri, before or after the subcommand, or by DLOG_URI.

    Exit codes: 0 done, 1 the operation failed, 2 the command line was wrong.
    """


dlog.add_command(sandbox_command)
dlog.add_command(log_group)
dlog.add_command(segment_group)
dlog.add_command(bookie_group)
dlog.add_command(ledger_group)
dlog.add_command(staging_group)
dlog.add_command(autorecovery_group)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit the process with its code; SIGTERM ends it as cleanly."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: the command line without the program's name; by default that of the process.
    """
    debug: dict[str, bool] = {}
    try:
        exit_code = dlog.main(
            args=None if arguments is None else list(arguments),
            prog_name="dlog",
            standalone_mode=False,
            obj={DEBUG_KEY: debug},
        )
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help(), err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        return _fail(_usage_text(error), EXIT_USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output left, as `head` does; the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except DLError as error:
        if debug.get(DEBUG_KEY):
            raise
        usage = isinstance(error, ConfigurationError)
        return _fail(str(error) or type(error).__name__, EXIT_USAGE if usage else EXIT_FAILED)
    return exit_code if isinstance(exit_code, int) else 0  # of a command that said `exit`


def _usage_text(error: click.ClickException) -> str:
    text = error.format_message()
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{text} (see: {context.command_path} --help)" if context else text


def _fail(text: str, exit_code: int) -> int:
    click.echo(f"error: {' '.join(text.split())}", err=True)
    return exit_code
