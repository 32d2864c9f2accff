"""Requests that are refused, with the status of their answers."""

from functools import partial

from lrpfx.errors import InputError, InputTypeError, LrpfxError

#: Errors about a server, its settings and its requests.
invalid, wrong_type = partial(InputError, topic="serving-programs"), partial(InputTypeError, topic="serving-programs")

BAD_REQUEST, FORBIDDEN, UNAUTHORIZED, NOT_FOUND, TOO_SLOW, TOO_LARGE = 400, 403, 401, 404, 408, 413
UNSUPPORTED, BUSY, FAILED, NOT_READY, TIMED_OUT = 415, 429, 500, 503, 504

#: Characters of a message that an answer contains: a message may contain names from the request.
LONGEST_MESSAGE = 1000


class RequestError(InputError):
    """A request that is refused with this status of HTTP."""

    topic = "serving-programs"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def refusal_of(error: BaseException) -> RequestError:
    """The refusal that an error of a program or of its checks means, without the error's traceback, which holds tensors."""
    if isinstance(error, RequestError):
        return RequestError(str(error), error.status)
    if isinstance(error, InputError):
        return RequestError(str(error), BAD_REQUEST)
    if isinstance(error, MemoryError):
        return RequestError("there is not enough memory for this request: send fewer rows, or smaller ones", NOT_READY)
    if isinstance(error, LrpfxError):
        return RequestError(str(error), FAILED)
    return RequestError(f"the program failed: {type(error).__name__}", FAILED)
