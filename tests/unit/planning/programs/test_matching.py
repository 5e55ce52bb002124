"""Which known graphs a program resembles."""

import math

import numpy as np
import pytest

from planning.programs.graph import to_stages
from planning.programs.matching import (
    PatternTable,
    Prefix,
    graph_similarities,
    nearest,
    node_similarity,
    ranked,
    similarities,
)
from tests.support.program_cases import chain, graph


def known(*graphs: np.ndarray) -> PatternTable:
    table = PatternTable()
    for row, nodes in enumerate(graphs):
        table.put(row, to_stages(nodes))
    return table


def test_the_graph_of_like_lengths_is_nearest_and_shorter_ones_are_pruned() -> None:
    table = known(
        chain((100, 10), (200, 20), (300, 30)), chain((9000, 900), (9000, 900), (9000, 900)), chain((110, 11))
    )
    found = similarities(Prefix(to_stages(chain((110, 12), (210, 5))), 1), table)
    assert found[0] > 0.8 > 0.3 > found[1] > 0.0
    assert found[2] == 0.0, "it had ended by then"
    assert nearest(found).tolist() == [0, 1]


def test_another_tool_prunes_and_what_is_not_said_does_not() -> None:
    own = chain((100, 10), (200, 20), label=5)
    table = known(own, chain((100, 10), (200, 20), label=6), chain((100, 10), (200, 20)))
    assert similarities(Prefix(to_stages(own), 2), table).tolist() == [1.0, 0.0, 1.0]


def test_the_output_of_a_stage_under_way_does_not_count() -> None:
    table = known(chain((100, 10), (200, 20)))
    running = to_stages(chain((100, 10), (200, 9999)))
    assert similarities(Prefix(running, 1), table)[0] == 1.0
    assert similarities(Prefix(running, 2), table)[0] < 0.9


def test_tool_time_counts() -> None:
    table = known(chain((100, 10), (200, 20), gap_s=0.5), chain((100, 10), (200, 20), gap_s=60.0))
    found = similarities(Prefix(to_stages(chain((100, 10), (200, 20), gap_s=50.0)), 1), table)
    assert found[1] > found[0]


def test_nodes_tell_apart_what_super_nodes_do_not() -> None:
    even = graph((0, 100, 50, 0, 1, 0), (0, 100, 50, 0, 1, 0))
    odd = graph((0, 10, 1, 0, 1, 0), (0, 190, 99, 0, 1, 0))
    assert similarities(Prefix(to_stages(even), 1), known(odd))[0] == pytest.approx(1.0)
    assert node_similarity(ranked(even), ranked(odd), 1) < 0.6
    assert node_similarity(ranked(even), ranked(even), 1) == 1.0


def test_a_node_without_a_partner_counts_as_unlike() -> None:
    one = graph((0, 100, 50, 0, 1, 0))
    two = graph((0, 100, 50, 0, 1, 0), (0, 5000, 50, 0, 1, 0))
    assert node_similarity(ranked(one), ranked(two), 1) == pytest.approx(0.5)
    running = graph((0, 100, 0, 0, math.inf, 0))
    assert node_similarity(ranked(running), ranked(one), 1) == 1.0, "its output is not known yet"


def test_wholes_are_compared_by_the_shorter_prefix_and_their_lengths() -> None:
    table = known(chain((100, 10), (200, 20)), chain((100, 10), (200, 20), (300, 30), (400, 40)))
    found = graph_similarities(0, table)
    assert found.tolist() == [1.0, 0.5]
    assert graph_similarities(1, table).tolist() == [0.5, 1.0]


def test_a_table_grows_and_keeps_rows() -> None:
    graphs = [chain(*[(100.0 * (k + 1), 10.0)] * (k + 1)) for k in range(20)]
    table = known(*graphs)
    table.keep(np.array([19, 3]))
    assert table.count == 2
    assert table.lengths[:2].tolist() == [20, 4]
    assert table.stages["input_tokens"][1, :5].tolist() == [400, 400, 400, 400, 0]
