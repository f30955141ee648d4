"""Limits on message sizes, enforced before memory is allocated."""

import os

__all__ = [
    "ENVIRONMENT",
    "FRAME_BYTES",
    "HEADER_BYTES",
    "environment",
    "expect",
    "message_bytes",
]

FRAME_BYTES = 4 << 20  # bytes of one frame: NVFlare splits messages into chunks of 1 MB
HEADER_BYTES = 1 << 20  # overhead of NVFlare and tensor names in a request
SERVER_BYTES = 4 << 30  # maximum of one message that the coordinator's server forwards, in frames
JOB_BYTES = 64 << 20  # maximum of one message to the coordinator's job, before it knows its run
ENVIRONMENT = "ATOLL_MESSAGE_BYTES"
ANSWERS = "ATOLL_ANSWER_BYTES"  # variable by which the coordinator's job configures its own filter


def environment(question: int) -> dict[str, str]:
    """The variables that limit the size of a request at a site's processes."""
    most = str(question + HEADER_BYTES)
    return {ENVIRONMENT: most, "NVFLARE_STREAMING_MAX_BLOB_SIZE": most}


def expect(count: int) -> None:
    """Set the largest answer that this process, the coordinator's job, accepts."""
    os.environ[ANSWERS] = str(count)


def message_bytes(process: str) -> int:
    """The largest message that this process accepts; an environment variable overrides it."""
    if ENVIRONMENT in os.environ:
        return int(os.environ[ENVIRONMENT])
    return int(os.environ.get(ANSWERS, JOB_BYTES)) if process == "server_job" else SERVER_BYTES
