"""Requests that are refused, with the status of their answers."""

from lrpfx.errors import InputError, LrpfxError

BAD_REQUEST, FORBIDDEN, UNAUTHORIZED, NOT_FOUND, TOO_SLOW, TOO_LARGE = 400, 403, 401, 404, 408, 413
UNSUPPORTED, BUSY, FAILED, NOT_READY, TIMED_OUT = 415, 429, 500, 503, 504

#: Characters of a message that an answer contains: a message may contain names from the request.
LONGEST_MESSAGE = 1000


class RequestError(InputError):
    """A request that is refused with this status of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def refusal_of(error: BaseException) -> RequestError:
    """The refusal that an error of a program or of its checks means, without the error's traceback, which holds tensors."""
    if isinstance(error, RequestError):
        return RequestError(error.status, str(error))
    if isinstance(error, InputError):
        return RequestError(BAD_REQUEST, str(error))
    if isinstance(error, MemoryError):
        return RequestError(NOT_READY, "there is not enough memory for this request: send fewer rows, or smaller ones")
    if isinstance(error, LrpfxError):
        return RequestError(FAILED, str(error))
    return RequestError(FAILED, f"the program failed: {type(error).__name__}")
