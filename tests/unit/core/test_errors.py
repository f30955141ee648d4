"""The errors that a user may see."""

import pytest

from atoll.core import errors
from atoll.core.errors import BadMessageError, ClientFailedError, InterruptedRunError, UserError


def test_a_users_error_says_what_where_and_what_to_do() -> None:
    error = UserError("unknown option 'lamda'", "run.toml, [method]", "did you mean 'lambda'?")
    assert str(error) == "unknown option 'lamda' (run.toml, [method]): did you mean 'lambda'?"
    assert (error.what, error.where) == ("unknown option 'lamda'", "run.toml, [method]")
    assert error.remedy == "did you mean 'lambda'?"


def test_a_users_error_ends_with_code_2_unless_it_says_otherwise() -> None:
    assert UserError("a", "b", "c").exit_code == errors.EXIT_USER == 2
    assert UserError("a", "b", "c", errors.EXIT_DATA_MISSING).exit_code == 3


def test_a_refused_message_names_its_sender_and_the_reason() -> None:
    error = BadMessageError("hospital-1", "tensor 'w' is missing")
    assert str(error) == "message from hospital-1 refused: tensor 'w' is missing"
    assert (error.sender, error.reason) == ("hospital-1", "tensor 'w' is missing")


def test_a_failed_client_is_named_with_what_it_was_doing() -> None:
    error = ClientFailedError("bank-2", "fit", "out of memory")
    assert str(error) == "client bank-2 failed in fit: out of memory"
    assert (error.client, error.action, error.reason) == ("bank-2", "fit", "out of memory")


def test_exit_codes_are_those_of_the_documents_and_differ() -> None:
    codes = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert codes == {
        "EXIT_DONE": 0,
        "EXIT_OUR_FAULT": 1,
        "EXIT_USER": 2,
        "EXIT_DATA_MISSING": 3,
        "EXIT_SITE_FAILED": 4,
        "EXIT_INTERRUPTED": 130,
    }


@pytest.mark.parametrize("kind", [BadMessageError, ClientFailedError, InterruptedRunError])
def test_only_a_users_mistake_is_a_users_error(kind: type[Exception]) -> None:
    assert not issubclass(kind, UserError)


def test_words_of_others_are_one_line_without_commands_for_a_terminal() -> None:
    words = "\x1b[2Jall is\r\nwell\x07\u202e \x9b31m caf\u00e9  ok"
    assert errors.printable(words) == "?[2Jall is  well?? ?31m caf\u00e9  ok"
    for error in (
        BadMessageError("site\x1b[1m", words),
        ClientFailedError("site\x1b[1m", "fit\x1b[1m", words),
    ):
        assert str(error).isprintable()
        assert error.reason == errors.printable(words)
