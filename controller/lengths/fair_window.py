"""The latest items of many tenants, of which no named tenant has more than its part. Pure."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

SHARES = 4  # a named tenant has at most one of so many parts: a client that sends odd lengths is heard, not obeyed
ANYBODY = ""  # whoever is not known by a tenant's name

Item = TypeVar("Item")


class FairWindow(Generic[Item]):
    """A sliding window over ``size`` items, oldest first."""

    def __init__(self, size: int) -> None:
        self.size, self._next = size, 0
        self._items: OrderedDict[int, tuple[str, Item]] = OrderedDict()
        self._places: dict[str, deque[int]] = {}

    def append(self, tenant: str, item: Item) -> Item | None:
        """Add an item; the oldest of this tenant or, where the window is full, of all makes room, and is returned."""
        left: Item | None = None
        if (places := self._places.get(tenant)) is None:
            places = self._places[tenant] = deque()
        if tenant != ANYBODY and len(places) >= max(1, self.size // SHARES):
            _tenant, left = self._items.pop(places.popleft())
        elif len(self._items) >= self.size:
            _place, (owner, left) = self._items.popitem(last=False)
            self._places[owner].popleft()
            if not self._places[owner] and owner != tenant:
                del self._places[owner]
        self._items[self._next] = tenant, item
        places.append(self._next)
        self._next += 1
        return left

    def __iter__(self) -> Iterator[Item]:
        return (item for _tenant, item in self._items.values())

    def entries(self) -> Iterator[tuple[str, Item]]:
        """Tenants and their items."""
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)
