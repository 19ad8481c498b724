"""Speed-up over batch size as an SVG, written by hand: panels side by side on one scale."""

import math
from collections.abc import Sequence
from html import escape

Points = Sequence[tuple[int, float]]  # batch, speed-up

PANEL, GAP, LEFT, RIGHT = 270, 40, 60, 20  # pixels, as everything here
TOP, HEIGHT, BOTTOM = 70, 260, 90
STEP = 0.5  # of the speed-up axis, between two lines of its grid
LEAST_TOP = 2.5  # of that axis: holds the floors of large batches, 2.2 and below
MEASURED, FLOOR, PUBLISHED, GRID, TEXT = "#1f5fa8", "#555555", "#c2571a", "#dddddd", "#222222"


def speedup_plot(panels: Sequence[tuple[str, Points, Points, Points]], title: str) -> str:
    """The drawing.

    Args:
        panels: title, and what is measured (a line with dots), the floor of memory traffic (dashes) and what others
            published (diamonds), each as points of batch and speed-up. A floor above the axis is left out: it is that
            of a batch so small that the time is not the traffic's.
    """
    reached = [point for _, measured, _, published in panels for point in (*measured, *published)]
    top = max(LEAST_TOP, STEP * math.ceil(max(speedup for _, speedup in reached) / STEP + 0.1))
    batches = sorted({batch for batch, _ in reached})
    low, high = math.log2(batches[0]), math.log2(batches[-1])
    width = LEFT + len(panels) * (PANEL + GAP) - GAP + RIGHT

    def x(batch: int) -> float:
        return PANEL * (0.05 + 0.9 * ((math.log2(batch) - low) / (high - low) if high > low else 0.5))

    def y(speedup: float) -> float:
        return HEIGHT * (1 - speedup / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + BOTTOM}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(width / 2, 24, title, size=15),
    ]
    for index, (name, measured, floor, published) in enumerate(panels):
        parts.append(f'<g transform="translate({LEFT + index * (PANEL + GAP)} {TOP})">')
        parts.append(_text(PANEL / 2, -12, name, size=13))
        for tick in range(round(top / STEP) + 1):
            parts.append(_line(0, y(tick * STEP), PANEL, y(tick * STEP), GRID))
            parts.append(_text(-6, y(tick * STEP) + 4, f"{tick * STEP:.1f}", anchor="end"))
        parts.append(_line(0, y(1), PANEL, y(1), TEXT))
        for batch in batches:
            parts.append(_text(x(batch), HEIGHT + 18, str(batch)))
        for batch, speedup in floor:
            if speedup <= top:
                parts.append(_dash(x(batch), y(speedup)))
        for batch, speedup in published:
            parts.append(_diamond(x(batch), y(speedup)))
        line = " ".join(f"{x(batch):.1f},{y(speedup):.1f}" for batch, speedup in measured)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{MEASURED}" stroke-width="2"/>')
        parts.extend(_dot(x(batch), y(speedup)) for batch, speedup in measured)
        parts.append("</g>")
    parts.append(_text(width / 2, TOP + HEIGHT + 40, "batch (sequences)"))
    parts.append(_legend(width / 2, TOP + HEIGHT + 68))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(middle: float, y: float) -> str:
    entries = [
        (_dot, "this library", -280),
        (_dash, "floor: its bytes at the measured read ceiling", -170),
        (_diamond, "best published replay kernel", 130),
    ]
    return "\n".join(
        mark(middle + at, y - 4) + "\n" + _text(middle + at + 14, y, said, anchor="start") for mark, said, at in entries
    )


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{MEASURED}"/>'


def _dash(x: float, y: float) -> str:
    return _line(x - 8, y, x + 8, y, FLOOR, width=3)


def _diamond(x: float, y: float) -> str:
    corners = f"{x:.1f},{y - 6:.1f} {x + 6:.1f},{y:.1f} {x:.1f},{y + 6:.1f} {x - 6:.1f},{y:.1f}"
    return f'<polygon points="{corners}" fill="white" stroke="{PUBLISHED}" stroke-width="2"/>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str, width: int = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, said: str, *, anchor: str = "middle", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{TEXT}">{escape(said)}</text>'
