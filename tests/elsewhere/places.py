"""Surroundings that differ from a developer's machine, each as a row: how it is made, what is run.

A place is made by a few lines of shell, before which a process has namespaces of its own: what the
lines mount and set is gone when it ends, and nothing else on the machine sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ORDINARY_USER = "nobody"
_BOOKIES = (
    "tests/bookie/test_real_disk.py tests/bookie/test_server.py tests/bookie/test_full_disk.py"
)
_PROCESSES = (
    "tests/integration/test_log_sync.py tests/integration/test_log_face.py tests/dlcore/ops/cli"
)
_SPARK = "tests/spark/test_batch_read.py tests/spark/test_stream_write.py"
_WORDS = f"{_PROCESSES} tests/dlcore/log/test_typed_arrow.py tests/dlspark {_SPARK}"
_NETWORK = (
    "tests/bookie/test_connection.py tests/dlcore/wire tests/dlcore/base/listening "
    "tests/integration/test_tls.py tests/integration/test_proxy_writing.py "
    "tests/integration/test_streams.py"
)


@dataclass(frozen=True, slots=True)
class Place:
    """One surrounding."""

    name: str
    tests: str
    """The tests that it could make fail; `--whole` runs all instead."""
    setup: str = ""
    """Lines of shell; `$WORK` is a folder that is empty before and removed afterwards."""
    environment: dict[str, str] = field(default_factory=dict)
    namespaces: tuple[str, ...] = ()
    """Those of its own beside that of mounts, as options of `unshare`."""
    needs_root: bool = True
    programs: tuple[str, ...] = ()
    """Looked for on the PATH; without them the place is skipped, and that is said."""
    folder: str = ""
    """A fresh clone to run in, below `$WORK`; otherwise the checkout itself is run in."""
    user: str = ""
    """As whom; otherwise as who started it."""
    workers: int = 0
    """How many processes run the tests; 0: as many as elsewhere."""
    lacks_demo: str = ""
    """Why the demo cannot run there."""


def _on(filesystem: str, make: str) -> Place:
    return Place(
        f"data on {filesystem}",
        tests=f"{_BOOKIES} {_PROCESSES}",
        setup=f'truncate -s 6G "$WORK/disk"; {make} "$WORK/disk"; mkdir "$WORK/data"\n'
        'mount -o loop "$WORK/disk" "$WORK/data"; chmod 1777 "$WORK/data"',
        environment={"TMPDIR": "$WORK/data"},
        programs=(make.split()[0],),
    )


def _in_locale(language: str) -> Place:
    return Place(
        f"locale {language}",
        tests=_WORDS,
        setup=f'localedef -i {language} -f UTF-8 "$WORK/{language}.UTF-8"',
        environment={"LOCPATH": "$WORK", "LC_ALL": f"{language}.UTF-8"},
        needs_root=False,
        programs=("localedef",),
    )


def _at(zone: str) -> Place:
    return Place(f"time zone {zone}", _WORDS, environment={"TZ": zone}, needs_root=False)


_SPARK_IN_1_GIB = "with one CPU its processes, Spark's above all, take 2 GiB"


def _with_one_cpu(size: str, size_bytes: int, tests: str, *, lacks_demo: str = "") -> Place:
    return Place(
        f"one CPU and {size}",
        tests=tests,
        # Version 2 of control groups has one tree, version 1 one for each kind of limit.
        setup=f"""for tree in /sys/fs/cgroup /sys/fs/cgroup/memory /sys/fs/cgroup/unified; do
            [ -d "$tree" ] || continue
            group="$tree/dlog-elsewhere"
            mkdir -p "$group" 2>/dev/null || continue
            for limit in memory.max memory.limit_in_bytes; do
                [ ! -e "$group/$limit" ] || {{ echo {size_bytes} > "$group/$limit"; limited=yes; }}
            done
            [ -z "${{limited:-}}" ] || {{ echo $$ > "$group/cgroup.procs"; break; }}
        done
        [ -n "${{limited:-}}" ] || {{ echo "error: no control group limits memory" >&2; exit 1; }}
        taskset --pid --cpu-list 0 $$ > "$WORK/affinity\"""",
        programs=("taskset",),
        workers=1,
        lacks_demo=lacks_demo,
    )


PLACES: tuple[Place, ...] = (
    Place("an ordinary user", tests="tests", folder="clone", user=ORDINARY_USER),
    Place(
        "a folder with spaces and other letters",
        tests=f"{_PROCESSES} {_SPARK} tests/demo tests/deploying tests/notebooks",
        folder="dlog tests Größe 日本",
        needs_root=False,
    ),
    Place("umask 077", f"{_BOOKIES} {_WORDS}", setup="umask 077", needs_root=False),
    Place("ulimit -n 1024", f"{_NETWORK} {_SPARK}", setup="ulimit -n 1024", needs_root=False),
    Place("LANG=C", _WORDS, environment={"LC_ALL": "C", "LANG": "C"}, needs_root=False),
    _in_locale("tr_TR"),
    _in_locale("de_DE"),
    _at("Pacific/Kiritimati"),
    _at("America/Anchorage"),
    Place(
        "a host name that does not resolve",
        tests=f"{_NETWORK} {_SPARK}",
        setup="hostname no-such-host",
        namespaces=("--uts",),
        programs=("hostname",),
    ),
    Place(
        "without IPv6",
        tests=f"{_NETWORK} {_SPARK}",
        setup="echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; ip link set lo up",
        namespaces=("--net",),
        programs=("ip",),
    ),
    Place(
        "localhost is ::1 first",
        tests=f"{_NETWORK} {_SPARK}",
        setup='ip link set lo up; { echo "::1 localhost"; cat /etc/hosts; } > "$WORK/hosts"\n'
        'mount --bind "$WORK/hosts" /etc/hosts',
        namespaces=("--net",),
        programs=("ip",),
    ),
    Place(
        "temporary folder on tmpfs",
        tests=f"{_BOOKIES} {_PROCESSES}",
        setup='mkdir "$WORK/data"; mount -t tmpfs -o size=6G,mode=1777 tmpfs "$WORK/data"',
        environment={"TMPDIR": "$WORK/data"},
    ),
    _on("ext4", "mkfs.ext4 -q"),
    _on("XFS", "mkfs.xfs -q"),
    _on("btrfs", "mkfs.btrfs -q"),
    Place(
        "data on overlayfs",
        tests=f"{_BOOKIES} {_PROCESSES}",
        # Its upper folder may not be on an overlay itself, as that of a container is.
        setup='mkdir "$WORK/disk" "$WORK/data"; mount -t tmpfs -o size=6G tmpfs "$WORK/disk"\n'
        'cd "$WORK/disk"; mkdir lower upper work; cd "$OLDPWD"\n'
        'mount -t overlay -o "lowerdir=$WORK/disk/lower,upperdir=$WORK/disk/upper,'
        'workdir=$WORK/disk/work" overlay "$WORK/data"; chmod 1777 "$WORK/data"',
        environment={"TMPDIR": "$WORK/data"},
    ),
    _with_one_cpu("1 GiB", 1 << 30, f"{_BOOKIES} {_PROCESSES}", lacks_demo=_SPARK_IN_1_GIB),
    _with_one_cpu(
        "3 GiB", 3 << 30, "tests/spark/test_batch_read.py tests/spark/test_stream_write.py"
    ),
    Place(
        "a checkout that cannot be written",
        tests=f"{_PROCESSES} tests/spark/test_batch_read.py",
        setup='mount --bind "$PWD" "$PWD"; mount -o remount,bind,ro "$PWD"; cd "$PWD"',
        environment={"PYTHONDONTWRITEBYTECODE": "1"},
    ),
)
