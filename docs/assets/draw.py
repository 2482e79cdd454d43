# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Draws the documentation's pictures: `python docs/assets/draw.py` writes overview.svg and lap.svg beside this file.
Needs nothing but Python.
"""

from __future__ import annotations

from pathlib import Path


RANKS = (("#4e79a7", "#dbe5ef"), ("#e58a2b", "#fbe8d3"), ("#4f9d5b", "#dcefdf"), ("#a8699f", "#f0e1ee"))
"""The colour of each rank's shards: arrived, and not here yet."""
INK, SOFT, LINE, PANEL = "#1f2328", "#59636e", "#c4ccd4", "#f6f8fa"
COPY, COMM, COMPUTE = "#3b6ea5", "#8a5a9e", "#2f7d4f"
FONT = "-apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


class Picture:
    """An SVG under construction."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, line: str = "none", r: float = 4, **style
    ) -> None:
        extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}" fill="{fill}" stroke="{line}"{extra}/>'
        )

    def text(
        self, x: float, y: float, words: str, size: float = 13, color: str = INK, bold: bool = False, at: str = "start"
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" text-anchor="{at}"{weight}>{words}</text>'
        )

    def path(self, points: str, color: str, width: float = 2, head: bool = True, tail: bool = False) -> None:
        ends = (f' marker-end="url(#head{color[1:]})"' if head else "") + (
            f' marker-start="url(#head{color[1:]})"' if tail else ""
        )
        self._parts.append(f'<path d="{points}" fill="none" stroke="{color}" stroke-width="{width:g}"{ends}/>')

    def shards(self, x: float, y: float, w: float, h: float, here: set[int] | None = None) -> None:
        """A block's image, cut in a shard for each rank; those of ranks in `here` have arrived (all by default)."""
        part = w / len(RANKS)
        for rank, (solid, pale) in enumerate(RANKS):
            self.box(x + rank * part, y, part, h, solid if here is None or rank in here else pale, "#ffffff", 2)

    def write(self, path: Path) -> None:
        width, height = self._size
        heads = "".join(
            f'<marker id="head{color[1:]}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="11" markerHeight="11" '
            f'orient="auto-start-reverse" markerUnits="userSpaceOnUse"><path d="M0 0L10 5L0 10z" fill="{color}"/>'
            "</marker>"
            for color in (SOFT, COPY, COMM, *(solid for solid, _ in RANKS))
        )
        body = "\n".join(self._parts)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="{FONT}" role="img" aria-label="{self._title}">\n'
            f"<title>{self._title}</title>\n"
            f'<defs>{heads}</defs>\n<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" '
            f'fill="#ffffff" stroke="{LINE}"/>\n{body}\n</svg>\n'
        )


def draw_overview(path: Path) -> None:
    """Where the bytes of a block go: files, host memory, a shard for each rank, the gather, two slots."""
    picture = Picture(1120, 440, "The way of a block from the checkpoint to the device, with four ranks")
    top = 100
    headings = ((40, "Checkpoint"), (216, "Host memory"), (506, "Host links"), (700, "Devices"))
    for x, words in headings:
        picture.text(x, 44, words, 17, bold=True)
    picture.text(40, 64, "safetensors files", 12.5, SOFT)
    picture.text(216, 64, "one copy per host, shared by its ranks", 12.5, SOFT)
    picture.text(506, 64, "each rank copies its 1/N", 12.5, SOFT)
    picture.text(506, 82, "copy stream", 12.5, COPY, True)
    picture.text(700, 64, "two block-sized slots on each, whatever the model's depth", 12.5, SOFT)

    for index in range(3):
        x, y = 44 + 10 * index, top + 87 + 14 * index
        picture.box(x, y, 84, 104, "#ffffff", SOFT, 5)
        for line in range(5):
            picture.box(x + 12, y + 16 + 16 * line, 60 - 12 * (line % 2), 5, LINE, r=2)
    picture.path(f"M158 {top + 153}H206", SOFT)

    picture.box(216, top - 10, 250, 326, PANEL, LINE, 8)
    names = ("block 0", "block 1", "...", "block k", "block k+1", "...", "block n")
    rows = [top + 7 + 43 * index for index in range(len(names))]
    for name, y in zip(names, rows):
        if name == "...":
            picture.text(352, y + 18, "⋮", 20, SOFT, at="middle")
            continue
        streaming = name == "block k+1"
        picture.text(304, y + 19, name, 13, INK if streaming else SOFT, streaming, at="end")
        picture.shards(314, y, 136, 28)
        if streaming:
            picture.box(311, y - 3, 142, 34, "none", INK, 4, stroke_width=2)

    start = rows[4] + 14
    lanes = [top + 84 * rank for rank in range(len(RANKS))]
    for rank, (solid, _) in enumerate(RANKS):
        y = lanes[rank]
        picture.box(700, y - 10, 300, 74, PANEL, LINE, 8)
        picture.text(712, y + 32, f"rank {rank}", 13, solid, True)
        picture.shards(772, y + 2, 100, 28)
        picture.shards(886, y + 2, 100, 28, {rank})
        picture.text(822, y + 49, "block k computes", 11.5, COMPUTE, at="middle")
        picture.text(936, y + 49, "block k+1 arrives", 11.5, SOFT, at="middle")
        picture.path(f"M458 {start}C560 {start} 560 {y + 27} 690 {y + 27}", solid, 3)

    bus = 1022
    picture.path(f"M{bus} {lanes[0] + 14.5}V{lanes[-1] + 17.5}", COMM, 4, head=False)
    for y in lanes:
        picture.path(f"M{bus} {y + 16}H994", COMM, 3)
    middle = (lanes[0] + lanes[-1]) / 2 + 16
    for index, (words, color, bold) in enumerate(
        (
            ("comm", COMM, True),
            ("stream", COMM, True),
            ("all-gather", SOFT, False),
            ("over the", SOFT, False),
            ("fast links", SOFT, False),
        )
    ):
        picture.text(1036, middle - 32 + 18 * index, words, 13 if bold else 12.5, color, bold)
    picture.write(path)


def draw_lap(path: Path) -> None:
    """When things happen: one lap over five blocks with two slots."""
    picture = Picture(1120, 300, "One lap over five blocks with two slots")
    left, unit, top, height = 150, 160, 74, 40
    picture.text(32, 40, "One pass, five blocks, two slots", 17, bold=True)
    lanes = (("copy stream", COPY), ("comm stream", COMM), ("compute", COMPUTE))
    ys = [top + 56 * index for index in range(3)]
    for (name, color), y in zip(lanes, ys):
        picture.text(32, y + 25, name, 13.5, color, True)
        picture.box(left, y, 5 * unit + 136, height, PANEL, r=4)
    for index in range(5):
        slot = index % 2
        x = left + index * unit
        shade = COMPUTE if slot == 0 else "#5aa878"
        picture.box(x + 1, ys[2], unit - 2, height, shade, r=4)
        picture.text(x + unit / 2, ys[2] + 25, f"block {index}, slot {slot}", 12.5, "#ffffff", True, "middle")
        following, target = (index + 1) % 5, (index + 1) % 2
        picture.box(x + 4, ys[0], 78, height, COPY if target == 0 else "#6f9ac6", r=4)
        picture.text(x + 43, ys[0] + 25, f"1/N of {following}", 12.5, "#ffffff", True, "middle")
        picture.box(x + 84, ys[1], 44, height, COMM if target == 0 else "#b088c0", r=4)
        picture.text(x + 106, ys[1] + 25, f"{following}", 12.5, "#ffffff", True, "middle")
        picture.path(f"M{x + 128} {ys[1] + 20}H{x + unit + 10}V{ys[2] - 4}", SOFT, 1.5)
    picture.text(left + 5 * unit + 16, ys[2] + 18, "the next pass", 12.5, SOFT)
    picture.text(left + 5 * unit + 16, ys[2] + 34, "starts with block 0", 12.5, SOFT)
    notes = (
        "Dark and light are the two slots. A copy into a slot waits until the block that used it last is computed;",
        "a block computes when its gather is done. The host waits for neither: events order the streams.",
    )
    for index, words in enumerate(notes):
        picture.text(left, ys[2] + 72 + 18 * index, words, 12.5, SOFT)
    picture.write(path)


if __name__ == "__main__":
    folder = Path(__file__).parent
    draw_overview(folder / "overview.svg")
    draw_lap(folder / "lap.svg")
