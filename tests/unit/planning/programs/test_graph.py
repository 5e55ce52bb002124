"""Super-nodes of a graph."""

import math

import numpy as np
import pytest

from planning.programs.graph import NODE, complete_stages, execution_s, to_stages
from tests.support.program_cases import chain, graph


def test_siblings_are_one_stage_and_the_longest_sets_its_pace() -> None:
    nodes = graph((0, 100, 10, 0, 1, 7), (1, 200, 30, 3, 5, 8), (1, 300, 90, 3.5, 9, 9), (2, 50, 5, 10, 11, 0))
    stages = to_stages(nodes)
    assert stages["requests"].tolist() == [1, 2, 1]
    assert stages["input_tokens"].tolist() == [100, 500, 50]
    assert stages["output_tokens"].tolist() == [10, 120, 5]
    assert stages["longest_tokens"].tolist() == [10, 90, 5]
    assert stages["gap_s"].tolist() == [0, 2, 1], "tool time from the last end to the first begin"
    assert stages["label"].tolist() == [7, 8, 0], "the first to arrive names it"
    assert execution_s(stages, 0.01, 0.001).tolist() == pytest.approx([0.2, 1.4, 0.1])


def test_a_stage_is_complete_once_all_before_and_in_it_have_ended() -> None:
    nodes = graph((0, 1, 1, 0, 1, 0), (1, 1, 1, 1, math.inf, 0), (1, 1, 1, 1, 2, 0), (2, 1, 1, 2, 3, 0))
    assert complete_stages(nodes) == 1
    assert complete_stages(chain((1, 1), (1, 1))) == 2
    assert complete_stages(np.zeros(0, dtype=NODE)) == 0


def test_stages_that_overlap_have_no_gap() -> None:
    assert to_stages(graph((0, 1, 1, 0, 5, 0), (1, 1, 1, 2, 3, 0), (2, 1, 1, 6, 7, 0)))["gap_s"].tolist() == [0, 0, 1]


def test_a_graph_has_nodes() -> None:
    with pytest.raises(ValueError, match="nodes"):
        to_stages(np.zeros(0, dtype=NODE))
