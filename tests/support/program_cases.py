"""Graphs of programs for tests."""

import numpy as np

from planning.programs.graph import NODE, Nodes

Node = tuple[int, float, float, float, float, int]  # stage, input, output, begin, end, label


def graph(*nodes: Node) -> Nodes:
    """A graph of which every input is fresh."""
    rows = np.zeros(len(nodes), dtype=NODE)
    for row, (stage, inputs, outputs, begin_s, end_s, label) in zip(rows, nodes, strict=True):
        row["stage"], row["input_tokens"], row["fresh_tokens"] = stage, inputs, inputs
        row["output_tokens"], row["begin_s"], row["end_s"], row["label"] = outputs, begin_s, end_s, label
    return rows


def chain(*lengths: tuple[float, float], gap_s: float = 1.0, label: int = 0) -> Nodes:
    """One node per stage, each of input and output, a second long, with tool time between."""
    return graph(*((k, i, o, k * (1.0 + gap_s), k * (1.0 + gap_s) + 1.0, label) for k, (i, o) in enumerate(lengths)))


def drawn(rng: np.random.Generator, most_stages: int = 6, most_siblings: int = 3) -> Nodes:
    """A random graph."""
    nodes, now_s = list[Node](), 0.0
    for stage in range(int(rng.integers(1, most_stages + 1))):
        ends = []
        for _ in range(int(rng.integers(1, most_siblings + 1))):
            begin_s = now_s + float(rng.uniform(0.0, 0.5))
            ends.append(begin_s + float(rng.uniform(0.5, 3.0)))
            lengths = float(rng.integers(10, 5000)), float(rng.integers(1, 800))
            nodes.append((stage, *lengths, begin_s, ends[-1], int(rng.integers(0, 3))))
        now_s = max(ends) + float(rng.uniform(0.0, 5.0))
    return graph(*nodes)
