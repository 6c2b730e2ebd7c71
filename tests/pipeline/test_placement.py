from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.crew import FeedError
from pipeline.placement import Plan, plan
from pipeline.spec import FeedSpec

SPEC = FeedSpec("db", 8)


@pytest.mark.parametrize(("cpus", "workers", "most"), [(1, 1, 1), (2, 1, 2), (3, 2, 3), (4, 2, 4), (64, 2, 64)])
def test_auto_begins_with_few_and_may_have_as_many_as_there_are_cpus(cpus: int, workers: int, most: int) -> None:
    assert plan(SPEC, cpus, owner=False) == Plan(workers, 0.75, False, most)


def test_auto_has_no_more_than_what_fits() -> None:
    spec = replace(SPEC, worker_cpus=1.0)
    assert plan(spec, 4, owner=False) == Plan(2, 1.0, False, 3)
    assert plan(replace(spec, worker_cpus=1.5), 4, owner=True) == Plan(2, 1.5, True, 2)
    assert plan(replace(spec, worker_cpus=3.0), 4, owner=True) == Plan(1, 3.0, True, 1)


def test_a_number_that_was_given_is_the_number() -> None:
    assert plan(replace(SPEC, workers=3), 4, owner=False) == Plan(3, 0.75, False, 3)


def test_two_workers_an_owner_and_the_trainer_fit_two_cpus() -> None:
    planned = plan(replace(SPEC, workers=2), 2, owner=True)
    assert planned.workers == 2
    assert planned.cpus == pytest.approx(2 * 0.75 + 0.1 + 0.25)


def test_a_test_feed_beside_it_shares_a_cpu() -> None:
    assert plan(replace(SPEC, workers=1, worker_cpus=0.1), 1, owner=True).cpus < 0.5


def test_what_does_not_fit_fails_with_the_sum_and_what_would() -> None:
    with pytest.raises(FeedError, match="more CPUs than this node has") as caught:
        plan(replace(SPEC, workers=3), 2, owner=True)
    text = str(caught.value)
    assert "3 workers x 0.75 + reader 0.1 + trainer 0.25 = 2.6 CPUs" in text
    assert "found:    2 CPUs" in text
    assert "at most 2" in text


def test_one_worker_that_does_not_fit_is_told_of_the_inline_engine() -> None:
    with pytest.raises(FeedError) as caught:
        plan(replace(SPEC, workers="auto"), 0.5, owner=False)
    assert "inline" in str(caught.value)
