"""Checks once per process whether the Hugging Face hub answers.

Without this check, huggingface_hub waits half a minute per file if the hub does not answer, also
for files that are in the cache.
"""

from __future__ import annotations

import sys
import time

from huggingface_hub import constants
from huggingface_hub.utils import get_session

from ..errors import UsageError

# Seconds of the first attempt and of the pause after it. The second attempt takes up to
# HF_HUB_ETAG_TIMEOUT.
FIRST_TRY = 5.0
PAUSE = 1.0  # seconds between two attempts
_unreachable_by_endpoint: dict[str, bool] = {}  # by endpoint, as at the first check


def is_unreachable() -> bool:
    """Returns True if the hub does not answer, or if HF_HUB_OFFLINE is set. The first time that the
    hub does not answer, a message is printed.

    If the hub does not answer, the libraries are switched to offline mode in this process, so that
    earlier downloads are found at once.
    """
    if constants.ENDPOINT not in _unreachable_by_endpoint:
        if constants.HF_HUB_OFFLINE:
            return True
        _unreachable_by_endpoint[constants.ENDPOINT] = not _can_connect()
        if _unreachable_by_endpoint[constants.ENDPOINT]:
            constants.HF_HUB_OFFLINE = True
            # if datasets is imported later, it reads the value that was set above
            if datasets := sys.modules.get("datasets"):
                datasets.config.HF_HUB_OFFLINE = True
    return _unreachable_by_endpoint[constants.ENDPOINT]


def cache_miss_error(subject: str, alternative: str, *, is_partial: bool = False) -> UsageError:
    """Returns the error for a model or dataset that is not in the local cache and cannot be
    downloaded.

    alternative  what the user can give instead: `a local folder`
    is_partial   whether a part of the model or dataset is in the cache
    """
    message = f"{subject}: {'only a part of it is' if is_partial else 'not'} in the local cache"
    if constants.HF_HUB_OFFLINE and not _unreachable_by_endpoint.get(constants.ENDPOINT):
        return UsageError(
            f"{message}, and HF_HUB_OFFLINE is set",
            fix=f"unset HF_HUB_OFFLINE, or give {alternative}",
        )
    return UsageError(
        f"{message}, and the hub cannot be reached", fix=f"check the network, or give {alternative}"
    )


def _can_connect() -> bool:
    for attempt, seconds in enumerate((FIRST_TRY, constants.HF_HUB_ETAG_TIMEOUT)):
        try:
            get_session().head(constants.ENDPOINT, timeout=seconds)
            return True
        except Exception as error:  # of whatever HTTP library it is built on
            if not attempt:
                host = constants.ENDPOINT.partition("://")[2]
                reason = next(iter(str(error).splitlines()), "") or type(error).__name__
                print_status(
                    f"{host} does not answer ({reason}): asking once more, then going on with what"
                    " was downloaded before. HF_HUB_OFFLINE=1 does so at once"
                )
                time.sleep(PAUSE)
    return False


def print_status(text: str) -> None:
    print(f"isotype: {text}", file=sys.stderr, flush=True)
