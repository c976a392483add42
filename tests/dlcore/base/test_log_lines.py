"""Logs of programs, plain and as JSON, that no text of others can forge; levels of modules."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.base.log_lines import PlainLines, Process, escaped, lines_of, set_log_level
from dlcore.base.settings import log_levels_of, require_log_format
from tests.fixtures.bookie_process import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

FORGED = "clicks\n2026-11-26 ERROR bookie \x1b[31mgone\r\u2028\x85\x7f"
ADVICE = re.compile("; to do: (nothing|[a-z][^%]{9,})$")
PACKAGES = ("bookie", "dlcore", "dlspark")
LEVELS = ("warning", "error", "exception", "critical", "log")


def formatted(formatter: logging.Formatter, *args: object, failed: bool = False) -> str:
    """Return what a logger with the formatter writes of a message."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    error = ConfigurationError(FORGED) if failed else None
    trace = (ConfigurationError, error, None) if error else None
    record = logging.LogRecord("dlcore.log", 30, "", 1, "log=%s waits", args, trace)
    handler.handle(record)
    return stream.getvalue()


def test_a_name_begins_no_line_of_a_plain_log() -> None:
    """Whatever ends a line or steers a terminal is shown; a traceback is indented."""
    (line,) = formatted(PlainLines(), FORGED).splitlines()
    end = r"log=clicks\n2026-11-26 ERROR bookie \x1b[31mgone\r\u2028\x85\x7f waits"
    assert re.fullmatch(r"\S+ \S+ WARNING dlcore.log " + re.escape(end), line)
    first, *rest = formatted(PlainLines(), "a", failed=True).splitlines()
    assert first.endswith("WARNING dlcore.log log=a waits")
    assert rest
    assert all(each.startswith("    ") for each in rest)
    assert escaped("grün\t'\"\\") == "grün\\t'\"\\"
    stacked = logging.LogRecord("a", logging.INFO, "", 1, "b", None, None, sinfo="Stack:\n here")
    assert PlainLines().format(stacked).endswith("a b\n    Stack:\n     here")


def test_a_json_log_is_one_object_on_each_line() -> None:
    """With time, level, place, message and process; the text is what it was."""
    lines = lines_of("json", Process("bookie", "b\n1"))
    written = formatted(lines, FORGED) + formatted(lines, "a", failed=True)
    assert written.isascii()
    first, second = map(json.loads, written.splitlines())
    assert (first["level"], first["logger"]) == ("warning", "dlcore.log")
    assert first["message"] == f"log={FORGED} waits"
    assert (first["role"], first["name"]) == ("bookie", "b\n1")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["time"])
    assert "exception" not in first
    assert FORGED in second["exception"]
    assert isinstance(lines_of("plain", Process.here("proxy")), PlainLines)
    assert Process.here("proxy").role == "proxy"


@pytest.fixture
def level() -> Iterator[None]:
    """Levels as they were, afterwards."""
    before = logging.getLogger().level
    yield
    set_log_level("info")
    logging.getLogger().setLevel(before)


@pytest.mark.usefixtures("level")
def test_modules_have_levels_until_they_are_not_named() -> None:
    """Live: the next setting takes the place of the one before."""
    proxy, other = logging.getLogger("dlcore.proxy.x"), logging.getLogger("dlcore.ops.x")
    set_log_level("warning, dlcore.proxy=debug, dlcore.ops=error")
    assert (proxy.getEffectiveLevel(), other.getEffectiveLevel()) == (10, 40)
    assert logging.getLogger().level == 30
    set_log_level("info,dlcore.ops=debug")
    assert (proxy.getEffectiveLevel(), other.getEffectiveLevel()) == (20, 10)
    with pytest.raises(ConfigurationError):
        set_log_level("info,dlcore.ops=loud")
    assert other.getEffectiveLevel() == 10


@pytest.mark.parametrize(
    "text",
    ["", "INFO", "loud", "a=info", "info,warning", "info,a=b", "info,a=info,a=info", "info,=info",
     "info,a b=info", "info,a..b=info", "info,"],
)  # fmt: skip
def test_a_wrong_level_is_refused(text: str) -> None:
    """With what is expected, and the part that is wrong."""
    with pytest.raises(ConfigurationError, match=r"expected one of debug, info, .* does not fit"):
        log_levels_of(text)


def test_formats_are_plain_and_json() -> None:
    """Nothing else."""
    require_log_format("json")
    with pytest.raises(ConfigurationError, match="log_format='xml': expected one of plain, json"):
        require_log_format("xml")


def templates() -> dict[str, str]:
    """Return the templates of all warnings and errors, by place."""
    found = {}
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name("logger"), attr=attr), args=[first, *rest]
                    ) if attr in LEVELS:
                        text = rest[0] if attr == "log" else first
                        place = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                        assert isinstance(text, ast.Constant), f"{place}: expected plain text"
                        found[place] = str(text.value)
    return found


def test_each_warning_says_what_to_do() -> None:
    """Its last clause is for the operator; one that asks for nothing says so."""
    found = templates()
    assert len(found) > 100
    assert [place for place, text in found.items() if not ADVICE.search(text)] == []
    for text in ("a failed", "a failed; to do: ", "a failed; to do: see %s"):
        assert not ADVICE.search(text)


def test_only_one_place_sets_up_logs() -> None:
    """A logger that is made otherwise would escape the rules above."""
    setting = re.compile(
        r"basicConfig|dictConfig|fileConfig|StreamHandler|logging\.(warning|error)"
    )
    paths = [path for name in PACKAGES for path in sorted((REPOSITORY / name).rglob("*.py"))]
    found = [path.name for path in paths if setting.search(path.read_text())]
    assert found == ["log_lines.py"]
