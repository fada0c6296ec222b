"""Who may tell a rollout server what to do: whoever knows `QERL_SERVER_SECRET`, which never travels.

Every request of the trainer carries one header, an HMAC-SHA256 over its method, its target, the time, a number that is used once, and the
digest of its body. The server checks it before it reads the body, so that a stranger's bytes are never kept. Both halves are here;
vllm/endpoint.py asks for it, client.py adds it.
"""

import hashlib
import hmac
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable

#: environment variable with the shared secret, on the server and in the trainer
SECRET = "QERL_SERVER_SECRET"
HEADER = "X-Qerl-Signature"
#: seconds that a request's time may differ from the server's; for so long a signature can be used
WINDOW = 300
_SHORTEST = 16
_FORM = re.compile(r"v1 (\d{1,12}) ([0-9a-f]{32}) ([0-9a-f]{64}) ([0-9a-f]{64})", re.ASCII)
MAKE_SECRET = f"""export {SECRET}=$(python3 -c "import secrets; print(secrets.token_hex(32))")"""


class SignatureError(ValueError):
    """A request is not from somebody who knows the secret, is too old, or comes a second time."""


def secret() -> bytes:
    """The secret of this process.

    Raises:
        `RuntimeError`: there is none, or it can be guessed; says how to make one.
    """
    value = os.environ.get(SECRET, "").strip()
    if len(value) >= _SHORTEST:
        return value.encode()
    found = f"has {len(value)} characters, which can be guessed" if value else "is not set"
    raise RuntimeError(
        f"{SECRET} {found}. A rollout server takes adapter and noise only from who knows its secret. Make one, and give the same to "
        f"the server and to the trainer:\n{MAKE_SECRET}"
    )


def sign(secret: bytes, method: str, target: str, body: bytes) -> str:
    """The header's value for one request; `target` is the path under the server's base URL, with the query."""
    digest = hashlib.sha256(body).hexdigest()
    now, once = str(int(time.time())), secrets.token_hex(16)
    return f"v1 {now} {once} {digest} {_hmac(secret, method, target, now, once, digest)}"


def _hmac(secret: bytes, *parts: str) -> str:
    return hmac.new(secret, "\n".join(("qerl-trl", *parts)).encode(), hashlib.sha256).hexdigest()


class Verifier:
    """The server's half; remembers what was used.

    Args:
        secret: as the trainer's.
        clock: seconds since the epoch.
    """

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self._secret, self._clock = secret, clock
        self._used: set[str] = set()
        self._until: deque[tuple[float, str]] = (
            deque()
        )  # when a number may be forgotten; only requests that were signed

    def check(self, header: str, method: str, target: str) -> str:
        """The digest (sha256) that the body must have. A signature passes once.

        Raises:
            [`SignatureError`]: says why.
        """
        match = _FORM.fullmatch(header)
        if match is None:
            raise SignatureError(f"the header {HEADER} is missing or is none of qerl-trl's")
        then, number, digest, signature = match.groups()
        expected = _hmac(self._secret, method, target, then, number, digest)
        if not hmac.compare_digest(expected, signature):
            raise SignatureError(f"the signature was made with another {SECRET}, or for another request")
        now = self._clock()
        if abs(now - int(then)) > WINDOW:
            raise SignatureError(
                f"the request was signed {now - int(then):+.0f} s ago by this server's clock, and {WINDOW} s are allowed: set the clocks"
            )
        while self._until and self._until[0][0] < now:
            self._used.discard(self._until.popleft()[1])
        if number in self._used:
            raise SignatureError("the request was received before")
        self._used.add(number)
        self._until.append((now + 2 * WINDOW, number))
        return digest
