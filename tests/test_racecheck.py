"""The reader of racecheck's hazards, on the format of NVIDIA's documentation and of release 2025."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from racecheck import races

EQUAL = {
    "severity": "Error",
    "kind": "WAW",
    "address": 0,
    "first": "Write Thread (0,0,0) at token_kernel+0x4f60 in triton_decode.py:20",
    "second": "Write Thread (1,0,0) at token_kernel+0x4f60 in triton_decode.py:20",
    "values": "Current Value : 3, Incoming Value : 3",
}
DOCUMENTED = """\
========= COMPUTE-SANITIZER
========= ERROR: Potential WAW hazard detected at __shared__ 0x0 in block (0,0,0) :
========= Write Thread (0,0,0) at WAW()+0x2f0 in raceWAW.cu:20
========= Write Thread (1,0,0) at WAW()+0x2f0 in raceWAW.cu:20
========= Current Value : 1, Incoming Value : 2
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def summary(count: int) -> str:
    return f"RACECHECK SUMMARY: {count} hazard{'s' * (count != 1)} displayed ({count} errors, 0 warnings)"


def report(*hazards: dict[str, object], count: int | None = None) -> str:
    lines = ["a line of the program", "========= COMPUTE-SANITIZER"]
    for hazard in hazards:
        place = f"__shared__ {hazard['address']:#x} in block (11,0,0) :"
        lines.append(f"========= {hazard['severity']}: Potential {hazard['kind']} hazard detected at {place}")
        lines += [f"=========     {hazard[name]}" for name in ("first", "second", "values") if hazard[name]]
        lines.append("========= ")
    lines.append(f"========= {summary(len(hazards) if count is None else count)}")
    return "\n".join(lines) + "\n"


@given(st.lists(st.tuples(st.sampled_from(["Error", "Warning"]), st.integers(0, 2**18), st.integers(0, 255))))
def test_equal_values_of_one_instruction_are_no_race(drawn: list[tuple[str, int, int]]) -> None:
    hazards = [
        EQUAL | {"severity": severity, "address": address, "values": f"Current Value : {v}, Incoming Value : {v}"}
        for severity, address, v in drawn
    ]
    assert races(report(*hazards)) == []


@given(before=st.integers(0, 3), after=st.integers(0, 3), data=st.data())
def test_one_race_among_copies_is_found(before: int, after: int, data: st.DataObject) -> None:
    name, text = data.draw(
        st.sampled_from(
            [
                ("kind", "RAW"),
                ("kind", "WAR"),
                ("first", "Read Thread (0,0,0) at token_kernel+0x4f60 in triton_decode.py:20"),
                ("second", "Write Thread (1,0,0) at token_kernel+0x4f6 in triton_decode.py:20"),
                ("second", "Write Thread (1,0,0) at token_kernel+0x4f600 in triton_decode.py:20"),
                ("second", "Write Thread (1,0,0) at flush_kernel+0x4f60 in triton_decode.py:20"),
                ("second", "Write Thread (1,0,0) at token_kernel+0x4f60"),
                ("second", ""),
                ("values", "Current Value : 3, Incoming Value : 30"),
                ("values", "Current Value : 30, Incoming Value : 3"),
                ("values", "Current Value : 3"),
                ("values", ""),
                ("values", "Current Value : 3, Incoming Value : 3 (invalid memcpy_async synchronization)"),
            ]
        )
    )
    found = races(report(*[EQUAL] * before, EQUAL | {name: text}, *[EQUAL] * after))
    assert sum("hazard detected" in line for line in found) == 1
    assert not text or any(text in line for line in found)


def test_the_documented_hazard_is_a_race() -> None:
    assert races(DOCUMENTED)[0] == "ERROR: Potential WAW hazard detected at __shared__ 0x0 in block (0,0,0) :"
    assert races(DOCUMENTED.replace("Value : 2", "Value : 1")) == []


@pytest.mark.parametrize("count", [0, 1, 3, 22])
def test_a_count_of_other_hazards_than_those_printed_is_a_failure(count: int) -> None:
    assert races(report(EQUAL, EQUAL, count=count)) == [summary(count)]


@pytest.mark.parametrize(
    "line",
    [
        "Error: Race reported between Write access at token_kernel+0x4f60",
        "Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect.",
        "Target application returned an error",
        "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
    ],
)
def test_what_is_not_understood_is_a_failure(line: str) -> None:
    assert line in races(report(EQUAL) + f"========= {line}\n")


@pytest.mark.parametrize("printed", ["", "a line of the program\n", report(EQUAL).rsplit("=========", 1)[0]])
def test_a_report_without_its_end_is_a_failure(printed: str) -> None:
    assert races(printed) == ["no summary"]
