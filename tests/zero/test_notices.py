"""When a rank is told that what it waits for will not come, and when not."""

import pytest
from torch.distributed import HashStore

from lamina.zero.ranks.notices import Board, Doing, Notice, hopeless


def waiting(lane: int, index: int, *started: int) -> Notice:
    return Notice(doing=Doing.WAITING, what=f"{lane}.{index}", lane=lane, index=index, started=started)


def left(*started: int) -> Notice:
    return Notice(doing=Doing.LEFT, what="has left", started=started)


def going(*started: int) -> Notice:
    return Notice(started=started)


THREE = "all wait: rank 0 for 0.3; rank 1 for 0.3; rank 2 for 1.2"


@pytest.mark.parametrize(
    ("notices", "reason"),
    [
        ([waiting(0, 3, 3, 1), going(2, 1)], None),  # it computes
        ([waiting(0, 3, 3, 1), going()], None),  # it has put nothing down yet
        ([waiting(0, 3, 3, 1), left(2, 9)], "rank 1 has left"),
        ([waiting(0, 3, 3, 1), left(3, 1)], None),  # it has done its part, which is on its way
        ([waiting(0, 3, 3, 1), waiting(1, 2, 2, 2)], "all wait: rank 0 for 0.3; rank 1 for 1.2"),
        ([waiting(0, 3, 3, 2), waiting(1, 2, 2, 2)], None),  # rank 1 is being served
        ([waiting(0, 3, 3, 1), waiting(0, 3, 3, 1)], None),  # both of the same: a slow one
        ([waiting(0, 3, 3, 1), waiting(0, 3, 3, 1), waiting(1, 2, 2, 2)], THREE),
        ([waiting(0, 3, 3, 1), waiting(0, 3, 3, 1), going(2, 1)], None),
        ([waiting(0, 3, 3, 1), waiting(1, 2, 3, 2), left(3, 1)], None),  # rank 1 learns it, rank 0 from rank 1
    ],
)  # fmt: skip
def test_nobody_will_come(notices: list[Notice], reason: str | None) -> None:
    assert hopeless(notices, 0) == reason


def test_notices_are_read_as_they_were_put_down() -> None:
    store = HashStore()
    boards = [Board(rank=rank, world_size=2, store=store, started=[4, 5]) for rank in range(2)]
    assert boards[0].read() == [Notice(), Notice()]
    boards[1].put(Doing.WAITING, "block 1", 1, 5)
    assert boards[0].read()[1] == Notice(serial=1, doing=Doing.WAITING, what="block 1", lane=1, index=5, started=(4, 5))
    try:
        raise ValueError("no more data")
    except ValueError:
        boards[1].leave()
    assert boards[0].who_left() == ". rank 1 has closed its engine after ValueError: no more data"


def test_a_store_that_is_gone_is_done_without() -> None:
    class Gone:
        def set(self, *_: str) -> None:
            raise RuntimeError("connection reset")

    board = Board(rank=0, world_size=2, store=Gone(), started=[0])
    board.put(Doing.WAITING, "block 1", 0, 1)
    assert board.read()[1] == Notice()
