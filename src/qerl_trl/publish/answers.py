"""What went wrong on the way to the Hub, in words that say what to do."""

from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

#: what the client's HTTP library raises also where no answer came: httpx's, from huggingface_hub 2 on httpx2's
HTTPError: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


def explanation(error: Exception, repo_id: str) -> str:
    nothing = "Nothing was published: files become visible only with the last step."
    if isinstance(error, OfflineModeIsEnabled):
        return f"huggingface_hub is in offline mode (HF_HUB_OFFLINE=1). Unset it to publish. {nothing}"
    response = getattr(root_of(error), "response", None)
    status = getattr(response, "status_code", None)
    if status == 401:
        return f"The Hub refused the token (401). Log in again with `hf auth login`, or set a valid HF_TOKEN. {nothing}"
    if status == 403:
        return (
            f"The token may not write to {repo_id} (403). Use a token with write access, and a namespace that is yours: user/name or "
            f"organization/name. {nothing}"
        )
    if isinstance(root_of(error), RepositoryNotFoundError):
        return f"{repo_id} was not found, or the token may not see it. {nothing}"
    if status is not None:
        return f"The Hub answered {status} for {repo_id}: {root_of(error)}. {nothing} Try the same command again later."
    if isinstance(root_of(error), (HTTPError, OSError)):
        return (
            f"The connection to the Hub failed ({type(root_of(error)).__name__}: {root_of(error)}). {nothing} Run the same command again: files "
            "that arrived are not sent twice."
        )
    return f"{type(error).__name__}: {error}. {nothing}"


def root_of(error: BaseException) -> BaseException:
    """The first HTTP or connection error behind an exception (huggingface_hub wraps failed uploads in a RuntimeError)."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (HfHubHTTPError, HTTPError, ConnectionError, TimeoutError)):
            return cause
        cause = cause.__cause__
    return error
