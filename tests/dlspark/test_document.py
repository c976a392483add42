"""The pages for users of Spark say what the code does.

Goal: no option without its row, no row without its option.  Method: the tables of the pages on
Spark are made anew and compared; the names of Kafka's options are looked for in docs/kafka.md.
"""

from __future__ import annotations

import re

from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlspark.option_table import KAFKA_NAMES, KAFKA_ONLY, OPTIONS
from tests.fixtures.made_parts import require_as_made
from tests.spark_document import DOCUMENTS, FOLDER, render


def test_the_tables_are_those_of_the_code() -> None:
    """`make pages` was run after the last change."""
    texts = [each.read_text(encoding="utf-8") for each in DOCUMENTS]
    for document, text in zip(DOCUMENTS, texts, strict=True):
        require_as_made(document, render(text))
    text = "".join(texts)
    assert text.count("<!-- made of ") == 4
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert {option.name for option in OPTIONS} <= rows


def test_the_size_of_a_record_is_that_of_the_code() -> None:
    """The example of a value, and of a row of a typed log."""
    for page in ("spark-read", "spark-typed"):
        text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
        assert re.findall(r"at most ([0-9,]+) bytes", text) == [f"{RECORD_SIZE_BYTES_MAX:,}"], page


def test_every_name_of_kafkas_source_has_its_row() -> None:
    """And what stands beside it is an option of ours."""
    text = (FOLDER / "kafka.md").read_text(encoding="utf-8")
    names = {option.name for option in OPTIONS}
    for name, ours in KAFKA_NAMES.items():
        assert re.search(rf"^\| `{re.escape(name)}` \|", text, re.MULTILINE), name
        assert set(ours.split(" or ")) <= names
    for name in KAFKA_ONLY:
        assert f"`{name}`" in text, name


def test_errors_in_the_page_on_deploying_are_what_the_code_says() -> None:
    """Spark's own apart, which are known by their capitals or by what they name."""
    root = FOLDER.parent
    sources = "".join(
        file.read_text(encoding="utf-8")
        for package in ("dlcore", "dlspark")
        for file in sorted((root / package).rglob("*.py"))
    )
    said = re.sub(r'"\s*\n\s*f?"', "", sources)
    page = (root / "docs" / "deploying-spark.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page.partition("## Errors")[2], re.MULTILINE)
    assert len(rows) > 10
    of_spark = r"[A-Z_]+$|'|No module|MemoryError$|does not support|Data source not found|Python w"
    for text in re.findall(r"`([^`]+)`", " ".join(rows)):
        if not re.match(of_spark, text):
            assert all(part.strip() in said for part in text.split("…")), text
