"""`dlog secure`: certificates and configuration of a secured cluster."""

from __future__ import annotations

from pathlib import Path

import click

from dlcore.base.clock import SystemClock
from dlcore.base.extras import missing_packages_explained
from dlcore.ops.cli.context import common_options, namespace_uri
from dlcore.ops.cli.output import show_done, time_text

_PORT = click.IntRange(min=1, max=65_535)


@click.group("secure")
@common_options
def secure_group() -> None:
    """Make certificates and configuration of a secured cluster."""


@secure_group.command(
    "init",
    epilog="Example: dlog secure init cluster --host node-1 --host node-2 --host node-3 "
    "--client ingest --install-dir /etc/dlog --uri distributedlog://node-1:2181/dlog",
)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A host, by the name or address at which others reach it; may be repeated.",
)
@click.option(
    "--client",
    "clients",
    multiple=True,
    metavar="NAME",
    help="A client that reaches bookies and proxies; may be repeated.",
)
@click.option(
    "--remote-client",
    "remote_clients",
    multiple=True,
    metavar="NAME",
    help="A client of proxies only; may be repeated.  Name all hosts with it.",
)
@click.option(
    "--zookeeper-tls",
    is_flag=True,
    help="Make certificates for the servers of the URI, too; its ports are for TLS.",
)
@click.option(
    "--install-dir",
    default="",
    metavar="DIR",
    help="The folder in which each host will have its files; by default where they are made.",
)
@click.option(
    "--data-dir",
    default="/var/lib/dlog",
    show_default=True,
    metavar="DIR",
    help="The folder of a host's data.",
)
@click.option("--bookie-port", type=_PORT, default=3181, show_default=True, help="Bookies' port.")
@click.option(
    "--control-port",
    type=_PORT,
    default=3182,
    show_default=True,
    help="Port of bookies' control service.",
)
@click.option("--proxy-port", type=_PORT, default=4190, show_default=True, help="Proxies' port.")
@click.option(
    "--days",
    type=click.IntRange(min=1, max=3650),
    default=365,
    show_default=True,
    help="How long the certificates hold; that of the authority holds for ten years.",
)
@common_options
def init(
    *,
    folder: Path,
    hosts: tuple[str, ...],
    clients: tuple[str, ...],
    remote_clients: tuple[str, ...],
    zookeeper_tls: bool,
    install_dir: str,
    data_dir: str,
    bookie_port: int,
    control_port: int,
    proxy_port: int,
    days: int,
) -> None:
    """Make an authority, certificates and configuration in FOLDER.

    Each host and each client has its own.  FOLDER/hosts/HOST is for that host: `dlog bookie run`,
    `proxy run` and `autorecovery run` take its files by --config.  FOLDER/clients/NAME has the same
    for a client.  Private keys can be read by their owner only; ca.key stays here.  With
    --zookeeper-tls FOLDER/hosts/HOST/zoo.cfg has the lines for a server's own zoo.cfg, and
    everybody connects to the servers by TLS.

    Nothing is overwritten: called again, the command makes what is missing, such as the files of
    another host, or a new certificate where the old one was removed.
    """
    with missing_packages_explained():
        from dlcore.ops.secure.folder import make_missing
    from dlcore.ops.secure.plan import ClusterPlan, Places, Ports

    plan = ClusterPlan(
        uri=namespace_uri(),
        hosts=hosts,
        clients=clients,
        remote_clients=remote_clients,
        places=Places(
            folder=str(folder.absolute()), installed=install_dir.rstrip("/"), data_dir=data_dir
        ),
        zookeeper_tls=zookeeper_tls,
        ports=Ports(bookie_port=bookie_port, control_port=control_port, proxy_port=proxy_port),
    )
    made = make_missing(folder, plan, now_ms=SystemClock().now_ms(), days=days)
    text = "\n".join(f"made {folder / name}" for name in made)
    show_done(text or f"nothing is missing in {folder}", {"folder": str(folder), "made": made})


@secure_group.command("token", epilog="Example: dlog secure token cluster --user alice --hours 8")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--user", required=True, metavar="NAME", help="The user who shows the token.")
@click.option(
    "--hours",
    type=click.FloatRange(min=0, min_open=True, max=24 * 365),
    default=8.0,
    show_default=True,
    help="How long it holds.",
)
@common_options
def make_token(*, folder: Path, user: str, hours: float) -> None:
    """Print a token by which proxies know the user NAME.

    It holds for some hours.  It is signed with FOLDER/tokens.key, which `dlog secure init` makes.
    To have the token is to be the user: pass it on like a password.
    """
    with missing_packages_explained():
        from dlcore.ops.secure.tokens import signed_token

    key, now_ms = (folder / "tokens.key").read_bytes(), SystemClock().now_ms()
    token, expires_ms = signed_token(key, user, now_ms=now_ms, hours=hours)
    show_done(token, {"token": token, "user": user, "expires": time_text(expires_ms)})
