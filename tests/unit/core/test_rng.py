"""Named random streams and counter-based permutations."""

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.core.rng import Stream, _signed, permutations


def keys(count: int, *names: str | int) -> Tensor:
    return torch.tensor([Stream.of(7, *names, i).key for i in range(count)])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "b"), ("ab",)),
        (("a", "b"), ("b", "a")),
        ((1,), ("1",)),
        ((1, 2), (12,)),
        (("a", "", "b"), ("a", "b")),
        (("a",), ("a", "")),
        (("a\x1fstr:b",), ("a", "b")),
        (("a\\x1fstr:b",), ("a\x1fstr:b",)),
        (("int:1",), (1,)),
        ((-1,), (1,)),
    ],
)
def test_different_names_are_different_streams(
    one: tuple[str | int, ...], other: tuple[str | int, ...]
) -> None:
    assert Stream.of(0, *one) != Stream.of(0, *other)
    assert Stream.of(0).child(*one) != Stream.of(0).child(*other)


def test_the_same_names_are_the_same_stream() -> None:
    assert Stream.of(3, "fit", "a") == Stream.of(3, "fit", "a")
    assert Stream.of(3).child("fit", 2) == Stream.of(3).child("fit", 2)
    assert Stream.of(3) != Stream.of(4)


def test_a_whole_number_of_numpy_is_the_same_name() -> None:
    assert Stream.of(3, int(np.int64(5))) == Stream.of(3, np.int64(5))  # type: ignore[arg-type]


def test_keys_do_not_change_between_versions() -> None:
    assert Stream.of(0).key == -5023766233385703069
    assert Stream.of(0, "fit", 1).child("x").key == -1710292294640557158


def test_generators_of_a_stream_repeat_and_do_not_touch_the_global_state() -> None:
    stream = Stream.of(1, "noise")
    before = torch.random.get_rng_state()
    assert (stream.numpy().random(4) == stream.numpy().random(4)).all()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_generators_of_different_streams_differ() -> None:
    one, other = Stream.of(1, "a"), Stream.of(1, "b")
    assert not (one.numpy().random(4) == other.numpy().random(4)).any()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_a_permutation_has_every_number_once(count: int) -> None:
    order = Stream.of(1, "shuffle").permutation(count)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(count))


def test_a_key_gives_the_same_order_alone_and_among_others() -> None:
    batch = keys(50, "client")
    together = permutations(batch, 37)
    for number in (0, 1, 25, 49):
        assert torch.equal(permutations(batch[number : number + 1], 37)[0], together[number])
        assert torch.equal(Stream(int(batch[number])).permutation(37), together[number])


def test_an_order_does_not_depend_on_how_many_clients_there_are() -> None:
    few, many = permutations(keys(3, "client"), 20), permutations(keys(300, "client"), 20)
    assert torch.equal(few, many[:3])


def test_other_keys_give_other_orders() -> None:
    orders = permutations(keys(2000, "client"), 20)
    assert len({tuple(order) for order in orders.tolist()}) == 2000


def test_permutations_do_not_change_the_keys() -> None:
    batch = keys(5)
    before = batch.clone()
    permutations(batch, 9)
    assert torch.equal(batch, before)


def splitmix(state: int) -> int:
    """The finaliser as its authors print it, on unsigned numbers."""
    mask = (1 << 64) - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@pytest.mark.parametrize("key", [0, 1, -1, -(1 << 63), (1 << 63) - 1, Stream.of(0).key])
def test_an_order_is_that_of_the_published_hash_on_every_machine(key: int) -> None:
    hashes = [splitmix((key + (i + 1) * 0x9E3779B97F4A7C15) % (1 << 64)) for i in range(50)]
    signed = [number - (1 << 64) * (number >> 63) for number in hashes]
    assert Stream(key).permutation(50).tolist() == sorted(range(50), key=signed.__getitem__)


def chi_square(observed: Tensor) -> float:
    expected = observed.double().sum() / observed.numel()
    return float(((observed - expected) ** 2 / expected).sum())


def test_every_number_comes_to_every_place_equally_often() -> None:
    rows, count = 6000, 5
    orders = permutations(keys(rows, "uniform"), count)
    table = torch.stack([torch.bincount(orders[:, i], minlength=count) for i in range(count)])
    assert chi_square(table) < 39.3  # 16 degrees of freedom, one chance in a thousand


def test_every_order_comes_equally_often() -> None:
    rows = 6000
    orders = permutations(keys(rows, "orders"), 4)
    codes = (orders * torch.tensor([64, 16, 4, 1])).sum(1)
    counts = torch.unique(codes, return_counts=True)[1]
    assert len(counts) == 24
    assert chi_square(counts) < 49.7  # 23 degrees of freedom, one chance in a thousand


def test_keys_that_follow_each_other_give_unrelated_orders() -> None:
    orders = permutations(torch.arange(6000), 5)
    pairs = orders[:-1, 0] * 5 + orders[1:, 0]
    assert chi_square(torch.bincount(pairs, minlength=25)) < 51.2  # 24 degrees of freedom


@pytest.mark.parametrize(
    ("number", "signed"),
    [(0, 0), (1 << 62, 1 << 62), ((1 << 63) - 1, (1 << 63) - 1), (1 << 63, -(1 << 63)),
     ((1 << 64) - 1, -1)],
)  # fmt: skip
def test_bits_of_64_are_read_as_a_signed_number(number: int, signed: int) -> None:
    assert _signed(number) == signed
