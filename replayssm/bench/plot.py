"""Panels of points as an SVG, written by hand: speed-up over batch, cost over tokens, divergence over position."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

Points = Sequence[tuple[int, float]]  # batch or tokens, and what came of it
Mark = Callable[[float, float], str]

PANEL, GAP, LEFT, RIGHT = 270, 40, 60, 20  # pixels, as everything here
TOP, HEIGHT, BOTTOM = 70, 260, 90
STEP = 0.5  # of the speed-up axis, between two lines of its grid
LEAST_TOP = 2.5  # of that axis: holds the floors of large batches, 2.2 and below
WIDE = 560  # of the one panel of drift_plot
COLOURS = "#555555", "#c2571a", "#e0a13a", "#7a9e3a", "#1f8a70", "#1f5fa8", "#7b4fa3"  # of its lines
MEASURED, OTHER, FLOOR, PUBLISHED, GRID, TEXT = "#1f5fa8", "#7a9e3a", "#555555", "#c2571a", "#dddddd", "#222222"


class Series(NamedTuple):
    """Marks, and a line through them if it has a colour."""

    points: Points
    mark: Mark
    line: str | None = None


class Axis(NamedTuple):
    """The vertical axis: the height of a value, the lines of the grid, and how many decimals they are named with."""

    y: Callable[[float], float]
    ticks: Sequence[float]
    decimals: int


def speedup_plot(panels: Sequence[tuple[str, Points, Points, Points]], title: str) -> str:
    """The drawing of speed-up over batch size.

    Args:
        panels: title, and what is measured (a line with dots), the floor of memory traffic (dashes) and what others
            published (diamonds), each as points of batch and speed-up. A floor above the axis is left out: it is that
            of a batch so small that the time is not the traffic's.
    """
    reached = [point for _, measured, _, published in panels for point in (*measured, *published)]
    top = max(LEAST_TOP, STEP * math.ceil(max(speedup for _, speedup in reached) / STEP + 0.1))
    axis = Axis(lambda speedup: HEIGHT * (1 - speedup / top), [STEP * i for i in range(round(top / STEP) + 1)], 1)
    drawn = []
    for name, measured, floor, published in panels:
        seen = [point for point in floor if point[1] <= top]
        drawn.append((name, [Series(seen, _dash), Series(published, _diamond), Series(measured, _dot, MEASURED)]))
    legend = [
        (_dot, "this library", -280),
        (_dash, "floor: its bytes at the measured read ceiling", -170),
        (_diamond, "best published replay kernel", 130),
    ]
    return _drawing(drawn, {batch for batch, _ in reached}, axis, title, "batch (sequences)", legend)


def cost_plot(panels: Sequence[tuple[str, Points, Points, Points, Points]], title: str) -> str:
    """The drawing of the cost of a step over its tokens, on a logarithmic axis.

    Args:
        panels: title, and replay with all tokens kept (a line with dots), with half of them kept (a line with rings),
            native (a line with squares) and what others published of replay (diamonds), each as points of tokens and
            cost in conventional steps.
    """
    reached = [point for _, *series in panels for points in series for point in points]
    costs = [cost for _, cost in reached]
    low, high = math.floor(math.log2(min(costs)) - 0.1), math.ceil(math.log2(max(costs)) + 0.1)
    axis = Axis(
        lambda cost: HEIGHT * (1 - (math.log2(cost) - low) / (high - low)),
        [2.0**power for power in range(low, high + 1)],
        max(0, -low),
    )
    drawn = []
    for name, replay, half, native, published in panels:
        lines = [Series(native, _square, OTHER), Series(half, _ring, MEASURED), Series(replay, _dot, MEASURED)]
        drawn.append((name, [*lines, Series(published, _diamond)]))
    legend = [
        (_dot, "replay, all tokens kept", -400),
        (_ring, "half of them kept", -225),
        (_square, "native, a state for each token", -85),
        (_diamond, "best published replay kernel", 140),
    ]
    return _drawing(drawn, {tokens for tokens, _ in reached}, axis, title, "tokens a step", legend)


def drift_plot(lines: Sequence[tuple[str, Points]], title: str) -> str:
    """The drawing of divergence over position in a text, both on logarithmic axes.

    Args:
        lines: name, and points of position and divergence, all positive.
    """
    places = sorted({place for _, points in lines for place, _ in points})
    values = [value for _, points in lines for _, value in points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high += high == low
    first, last = math.log2(places[0]), math.log2(places[-1])

    def x(place: int) -> float:
        return WIDE * (0.03 + 0.94 * ((math.log2(place) - first) / (last - first) if last > first else 0.5))

    def y(value: float) -> float:
        return HEIGHT * (high - math.log10(value)) / (high - low)

    width, height = LEFT + WIDE + RIGHT, TOP + HEIGHT + 60 + 16 * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(width / 2, 24, title, size=15),
        f'<g transform="translate({LEFT} {TOP})">',
        _text(0, -12, "KL, nats", anchor="start"),
    ]
    for power in range(low, high + 1):
        parts.append(_line(0, y(10.0**power), WIDE, y(10.0**power), GRID))
        parts.append(_text(-6, y(10.0**power) + 4, f"1e{power}", anchor="end"))
    for place in places:
        parts.append(_text(x(place), HEIGHT + 18, f"{place // 1024}K" if place % 1024 == 0 else str(place)))
    parts.append(_text(WIDE / 2, HEIGHT + 36, "position in the text, up to (bytes)"))
    for number, (name, points) in enumerate(lines):
        colour, below = COLOURS[number % len(COLOURS)], HEIGHT + 56 + 16 * number
        through = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in points)
        parts.append(f'<polyline points="{through}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.extend(
            f'<circle cx="{x(place):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>' for place, value in points
        )
        parts.append(_line(10, below - 4, 34, below - 4, colour, width=2))
        parts.append(_text(42, below, name, anchor="start"))
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def _drawing(
    panels: Sequence[tuple[str, Sequence[Series]]],
    places: set[int],
    axis: Axis,
    title: str,
    below: str,
    legend: Sequence[tuple[Mark, str, int]],
) -> str:
    """Panels over one logarithmic horizontal axis of ``places``; the value 1 has a dark line."""
    ordered = sorted(places)
    low, high = math.log2(ordered[0]), math.log2(ordered[-1])
    width = LEFT + len(panels) * (PANEL + GAP) - GAP + RIGHT

    def x(place: int) -> float:
        return PANEL * (0.05 + 0.9 * ((math.log2(place) - low) / (high - low) if high > low else 0.5))

    y = axis.y
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + BOTTOM}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(width / 2, 24, title, size=15),
    ]
    for index, (name, series) in enumerate(panels):
        parts.append(f'<g transform="translate({LEFT + index * (PANEL + GAP)} {TOP})">')
        parts.append(_text(PANEL / 2, -12, name, size=13))
        for tick in axis.ticks:
            parts.append(_line(0, y(tick), PANEL, y(tick), GRID))
            parts.append(_text(-6, y(tick) + 4, f"{tick:.{axis.decimals}f}", anchor="end"))
        parts.append(_line(0, y(1), PANEL, y(1), TEXT))
        for place in ordered:
            parts.append(_text(x(place), HEIGHT + 18, str(place)))
        for points, mark, line in series:
            if line is not None:
                through = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in points)
                parts.append(f'<polyline points="{through}" fill="none" stroke="{line}" stroke-width="2"/>')
            parts.extend(mark(x(place), y(value)) for place, value in points)
        parts.append("</g>")
    parts.append(_text(width / 2, TOP + HEIGHT + 40, below))
    parts.append(_legend(width / 2, TOP + HEIGHT + 68, legend))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(middle: float, y: float, entries: Sequence[tuple[Mark, str, int]]) -> str:
    return "\n".join(
        mark(middle + at, y - 4) + "\n" + _text(middle + at + 14, y, said, anchor="start") for mark, said, at in entries
    )


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{MEASURED}"/>'


def _ring(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="white" stroke="{MEASURED}" stroke-width="2"/>'


def _square(x: float, y: float) -> str:
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{OTHER}"/>'


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
