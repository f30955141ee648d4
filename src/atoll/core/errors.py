"""The errors that a user may see, and the exit codes of the command."""

from typing import Final

__all__ = [
    "EXIT_DATA_MISSING",
    "EXIT_DONE",
    "EXIT_INTERRUPTED",
    "EXIT_OUR_FAULT",
    "EXIT_SITE_FAILED",
    "EXIT_USER",
    "BadMessageError",
    "ClientFailedError",
    "InterruptedRunError",
    "SiteLostError",
    "UserError",
    "memory_error",
    "note_client",
    "noted_client",
    "out_of_memory",
    "printable",
]

EXIT_DONE: Final = 0
EXIT_OUR_FAULT: Final = 1
EXIT_USER: Final = 2
EXIT_DATA_MISSING: Final = 3
EXIT_SITE_FAILED: Final = 4
EXIT_INTERRUPTED: Final = 130

CLIENT_NOTE: Final = "job of client "


def printable(words: str) -> str:
    """Foreign text as one line, without control characters for the terminal."""
    line = "".join(" " if letter.isspace() else letter for letter in words)
    return "".join(letter if letter.isprintable() else "?" for letter in line)


class UserError(Exception):
    """An error that the user can fix: what is wrong, where it is, what to do about it.

    >>> error = UserError("unknown option 'lr'", "--set", "did you mean 'rate'?")
    >>> print(error)
    unknown option 'lr' (--set): did you mean 'rate'?
    """

    def __init__(self, what: str, where: str, remedy: str, exit_code: int = EXIT_USER) -> None:
        super().__init__(f"{what} ({where}): {remedy}")
        self.what, self.where, self.remedy, self.exit_code = what, where, remedy, exit_code


class BadMessageError(Exception):
    """A packet that is refused: who sent it and why."""

    def __init__(self, sender: str, reason: str) -> None:
        self.sender, self.reason = printable(sender), printable(reason)
        super().__init__(f"message from {self.sender} refused: {self.reason}")


class SiteLostError(Exception):
    """A site that no longer answers; the run can continue when it is back."""

    def __init__(self, site: str, reason: str) -> None:
        super().__init__(f"site {site} was lost: {reason}")
        self.site, self.reason = site, reason


class ClientFailedError(Exception):
    """A client that did not answer: its id, the action, and the reason."""

    def __init__(self, client: str, action: str, reason: str) -> None:
        self.client, self.action = printable(client), printable(action)
        self.reason = printable(reason)
        super().__init__(f"client {self.client} failed in {self.action}: {self.reason}")


def note_client(error: BaseException, client: str) -> None:
    """Attach to an error whose job it ended."""
    error.add_note(f"{CLIENT_NOTE}{printable(client)}")


def noted_client(error: BaseException) -> str:
    """The client whose job raised an error; empty if unknown."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(CLIENT_NOTE)]
    return notes[0].removeprefix(CLIENT_NOTE) if notes else ""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch has a class for it on GPUs, and only a message on the CPU."""
    from_torch = type(error).__name__ == "OutOfMemoryError"
    return from_torch or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def memory_error(where: str) -> UserError:
    """The error of a run that needs more memory than is available."""
    remedy = "use fewer clients or rows, smaller batches or networks, or a machine with more memory"
    return UserError("not enough memory", where, remedy)


class InterruptedRunError(Exception):
    """The run was asked to stop and has saved its state."""
