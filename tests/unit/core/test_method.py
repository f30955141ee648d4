"""What a method is unless its module says otherwise."""

from atoll.core.method import Method


def test_a_method_is_for_rows_and_asks_all_clients_of_a_round() -> None:
    method = Method(dict, lambda options, site: None, lambda options, site: None)
    assert (method.split, method.headline) == ("rows", "")
    assert method.quorum is False
    assert method.concurrency is None
    assert method.first is None
