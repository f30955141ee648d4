"""How much a process takes off the network at once; decided before memory is used for it."""

import os

__all__ = ["ENVIRONMENT", "FRAME_BYTES", "HEADER_BYTES", "environment", "message_bytes"]

FRAME_BYTES = 4 << 20  # of one frame: NVFlare cuts messages into pieces of 1 MB
HEADER_BYTES = 1 << 20  # that NVFlare and the names of tensors add to a question
SERVER_BYTES = 4 << 30  # of one answer, at the coordinator
ENVIRONMENT = "ATOLL_MESSAGE_BYTES"


def environment(question: int) -> dict[str, str]:
    """The variables that limit the size of a request at a site's processes."""
    most = str(question + HEADER_BYTES)
    return {ENVIRONMENT: most, "NVFLARE_STREAMING_MAX_BLOB_SIZE": most}


def message_bytes() -> int:
    """Bytes of one message that this process takes."""
    return int(os.environ.get(ENVIRONMENT, SERVER_BYTES))
