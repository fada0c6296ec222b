"""Who knows the secret, without a server."""

import pytest

from qerl_trl.rollout import signature
from qerl_trl.rollout.signature import SECRET, WINDOW, SignatureError, Verifier, sign

KEY = b"sixteen or more!"


def test_what_was_signed_passes_once():
    verifier, header = Verifier(KEY), sign(KEY, "POST", "/qerl/call", b"{}")
    assert verifier.check(header, "POST", "/qerl/call") == signature.hashlib.sha256(b"{}").hexdigest()
    with pytest.raises(SignatureError, match="received before"):
        verifier.check(header, "POST", "/qerl/call")
    again = sign(KEY, "POST", "/qerl/call", b"{}")
    assert again != header and verifier.check(again, "POST", "/qerl/call")


@pytest.mark.parametrize(
    ("method", "target", "key"),
    [("GET", "/a", KEY), ("POST", "/b", KEY), ("POST", "/a?x=1", KEY), ("POST", "/a", b"another secret..")],
)
def test_another_request_or_secret_is_refused(method, target, key):
    with pytest.raises(SignatureError, match=f"another {SECRET}, or for another request"):
        Verifier(key).check(sign(KEY, "POST", "/a", b""), method, target)


@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_an_edited_part_is_refused(part):
    words = sign(KEY, "POST", "/a", b"").split()
    words[part] = ("1" if words[part][0] == "0" else "0") + words[part][1:]
    with pytest.raises(SignatureError, match="another"):
        Verifier(KEY).check(" ".join(words), "POST", "/a")


@pytest.mark.parametrize(
    "header", ["", "v1", "v2 1 2 3 4", "v1 " + "٣" * 10, "v1 1_0 " + "0" * 32 + " " + "0" * 64 + " x"]
)
def test_what_is_no_signature_is_refused(header):
    with pytest.raises(SignatureError, match="missing or is none"):
        Verifier(KEY).check(header, "POST", "/a")


@pytest.mark.parametrize("late", [WINDOW + 2, -WINDOW - 2])
def test_another_time_is_refused(late, monkeypatch):
    header = sign(KEY, "POST", "/a", b"")
    now = signature.time.time()
    with pytest.raises(SignatureError, match="set the clocks"):
        Verifier(KEY, lambda: now + late).check(header, "POST", "/a")


def test_numbers_are_forgotten_when_their_time_is_over(monkeypatch):
    now = [1e9]
    monkeypatch.setattr(signature.time, "time", lambda: now[0])
    verifier = Verifier(KEY, lambda: now[0])
    for _ in range(5):
        verifier.check(sign(KEY, "POST", "/a", b""), "POST", "/a")
    assert len(verifier._used) == 5
    now[0] += 2 * WINDOW + 1
    verifier.check(sign(KEY, "POST", "/a", b""), "POST", "/a")
    assert len(verifier._used) == len(verifier._until) == 1


@pytest.mark.parametrize(("value", "found"), [("", "is not set"), ("short", "has 5 characters")])
def test_a_missing_secret_says_how_to_make_one(value, found, monkeypatch):
    monkeypatch.setenv(SECRET, value)
    with pytest.raises(RuntimeError, match=f"{SECRET} {found}.*to the trainer:\nexport {SECRET}="):
        signature.secret()
