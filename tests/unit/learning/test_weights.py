"""Arithmetic on named tensors."""

import torch

from atoll.core.messages import Part, Wholes
from atoll.learning.weights import _whole, copied, mean, only, prefixed, without

ONE = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(0.0)}
TWO = {"w": torch.tensor([3.0, 6.0]), "b": torch.tensor(8.0)}


def test_the_mean_is_equal_unless_weights_are_given() -> None:
    found = mean([ONE, TWO])
    assert found["w"].tolist() == [2.0, 4.0]
    assert float(found["b"]) == 4.0


def test_a_weighted_mean_worked_out_by_hand() -> None:
    found = mean([ONE, TWO], [3, 1])
    assert found["w"].tolist() == [1.5, 3.0]
    assert float(found["b"]) == 2.0


def test_equal_weights_are_as_good_as_none() -> None:
    items = [{"w": torch.randn(5, generator=torch.Generator().manual_seed(n))} for n in range(3)]
    assert torch.equal(mean(items, [7.0, 7.0, 7.0])["w"], mean(items)["w"])
    by_hand = (items[0]["w"] + 2 * items[1]["w"] + 3 * items[2]["w"]) / 6
    torch.testing.assert_close(mean(items, [1.0, 2.0, 3.0])["w"], by_hand)


def test_the_mean_of_copies_is_the_copy_to_the_last_bit() -> None:
    item = {"w": torch.rand(100, generator=torch.Generator().manual_seed(0))}
    assert torch.equal(mean([item] * 7)["w"], item["w"])


def test_the_mean_is_summed_in_double_precision_and_has_the_type_of_its_items() -> None:
    big, small = {"w": torch.tensor([2.0**24])}, {"w": torch.tensor([1.0])}
    found = mean([big, small, small, {"w": torch.tensor([-(2.0**24)])}])["w"]
    assert found.dtype == torch.float32
    assert found.tolist() == [0.5]


def test_a_copy_has_tensors_of_its_own() -> None:
    source = {"w": torch.zeros(2, requires_grad=True)}
    copy = copied(source)
    copy["w"] += 1
    assert source["w"].tolist() == [0.0, 0.0]
    assert not copy["w"].requires_grad


def test_a_prefix_that_was_put_on_comes_off() -> None:
    both = prefixed("server", ONE) | prefixed("server/a", TWO)
    assert set(both) == {"server/w", "server/b", "server/a/w", "server/a/b"}
    assert without("server/a", both) == TWO
    assert without("serve", both) == {}
    assert set(without("server", both)) == {"w", "b", "a/w", "a/b"}


def test_the_mean_of_parts_is_that_of_their_tensors() -> None:
    wholes = Wholes({"w": torch.randn(5, 3, 2), "b": torch.randn(5)})
    every, some = (tuple(Part(wholes, i) for i in places) for places in (range(5), (3, 1, 4)))
    for parts in (every, some, every[::-1]):
        for shares in (None, [float(i + 1) for i in range(len(parts))]):
            expected = mean([dict(part) for part in parts], shares)
            assert all(torch.equal(mean(parts, shares)[n], expected[n]) for n in wholes.tensors)


def test_parts_stay_parts_where_all_of_a_whole_is_asked_for() -> None:
    wholes = Wholes({"w": torch.randn(2, 3), "b": torch.randn(2)})
    part = Part(wholes, 1, {"anchor/w": torch.zeros(3)})
    found = only(part, ["b", "w"])
    assert isinstance(found, Part)
    assert sorted(found) == ["b", "w"]
    assert only(part, ["w"]).keys() == {"w"}
    plain = dict(part)
    assert only(plain, ["w"]) == {"w": plain["w"]}


def test_equal_weights_change_no_bit_in_double_precision_either() -> None:
    stream = torch.Generator().manual_seed(0)
    items = [{"w": torch.randn(50, generator=stream, dtype=torch.float64)} for _ in range(3)]
    assert torch.equal(mean(items, [0.1, 0.1, 0.1])["w"], mean(items)["w"])


def test_the_mean_of_one_item_is_the_item_and_names_come_in_the_order_of_the_first() -> None:
    assert mean([TWO])["w"].tolist() == [3.0, 6.0]
    assert list(mean([ONE, {"b": TWO["b"], "w": TWO["w"]}])) == ["w", "b"]


def test_the_mean_of_the_only_part_of_a_whole_is_the_part() -> None:
    wholes = Wholes({"w": torch.tensor([[1.0, 2.0]])})
    assert mean([Part(wholes, 0)])["w"].tolist() == [1.0, 2.0]


def test_all_parts_of_a_whole_in_order_are_averaged_where_they_lie() -> None:
    wholes = Wholes({"w": torch.arange(6.0).view(3, 2)})
    parts = [Part(wholes, place) for place in range(3)]
    assert _whole(parts) is wholes.tensors
    assert _whole(parts[::-1]) is None
    assert _whole(parts[:2]) is None
    assert _whole([Part(wholes, place, {"rest": torch.zeros(1)}) for place in range(3)]) is None


def test_parts_of_several_wholes_and_plain_tensors_are_averaged_as_what_they_are() -> None:
    one, other = (Wholes({"w": torch.tensor([[a], [b]])}) for a, b in ((1.0, 2.0), (10.0, 20.0)))
    assert mean([Part(one, 0), Part(other, 1)])["w"].tolist() == [10.5]
    assert mean([Part(one, 0), {"w": torch.tensor([5.0])}])["w"].tolist() == [3.0]
