"""Reads what the racecheck tool of compute-sanitizer prints, hazard by hazard (``--racecheck-report hazard``)."""

import re

PREFIX = "========="
# Threads that hold copies of one value, as layouts of Triton let lanes of a warp, all store it: which one is last does
# not matter. Values are printed byte by byte.
COPIES = re.compile(
    r"""^\w+:\ Potential\ WAW\ hazard\ detected\ at\ __shared__\ 0x[0-9a-f]+\ in\ block\ \([\d,\ ]+\)\ :\n
    Write\ Thread\ \([\d,\ ]+\)\ at\ (?P<instruction>\S.*\+0x[0-9a-f]+.*)\n
    Write\ Thread\ \([\d,\ ]+\)\ at\ (?P=instruction)\n
    Current\ Value\ :\ (?P<value>\w+),\ Incoming\ Value\ :\ (?P=value)$""",
    re.MULTILINE | re.VERBOSE,
)
SUMMARY = re.compile(r"^RACECHECK SUMMARY: (\d+) hazards? displayed \(\d+ errors?, \d+ warnings?\)$", re.MULTILINE)


def races(printed: str) -> list[str]:
    """The lines of the tool that may tell of a race; none if all is well.

    All is well with hazards that are two writes of equal values by one instruction, and as many of them as the summary
    counts. Whatever else the tool said is returned, understood or not.
    """
    lines = [line.removeprefix(PREFIX).strip() for line in printed.splitlines() if line.startswith(PREFIX)]
    left, copies = COPIES.subn("", "\n".join(lines))
    if SUMMARY.findall(left) == [str(copies)]:
        left = SUMMARY.sub("", left)
    elif not SUMMARY.search(left):
        left += "\nno summary"
    return [line for line in left.splitlines() if line not in ("", "COMPUTE-SANITIZER")]
