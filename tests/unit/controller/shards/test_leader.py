"""The leader: replicas go where they are lacked, a dead shard's go to the others, and none moves without need."""

from collections import Counter

from controller.scaling.signals import Serve
from controller.shards.leader import ARRIVE_S, SILENT_S, Leader
from protocol.shards import ShardReport


class Shards:
    """Shards that do as the leader says; time goes on by half a second a round."""

    def __init__(self, *replicas: int) -> None:
        self.leader, self.now_s = Leader(len(replicas)), 0.0
        self.replicas = Counter(dict(enumerate(replicas)))
        self.alive = set(range(len(replicas)))
        self.moved = 0

    def round(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.now_s += 0.5
            for shard in sorted(self.alive):
                orders = self.leader.sync(ShardReport(shard, self.replicas[shard]), self.now_s)
                for other, count in orders.give:
                    self.replicas[shard] -= count
                    self.replicas[other] += count
                    self.moved += count

    def newcomer(self) -> None:
        self.replicas[self.leader.home(self.now_s)] += 1


def test_newcomers_are_spread() -> None:
    shards = Shards(0, 0, 0, 0)
    shards.round()
    for _ in range(10):
        shards.newcomer()
    assert sorted(shards.replicas.values()) == [2, 2, 3, 3]
    shards.round(5)
    assert shards.moved == 0


def test_a_shard_that_comes_late_gets_its_part_some_at_a_time() -> None:
    shards = Shards(40, 0)
    shards.round(2)
    assert 1 <= shards.moved <= 8, "a tenth of those that it has"
    shards.round(40)
    assert (shards.replicas[0], shards.replicas[1]) == (20, 20)
    moved = shards.moved
    shards.round(10)
    assert shards.moved == moved, "nothing moves without need"


def test_who_is_silent_gets_nothing_and_others_share_its_bounds() -> None:
    shards = Shards(2, 2, 2)
    shards.round(3)
    shards.alive.remove(1)
    assert shards.leader.sync(ShardReport(0, 2), shards.now_s).parts == 3
    shards.now_s += SILENT_S
    shards.alive.remove(2)
    orders = shards.leader.sync(ShardReport(0, 2), shards.now_s)
    assert (orders.place, orders.parts) == (0, 1)
    assert shards.leader.home(shards.now_s) == 0
    shards.alive |= {1, 2}
    shards.round(2)
    orders = shards.leader.sync(ShardReport(2, 2), shards.now_s)
    assert (orders.place, orders.parts) == (2, 3)


def test_a_shard_that_is_no_more_wanted_gives_all_it_has() -> None:
    shards = Shards(3, 3, 4)
    shards.round()
    shards.leader.shards = 2
    shards.round(3)
    assert (shards.replicas[2], shards.replicas[0], shards.replicas[1]) == (0, 5, 5)


def test_replicas_on_their_way_count_where_they_go_and_not_for_ever() -> None:
    shards = Shards(0, 0)
    shards.round()
    homes = [shards.leader.home(shards.now_s) for _ in range(4)]
    assert sorted(homes) == [0, 0, 1, 1]
    shards.now_s += ARRIVE_S / 2
    shards.leader.sync(ShardReport(0, 0), shards.now_s)
    shards.leader.sync(ShardReport(1, 0), shards.now_s)
    shards.now_s += ARRIVE_S
    assert shards.leader.home(shards.now_s) == 0, "the four that were sent never came"


def test_replicas_go_where_the_autoscalers_want_them() -> None:
    shards = Shards(4, 4)
    shards.round()
    sizes = shards.leader.sizes
    assert sizes.follow(Serve(8), [0, 1], 8) is None
    sizes.ask(1, 7)
    for _ in range(3):
        shards.newcomer()
    assert (shards.replicas[0], shards.replicas[1]) == (4, 7)
    shards.round(5)
    assert (shards.replicas[0], shards.replicas[1]) == (4, 7)
