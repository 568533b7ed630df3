"""Refusals as the OpenAI API words them, so that its clients raise their own exceptions."""

from __future__ import annotations

from typing import Any

__all__ = ["ApiError", "bad_request", "no_session"]


class ApiError(Exception):
    """What a request is answered with instead of a completion."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        """`status` is the HTTP status; `param` the field of the request that was at fault."""
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = (
            status,
            message,
            kind,
            param,
            code,
        )

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def no_session(found: str | None) -> ApiError:
    """Nobody knows whose request it is."""
    said = "the request names no session" if found is None else f"there is no session {found!r}"
    return ApiError(
        401,
        f"{said}: give the API key that the agent was started with (Authorization: Bearer "
        "sk-<session>), the header X-Session-Id, or the base URL /sessions/<session>/v1",
        code="invalid_api_key",
    )
