"""All delivery features at once, kill -9 in between, and one checker that knows what must be true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.delivery_checking import check, report
from tests.fault.delivery_ledger import Ledger
from tests.fault.delivery_life import Life
from tests.sampling import SEED, sample_size

ROUNDS = sample_size(share=8, whole=60)
LIVES = sample_size(share=1, whole=8)
CALM_S = 4.0


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(LIVES))
def test_all_delivery_features_hold_while_processes_are_killed(tmp_path: Path, number: int) -> None:
    seed = f"{SEED} delivery {number}"
    with Life(tmp_path, seed) as life:
        try:
            life.trouble(ROUNDS)
            life.calm(CALM_S)
            letters = life.settle()
        except BaseException as error:
            error.add_note(f"DMQ_SEED={SEED}, life {number}, last: {life.done[-8:]}")
            raise
    ledger = Ledger(life.events(), letters)
    try:
        check(ledger)
    except AssertionError as error:
        error.add_note(f"DMQ_SEED={SEED}, life {number}, {life.done}\n{report(ledger)}")
        raise
    print(f"DMQ_SEED={SEED}, life {number}, {life.kills} kills of the broker:", report(ledger))
