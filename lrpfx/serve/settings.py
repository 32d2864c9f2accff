"""The limits of a server, and the token that it asks for."""

import math
import re
from dataclasses import dataclass, field

from lrpfx.serve.refusals import invalid

#: A token that is shorter could be guessed.
SHORTEST_TOKEN = 16

#: The largest values of settings that are counts.
_MOST = {"max_batch": 2**16, "max_queue": 2**16, "max_request_bytes": 2**31, "max_waiting_bytes": 2**40, "max_size": 2**31}


@dataclass(frozen=True)
class Settings:
    """The limits of a server, and the token that it asks for.

    Parameters
    ----------
    max_batch
        The largest number of rows that the program computes at once, and of rows in one request.
    max_delay
        Seconds that a request waits for others to be computed with it; 0 for none.
    max_queue
        The largest number of requests that are read, wait or are computed at the same time. Others are refused with status 429.
    max_request_bytes
        The largest body of a request. Larger ones are refused with status 413.
    max_waiting_bytes
        The largest number of bytes in the bodies of all requests at the same time. Others are refused with status 429.
    max_size
        The largest size in a dimension that the program leaves open, such as a number of tokens; not for the batch.
    timeout
        Seconds from the first byte of a request to its answer. After that, the answer is status 408 or 504.
    token
        The bearer token of all requests except those for health, or None for none. It has at least 16 printable characters of
        ASCII, without spaces.

    Raises
    ------
    InputError
        A setting is out of range.
    """

    max_batch: int = 32
    max_delay: float = 0.005
    max_queue: int = 256
    max_request_bytes: int = 16 * 2**20
    max_waiting_bytes: int = 256 * 2**20
    max_size: int = 2048
    timeout: float = 30.0
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise invalid(f"{name} is a whole number from 1 to {most}, not {value!r}")
        for name, least, longest in (("max_delay", 0.0, 10.0), ("timeout", 0.01, 86_400.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or not least <= value <= longest:
                raise invalid(f"{name} is a number of seconds from {least:g} to {longest:g}, not {value!r}")
        if self.max_waiting_bytes < self.max_request_bytes:
            raise invalid("max_waiting_bytes is at least max_request_bytes: otherwise the largest request is never read")
        if self.token is not None and not re.fullmatch(rf"[!-~]{{{SHORTEST_TOKEN},}}", self.token):
            raise invalid(
                f"a token has at least {SHORTEST_TOKEN} printable characters of ASCII without spaces: "
                "`openssl rand -hex 32` makes one"
            )
