"""Pattern graphs: what the sub-requests of one program were, stage by stage. Numbers only, no text and no names.

A *node* is one sub-request. Sub-requests that run side by side are a *stage*, which is one super-node (Tempo section
4.1, figure 6). Time between the end of a stage and the begin of the next one is tool time: the gap before that stage.
"""

import numpy as np

NODE = np.dtype(
    [
        ("stage", "i4"),  # from 0
        ("input_tokens", "f8"),
        ("fresh_tokens", "f8"),  # of them, not in the prompt or output of an earlier node: left to compute
        ("output_tokens", "f8"),
        ("begin_s", "f8"),  # since the program's first arrival
        ("end_s", "f8"),  # inf while it runs
        ("label", "i8"),  # digest of the model and of the tools called before it; 0: not said
    ]
)
STAGE = np.dtype(
    [
        ("requests", "f8"),
        ("input_tokens", "f8"),  # sum over the stage: weight of the edge into it
        ("output_tokens", "f8"),  # sum over the stage: weight of the super-node
        ("fresh_tokens", "f8"),  # sum over the stage
        ("longest_tokens", "f8"),  # longest output: sets the pace of the stage
        ("gap_s", "f8"),  # tool time before it
        ("label", "i8"),  # 0: not said
    ]
)
Nodes = np.ndarray  # NODE[n]
Stages = np.ndarray  # STAGE[s]


def to_stages(nodes: Nodes) -> Stages:
    """Super-nodes of a graph (STAGE[s], s one more than the last stage of ``nodes``); raises ``ValueError`` for none.

    A stage that no node belongs to, because its sub-requests were refused, is empty.
    """
    if not len(nodes):
        raise ValueError("nodes: a graph has one at least")
    which, count = nodes["stage"], int(nodes["stage"].max()) + 1
    stages = np.zeros(count, dtype=STAGE)
    for name in ("input_tokens", "output_tokens", "fresh_tokens"):
        stages[name] = np.bincount(which, weights=nodes[name], minlength=count)
    stages["requests"] = np.bincount(which, minlength=count)
    np.maximum.at(stages["longest_tokens"], which, nodes["output_tokens"])
    begin_s, end_s = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(begin_s, which, nodes["begin_s"])
    np.maximum.at(end_s, which, np.where(np.isfinite(nodes["end_s"]), nodes["end_s"], nodes["begin_s"]))
    before_s = np.maximum.accumulate(end_s)[:-1]
    stages["gap_s"][1:] = np.where(np.isfinite(begin_s[1:]), np.maximum(0.0, begin_s[1:] - before_s), 0.0)
    said = np.flatnonzero(nodes["label"])
    named, first = np.unique(which[said], return_index=True)
    stages["label"][named] = nodes["label"][said[first]]  # how many siblings follow does not change it
    return stages


def complete_stages(nodes: Nodes) -> int:
    """How many stages from the first one on have ended with all their nodes."""
    running = nodes["stage"][~np.isfinite(nodes["end_s"])]
    return int(running.min()) if len(running) else int(nodes["stage"].max(initial=-1)) + 1


def execution_s(stages: Stages, token_s: float, prompt_token_s: float) -> np.ndarray:
    """Least seconds that each stage runs (f8[s]): its prompts one after the other, then its longest output.

    Args:
        token_s: seconds per output token on an engine that is otherwise idle.
        prompt_token_s: seconds per prompt token in large batches.
    """
    seconds: np.ndarray = stages["fresh_tokens"] * prompt_token_s + stages["longest_tokens"] * token_s
    return seconds
