"""How large a message a process takes: less before the coordinator's job knows its run."""

import pytest

from atoll.engines.network import limits


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (limits.ENVIRONMENT, limits.ANSWERS):
        monkeypatch.setenv(name, "0")  # so that it is restored, whatever sets it
        monkeypatch.delenv(name)


def test_the_coordinators_job_takes_little_before_it_knows_its_run() -> None:
    assert limits.message_bytes("server_job") == 64 << 20
    limits.expect(1_000_000)
    assert limits.message_bytes("server_job") == 1_000_000
    assert limits.message_bytes("server") == 4 << 30  # it passes on what sites may take


def test_a_variable_sets_another_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.expect(1_000_000)
    monkeypatch.setenv("ATOLL_MESSAGE_BYTES", "5000")
    assert limits.message_bytes("server_job") == 5000
    assert limits.message_bytes("server") == 5000


def test_the_processes_of_a_site_take_what_its_contract_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in limits.environment(2_000_000).items():
        monkeypatch.setenv(name, value)
    assert limits.message_bytes("client_job") == 2_000_000 + limits.HEADER_BYTES
