"""KV caches that travel over the network between two engines of one GPU, by vLLM's own connectors."""

from collections.abc import Iterator

import pytest

from replicas.kv_transfer import CONNECTORS, CONSUMER, PRODUCER, missing_package
from tests.support.engine_driver import LOOSE, Driver, submission
from tests.support.hand_over import deltas, first_tokens, prefilled, text

pytestmark = [pytest.mark.integration, pytest.mark.gpu, pytest.mark.timeout(900)]

BLOCK = 32


@pytest.fixture(scope="module", params=["NixlConnector", "MooncakeConnector"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Driver, Driver]]:
    """One to prefill, one to decode, each with ports of its own."""
    connector: str = request.param
    if package := missing_package(connector):
        pytest.skip(f"{connector} needs the package {package}")
    assert CONNECTORS[connector].port_variable
    drivers: list[Driver] = []
    try:
        settings = dict(kv_cache_gib=1.0, max_num_seqs=16, kv_connector=connector)
        drivers.append(Driver(**settings, kv_role=PRODUCER))
        drivers.append(Driver(**settings, kv_role=CONSUMER))
        yield drivers[0], drivers[1]
    finally:
        for driver in drivers:
            driver.stop()


def test_a_prompt_that_one_engine_computed_is_fetched_by_the_other(engines: tuple[Driver, Driver]) -> None:
    prefill, decode = engines
    prompts = [[65 + (place * step) % 60 for place in range(20 * BLOCK + step)] for step in (1, 3, 7, 11)]
    asked = [submission(f"alone-{step}", prompt, 20, LOOSE) for step, prompt in enumerate(prompts)]
    alone = [text(seen) for seen in deltas(decode, asked).values()]
    decode.runner.run(decode.engine._client.reset_prefix_cache_async())
    decode.engine.take_steps()
    moved = prefilled(prefill, [submission(f"moved-{step}", each, 20, LOOSE) for step, each in enumerate(prompts)])
    decoded = deltas(decode, moved)
    both = [first + text(decoded[each.request_id]) for first, each in zip(first_tokens(moved), moved, strict=True)]
    assert both == alone
    computed = sum(step.batch_tokens for step in decode.engine.take_steps())
    assert computed <= sum(map(len, both)) + len(moved) * (BLOCK + 1), "prompts were fetched, not computed again"
