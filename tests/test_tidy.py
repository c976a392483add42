"""The repository checks itself: lengths, first lines, words, modules without a user.

Goal: what the rules of the house ask for stays true without a reviewer.  Method: read every Python
file that is written by hand; the limits are in constants here and nowhere else.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
MACHINES = {
    "bookie/serving/session.py",
    "dlcore/flight/producer_client.py",
    "dlcore/flight/producer_server.py",
    "dlcore/ledger/reading/follow.py",
    "dlcore/ledger/recovering/recovery.py",
    "dlcore/ledger/writing/appender.py",
    "dlcore/log/reading/holding.py",
    "dlcore/log/reading/tail.py",
    "dlcore/log/staging/commit.py",
    "dlcore/log/writing/append.py",
    "dlcore/wire/session.py",
}
"""Each is one protocol, which is one file however long: cut into pieces it would be read whole."""
LEAVES = (ast.Name, ast.Constant, ast.expr_context)
"""Two thirds of a tree, of which no fact is asked."""
PACKAGES = ("dlcore", "bookie", "dlspark")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "demo", "tools")
QUESTION_WORDS = ("How ", "What ", "When ", "Where ", "Which ", "Who ", "Whose ", "Why ")

# Spelled in pieces, so that this file passes its own test.
UNFINISHED = re.compile(
    r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b"
)
ROOMS_WITHOUT_A_SUBJECT = {"utils", "util", "common", "helpers", "misc", "core", "base"}
# One word for each thing; these are another system's words for ours, but where it is meant.
FOREIGN_WORDS = re.compile(
    r"\b(" + "|".join(("bro" + "kers?", "to" + "pics?", "sha" + "rds?")) + r")\b", re.I
)
SPEAKS_OF_THE_OTHER = (
    "benchmarks/peers/",
    "dlcore/proxy/kafka/",
    "tests/dlcore/proxy/kafka/",
    "tests/fixtures/kafka",
    "tests/integration/test_kafka",
    "tests/kafka_clients/",
)
"""Files that run the other system, or have the words of its protocol."""
# A sentence that begins with one of these names its subject late or never, and is read twice.
LATE_SUBJECT = re.compile(
    r"(?:^|(?<=[.!?] ))(?:What|Who|Whoever|Whose|Whom|Of|So|Likewise)\b.{0,40}"
)
STARTS_TASKS = "dlcore/base/background.py"
# These leave open which process is meant, or what it does; "tell" is for messages.
DIM_PHRASES = re.compile(
    r"\b(?:lets? go of|told of|(?:is|are|was|were|be|been) (?:told|met))\b.{0,40}", re.I
)
DIM_WORDS = re.compile(
    r"(?:(?:^|(?<=[.!?] ))(?:Who|Whose|Whom)"
    r"|\b(?:he|him|his|himself|whoever|all the same|even so))\b.{0,40}",
    re.I,
)
# Each of these hides who does what: a client, a writer; sent, reported, acknowledged.
REFUSED_WORDS = re.compile(
    "(?<![a-z])("
    + "|".join(("to" + "ld", "unto" + "ld", "no" + "body", "some" + "body", "who" + "ever"))
    + "|"
    + "|".join(("ha" + "sty", "like" + "wise"))
    + ")(?![a-z])",
    re.I,
)
# A test's name is a sentence, too.
LATE_NAME = re.compile(r"def test_(?:what|who|whose|whom|of|so)_")
KEEPS_REFUSED_WORDS = {
    "dlcore/ops/diagnosis/collecting.py": "a key in archives",
    "dlcore/ops/diagnosis/faults.py": "a key in archives",
    "tests/dlcore/ops/diagnosis/test_faults.py": "a key in archives",
    "tests/elsewhere/places.py": "the name of a user of the system",
    "tests/test_paragraphs.py": "refused examples",
    "tests/test_tidy.py": "refused examples",
    "tests/upgrade/make_fixtures.py": "a file of releases",
    "tests/upgrade/test_formats.py": "a file of releases",
}
"""Files in which a stored name has such a word, or that show what is refused."""


def hand_written_files() -> list[Path]:
    """Return all Python files of the repository but the generated ones."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted([*(path for path in found if "_pb2" not in path.name), *ROOT.glob("*.py")])


def name_of(path: Path) -> str:
    """Return the path of a file inside the repository, for test ids and messages."""
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The text of every file by its name."""
    found = {name_of(path): path.read_text(encoding="utf-8") for path in hand_written_files()}
    # A wrong root would let everything pass.
    assert {"dlcore/base/errors.py", "tests/test_tidy.py"} <= found.keys()
    return found


def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes of a tree without its leaves, faster than `ast.walk`."""
    found: list[ast.AST] = [tree]
    for node in found:  # which grows
        for name in node._fields:
            child = getattr(node, name)
            children = child if isinstance(child, list) else (child,)
            found += [
                each
                for each in children
                if isinstance(each, ast.AST) and not isinstance(each, LEAVES)
            ]
    return found


def is_product(name: str) -> bool:
    """Whether a file is of a package that users install."""
    return name.startswith(tuple(f"{package}/" for package in PACKAGES))


@dataclass(frozen=True)
class Facts:
    """The facts about a file's syntax tree, which is too large to keep."""

    opening: str
    long_functions: list[str]
    imported: set[str]
    dark_sentences: list[str]
    bare_tasks: list[str]

    @classmethod
    def of(cls, name: str, tree: ast.Module) -> Facts:
        """Walk it once."""
        nodes = nodes_of(tree)
        docstrings = docstrings_of(nodes)
        return cls(
            opening=(ast.get_docstring(tree) or "").split("\n\n")[0].rstrip(),
            long_functions=[
                f"{name}:{node.lineno} {node.name} has {lines} lines"
                for node in nodes
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                if (lines := function_line_count(node)) > FUNCTION_LINES_MAX
            ],
            imported=set().union(*map(imported_modules, nodes)),
            dark_sentences=[
                f"{name}:{line}: {found}"
                for line, text in docstrings
                for found in dark_sentences(text)
            ],
            bare_tasks=[
                f"{name}:{line}: {found}"
                for line, found in (bare_tasks(nodes) if is_product(name) else ())
            ],
        )


@pytest.fixture(scope="module")
def facts(sources: dict[str, str]) -> dict[str, Facts]:
    """The facts of every file by its name."""
    return {name: Facts.of(name, ast.parse(source)) for name, source in sources.items()}


def test_files_open_with_one_sentence(facts: dict[str, Facts]) -> None:
    """A module says first what lives in it."""
    opened = {name: each.opening for name, each in facts.items()}
    assert not {name: first for name, first in opened.items() if not first.endswith((".", ":"))}
    assert not {name: first for name, first in opened.items() if first.startswith(QUESTION_WORDS)}


def test_files_can_be_read_at_once(sources: dict[str, str]) -> None:
    """A longer one has more than one subject."""
    lengths = {name: source.count("\n") for name, source in sources.items()}
    long = {name for name, lines in lengths.items() if lines > FILE_LINES_MAX}
    assert long == MACHINES, "divide a longer file; only a machine in `MACHINES` is one file"


def test_functions_fit_on_a_screen(facts: dict[str, Facts]) -> None:
    """Lines of a function count without its docstring."""
    assert not [function for each in facts.values() for function in each.long_functions]


def function_line_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the physical lines of a function, its docstring left out."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


@pytest.mark.parametrize("unwanted", [UNFINISHED, FOREIGN_WORDS], ids=["unfinished", "foreign"])
def test_words(sources: dict[str, str], unwanted: re.Pattern[str]) -> None:
    """No unfinished work is left marked, and each thing has one word."""
    assert not [
        f"{name}:{number}: {line.strip()}"
        for name, source in sources.items()
        if unwanted is UNFINISHED or not name.startswith(SPEAKS_OF_THE_OTHER)
        for number, line in enumerate(source.splitlines(), start=1)
        if unwanted.search(line)
    ]


def test_every_room_has_a_subject() -> None:
    """Modules are named by what they hold."""
    nameless = [
        name_of(path) for path in hand_written_files() if path.stem in ROOMS_WITHOUT_A_SUBJECT
    ]
    assert not nameless


def test_no_module_is_dead(facts: dict[str, Facts]) -> None:
    """Each module of a package is imported by another file, or is an entry point."""
    imported = set[str]().union(*(each.imported for each in facts.values()))
    dead = []
    for path in hand_written_files():
        relative = path.relative_to(ROOT)
        if relative.parts[0] not in PACKAGES or path.stem in {"__init__", "__main__"}:
            continue
        if ".".join(relative.with_suffix("").parts) not in imported:
            dead.append(str(relative))
    assert not dead


def imported_modules(node: ast.AST) -> set[str]:
    """Return every dotted name that `node` may mean, if it is an import."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    if isinstance(node, ast.Call) and is_import_module(node):
        return {
            argument.value
            for argument in node.args
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        }
    return set()


def is_import_module(node: ast.Call) -> bool:
    """Whether a call is `importlib.import_module(…)`."""
    return isinstance(node.func, ast.Attribute) and node.func.attr == "import_module"


def test_docstrings_name_their_subjects(facts: dict[str, Facts]) -> None:
    """A sentence says first what it is about, and a client is no person."""
    assert not [found for each in facts.values() for found in each.dark_sentences]


def test_comments_name_their_subjects(sources: dict[str, str]) -> None:
    """As docstrings do."""
    assert not [
        f"{name}:{line}: {found}"
        for name, source in sources.items()
        for line, text in comments_of(source)
        for found in LATE_SUBJECT.findall(text)
    ]


def comments_of(source: str) -> list[tuple[int, str]]:
    """Return the comments of a file with their first lines, wrapped ones joined."""
    found: list[tuple[int, str]] = []
    followed = (0, 0)  # the place of the next line of the latest comment
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        (line, column), text = token.start, token.string.lstrip("#").strip()
        if token.line[:column].strip():
            found.append((line, text))
            continue
        if followed == token.start:
            first, before = found.pop()
            line, text = first, f"{before} {text}"
        found.append((line, text))
        followed = (token.start[0] + 1, column)
    return found


def test_a_wrapped_comment_is_one_text() -> None:
    """A line that goes on begins no sentence; the end of a line of code does."""
    source = "a = 1\n# Ends of\n# What it holds.\nb = 2  # Of these\n# So it is\n"
    assert comments_of(source) == [(2, "Ends of What it holds."), (4, "Of these"), (5, "So it is")]


def docstrings_of(nodes: list[ast.AST]) -> list[tuple[int, str]]:
    """Return the docstrings of modules, classes, functions and attributes, with their lines."""
    bodies = (getattr(node, "body", None) for node in nodes)
    return [
        (statement.lineno, " ".join(statement.value.value.split()))
        for body in bodies
        if isinstance(body, list)
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement.value.value, str)
    ]


def dark_sentences(text: str) -> list[str]:
    """Return the sentences that begin with a forbidden word, and the uses of other ones."""
    return [each for rule in (LATE_SUBJECT, DIM_PHRASES, DIM_WORDS) for each in rule.findall(text)]


def test_texts_and_names_have_no_refused_word(sources: dict[str, str]) -> None:
    """Code, comments and messages name the process that acts, and its act."""
    found = {
        name: [
            f"{name}:{number}: {line.strip()}"
            for number, line in enumerate(source.splitlines(), start=1)
            if REFUSED_WORDS.search(line) or LATE_NAME.search(line)
        ]
        for name, source in sources.items()
    }
    assert not [line for name in found.keys() - KEEPS_REFUSED_WORDS.keys() for line in found[name]]
    assert not [name for name in KEEPS_REFUSED_WORDS if not found[name]]


@pytest.mark.parametrize(
    "line",
    ["# A client is told.", "def test_nobody_waits() -> None:", "_TOLD_BYTES = 4", "Likewise."],
)
def test_a_refused_word_is_found(line: str) -> None:
    """Also as a part of a name, and in capitals."""
    assert REFUSED_WORDS.search(line)


def test_a_late_name_is_found() -> None:
    """A name that says its subject first is left alone."""
    assert LATE_NAME.search("def " + "test_" + "what_is_sent_arrives() -> None:")
    assert not LATE_NAME.search("def test_a_message_arrives() -> None:")


@pytest.mark.parametrize(
    "text",
    [
        "What a log holds.",
        "A log's end.  Of those the last.",
        "It waits. So it is late.",
        "Is it ours?  Whoever asks knows.",
        "A subscriber, and his position.",
        "It serves whoever comes.",
        "A failure is told.",
        "The proxy lets go of the log.",
        "The damage is met at a read.",
    ],
)
def test_a_dark_sentence_is_found(text: str) -> None:
    """The rule notices each kind: a check that finds nothing would pass for ever."""
    assert dark_sentences(" ".join(text.split()))


@pytest.mark.parametrize(
    "text",
    ["Return what a log holds.", "The end of a log, so that it stays.", "This is theirs."],
)
def test_a_plain_sentence_is_let_be(text: str) -> None:
    """These words may stand within a sentence."""
    assert not dark_sentences(text)


def test_tasks_have_an_owner(facts: dict[str, Facts]) -> None:
    """The product starts tasks in groups, or through the one module whose tasks all end."""
    assert facts[STARTS_TASKS].bare_tasks
    assert not [
        found
        for name, each in facts.items()
        if is_product(name) and name != STARTS_TASKS
        for found in each.bare_tasks
    ]


def bare_tasks(nodes: list[ast.AST]) -> list[tuple[int, str]]:
    """Return the uses of functions that start or gather tasks which no owner has to end."""
    groups = {name for node in nodes for name in task_groups(node)}
    return [
        (node.lineno, ast.unparse(node))
        for node in nodes
        if isinstance(node, ast.expr | ast.stmt) and leaves_tasks(node, groups)
    ]


def leaves_tasks(node: ast.expr | ast.stmt, groups: set[str]) -> bool:
    """Whether a node is such a use; the tasks of `groups` end with their blocks."""
    match node:
        case ast.Attribute(value, "create_task"):
            return ast.unparse(value) not in groups
        case ast.Attribute(_, "ensure_future") | ast.ImportFrom(module="asyncio"):
            return True
        case ast.Attribute(_, "gather"):
            return ast.unparse(node) == "asyncio.gather"
    return False


def task_groups(node: ast.AST) -> set[str]:
    """Return the names that `node` gives to task groups."""
    match node:
        case ast.withitem(ast.Call(ast.Attribute(_, "TaskGroup")), ast.Name(name)):
            return {name}
        case ast.arg(name, ast.Attribute(_, "TaskGroup")):
            return {name}
    return set()


@pytest.mark.parametrize(
    "code",
    [
        "asyncio.create_task(work())",
        "self._loop.create_task(work())",
        "start = partial(asyncio.get_running_loop().create_task, name='work')",
        "asyncio.ensure_future(work())",
        "from asyncio import create_task",
        "await asyncio.gather(one(), other(), return_exceptions=True)",
        "await asyncio.gather(one(), other())",
    ],
)
def test_a_bare_task_is_found(code: str) -> None:
    """The rule notices each kind."""
    assert bare_tasks(list(ast.walk(ast.parse(code))))


@pytest.mark.parametrize(
    "code",
    [
        "async with asyncio.TaskGroup() as tries:\n    tries.create_task(work())",
        "def start(tries: asyncio.TaskGroup) -> None:\n    tries.create_task(work())",
        "async with side_tasks() as tasks:\n    tasks.start(work())",
        "await together(one(), other())",
        "spans.gather(one)",
    ],
)
def test_a_task_with_an_owner_is_let_be(code: str) -> None:
    """The block, or the caller that awaits all of them, ends these."""
    assert not bare_tasks(list(ast.walk(ast.parse(code))))
