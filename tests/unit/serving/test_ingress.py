"""The whole ingress in this process: what clients get, over a replica of plain functions."""

from tests.unit.serving.ingress_scene import MODEL, Ingress


def test_an_answer_comes_from_the_replica_through_vllms_server(ingress: Ingress) -> None:
    answer = ingress.post("/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": 6})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "abcdef"
    assert [each.max_tokens for each in ingress.links.submitted] == [6]
