"""Tokens that are made once more, in pieces that end where they ended before."""

from protocol.messages import Delta
from serving.ingress.replays import Cutter


class Reader:
    """What comes through a cutter; ``read`` says that all of it was dealt with."""

    def __init__(self, *cuts: int) -> None:
        self.deltas: list[Delta] = []
        self.cutter = Cutter(cuts, self.deltas.extend)

    def add(self, *tokens: int, finish: str = "", extra: bytes = b"") -> None:
        self.cutter.add(Delta("a", tokens, finish, extra=extra))

    def read(self) -> None:
        self.cutter.read(sum(len(delta.token_ids) for delta in self.deltas))

    @property
    def pieces(self) -> list[tuple[tuple[int, ...], str]]:
        return [(delta.token_ids, delta.finish) for delta in self.deltas]


def test_each_piece_waits_for_the_one_before() -> None:
    reader = Reader(2, 5)
    reader.add(1, 2, 3, 4, 5, 6, finish="stop")
    assert reader.pieces == [((1, 2), "")]
    reader.read()
    assert reader.pieces[1:] == [((3, 4, 5), "")]
    assert not reader.cutter.is_done
    reader.read()
    assert reader.pieces[2:] == [((6,), "stop")]
    assert reader.cutter.is_done


def test_a_piece_comes_whole_however_its_tokens_come() -> None:
    reader = Reader(3)
    reader.add(1, extra=b"x")
    reader.add(2)
    assert reader.pieces == []
    reader.add(3)
    assert reader.pieces == [((1, 2, 3), "")]
    assert reader.deltas[0].extra == b"", "it has the first of the tokens only"
    reader.add(4)
    assert len(reader.pieces) == 1, "not before the reader wants it"
    reader.read()
    reader.add(5)
    assert reader.pieces[1:] == [((4,), ""), ((5,), "")]


def test_an_end_comes_through_before_its_piece_is_whole() -> None:
    reader = Reader(3)
    reader.add(1)
    reader.add(finish="error")
    assert reader.pieces == [((1,), "error")]


def test_an_end_with_the_last_token_of_a_piece_is_a_part_of_it() -> None:
    reader = Reader(2)
    reader.add(1, 2, finish="length")
    assert reader.pieces == [((1, 2), "length")]
