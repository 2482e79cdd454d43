# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""How long ranks wait for one that computed the last pass: as pure arithmetic, on a clock of the test's own."""

import pytest

from diffusers_dlo.distributed import presence
from diffusers_dlo.distributed.presence import Presence


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(presence.time, "monotonic", lambda: now[0])
    return now


def experienced(clock: list[float], period: float, late: float) -> Presence:
    made = Presence()
    for _ in range(5):
        made.came(late)
        made.pass_begins(expected=True)
        clock[0] += period
    return made


def test_the_first_passes_are_waited_for_in_full(clock: list[float]) -> None:
    made = Presence()
    for _ in range(3):
        assert made.patience(1.0) == 1.0
        made.came(0.0)
        made.pass_begins(expected=True)
    assert made.patience(1.0) == 0.05


@pytest.mark.parametrize(
    "period,late,grace,expected",
    (
        (0.1, 0.0, 1.0, 0.05),  # never less than a twentieth of the grace
        (2.0, 0.0, 1.0, 0.4),  # a fifth of a pass
        (0.1, 0.03, 1.0, 0.12),  # or four times what it was late
        (20.0, 0.0, 1.0, 1.0),  # never more than the grace
        (0.1, 0.0, 30.0, 1.5),
        (20.0, 5.0, 0.0, 0.0),
    ),
)
def test_what_waiting_may_cost(clock: list[float], period: float, late: float, grace: float, expected: float) -> None:
    made = experienced(clock, period, late)
    made.pass_begins(expected=True)  # the period is that between the last two passes
    assert made.patience(grace) == pytest.approx(expected)


def test_who_is_not_expected_is_not_waited_for_until_all_begin_anew(clock: list[float]) -> None:
    made = experienced(clock, 2.0, 0.1)
    made.pass_begins(expected=False)
    assert made.patience(1.0) == 0.0
    made.begin_anew()
    assert made.patience(1.0) == 1.0
