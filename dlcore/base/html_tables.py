"""Small HTML tables, for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SHOWN_CHARACTERS = 500
_FIELDS = ("__struct_fields__", "__dataclass_fields__")


class ShownFields:
    """Shows a dataclass or a struct as a table of its fields, but not those without `repr`."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        kind = type(self)
        names = next(filter(None, (getattr(kind, each, ()) for each in _FIELDS)))
        fields = getattr(kind, "__dataclass_fields__", {})
        left_out = {name for name, field in fields.items() if not field.repr}
        shown = {
            name: getattr(self, name)
            for name in names
            if not name.startswith("_") and name not in left_out
        }
        return fields_html(kind.__name__, shown)


def fields_html(title: str, fields: Mapping[str, object]) -> str:
    """Return a table of two columns: names and values."""
    rows = "".join(f"<tr><th>{_text(k)}</th><td>{_text(v)}</td></tr>" for k, v in fields.items())
    return f"<table><caption>{_text(title)}</caption><tbody>{rows}</tbody></table>"


def rows_html(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a header."""
    head = "".join(f"<th>{_text(name)}</th>" for name in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(value)}</td>' for value in row)}</tr>" for row in rows
    )
    return (
        f"<table><caption>{_text(title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _text(value: object) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    text = f"{value:,}" if is_number else str(value)
    return escape(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…")
