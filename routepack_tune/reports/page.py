"""The page of every report: one self-contained HTML file, made of sections of plain data.

Nothing is loaded from outside: pictures are inline SVG, the style is in the page, there is no script. Every section
says what it rests on: measured, published, predicted, assumed or synthetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under heads; a table without rows is not shown."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    tuned: frozenset[int] = frozenset()
    """Rows set off as what the project made."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A sentence in full ink, with a bold word before it."""

    text: str
    lead: str = ""


Block = str | Table | Verdict | Mapping[str, Any] | Sequence[str]
"""A quiet paragraph (marked as safe: a picture), a table, a verdict, facts by name, a list of lines."""
Section = tuple[str, str, Sequence[Block]]
"""Title, badge that says what the section rests on, and blocks."""
Tile = tuple[str, str, bool]
"""A large number, what it is, and whether it is good news."""


def page(title: str, subtitle: str, sections: Sequence[Section], tiles: Sequence[Tile] = ()) -> str:
    """Return a whole page; facts without a value, empty blocks and sections without a block are left out."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("routepack_tune", "reports"), autoescape=True, undefined=StrictUndefined
    )
    shown = [(title, mark, [block for block in map(_known, blocks) if block]) for title, mark, blocks in sections]
    template = environment.get_template("page.html.j2")
    return template.render(title=title, subtitle=subtitle, tiles=tiles, sections=[one for one in shown if one[2]])


def _known(block: Block) -> Block:
    return {name: fact for name, fact in block.items() if fact} if isinstance(block, Mapping) else block
