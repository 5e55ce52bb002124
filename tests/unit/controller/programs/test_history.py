"""What an application's history keeps."""

import numpy as np
import pytest

from controller.programs import history as module
from controller.programs.history import History
from planning.programs.graph import Nodes, complete_stages, execution_s, to_stages
from planning.programs.matching import Prefix, Ranked, graph_similarities, ranked
from tests.support.program_cases import chain, drawn, graph


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> History:
    monkeypatch.setattr(module, "MOST_GRAPHS", 12)
    monkeypatch.setattr(module, "MEDOIDS", 4)
    return History()


def test_a_full_history_keeps_medoids_that_stand_for_all(small: History) -> None:
    rng = np.random.default_rng(0)
    for k in range(13):
        tokens = 100.0 * 10 ** (k % 3) * rng.uniform(0.95, 1.05)
        small.learn(chain((tokens, tokens / 10), (tokens, tokens / 10)), float(k))
    assert len(small) == len(small.ranked) == len(small.uses) == 5
    assert small.uses.sum() == pytest.approx(13.0)
    inputs = small.table.stages["input_tokens"][:5, 0]
    assert {round(float(np.log10(tokens / 100.0))) for tokens in inputs} == {0, 1, 2}, "one of each kind at least"


def test_distances_follow_the_rows(small: History) -> None:
    rng = np.random.default_rng(1)
    for k in range(20):
        small.learn(drawn(rng), float(k))
    count = len(small)
    fresh = [1.0 - graph_similarities(row, small.table) for row in range(count)]
    np.testing.assert_allclose(small._apart[:count, :count], fresh)


def test_nodes_follow_the_rows_and_are_ranked_when_they_are_learnt(
    small: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, calls = np.random.default_rng(1), []

    def counted(nodes: Nodes) -> Ranked:
        calls.append(len(nodes))
        return ranked(nodes)

    for k in range(20):
        small.learn(drawn(rng), float(k))
    for row, each in enumerate(small.ranked):
        stages, requests = np.unique(each.keys >> 32, return_counts=True)
        assert requests.tolist() == small.table.stages["requests"][row, stages].tolist()
    monkeypatch.setattr(module, "ranked", counted)
    own = graph(*((0, 1000.0 + k, 10.0, 0.0, 1.0, 0) for k in range(3)))
    assert len(small.match(own, Prefix(to_stages(own), 1)).rows) > 1
    assert calls == [3], "the program's own, once"


def test_what_programs_took_follows_the_rows(small: History) -> None:
    rng = np.random.default_rng(2)
    for k in range(20):
        small.learn(drawn(rng), float(k))
        each = [small.table.stages[row, : small.table.lengths[row]] for row in range(len(small))]
        expected_s = [execution_s(stages, 0.1, 0.01).sum() for stages in each]
        assert small.execution_s(0.1, 0.01).tolist() == pytest.approx(expected_s)


def test_nodes_count_as_memory_until_their_graph_goes(small: History) -> None:
    """Of 2048 calls side by side a graph takes 49 kB by its nodes, and a single stage."""
    wide = graph(*((0, 1.0 + k, 1.0, 0.0, 1.0, 0) for k in range(100)))
    for count in (*range(1, 13), 5):
        small.learn(wide, 0.0)
        assert len(small) == count
        rows = min(len(small.table.lengths), 12)
        assert small.nbytes == small.table.nbytes + count * 100 * 3 * 8 + rows * 12 * 8


def test_use_decays_by_the_hour_and_what_is_not_used_goes(small: History) -> None:
    small.learn(chain((10, 10)), 0.0)
    for k in range(12):
        small.learn(chain((1000, 10), (1000, 10)), 40 * 3600.0 + k)
    assert len(small) <= 5
    assert not (small.table.lengths[: len(small)] == 1).any(), "0.9 ** 40 of a use is less than LEAST_USE"


def test_a_match_is_of_use() -> None:
    history = History()
    history.learn(chain((100, 10), (200, 20)), 0.0)
    history.learn(chain((5000, 10), (9000, 20)), 0.0)
    own = chain((110, 10))
    match = history.match(own, Prefix(to_stages(own), complete_stages(own)))
    history.on_match(match)
    assert match.rows[0] == 0
    assert history.uses.tolist() == [2.0, 1.0]


def test_an_outlook_reads_the_matched_graphs() -> None:
    history = History()
    history.learn(chain((100, 10), (200, 20), (300, 30), gap_s=4.0), 0.0)
    own = chain((100, 10))
    match = history.match(own, Prefix(to_stages(own), 1))
    seen = history.outlook(match, 0, 0.1, 0.01)
    assert seen.this_s[0] == pytest.approx(2.0)
    assert seen.later_s[0] == pytest.approx(4.0 + 6.0)
    assert seen.later_gaps_s[0] == pytest.approx(8.0)


def test_an_empty_history_has_only_the_prior() -> None:
    history, own = History(), chain((100, 10))
    match = history.match(own, Prefix(to_stages(own), 1))
    assert len(match.rows) == 0
    for stage in (3, 4, 100):
        assert history.outlook(match, stage, 0.1, 0.01).weights.tolist() == [1.0]
