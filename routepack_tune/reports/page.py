"""The page of every report: one self-contained HTML file, made of sections of plain data.

Nothing is loaded from outside: pictures are inline SVG, the style is in the page, there is no script. Every section
says what it rests on: measured, published, predicted, assumed or synthetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True, slots=True)
class Table:
    """Records under heads; a table without records is not shown."""

    columns: Mapping[str, str]
    """Head to what a cell says, as a format of the record's names."""
    records: Sequence[Mapping[str, Any]]
    tuned: Iterable[int] = field(default=())
    """Rows set off as what the project made."""

    def __len__(self) -> int:
        return len(self.records)

    @property
    def rows(self) -> list[list[str]]:
        """The cells, row by row."""
        return [[cell.format_map(record) for cell in self.columns.values()] for record in self.records]


Block = str | Table | Mapping[str, Any] | Sequence[str]
"""A quiet paragraph (marked as safe: a picture or a verdict), a table, facts by name, a list of lines."""
Section = tuple[str, str, Sequence[Block]]
"""Title, badge that says what the section rests on, and blocks."""
Tile = tuple[str, str, bool]
"""A large number, what it is, and whether it is good news."""


def as_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return records as a table; their names are its heads."""
    return Table({head: f"{{{head}}}" for head in records[0]} if records else {}, records)


def verdict(text: str, lead: str = "") -> Markup:
    """Return a sentence in full ink, with a bold word before it."""
    from markupsafe import Markup

    return Markup("<p><b>{}</b> {}</p>").format(lead, text)


def in_words(topology: Mapping[str, int]) -> str:
    """Return the sizes of a topology that are not 1, in words."""
    sizes = [f"{name.replace('_', ' ').removesuffix(' size')} {size}" for name, size in topology.items() if size != 1]
    return ", ".join(sizes) or "one rank"


def page(title: str, subtitle: str, sections: Sequence[Section], tiles: Sequence[Tile] = ()) -> str:
    """Return a whole page; facts without a value, empty blocks and sections without a block are left out."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("routepack_tune", "reports")
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("page.html.j2")
    shown = [(title, mark, [block for block in map(_known, blocks) if block]) for title, mark, blocks in sections]
    return template.render(title=title, subtitle=subtitle, tiles=tiles, sections=[one for one in shown if one[2]])


def _known(block: Block) -> Block:
    return {name: fact for name, fact in block.items() if fact} if isinstance(block, Mapping) else block
