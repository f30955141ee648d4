"""Arithmetic on named tensors."""

import torch

from atoll.learning.weights import copied, mean, placed, prefixed, without

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


def test_equal_weights_change_no_bit_in_double_precision_either() -> None:
    stream = torch.Generator().manual_seed(0)
    items = [{"w": torch.randn(50, generator=stream, dtype=torch.float64)} for _ in range(3)]
    assert torch.equal(mean(items, [0.1, 0.1, 0.1])["w"], mean(items)["w"])


def test_the_mean_of_one_item_is_the_item_and_names_come_in_the_order_of_the_first() -> None:
    assert mean([TWO])["w"].tolist() == [3.0, 6.0]
    assert list(mean([ONE, {"b": TWO["b"], "w": TWO["w"]}])) == ["w", "b"]


def test_weights_on_their_device_stay_the_same_object_and_others_are_moved() -> None:
    assert placed(ONE, torch.device("cpu")) is ONE
    moved = placed(ONE, torch.device("meta"))
    assert {name: (w.device.type, w.shape) for name, w in moved.items()} == {
        "w": ("meta", torch.Size([2])),
        "b": ("meta", torch.Size([])),
    }
